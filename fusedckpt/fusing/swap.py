"""The change of a module's class, and the base of the forwards that it brings.

`fuse` makes a change, and `unfuse` undoes it by its record. A swapped module gets a subclass of its
class, which is made at run time: a class of ours before one of the user's. So the module keeps its
kind: isinstance checks, attributes and methods go on working. Such a class is made once for each
pair, and found again by the pair that it was made from, so that copies and pickles need no name for
it. A call that was not proven equal runs the original forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn

from fusedckpt.autograd import dispatch, private, tracker
from fusedckpt.layers import fallbacks, sharded
from fusedckpt.layers.fallbacks import NotFused, refuse_script
from fusedckpt.layers.notes import NO_NOTES, ModuleNotes, clear_notes, notes_of, set_notes

# where a made class has the classes that it was made of: ours and the original
_MADE = "_fusedckpt_made"
# the parts of a function, as FunctionType takes them
_FUNCTION = ("__code__", "__globals__", "__name__", "__defaults__", "__closure__")


class _Made(nn.Module):
    """A base of all made classes."""

    # of a module that lost its notes
    _fusedckpt: ModuleNotes = NO_NOTES

    def __init_subclass__(cls, **kwargs: Any) -> None:
        try:
            # that of transformers' layers wraps the forward, for gradient checkpointing
            super().__init_subclass__(**kwargs)
        except Exception:  # it may ask for arguments, or refuse a second class of a name
            if _MADE not in vars(cls):
                raise

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

    Its name begins with `_fusedckpt_prefix` of `ours`, "Fused" where that says nothing. If `ours`
    has `_fusedckpt_members(original)`, that returns more members for it.
    """
    names = {"__module__": original.__module__, _MADE: (ours, original)}
    # a class that was made begins with it already
    bases = (ours, original) if issubclass(original, _Made) else (_Made, ours, original)
    made = type(f"{_prefix(ours)}{original.__name__}", bases, names)
    for name, member in getattr(ours, "_fusedckpt_members", _no_members)(original).items():
        setattr(made, name, member)
    return made


def _no_members(original: type[nn.Module]) -> dict[str, Any]:
    return {}


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


class Swapped(nn.Module):
    """Forward of a swapped module: fused if proven equal for this call, else the original one."""

    # how many tensors a fused call takes
    _fusedckpt_count = 1
    # their names in the original's signature
    _fusedckpt_names: tuple[str, ...]
    # of a module that is swapped
    _fusedckpt: ModuleNotes
    # returns the result, or why this call cannot run fused
    _fused: Callable[..., Tensor | NotFused]

    @classmethod
    def _fusedckpt_members(cls, original: type[nn.Module]) -> dict[str, Any]:
        """Return the forward with the original's signature, by which torch.fx names inputs."""
        forward = FunctionType(*(getattr(cls.forward, key) for key in _FUNCTION))
        _, *parameters = inspect.signature(original.forward).parameters.values()
        names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        return {
            "forward": wraps(original.forward)(forward),
            "_fusedckpt_names": tuple(names[: cls._fusedckpt_count]),
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the fused forward, or that of the original class."""
        tensors = self._by_position(args, kwargs) if kwargs else args
        if not dispatch.is_traced(tensors[0] if tensors else None):
            is_taken = len(tensors) == self._fusedckpt_count
            for x in tensors:
                is_taken = is_taken and isinstance(x, Tensor)
            if private.num_function_modes() and tracker.has_foreign_modes():
                y = NotFused("mode")
            else:
                y = self._fused(*tensors) if is_taken else NotFused("arguments")
            if not isinstance(y, NotFused):
                return y
            fallbacks.note_fallback(self, y)
        if self._fusedckpt.sharding is not None and len(tensors) == 1:
            return sharded.on_dtensors(super().forward, tensors[0], self._fusedckpt.sharding)
        return super().forward(*args, **kwargs)

    __prepare_scriptable__ = refuse_script

    def _by_position(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return a fused call's tensors, nothing where others are passed by name."""
        names = self._fusedckpt_names[len(args) :]
        return (*args, *(kwargs[n] for n in names)) if {*names} == kwargs.keys() else ()

    def _original(self, x: Tensor) -> Any:
        return super().forward(x)

    def _function_now(self) -> str:
        """Name the function that it computes now, "" for its own."""
        return ""

    def extra_repr(self) -> str:
        """Describe the module as its class does, and name the function that it computes now."""
        return ", ".join(filter(None, (super().extra_repr(), self._function_now())))
