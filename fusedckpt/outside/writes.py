"""The state outside of a module that code may write while it is recorded, noted and put back.

A recording runs a copy of the module, but its code may append to a global list, count in a global
variable, or draw from a generator of its own. So before a function runs for the first time, the
variables that its code names are noted, with the contents of containers and objects in them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from types import CellType, FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from fusedckpt.outside.reads import MISSING
from fusedckpt.state import holders, rng
from fusedckpt.state.code_names import CodeRead, reads_in


class _Noted(NamedTuple):
    """A holder, its contents before, and the name of the variable that leads to it."""

    holder: Any
    contents: Any
    name: str


class OutsideState:
    """The variables that code names, as they were before it ran."""

    def __init__(self) -> None:
        self._contents: list[_Noted] = []
        # objects or dicts of globals, an attribute that is assigned, and its value
        self._assigned: list[tuple[Any, str, Any]] = []
        self._generators: list[rng.RandomStates] = []
        self._seen: dict[int, Any] = {}

    def note(self, frame: FrameType, is_library: Any) -> None:
        """Note the state that a function which begins to run may write.

        is_library: tells by a Python module's name whether objects of its classes are no state.
        """
        code = frame.f_code
        variables = frame.f_locals
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for name in arguments:
            # a default value is an argument
            self._note_value(variables.get(name), name, is_library)
        for read in reads_in(code, frame.f_globals.get("__package__")):
            for value in self._values(read, frame, variables):
                self._note_value(value, ".".join((read.name, *read.attributes)), is_library)
                if isinstance(value, ModuleType) and not is_library(value.__name__):
                    space = vars(value)
                    names = [name for name in code.co_names if name in space]
                    self._assigned += [(value, name, space[name]) for name in names]

    def _values(self, read: CodeRead, frame: FrameType, variables: Any) -> Iterator[Any]:
        """Yield a variable's value, and the attributes that are read of it."""
        if read.root == "free":
            if read.is_written and not read.attributes:
                self._note_cells(frame, read.name)
            value = variables.get(read.name, MISSING)
        elif read.root == "global":
            value = frame.f_globals.get(read.name, MISSING)
            if read.is_written and not read.attributes:
                self._assigned.append((frame.f_globals, read.name, value))
        else:
            value = sys.modules.get(read.name, MISSING)
        yield value
        for place, name in enumerate(read.attributes, 1):
            attribute = _value_in(value, name)
            if read.is_written and place == len(read.attributes):
                self._assigned.append((value, name, attribute))
            value = attribute
            yield value

    def _note_cells(self, frame: FrameType, name: str) -> None:
        code = frame.f_code
        for function in _functions_of(frame):
            cell = (function.__closure__ or ())[code.co_freevars.index(name)]
            self._assigned.append((cell, name, _value_in(cell, name)))

    def _note_value(self, value: Any, name: str, is_library: Any) -> None:
        for part in islice(_parts(value, is_library), holders.MOST_OBJECTS):
            if id(part) in self._seen:
                continue
            self._seen[id(part)] = part
            if (generator := rng.of_object(part)) is not None:
                self._generators.append(rng.RandomStates([generator]))
                continue
            for holder in self._holders_of(part):
                if len(holder) <= holders.MOST_ENTRIES:
                    self._contents.append(_Noted(holder, holders.contents_of(holder), name))

    def _holders_of(self, part: Any) -> Sequence[Any]:
        """Return the holders of an object's state, of a class its counters and containers."""
        if not isinstance(part, type):
            return holders.holders_of(part)
        values = [value for base in part.__mro__ for value in vars(base).values()]
        containers = [value for value in values if type(value) in holders.PLAIN]
        return [*holders.numbers_of(part), *containers]

    def put_back(self) -> str | None:
        """Put the state back; return the name of a variable that was written, None if none was."""
        written = None
        for holder, contents, name in self._contents:
            if not holders.are_same(contents, holders.contents_of(holder)):
                holders.put_back(holder, contents)
                written = written or name
        for owner, name, value in reversed(self._assigned):
            if _value_in(owner, name) is value:
                continue
            written = written or name
            if isinstance(owner, CellType):
                owner.cell_contents = value
            elif isinstance(owner, dict):
                owner.update({name: value})
                if value is MISSING:
                    del owner[name]
            elif value is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        return written

    def restore_generators(self) -> bool:
        """Give generators their states back; return whether any had moved."""
        moved = [states for states in self._generators if states.have_moved()]
        for states in moved:
            states.restore()
        return bool(moved)


def _functions_of(frame: FrameType) -> Iterator[FunctionType]:
    """Yield the functions that may be those of a frame: its caller has them, or some object."""
    code = frame.f_code
    caller = frame.f_back
    spaces = [frame.f_globals]
    spaces += [] if caller is None else [caller.f_globals, caller.f_locals]
    values = [value for space in spaces for value in [*space.values()]]
    known = [f for f in values if isinstance(f, FunctionType) and f.__code__ is code]
    referrers = known or gc.get_referrers(code)
    yield from (f for f in referrers if isinstance(f, FunctionType))


def _value_in(owner: Any, name: str) -> Any:
    """Return a value in a dict, a cell, or the attributes of an object or class itself."""
    if isinstance(owner, CellType):
        try:
            return owner.cell_contents
        except ValueError:
            # not assigned yet
            return MISSING
    space = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
    return space.get(name, MISSING)


def _parts(value: Any, is_library: Any) -> Iterator[Any]:
    """Yield an object that is state, and those inside it."""
    todo = [value]
    seen = set[int]()
    for part in todo:
        kind = type(part)
        is_container = isinstance(part, holders.CONTAINERS)
        is_of_user = not is_library((part if isinstance(part, type) else kind).__module__)
        is_state = is_container or kind is SimpleNamespace or is_of_user
        if id(part) in seen or not (is_state or rng.of_object(part) is not None):
            continue
        seen.add(id(part))
        yield part
        if is_state and len(todo) < holders.MOST_OBJECTS:
            todo += holders.parts_of(part)[: holders.MOST_ENTRIES]
