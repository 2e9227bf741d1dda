"""Find the values outside of a module that the code of its forward reads.

From the functions that ran, by the names in their code. A function is compared as an attribute of
the class or Python module that has it, with its code, which an editor may replace in place; a
global variable as an attribute of its Python module; a container by its entries. Of objects, the
attributes with a name that any of the code has are compared, and of these the same.
"""

from __future__ import annotations

import datetime
import gc
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from enum import Enum
from functools import cached_property, partial
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist

from fusedckpt.autograd import private
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.outside.reads import (
    MISSING,
    OutsideRead,
    OutsideReads,
    Place,
    Read,
    cell_of,
    context_value,
    entry_of,
    is_function,
    is_simple,
    item_of,
    length_of,
    members_of,
    method_of_class,
    setting_of,
)
from fusedckpt.outside.watch import CHANGING, CodeWatch, is_library
from fusedckpt.state.code_names import CodeRead, codes_in, is_read_as_global, reads_in

# attribute of a class that was made for a method of another: that class, and the method's name
METHOD = "_fusedckpt_method"
# of one container, and in all: more is data, not options
_MOST_PARTS = 64
_MOST_ROWS = 256
_MOST_DEPTH = 6
# attributes that every module has
_OF_MODULES = private.MODULE_ATTRIBUTES - {"training"}
# classes with objects that do not change a forward's result
_CONSTANT_CLASSES = frozenset(
    ("_lru_cache_wrapper", "Logger", "RootLogger", "LoggerAdapter", "Pattern", "lock", "RLock")
    + ("TypeVar", "ParamSpec", "property", "Path", "PosixPath", "WindowsPath", "_Environ")
    + ("_GenericAlias", "GenericAlias", "_UnionGenericAlias", "UnionType", "_SpecialForm")
    + ("itemgetter", "attrgetter", "methodcaller", "Decimal", "Fraction", "ContextVar")
)
_CONSTANT_TYPES = (Tensor, np.generic, np.dtype, np.ufunc)
_OF_CONSTANTS = ("torch", "triton", "typing", "abc", "enum")
# functions of `os` that read nothing, or the environment: its variables are compared
_OF_OS = ("fspath", "getenv")
# classes that tell the time
_CLOCKS = (datetime.date, datetime.datetime)
# functions of torch that tell a setting
_SETTINGS = [torch.get_default_dtype, torch.are_deterministic_algorithms_enabled]
_SETTINGS += [torch.is_inference_mode_enabled, torch.is_anomaly_enabled, torch.get_num_threads]
_SETTINGS += [torch.get_float32_matmul_precision]
# the package of torch's objects whose attributes are settings
_BACKENDS = "torch.backends"
if dist.is_available():
    _SETTINGS += [dist.is_initialized, dist.get_rank, dist.get_world_size]
# names by which code reads attributes that it spells as strings, or does not spell
_BY_ANY_NAME = frozenset(("getattr", "vars", "__dict__", "asdict", "attrgetter"))
_BY_STRING = _BY_ANY_NAME | {"hasattr", "get"}
# builtins by which code reads variables that it does not name
_UNREADABLE = frozenset(("__import__", "eval", "exec", "globals", "input", "open"))
# functions and methods that read files, or objects by names that code makes
_READING = frozenset(
    ("read_text", "read_bytes", "exists", "is_file", "is_dir", "getsize", "import_module")
    + ("currentframe", "_getframe", "get_objects", "get_referrers")
)
# methods that a subclass's object gets from its base
_METHODS = (FunctionType, staticmethod, classmethod, property, cached_property)


class _Left(Exception):
    """A value cannot be compared; the argument is the reason."""


def outside_reads(
    watches: Sequence[CodeWatch],
    kinds: Mapping[Any, type[nn.Module]],
    functions: Iterable[Any] = (),
) -> OutsideReads | NotFused:
    """Return the values that code reads outside of a module, or why one cannot be compared.

    Args:
        watches: the code of runs.
        kinds: the classes of the module, with the key (), and of those inside.
        functions: that the module has in its attributes.
    """
    finder = _Finder(CodeWatch.of_all(watches), kinds, functions)
    try:
        finder.find()
    except _Left as error:
        (reason,) = error.args
        return reason
    return OutsideReads(finder.rows.values())


