"""One change of a module's class: `fuse` makes it, and `unfuse` undoes it by its record.

A swapped module gets a subclass of its class that overrides forward: isinstance checks, attributes
and methods keep working.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from fusedckpt.layers.notes import clear_notes, notes_of, set_notes


class Part(NamedTuple):
    """A swapped module or run, as reports name it."""

    # "norm", "mlp", "linear", "attention" or "experts"
    kind: str
    # the text of the report
    change: str
    # bytes per token before and after the swap, None where they are not known
    saved: tuple[float, float] | None


class Original(NamedTuple):
    """The state of a module before it was swapped."""

    # its class
    kind: type[nn.Module]
    # the attributes that `unfuse` deletes
    attributes: tuple[str, ...]
    # the notes that it forgets
    notes: tuple[str, ...]
    # the notes that it forgets
    notes: tuple[str, ...]
    # its swapped parts, by the name below the module
    parts: dict[str, Part]


def original_of(module: nn.Module) -> Original | None:
    """Return the state of a module before it was swapped, None if it is not swapped."""
    return notes_of(module).original


def run_forward(module: Any, x: Tensor) -> Any:
    """Run the module's forward, without the hooks around it."""
    return type(module).forward(module, x)


@dataclass(frozen=True)
class Swap:
    """One change of class, not yet made."""

    # an argument of `fuse`: "norm", "mlp", "linear", ...
    kind: str
    # its text in the report
    change: str
    # the class that the module gets
    new_class: type[nn.Module]
    # the attributes that it gets, and loses by `unfuse`
    attributes: dict[str, Any] = field(default_factory=dict)
    # the fields of its notes, likewise
    notes: dict[str, Any] = field(default_factory=dict)
    # the trailing shape of the module's input
    features: tuple[int, ...] = ()
    # whether the module computes the same with smaller parameters, which are then verified
    can_shrink: bool = False
    # the words of reports, by the name below the module
    parts: dict[str, Part] = field(default_factory=dict)
    # where a method is swapped: a module of the children that the method calls
    method_mlp: Any = None
    # calls the module on one tensor
    run: Callable[[Any, Tensor], Any] = run_forward

    def storing(self, store: str | None) -> Swap:
        """Return the swap of a module that keeps its input as `store` says."""
        if store is None:
            return self
        return replace(self, notes={**self.notes, "store": store})

    def apply(self, module: nn.Module) -> None:
        """Change the module's class."""
        notes = self.notes
        match = notes.get("match")
        if match is not None:
            notes = {**notes, "reader": match.reader()}
        before = original_of(module) or Original(type(module), (), (), {})
        module.__dict__.update(self.attributes)
        original = Original(
            before.kind,
            (*before.attributes, *self.attributes),
            (*before.notes, *notes),
            {**before.parts, **self.parts},
        )
        set_notes(module, original=original, **notes)
        module.__class__ = self.new_class


def undo(module: nn.Module) -> None:
    """Give a swapped module its class back."""
    original: Original = notes_of(module).original
    clear_notes(module, "original", *original.notes)
    for attribute in original.attributes:
        module.__dict__.pop(attribute, None)
    module.__class__ = original.kind
