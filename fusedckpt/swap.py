"""Swap the layers of a model in place for those that keep only their inputs, and back.

A swap changes a module's class and nothing else: the module object, its Parameters, hooks and
state_dict stay. An activation that a linear absorbs leaves an `Absorbed` identity in its slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from fusedckpt import _check
from fusedckpt.kernels.activations import name_of
from fusedckpt.linear import LEVELS, Linear
from fusedckpt.norm import LayerNorm, RMSNorm

__all__ = ["Absorbed", "FuseReport", "fuse", "unfuse"]

# attributes that a swapped module has and its original has not
_NORMS: dict[type[nn.Module], tuple[type[nn.Module], dict[str, Any]]] = {
    nn.RMSNorm: (RMSNorm, {"offset": 0.0, "cast": "torch"}),
    nn.LayerNorm: (LayerNorm, {}),
}
_MARK = "_fusedckpt_original"
_ACTIVATION_MODULE = nn.GELU.__module__
_OUTPUT_HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


class Absorbed(nn.Module):
    """The identity where an activation stood that the linear before it now computes."""

    def __init__(self, original: nn.Module):
        super().__init__()
        self.training = original.training
        # in a tuple, so that it is no submodule
        self._original = (original,)

    def forward(self, input: Tensor) -> Tensor:
        """Return the input."""
        return input

    def extra_repr(self) -> str:
        """Name the activation."""
        return repr(self._original[0])


@dataclass(frozen=True)
class FuseReport:
    """What `fuse` did: `swapped` maps a module's name to its change, `left` to the reason."""

    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = Counter(self.swapped.values())
        lines = [f"fused {len(self.swapped)} modules, left {len(self.left)}"]
        lines += [f"  {count:4d} x {change}" for change, count in counts.most_common()]
        lines += [f"  left {name or '(root)'}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Swap:
    """One planned change; nothing is touched before all are planned."""

    name: str
    module: nn.Module
    to: type[nn.Module]
    attributes: dict[str, Any]
    absorbs: tuple[nn.Sequential, str] | None = None

    @property
    def change(self) -> str:
        activation = self.attributes.get("activation")
        original = f"nn.{type(self.module).__name__}"
        return f"{original}{f' + {activation}' if activation else ''} -> {self.to.__name__}"

    def apply(self) -> None:
        self.module.__dict__.update(self.attributes)
        setattr(self.module, _MARK, (type(self.module), tuple(self.attributes)))
        self.module.__class__ = self.to
        if self.absorbs is not None:
            parent, slot = self.absorbs
            parent._modules[slot] = Absorbed(parent._modules[slot])  # type: ignore[arg-type]


def fuse(model: nn.Module, *, save: str = "inputs") -> FuseReport:
    """Swap, in place, the layers of `model` that keep more for backward than they need.

    nn.RMSNorm and nn.LayerNorm become fusedckpt's; an nn.Linear followed by an activation inside an
    nn.Sequential becomes a fusedckpt.Linear that computes both. Parameters, hooks, module names
    and the state_dict stay; `unfuse` restores the classes.

    Args:
        model: any module; itself a norm or a Sequential, too.
        save: what a swapped linear keeps, see `functional.linear_act`.

    Returns:
        What was swapped, and what was left as it is and why: subclasses, parametrized modules,
        activations with other than default parameters, linears used in several places, and
        linears or activations whose hooks expect to see what lies between them.

    Raises:
        TypeError: `model` is no nn.Module.
        ValueError: `save` is no level of a linear.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fuse: model must be an nn.Module, got {type(model).__name__}")
    _check.level("fuse", save, LEVELS)
    left: dict[str, str] = {}
    swaps = [*_norm_swaps(model, left), *_linear_swaps(model, save, left)]
    for swap in swaps:
        swap.apply()
    return FuseReport({swap.name: swap.change for swap in swaps}, left)


def unfuse(model: nn.Module) -> nn.Module:
    """Undo `fuse`: restore every original class and activation, and return the model.

    Works after training, deepcopy, pickling and loading. Layers built as fusedckpt's stay.
    """
    for module in list(model.modules()):
        for slot, child in module._modules.items():
            if isinstance(child, Absorbed):
                child._original[0].train(child.training)
                module._modules[slot] = child._original[0]
        if _MARK in module.__dict__:
            original, attributes = module.__dict__.pop(_MARK)
            for attribute in attributes:
                del module.__dict__[attribute]
            module.__class__ = original
    return model


def _norm_swaps(model: nn.Module, left: dict[str, str]) -> Iterator[_Swap]:
    for name, module in model.named_modules():
        for original, (swapped, attributes) in _NORMS.items():
            if not isinstance(module, original) or isinstance(module, swapped):
                continue
            if type(module) is not original:
                left[name] = f"{type(module).__name__} is a subclass of nn.{original.__name__}"
            elif "forward" in module.__dict__:
                left[name] = "its forward was replaced"
            else:
                yield _Swap(name, module, swapped, attributes)


def _linear_swaps(model: nn.Module, save: str, left: dict[str, str]) -> Iterator[_Swap]:
    uses = Counter(
        id(child) for parent in model.modules() for child in parent._modules.values() if child
    )
    for prefix, parent in model.named_modules():
        if type(parent) is not nn.Sequential:
            continue
        for (slot, linear), (next_slot, follower) in pairwise(parent._modules.items()):
            if not isinstance(linear, nn.Linear) or isinstance(linear, Linear):
                continue
            if follower is None or type(follower).__module__ != _ACTIVATION_MODULE:
                continue
            name = f"{prefix}.{slot}" if prefix else slot
            activation = name_of(follower)
            reason = _why_not(linear, follower, activation, uses)
            if reason:
                left[name] = reason
                continue
            attributes = {"activation": activation, "save": save}
            yield _Swap(name, linear, Linear, attributes, (parent, next_slot))


def _why_not(
    linear: nn.Linear, follower: nn.Module, activation: str | None, uses: Counter[int]
) -> str | None:
    """Return why a linear and the activation after it must stay apart, None if they need not."""
    if activation is None:
        return f"{follower} is no activation that can be fused"
    if type(linear) is not nn.Linear:
        return f"{type(linear).__name__} is a subclass of nn.Linear"
    if uses[id(linear)] > 1:
        return "it is used in several places"
    if any("forward" in module.__dict__ for module in (linear, follower)):
        return "its forward, or its activation's, was replaced"
    if linear.weight.dtype not in _check.DTYPES:
        return f"its weight is {linear.weight.dtype}"
    if any(getattr(linear, hooks) for hooks in _OUTPUT_HOOKS) or any(
        getattr(follower, hooks) for hooks in (*_OUTPUT_HOOKS, "_forward_pre_hooks")
    ):
        return "a hook watches what lies between it and its activation"
    return None