class _Binding(NamedTuple):
    """A function that ran, and where it is found; None where only its code is known."""

    function: FunctionType | None
    place: Place


class _Finder:
    def __init__(
        self, watch: CodeWatch, kinds: Mapping[Any, type[nn.Module]], functions: Iterable[Any]
    ):
        self._watch = watch
        self._kinds = kinds
        self._functions = functions
        # by holder and name, so that none is read twice
        self.rows: dict[Any, OutsideRead] = {}
        self._seen: dict[int, Any] = {}
        codes = [part for code, _ in watch.codes.values() for part in codes_in(code)]
        # of the attributes that the code may read
        self._names = {name for code in codes for name in code.co_names}
        # and those that it may read by getattr
        self._strings = {
            value
            for code in codes
            if not _BY_STRING.isdisjoint(code.co_names)
            for value in code.co_consts
            if isinstance(value, str) and value.isidentifier()
        }

        # whether it may read attributes of any name
        self._reads_any = any(not _BY_ANY_NAME.isdisjoint(code.co_names) for code in codes)

    def find(self) -> None:
        """Find all values.

        Raises:
            _Left: one cannot be compared.
        """
        watch = self._watch
        if watch.changing is not None:
            raise _Left(NotFused("state", f"{watch.changing}()"))
        if reading := sorted(self._reading()):
            raise _Left(NotFused("state", f"values by {reading[0]}()"))
        self._find_classes()
        bindings = self._bindings()
        for key, (code, namespace) in watch.codes.items():
            function, place = bindings.get(key, _Binding(None, Place(None)))
            if function is not None:
                self._find_defaults(function, place)
            package = namespace.get("__package__")
            for read in reads_in(code, package):
                self._find_named(read, namespace, function, place)
        for name in watch.environment:
            key = os.environ.encodekey(name)  # type: ignore[attr-defined]  # of os._Environ
            place = Place(os, ((getattr, "environ"), (getattr, "_data")))
            self._add(entry_of, os.environ._data, key, place)  # type: ignore[attr-defined]
        for function in self._functions:
            self._find_in(function, Place(function), 0)

    def _reading(self) -> Iterator[str]:
        """Yield names by which the code calls, or may call, functions that read files or objects.

        A function of the user by such a name (`exists(value)`) is seen when it runs, as any other.
        """
        for code, namespace in self._watch.codes.values():
            for part in codes_in(code):
                for name in _READING.intersection(part.co_names):
                    value = namespace.get(name)
                    is_of_user = isinstance(value, FunctionType) and not is_library(
                        value.__module__
                    )
                    if not (is_of_user and is_read_as_global(part, name)):
                        yield name

    def _add(self, read: Read, holder: Any, name: Any, place: Place) -> Any:
        """Compare a value in each call; return the value."""
        value = read(holder, name, MISSING)
        key = read, id(holder), name
        if key not in self.rows:
            self.rows[key] = OutsideRead(read, holder, name, value, place.then(read, name))
            if len(self.rows) > _MOST_ROWS:
                raise _Left(NotFused("state", place.words))
        return value

    # classes and functions

    def _find_classes(self) -> None:
        """Compare the forward of each class, and the functions of torch that its layers call."""
        for path, kind in self._kinds.items():
            kind, method = vars(kind).get(METHOD, (kind, "forward"))
            forward = self._add(_reader_of(kind, method), kind, method, Place(kind))
            if path:
                self._add(getattr, kind, "__call__", Place(kind))
            code = getattr(forward, "__code__", None)
            if code is None or not is_library(forward.__module__):
                continue
            for read in reads_in(code):
                value = forward.__globals__.get(read.name)
                if value is nn.functional and read.attributes:
                    self._add(getattr, value, read.attributes[0], Place(value))

    def _bindings(self) -> dict[int, _Binding]:
        """Return the functions that ran, by the ids of their code."""
        codes = self._watch.codes
        inner = {
            id(part) for code, _ in codes.values() for part in codes_in(code) if part is not code
        }
        bindings: dict[int, _Binding] = {}
        for function, place in self._candidates():
            key = id(function.__code__)
            if key in codes and key not in bindings:
                bindings[key] = _Binding(function, place)
                self._compare_function(place)
        for key, (code, _) in codes.items():
            # the variables of a function inside are those of the function around
            if key not in bindings and key not in inner:
                referrers = (f for f in gc.get_referrers(code) if isinstance(f, FunctionType))
                if (function := next(referrers, None)) is not None:
                    bindings[key] = _Binding(function, Place(function))
        return bindings

    def _compare_function(self, place: Place) -> None:
        """Compare a function where it is found, and its code."""
        holder = place.root
        holder_place = Place(place.root)
        for read, name in place.steps:
            is_own = isinstance(holder, (FunctionType, staticmethod, property, cached_property))
            if read in (method_of_class, getattr) and not is_own:
                self._add(read, holder, name, holder_place)
            holder = read(holder, name, MISSING)
            holder_place = holder_place.then(read, name)
        if isinstance(holder, FunctionType):
            self._add(getattr, holder, "__code__", place)

    def _candidates(self) -> Iterator[tuple[FunctionType, Place]]:
        """Yield functions of the module's classes and attributes, and of the code's globals."""
        seen = set[int]()
        for kind in dict.fromkeys(self._kinds.values()):
            for base in kind.__mro__:
                if not is_library(base.__module__):
                    yield from _functions_in_class(kind, base, Place(kind), seen)
        for function in self._functions:
            yield from _functions_in(function, Place(function), seen)
        spaces = {id(space): space for _, space in self._watch.codes.values()}
        for space in spaces.values():
            holder, read = _holder_of(space)
            for name, value in [*space.items()]:
                place = Place(holder).then(read, name)
                if isinstance(value, type) and not is_library(value.__module__):
                    for base in value.__mro__:
                        if not is_library(base.__module__):
                            yield from _functions_in_class(value, base, place, seen)
                else:
                    yield from _functions_in(value, place, seen)

    def _find_defaults(self, function: FunctionType, place: Place) -> None:
        for attribute in ("__defaults__", "__kwdefaults__"):
            values = getattr(function, attribute)
            if values:
                self._add(getattr, function, attribute, place)
                self._find_in(values, place.then(getattr, attribute), 0)

    # variables

    def _find_named(
        self,
        read: CodeRead,
        namespace: dict[str, Any],
        function: FunctionType | None,
        place: Place,
    ) -> None:
        """Compare a variable that code names, and the attributes that it reads of its value."""
        if read.root == "global":
            if read.name not in namespace:
                if read.name in _UNREADABLE and not read.is_written:
                    raise _Left(NotFused("state", f"variables by {read.name}()"))
                return
            holder, get = _holder_of(namespace)
            place = Place(holder)
        elif read.root == "free":
            if read.name == "__class__" and not read.attributes:
                return
            if function is None:
                raise _Left(NotFused("state", f"{read.name}, a variable of a function around"))
            place = place.then(cell_of, read.name)
            holder = cell_of(function, read.name, MISSING)
            get = getattr
        else:
            value = sys.modules.get(read.name)
            if value is not None:
                self._find_attributes(value, read, Place(value))
            return
        if read.is_written and not read.attributes:
            raise _Left(NotFused("writes", place.then(get, read.name).words))
        name = "cell_contents" if read.root == "free" else read.name
        value = self._add(get, holder, name, place)
        if value is not MISSING:
            self._find_attributes(value, read, place.then(get, name))

    def _find_attributes(self, value: Any, read: CodeRead, place: Place) -> None:
        """Compare the attributes that code reads of a variable's value, one of the other."""
        if read.is_written:
            raise _Left(NotFused("writes", ".".join((place.words, *read.attributes))))
        get: Any
        for name in read.attributes:
            is_of_library = is_library(getattr(value, "__name__", None) or "")
            if _python_module(value).startswith(_BACKENDS):
                attribute = getattr(value, name, MISSING)
                if is_simple(attribute):
                    self._add(getattr, value, name, place)
                get = getattr
            elif isinstance(value, ModuleType):
                attribute = getattr(value, name, MISSING)
                if not is_of_library or isinstance(attribute, (FunctionType, BuiltinFunctionType)):
                    self._add(getattr, value, name, place)
                get = getattr
            elif isinstance(value, type) and not is_library(value.__module__):
                # a method may read more of its class
                self._find_in(value, place, 0)
                get = _reader_of(value, name)
                attribute = self._add(get, value, name, place)
            elif isinstance(value, FunctionType) and not is_library(value.__module__):
                attribute = self._add(getattr, value, name, place)
                get = getattr
            else:
                if any(value is clock for clock in _CLOCKS) and name in ("now", "today", "utcnow"):
                    raise _Left(NotFused("state", f"{value.__name__}.{name}()"))
                break
            value = attribute
            place = place.then(get, name)
        self._find_in(value, place, 0)

    def _find_in(self, value: Any, place: Place, depth: int) -> None:
        """Compare the parts of an object that may change while the object stays."""
        if isinstance(value, Enum):
            # a member may get attributes
            for name in sorted(self._names & vars(value).keys()):
                if not name.startswith("_"):
                    self._find_in(self._add(getattr, value, name, place), place, depth + 1)
        if is_simple(value) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if depth > _MOST_DEPTH:
            raise _Left(NotFused("state", place.words))
        if isinstance(value, (FunctionType, BuiltinFunctionType)):
            if value in _SETTINGS:
                self._add(setting_of, value, "", place)
            elif value.__module__ in CHANGING and value.__name__ not in _OF_OS:
                raise _Left(NotFused("state", f"{value.__module__}.{value.__name__}()"))
        elif isinstance(value, ContextVar):
            current = self._add(context_value, value, value.name, place)
            self._find_in(current, place, depth + 1)
        elif isinstance(value, (list, dict, set, frozenset, tuple, deque)):
            self._find_entries(value, place, depth)
        elif isinstance(value, partial):
            for name in ("func", "args", "keywords"):
                self._find_in(getattr(value, name), place.then(getattr, name), depth + 1)
        elif isinstance(value, MethodType):
            self._find_in(value.__self__, place.then(getattr, "__self__"), depth + 1)
        elif isinstance(value, nn.Module):
            self._find_module(value, place, depth)
        elif isinstance(value, (ModuleType, type)):
            if not is_library(_python_module(value)):
                self._find_attributes_named(value, place, depth)
        elif not is_function(value):
            self._find_object(value, place, depth)

    def _find_entries(self, value: Any, place: Place, depth: int) -> None:
        if len(value) > _MOST_PARTS:
            raise _Left(NotFused("state", f"{place.words}, a {type(value).__name__}"))
        if isinstance(value, (set, frozenset)):
            if not all(is_simple(x) or is_function(x) for x in value):
                raise _Left(NotFused("state", f"{place.words}, a {type(value).__name__}"))
            self._add(members_of, value, "", place)
            return
        is_dict = isinstance(value, dict)
        read: Any = entry_of if is_dict else item_of
        if not isinstance(value, tuple):
            self._add(length_of, value, "", place)
        for name in [*value] if is_dict else range(len(value)):
            if isinstance(value, tuple):
                entry = value[name]
            else:
                entry = self._add(read, value, name, place)
            self._find_in(entry, place.then(read, name), depth + 1)

    def _find_module(self, module: nn.Module, place: Place, depth: int) -> None:
        """Compare the options of a module that is called though it is none of the match's."""
        self._add(getattr, type(module), "forward", Place(type(module)))
        for name, value in vars(module).items():
            if name not in _OF_MODULES:
                self._add(getattr, module, name, place)
                self._find_in(value, place.then(getattr, name), depth + 1)
        for name, child in module._modules.items():
            if child is not None:
                self._find_module(child, place.then(getattr, name), depth + 1)

    def _find_object(self, value: Any, place: Place, depth: int) -> None:
        kind = type(value)
        is_of_user = bool(kind.__flags__ & _HEAP) and not is_library(kind.__module__)
        if is_of_user or isinstance(value, (threading.local, SimpleNamespace)):
            self._find_attributes_named(value, place, depth)
        elif not (isinstance(value, _CONSTANT_TYPES) or _is_constant(kind)):
            raise _Left(NotFused("state", f"{place.words}, a {kind.__name__}"))

    def _find_attributes_named(self, value: Any, place: Place, depth: int) -> None:
        """Compare the attributes of an object, class or Python module that any code names."""
        attributes = getattr(value, "__dict__", {})
        kind = value if isinstance(value, type) else type(value)
        names = self._names | self._strings
        if self._reads_any and not isinstance(value, (ModuleType, type)):
            names = names.union(islice(attributes, _MOST_PARTS))
        for name in sorted(names):
            if name.startswith("__"):
                continue
            static = next((vars(b)[name] for b in kind.__mro__ if name in vars(b)), MISSING)
            if name not in attributes and (static is MISSING or isinstance(static, _METHODS)):
                # it may be set later
                if static is MISSING and name in self._strings:
                    self._add(getattr, value, name, place)
                continue
            if isinstance(attributes.get(name), _METHODS) and not isinstance(value, ModuleType):
                continue
            attribute = self._add(getattr, value, name, place)
            self._find_in(attribute, place.then(getattr, name), depth + 1)


