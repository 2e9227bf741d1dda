"""The code of other libraries and of the user that runs while a forward is recorded.

Only code outside of Python's own library, torch and this package is read: only this code may read
values that change. Each function is seen when it is called, through any dispatch.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterable
from inspect import CO_NEWLOCALS
from types import CodeType, FrameType, FunctionType
from typing import Any

from fusedckpt.outside.writes import OutsideState

# packages that torch uses, and those whose functions depend on their arguments alone
_PURE = ("beartype", "einops", "filelock", "fsspec", "jaxtyping", "jinja2", "markupsafe", "mpmath")
_PURE += ("networkx", "opt_einsum", "optree", "packaging", "setuptools", "sympy", "typeguard")
_PURE += ("typing_extensions",)
# packages with functions that are taken as they are
LIBRARIES = sys.stdlib_module_names | {
    "builtins",
    "torch",
    "numpy",
    "triton",
    "fusedckpt",
    *_PURE,
}
# modules of Python's library that return something else each time
CHANGING = frozenset(("datetime", "os", "posix", "nt", "secrets", "threading", "time", "uuid"))
# modules that read `os.environ` for others
_MAPPINGS = ("os", "_collections_abc", "collections.abc")
# functions of `os` that read the environment, and those that they call
_OF_ENVIRONMENT = frozenset(
    ("__contains__", "__getitem__", "decode", "encode", "encodekey", "fsdecode", "fsencode", "get")
    + ("getenv", "check_str")
)


def is_library(name: str | None) -> bool:
    """Whether the functions of a library, by its module's name, are taken as they are."""
    name = name or ""
    # of the functions that a named tuple gets
    return name.startswith("namedtuple_") or name.partition(".")[0] in LIBRARIES


class CodeWatch:
    """Sees the functions that are called inside, in this thread.

    As a context it may be entered several times; another trace function is put back. No garbage is
    collected meanwhile: finalizers of other objects would be taken for functions of the forward.
    """

    def __init__(self) -> None:
        # by id, the code and the globals of the functions
        self.codes: dict[int, tuple[CodeType, dict[str, Any]]] = {}
        # names of variables of the environment that were read
        self.environment: set[str] = set()
        # a function that returns something else each time, by its name
        self.changing: str | None = None
        # the state that it may write
        self.state = OutsideState()
        # by id, the code of libraries
        self._of_libraries: dict[int, CodeType] = {}
        self._before: Any = None
        # whether garbage was collected before
        self._collects = False

    @classmethod
    def of_all(cls, watches: Iterable[CodeWatch]) -> CodeWatch:
        """Return the code that any of several has seen."""
        together = cls()
        for watch in watches:
            together.codes |= watch.codes
            together.environment |= watch.environment
            together.changing = together.changing or watch.changing
        return together

    @classmethod
    def of_functions(cls, functions: Iterable[Any]) -> CodeWatch:
        """Return the code of functions that may run, of those in them, and of methods of objects.

        Of the functions that they wrap and close over, and of closed-over objects the methods that
        they name.
        """
        watch = cls()
        queue = [*functions]
        for function in queue:
            function = getattr(function, "__func__", function)
            if not isinstance(function, FunctionType) or id(function.__code__) in watch.codes:
                continue
            if is_library(function.__module__):
                continue
            code = function.__code__
            watch.codes[id(code)] = code, function.__globals__
            queue.append(getattr(function, "__wrapped__", None))
            for value in inspect.getclosurevars(function).nonlocals.values():
                queue.append(value)
                queue += [getattr(type(value), name, None) for name in code.co_names]
        return watch

    def __enter__(self) -> CodeWatch:
        self._collects = gc.isenabled()
        gc.disable()
        self._before = sys.gettrace()
        sys.settrace(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        if self._collects:
            gc.enable()

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        # of calls alone, as nothing that follows the lines is returned
        place = id(frame.f_code)
        if place not in self._of_libraries and place not in self.codes:
            self._note(frame)

    def _note(self, frame: FrameType) -> None:
        code = frame.f_code
        name = frame.f_globals.get("__name__")
        if not is_library(name):
            # not the body of a module or class, which an import runs
            if code.co_flags & CO_NEWLOCALS:
                self.codes[id(code)] = code, frame.f_globals
                self.state.note(frame, is_library)
        elif name == "os" and code.co_name in _OF_ENVIRONMENT:
            if code.co_name == "__getitem__" and self._is_called_by_user(frame):
                self.environment.add(str(frame.f_locals["key"]))
        elif name in CHANGING:
            if self._is_called_by_user(frame):
                self.changing = self.changing or f"{name}.{code.co_name}"
        else:
            self._of_libraries[id(code)] = code

    def _is_called_by_user(self, frame: FrameType) -> bool:
        """Whether other code than torch's calls a function, by itself or by one of a mapping."""
        caller = frame.f_back
        while caller is not None and caller.f_globals.get("__name__") in _MAPPINGS:
            caller = caller.f_back
        return caller is not None and id(caller.f_code) in self.codes
