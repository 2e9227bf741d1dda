"""Subclasses made at run time: a class of ours before one of the user's.

A module is given such a class and keeps its kind: isinstance checks, attributes and methods go on
working. A class is made once for each pair, and found again by the pair it was made from, so that
copies and pickles need no name for it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from fusedckpt.layers.notes import NO_NOTES, ModuleNotes

# where a made class has the classes that it was made of: ours and the original
_MADE = "_fusedckpt_made"


class _Made(nn.Module):
    """A base of all made classes."""

    # of a module that lost its notes
    _fusedckpt: ModuleNotes = NO_NOTES

    def _get_name(self) -> str:
        return type(self).__name__ if _prefix(type(self)) else super()._get_name()

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        # a class made of this one, by parametrization or sharding, is not ours to find again
        if made_of(type(self)) is None:
            return reduced
        return _new, (_named_classes(type(self)),), *reduced[2:]


@cache
def subclass(ours: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `original` with the methods of `ours`, one and the same each time.

    Its name begins with `_fusedckpt_prefix` of `ours`, "Fused" where that says nothing.
    """
    names = {"__module__": original.__module__, _MADE: (ours, original)}
    # a class that was made begins with it already
    bases = (ours, original) if issubclass(original, _Made) else (_Made, ours, original)
    return type(f"{_prefix(ours)}{original.__name__}", bases, names)


def refuse_script(module: nn.Module) -> Any:
    """Refuse torch.jit.script, which would compile the original forward."""
    raise TypeError("torch.jit.script: the model was fused, call fusedckpt.unfuse first")


def _prefix(kind: type[nn.Module]) -> str:
    return getattr(kind, "_fusedckpt_prefix", "Fused")


def made_of(kind: type[nn.Module]) -> tuple[type[nn.Module], type[nn.Module]] | None:
    """Return the classes that `subclass` made this very class of, None where it did not."""
    return kind.__dict__.get(_MADE)


def _named_classes(kind: type[nn.Module]) -> Any:
    """Return the classes, which pickle finds by their names, that a class was made of."""
    made = made_of(kind)
    return kind if made is None else (made[0], _named_classes(made[1]))


def _class_of(named: Any) -> type[nn.Module]:
    if isinstance(named, type):
        return named
    ours, original = named
    return subclass(ours, _class_of(original))


def _new(named: Any) -> nn.Module:
    kind = _class_of(named)
    return kind.__new__(kind)