# the flag of classes that Python code defines
_HEAP = 1 << 9


def _python_module(value: Any) -> str:
    """Return the name of a Python module, or of that of a class or object."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return name or ""


def _is_constant(kind: type) -> bool:
    """Whether objects of a class of a library do not change the result of a forward."""
    return kind.__name__ in _CONSTANT_CLASSES or kind.__module__.partition(".")[0] in _OF_CONSTANTS


def _holder_of(namespace: dict[str, Any]) -> tuple[Any, Read]:
    """Return the Python module of a function's globals, or these where it is not to be found."""
    module = sys.modules.get(namespace.get("__name__", ""))
    if module is not None and vars(module) is namespace:
        return module, getattr
    return namespace, entry_of


def _reader_of(kind: type, name: str) -> Read:
    """Return how a class's attribute is read: getattr, which costs less, but for classmethods."""
    return method_of_class if isinstance(getattr(kind, name, None), MethodType) else getattr


def _functions_in_class(
    kind: type, base: type, place: Place, seen: set[int]
) -> Iterator[tuple[FunctionType, Place]]:
    for name, value in [*vars(base).items()]:
        yield from _functions_in(value, place.then(_reader_of(kind, name), name), seen)


def _functions_in(value: Any, place: Place, seen: set[int]) -> Iterator[tuple[FunctionType, Place]]:
    """Yield a function, and those that it wraps or closes over."""
    if id(value) in seen or is_simple(value):
        return
    seen.add(id(value))
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        yield from _functions_in(value.__func__, place, seen)
    elif isinstance(value, property):
        for name in ("fget", "fset"):
            yield from _functions_in(getattr(value, name), place.then(getattr, name), seen)
    elif isinstance(value, (cached_property, partial)):
        yield from _functions_in(value.func, place.then(getattr, "func"), seen)
    elif isinstance(value, (list, tuple)) and len(value) <= _MOST_PARTS:
        for number, entry in enumerate(value):
            yield from _functions_in(entry, place.then(item_of, number), seen)
    elif isinstance(value, dict) and len(value) <= _MOST_PARTS:
        for name, entry in [*value.items()]:
            yield from _functions_in(entry, place.then(entry_of, name), seen)
    elif isinstance(value, FunctionType) and not is_library(value.__module__):
        yield value, place
        for name in value.__code__.co_freevars:
            cell = cell_of(value, name, MISSING)
            inside = getattr(cell, "cell_contents", None)
            step = place.then(cell_of, name).then(getattr, "cell_contents")
            yield from _functions_in(inside, step, seen)
    wrapped = getattr(value, "__dict__", {}).get("__wrapped__")
    if wrapped is not None and not isinstance(value, (type, nn.Module)):
        yield from _functions_in(wrapped, place.then(getattr, "__wrapped__"), seen)
