"""Values that code reads outside of a module: found when it is matched, compared in calls.

A forward computes by more than its module: by functions of classes and of Python modules, global
and closed-over variables, default arguments, entries of global containers, attributes of global
objects, variables of the environment and of contexts. Any of these may be replaced later. Each is
read once when the match is made, and compared by identity in each call: after a class's forward is
patched, or a global is assigned, a call runs the original forward. Values that cannot change are
compared as such, and code by identity.

The code that ran while the module was recorded (watch.py) tells which they are, by the names in it
(find_reads.py). An object is compared by its attributes of these names, also where another path
leads to it. A value that cannot be compared is a reason to leave the module.
"""

from __future__ import annotations

import enum
import importlib
import sys
import types
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedckpt.layers.fallbacks import NotFused

# the value of a missing attribute
MISSING = "no value"
_NUMBERS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_OPTIONS = (range, slice, enum.Enum, torch.dtype, torch.device, torch.layout, torch.memory_format)
_SIMPLE = _NUMBERS + _OPTIONS
_EXECUTABLE = (types.FunctionType, types.BuiltinFunctionType, type, partial)
# one read, or one step on the way to a holder: read(holder, name, MISSING)
Read = Callable[[Any, Any, Any], Any]
Step = tuple[Read, Any]

# the expected value where an unpickled read finds none: nothing equals it
_GONE = object()


def is_simple(value: Any) -> bool:
    """Whether a value is immutable, and compared by value."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_simple, value))
    return isinstance(value, _SIMPLE)


def is_function(value: Any) -> bool:
    """Whether a value is code, compared by identity."""
    # torch's builtins and the jit's functions are of classes of their own
    is_code = isinstance(value, _EXECUTABLE) or type(value).__name__.endswith("ScriptFunction")
    return is_code and not isinstance(getattr(value, "__self__", None), nn.Module)


def entry_of(holder: Any, key: Any, missing: Any) -> Any:
    """Return the entry of a dict, by code that torch.compile can look into, unlike dict.get."""
    return holder.get(key, missing)


def item_of(holder: Any, place: int, missing: Any) -> Any:
    """Return the entry of a list, tuple or deque."""
    return holder[place] if place < len(holder) else missing


def length_of(holder: Any, name: str, missing: Any) -> Any:
    """Return the length of a container."""
    return len(holder)


def members_of(holder: Any, name: str, missing: Any) -> Any:
    """Return the members of a set."""
    return frozenset(holder)


def context_value(holder: Any, name: str, missing: Any) -> Any:
    """Return the value of a context variable."""
    try:
        return holder.get()
    except LookupError:
        return missing


def setting_of(holder: Any, name: str, missing: Any) -> Any:
    """Return the result of a function without arguments that tells a setting."""
    try:
        return holder()
    except (RuntimeError, ValueError):
        # there is no process group
        return missing


def cell_of(function: Any, name: str, missing: Any) -> Any:
    """Return the cell of a closed-over variable."""
    return function.__closure__[function.__code__.co_freevars.index(name)]


def method_of_class(kind: Any, name: str, missing: Any) -> Any:
    """Return a class's function, also of a classmethod, which is bound anew each time."""
    value = getattr(kind, name, missing)
    return getattr(value, "__func__", value)


class Place(NamedTuple):
    """Where an object is found: from a Python module, a class or a function, by steps."""

    root: Any
    steps: tuple[Step, ...] = ()

    def then(self, read: Read, name: Any) -> Place:
        """Return the place that a further step leads to."""
        return Place(self.root, (*self.steps, (read, name)))

    @property
    def words(self) -> str:
        """Name the object, as code would."""
        names = [getattr(self.root, "__qualname__", None) or getattr(self.root, "__name__", "")]
        for read, name in self.steps:
            if read in (entry_of, item_of):
                names.append(f"[{name!r}]")
            elif read in (getattr, method_of_class, cell_of) and name not in _UNNAMED:
                names.append(f".{name}")
        return "".join(names).lstrip(".")


# steps that code does not spell
_UNNAMED = frozenset(("__dict__", "__wrapped__", "cell_contents", "_data", "__code__", "fget"))


class OutsideRead(NamedTuple):
    """A value that was read outside, and the way to read it again."""

    # reads it again, from the holder by the name
    read: Read
    # the object that has it
    holder: Any
    # an attribute, or a key
    name: Any
    # the value then
    value: Any
    # of the value
    place: Place

    def is_changed(self) -> bool:
        """Whether the value is another one now."""
        now = self.read(self.holder, self.name, MISSING)
        return now is not self.value and not are_equal_values(now, self.value)


def are_equal_values(now: Any, value: Any) -> bool:
    """Whether two values that are not identical are simple, and equal."""
    return type(now) is type(value) and is_simple(value) and now == value


class OutsideReads:
    """The values that the code of one match reads outside of its module."""

    def __init__(self, rows: Iterable[OutsideRead] = ()):
        self.rows = tuple(rows)

    def change(self) -> NotFused | None:
        """Return the first value that is another one now, None if all are as they were."""
        for read, holder, name, value, place in self.rows:
            now = read(holder, name, MISSING)
            if now is not value and not are_equal_values(now, value):
                return NotFused("changed", place.words)
        return None

    def __deepcopy__(self, memo: Any) -> OutsideReads:
        # copies of a module read the same variables
        return self

    def __reduce__(self) -> Any:
        # names and simple values: another process has other objects
        return _found_again, (tuple(map(_pickled, self.rows)),)


NONE = OutsideReads()


def _pickled(row: OutsideRead) -> tuple[Any, ...]:
    root, steps = row.place
    if isinstance(root, ModuleType):
        return root.__name__, "", steps, _described(row.value)
    # classes made at run time, and functions inside of others, have no name to be found by
    names = getattr(root, "__module__", None), getattr(root, "__qualname__", None)
    return *(names if _named(*names) is root else (None, None)), steps, _described(row.value)


def _named(module: Any, names: Any) -> Any:
    """Return the object of a name in a Python module, None where there is none."""
    value = sys.modules.get(module)
    for name in names.split(".") if names else ():
        value = getattr(value, name, None)
    return value


def _described(value: Any) -> tuple[Any, ...]:
    """Return a value as it is pickled: itself if it is simple, else the name of its code."""
    if is_simple(value):
        return (value,)
    kind = value if hasattr(value, "__qualname__") else type(value)
    return getattr(kind, "__module__", None), kind.__qualname__


def _found_again(pickled: tuple[Any, ...]) -> OutsideReads:
    return OutsideReads(_row(*parts) for parts in pickled)


def _row(module: Any, names: Any, steps: tuple[Step, ...], described: Any) -> OutsideRead:
    """Return a read in this process; one that is not found, or of other code, is always changed."""
    *before, (read, name) = steps
    try:
        importlib.import_module(module)
        root = holder = _named(module, names)
        for step, step_name in before:
            holder = step(holder, step_name, MISSING)
        now = read(holder, name, MISSING)
    except Exception:  # arbitrary code of others
        return OutsideRead(getattr, None, name, _GONE, Place(None, steps))
    if len(described) == 1:
        value = described[0]
    else:
        value = now if _described(now) == described else _GONE
    return OutsideRead(read, holder, name, value, Place(root, steps))
