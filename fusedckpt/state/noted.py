"""The state of objects as it is now: contents of holders by reference, and states of generators.

Plain objects and containers are state, with the objects in them; modules, tensors, enums, classes
and objects of libraries are not. Tensors among them are listed for the caller.
"""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Sequence
from enum import Enum
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from fusedckpt.state import rng
from fusedckpt.state.holders import (
    ATOMS,
    MOST_ENTRIES,
    MOST_OBJECTS,
    PLAIN,
    contents_of,
    holders_of,
    put_back,
)

# objects of these packages are no state of a model
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "triton", "fusedckpt"}


class NotedState:
    """The state of objects, as it was when each was noted."""

    def __init__(self) -> None:
        # holders, and their contents
        self.contents: list[tuple[Any, Any]] = []
        # generators, and their states
        self.generators: list[tuple[rng.GeneratorCalls, Any]] = []

    def note(self, queue: list[Any], seen: set[int]) -> list[Tensor]:
        """Note the objects in a queue, and the objects in these, the nearest first.

        Return the tensors among them. seen: ids of objects that were noted, or are not to be.
        """
        most = len(self.contents) + MOST_OBJECTS
        queue = with_state(queue)
        tensors = []
        for value in queue:
            if id(value) in seen or len(self.contents) >= most:
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                tensors.append(value)
            else:
                queue += with_state(self._note(value))
        return tensors

    def _note(self, value: Any) -> Sequence[Any]:
        """Note one object, and return the objects in it."""
        kind = type(value)
        if kind in PLAIN:
            return self.note_contents(value)
        if isinstance(value, tuple):
            return value[:MOST_ENTRIES]
        if (calls := rng.of_object(value)) is not None:
            self.generators.append((calls, calls.read()))
        elif is_plain_class(kind):
            holders = holders_of(value, of_callables=True)
            return [part for holder in holders for part in self.note_contents(holder)]
        return ()

    def note_contents(self, holder: Any) -> Sequence[Any]:
        """Note a holder's contents unless it has very many, and return the objects in it."""
        if len(holder) > MOST_ENTRIES:
            return ()
        contents = contents_of(holder)
        self.contents.append((holder, contents))
        return [*contents.values()] if isinstance(contents, dict) else contents

    def put_back(self) -> None:
        """Give all holders and generators the state that was noted."""
        for holder, contents in self.contents:
            put_back(holder, contents)
        for calls, state in self.generators:
            calls.write(state)


def is_collection(value: Any) -> bool:
    """Whether an object is a container of which the contents are brought back."""
    return type(value) in PLAIN or isinstance(value, UserDict)


@cache
def is_plain_class(kind: type) -> bool:
    """Whether objects of a class are state: not those of libraries, modules, tensors and enums."""
    if kind is SimpleNamespace or issubclass(kind, UserDict):
        return True
    is_library = kind.__module__.partition(".")[0] in _LIBRARIES
    return not (is_library or issubclass(kind, (nn.Module, Tensor, Enum, type)))


def with_state(values: Sequence[Any]) -> list[Any]:
    """Return the objects that may hold state, as their classes tell."""
    return [values[place] for place in _places_of_state(tuple(map(type, values)))]


@lru_cache(1 << 12)
def _places_of_state(kinds: tuple[type, ...]) -> Sequence[int]:
    return [place for place, kind in enumerate(kinds) if _may_hold_state(kind)]


def _may_hold_state(kind: type) -> bool:
    if kind in PLAIN or issubclass(kind, (tuple, Tensor)) or rng.is_generator(kind):
        return True
    return kind not in ATOMS and is_plain_class(kind)
