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
from torch.nn.modules import activation as activations

from fusedckpt import _check
from fusedckpt.kernels.activations import name_of
from fusedckpt.linear import LEVELS, Linear
from fusedckpt.norm import LayerNorm, RMSNorm

__all__ = ["Absorbed", "FuseReport", "fuse", "unfuse"]

# what each norm becomes, and the attributes that it has then and had not before
_NORMS: dict[type[nn.Module], tuple[type[nn.Module], dict[str, Any]]] = {
    nn.RMSNorm: (RMSNorm, {"offset": 0.0, "cast": "torch"}),
    nn.LayerNorm: (LayerNorm, {}),
}
# where a swapped module remembers its original class and the attributes to delete
_MARK = "_fusedckpt_original"
# every activation of torch, so that those which cannot be fused are reported
_ACTIVATIONS = tuple(getattr(activations, name) for name in activations.__all__)
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

    def restore(self) -> nn.Module:
        """Return the activation, in the mode that this module is in."""
        return self._original[0].train(self.training)

    def extra_repr(self) -> str:
        """Name the activation."""
        return repr(self._original[0])


@dataclass(frozen=True)
class FuseReport:
    """What `fuse` did: `swapped` maps a module's name to its change, `left` to the reason."""

    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        changes = Counter(self.swapped.values())
        reasons = Counter(self.left.values())
        first = {reason: name or "(root)" for name, reason in reversed(self.left.items())}
        lines = [f"fused {len(self.swapped)} modules, left {len(self.left)}"]
        lines += [f"  {count:4d} x {change}" for change, count in changes.most_common()]
        for reason, count in reasons.most_common():
            others = f" and {count - 1} more" if count > 1 else ""
            lines.append(f"  left {first[reason]}{others}: {reason}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Swap:
    """One change, not yet made, and why it must not be, if so."""

    name: str
    module: nn.Module
    to: type[nn.Module]
    attributes: dict[str, Any]
    obstacle: str | None
    # the Sequential, the slot in it and the activation there
    absorbs: tuple[nn.Sequential, str, nn.Module] | None = None

    def __str__(self) -> str:
        activation = self.attributes.get("activation")
        absorbed = f" + {activation}" if activation else ""
        return f"nn.{type(self.module).__name__}{absorbed} -> {self.to.__name__}"

    def apply(self) -> None:
        self.module.__dict__.update(self.attributes)
        self.module.__dict__[_MARK] = type(self.module), tuple(self.attributes)
        self.module.__class__ = self.to
        if self.absorbs is not None:
            parent, slot, activation = self.absorbs
            parent._modules[slot] = Absorbed(activation)


def fuse(model: nn.Module, *, save: str = "inputs") -> FuseReport:
    """Swap, in place, the layers of `model` that keep more for backward than they need.

    nn.RMSNorm and nn.LayerNorm become fusedckpt's; an nn.Linear followed by an activation inside an
    nn.Sequential becomes a fusedckpt.Linear that computes both. Parameters, hooks, module names
    and the state_dict stay; `unfuse` restores the classes. What is fused already stays as it is.

    The activation's slot holds an identity from then on: call a Sequential as a whole, not its
    layers one by one, and unfuse it before replacing one of them.

    Args:
        model: any module; itself a norm or a Sequential, too.
        save: what a swapped linear keeps, see `functional.linear_act`.

    Returns:
        What was swapped, and what was left as it is and why: subclasses, parametrized modules,
        replaced forwards, parameters that are not dense local floating-point tensors, activations
        with other than default parameters, linears used in several places, and linears or
        activations whose hooks expect to see what lies between them.

    Raises:
        TypeError: `model` is no nn.Module.
        ValueError: `save` is no level of a linear.
    """
    _check_module("fuse", model)
    _check.level("fuse", save, LEVELS)
    # all are planned before anything is touched
    candidates = [*_norm_swaps(model), *_linear_swaps(model, save)]
    report = FuseReport(
        {swap.name: str(swap) for swap in candidates if swap.obstacle is None},
        {swap.name: swap.obstacle for swap in candidates if swap.obstacle is not None},
    )
    for swap in candidates:
        if swap.obstacle is None:
            swap.apply()
    return report


def unfuse(model: nn.Module) -> nn.Module:
    """Undo `fuse`: restore every original class and activation, and return the model.

    Works after training, deepcopy, pickling and loading. Layers built as fusedckpt's stay.

    Raises:
        TypeError: `model` is no nn.Module.
        ValueError: a fused module has changed its class since, by parametrization or sharding, or
            the slot that its activation would return to is not in `model`. Nothing is changed then.
    """
    _check_module("unfuse", model)
    _check_restorable(model)
    for module in list(model.modules()):
        for slot, child in module._modules.items():
            if isinstance(child, Absorbed):
                module._modules[slot] = child.restore()
        if _MARK in module.__dict__:
            original, attributes = module.__dict__.pop(_MARK)
            for attribute in attributes:
                del module.__dict__[attribute]
            module.__class__ = original
    return model


def _check_module(name: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}: model must be an nn.Module, got {type(model).__name__}")


def _check_restorable(model: nn.Module) -> None:
    """Refuse a model whose original would not come back."""
    followed = {
        module
        for parent in model.modules()
        for module, follower in pairwise(parent._modules.values())
        if isinstance(follower, Absorbed)
    }
    for name, module in model.named_modules():
        if _MARK not in module.__dict__:
            continue
        where = name or "the model"
        if type(module) not in (Linear, LayerNorm, RMSNorm):
            raise ValueError(f"unfuse: {where} became a {type(module).__name__}: undo that first")
        if isinstance(module, Linear) and module not in followed:
            raise ValueError(
                f"unfuse: {where} computes {module.activation} too, and the slot that held it is "
                "not in the model: unfuse the whole Sequential"
            )


def _norm_swaps(model: nn.Module) -> Iterator[_Swap]:
    for name, module in model.named_modules():
        for original, (to, attributes) in _NORMS.items():
            if isinstance(module, original) and not isinstance(module, to):
                obstacle = _unfit(module, original, attributes)
                yield _Swap(name, module, to, attributes, obstacle)


def _linear_swaps(model: nn.Module, save: str) -> Iterator[_Swap]:
    uses = Counter(child for parent in model.modules() for child in parent._modules.values())
    for prefix, parent in model.named_modules():
        if not isinstance(parent, nn.Sequential):
            continue
        for (slot, linear), (next_slot, follower) in pairwise(parent._modules.items()):
            if not isinstance(linear, nn.Linear) or isinstance(linear, Linear):
                continue
            if not isinstance(follower, _ACTIVATIONS):
                continue
            attributes = {"activation": name_of(follower), "save": save}
            obstacle = _unfit(linear, nn.Linear, attributes)
            obstacle = obstacle or _inseparable(parent, linear, follower, uses[linear])
            name = f"{prefix}.{slot}" if prefix else slot
            absorbs = (parent, next_slot, follower)
            yield _Swap(name, linear, Linear, attributes, obstacle, absorbs)


def _unfit(module: nn.Module, original: type[nn.Module], attributes: dict[str, Any]) -> str | None:
    """Return why ours cannot stand for this module, None if it can."""
    if type(module) is not original:
        return f"{type(module).__name__} is a subclass of nn.{original.__name__}"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    for attribute in attributes:
        if hasattr(module, attribute):
            return f"it has an attribute {attribute} of its own"
    try:
        _check.tensors(original.__name__, dict(module.named_parameters(recurse=False)))
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _inseparable(
    parent: nn.Sequential, linear: nn.Linear, follower: nn.Module, num_uses: int
) -> str | None:
    """Return why a linear and the activation after it must stay two modules, None if not."""
    if name_of(follower) is None:
        return f"{follower} is no activation that can be fused"
    if type(parent) is not nn.Sequential:
        return f"{type(parent).__name__} is a subclass of nn.Sequential"
    if any("forward" in module.__dict__ for module in (parent, follower)):
        return "the forward of its Sequential or of its activation was replaced"
    if num_uses > 1:
        return "it is used in several places"
    if any(getattr(linear, hooks) for hooks in _OUTPUT_HOOKS) or any(
        getattr(follower, hooks) for hooks in (*_OUTPUT_HOOKS, "_forward_pre_hooks")
    ):
        return "a hook watches what lies between it and its activation"
    return None
