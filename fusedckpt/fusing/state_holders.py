"""Holders of state: containers, and the attributes of objects and classes.

`contents_of` reads the contents of a holder, `put_back` writes them. Contents of containers are
filled in by the methods of the plain class, past those of a subclass, which may refuse writes, as a
config does.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import cache
from operator import is_
from typing import Any

# containers, and the classes whose methods fill those of a subclass, past its own
CONTAINERS = frozenset((dict, OrderedDict, defaultdict, Counter, list, set, deque))
BASES = OrderedDict, dict, list, set, deque


def contents_of(holder: Any) -> Any:
    """Return the contents of a container, Slots or ClassNumbers: a dict of them, or a list."""
    if isinstance(holder, Slots):
        return dict(holder.items())
    base = _base_of(holder)
    return dict(base.items(holder)) if issubclass(base, dict) else [*base.__iter__(holder)]


def _base_of(holder: Any) -> Any:
    return next(base for base in BASES if isinstance(holder, base))


def put_back(holder: Any, contents: Any) -> None:
    """Give a holder contents, unless it has them."""
    present = contents_of(holder)
    is_same = len(present) == len(contents) and all(map(is_, present, contents))
    if isinstance(contents, dict):
        is_same = is_same and all(map(is_, present.values(), contents.values()))
    if is_same:
        return
    if isinstance(holder, Slots):
        holder.put(contents)
        return
    base = _base_of(holder)
    base.clear(holder)
    if base is OrderedDict:
        for key, value in contents.items():
            base.__setitem__(holder, key, value)
    elif base in (dict, set):
        base.update(holder, contents)
    else:
        base.extend(holder, contents)


class Slots:
    """The attributes of an object that has no dict for them."""

    def __init__(self, owner: Any):
        self._owner = owner
        self._names = slots_of(type(owner))

    def __len__(self) -> int:
        return len(self._names)

    def items(self) -> list[tuple[str, Any]]:
        """Return the names and values of the slots that are set."""
        owner = self._owner
        return [(name, getattr(owner, name)) for name in self._names if hasattr(owner, name)]

    def put(self, contents: Mapping[str, Any]) -> None:
        """Set these slots, and no others."""
        for name, _ in self.items():
            if name not in contents:
                delattr(self._owner, name)
        for name, value in contents.items():
            object.__setattr__(self._owner, name, value)


class ClassNumbers(Slots):
    """The numbers among the attributes of a class, such as counters."""

    def __init__(self, owner: type, names: Sequence[str]):
        self._owner = owner
        self._names = names

    def items(self) -> list[tuple[str, Any]]:
        """Return the names and values of the attributes of this class itself."""
        attributes = vars(self._owner)
        return [(name, attributes[name]) for name in self._names if name in attributes]

    def put(self, contents: Mapping[str, Any]) -> None:
        """Set these attributes, and no others."""
        for name, value in self.items():
            if name not in contents:
                delattr(self._owner, name)
            elif contents[name] is not value:
                setattr(self._owner, name, contents[name])
        for name in contents.keys() - vars(self._owner).keys():
            setattr(self._owner, name, contents[name])


@cache
def numbers_of(kind: type) -> Sequence[ClassNumbers]:
    """Return the classes of the user that a class is made of, with all their numbers' names."""
    bases = [base for base in kind.__mro__ if not is_of_library(base)]
    names = [
        name
        for base in bases
        for name, value in vars(base).items()
        if type(value) in (int, float) and not name.startswith("__")
    ]
    return [ClassNumbers(base, names) for base in bases] if names else []


def is_of_library(kind: type) -> bool:
    """Whether a class is none of the user's."""
    return kind.__module__.partition(".")[0] in ("torch", "fusedckpt", "builtins")


@cache
def slots_of(kind: type) -> Sequence[str]:
    """Return the names of the slots of a class's objects."""
    names = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [name for name in names if not name.startswith("__")]
