"""The objects among a unit's arguments that its call changes, such as a cache of keys and values.

Layers that share keys and values write the same ones again when they are called again, a cache
grows: the first may be recomputed, the second may not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fusedckpt.checkpointing.determinism import Results, note_of
from fusedckpt.state.holders import ATOMS, nested, restorer

# why no segment may contain a unit
CHANGES = "changes its argument"
# the remedy
ADVICE = "if it is a cache of keys and values, pass use_cache=False to plan and to the model"


class ChangedArguments:
    """The objects among arguments, and those of them that a call changed."""

    def __init__(self, args: Any, kwargs: Any):
        # by number or name, and class
        self._objects = {
            f"{name}, a {type(x).__name__}": x
            for name, x in [*enumerate(args), *kwargs.items()]
            if hasattr(x, "__dict__") and not isinstance(x, (Tensor, nn.Module))
        }
        self._states = {name: _state_of(x) for name, x in self._objects.items()}

    def note(self) -> None:
        """Note the objects that the call changed, after it."""
        self._objects = {
            name: x for name, x in self._objects.items() if _state_of(x) != self._states[name]
        }
        self._states.clear()

    @contextmanager
    def called_again(self) -> Iterator[list[str]]:
        """Surround another call; at the end, put the objects back to their state before it.

        Yields a list that then has the names of the objects which the call changed once more.
        """
        contents = {name: _contents_of(x) for name, x in self._objects.items()}
        restorers = [restorer(part) for x in self._objects.values() for part in nested(x)]
        changed = list[str]()
        try:
            yield changed
            for name, x in self._objects.items():
                if not _are_close(contents[name], _contents_of(x)):
                    changed.append(name)
        finally:
            for restore in restorers:
                restore()


def _state_of(value: Any) -> list[Any]:
    """Return contents, and ids and versions of tensors, in an object."""
    state = list[Any]()
    for part in nested(value):
        if isinstance(part, Tensor):
            state.append((id(part), part._version))
        else:
            state.append(part if type(part) in ATOMS else id(part))
    return state


def _contents_of(value: Any) -> tuple[list[Any], list[Any]]:
    """Return the contents in an object, with the classes of others, and notes of its tensors."""
    parts = [*nested(value)]
    contents = [part if type(part) in ATOMS else type(part) for part in parts]
    return contents, [note_of(part) for part in parts if isinstance(part, Tensor)]


def _are_close(before: tuple[list[Any], list[Any]], after: tuple[list[Any], list[Any]]) -> bool:
    results = Results(note_of, rounds=True)
    results.see_notes("tensors", before[1])
    repeat = Results(note_of, results, rounds=True)
    repeat.see_notes("tensors", after[1])
    return before[0] == after[0] and repeat.difference is None
