"""The classes that fuse gives to modules whose own classes are not known in advance.

Such a module gets a subclass of its own class with our forward before the old one: isinstance
checks, attributes and methods go on working, and whatever a call does that was not proven equal
runs the old forward. A subclass is made once per original class and found again by what it was made
from, so that copies and pickles need no name for it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import cache, wraps
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedckpt.autograd import dispatch, fallbacks, levels
from fusedckpt.autograd.fallbacks import Fallback
from fusedckpt.autograd.hooks import has_hooks
from fusedckpt.layers import norm_sharing, validate
from fusedckpt.layers.linear import LEVELS as LINEAR_LEVELS
from fusedckpt.layers.linear import linear_act
from fusedckpt.layers.mlp import GATED_LEVELS, MLP_LEVELS, gated_mlp, mlp
from fusedckpt.layers.norm import rms_norm
from fusedckpt.layers.norm_spec import NormSpec

# where a swapped module remembers what it was, as an `Original`
MARK = "_fusedckpt_original"


class Part(NamedTuple):
    """What reports say of a swapped module, or of one block of a swapped Sequential.

    saved: the bytes that one token of training kept before and keeps now, None if unknown.
    """

    kind: str
    change: str
    saved: tuple[float, float] | None


class Original(NamedTuple):
    """The class that a swapped module had, the attributes to delete, and its parts.

    parts: by their names below the module, "" for the module itself.
    """

    kind: type[nn.Module]
    attributes: tuple[str, ...]
    parts: dict[str, Part]


@dataclass(frozen=True)
class Swap:
    """One change of class, not yet made.

    kind: "norm", "mlp" or "linear", as `fuse` switches them; change: what the report says of it;
    features: the trailing shape of what the module reads; small, sizes: a smaller such shape, and
    shapes of parameters by their ids, in which parity is checked; empty for the real ones; parts:
    what the swapped module remembers for reports.
    """

    kind: str
    change: str
    to: type[nn.Module]
    attributes: dict[str, Any]
    features: tuple[int, ...]
    small: tuple[int, ...] = ()
    sizes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)

    def apply(self, module: nn.Module) -> None:
        """Change the module's class."""
        module.__dict__.update(self.attributes)
        module.__dict__[MARK] = Original(type(module), tuple(self.attributes), self.parts)
        module.__class__ = self.to


class Made(nn.Module):
    """What all made classes begin with: they are copied and pickled by what they were made from."""

    _fusedckpt_bases: tuple[type[nn.Module], type[nn.Module]]

    def _get_name(self) -> str:
        return type(self).__name__

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = super().__reduce_ex__(protocol)
        # a class made from this one, by parametrization or sharding, is not ours to find again
        if not is_made(type(self)):
            return reduced
        return _new, self._fusedckpt_bases, *reduced[2:]


def _new(ours: type[nn.Module], original: type[nn.Module]) -> nn.Module:
    made = subclass(ours, original)
    return made.__new__(made)


# what a function is made of
_FUNCTION = ("__code__", "__globals__", "__name__", "__defaults__", "__closure__")


@cache
def subclass(ours: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `original` with the forward of `ours`, one and the same each time."""
    names: dict[str, Any] = {
        "__module__": original.__module__,
        "_fusedckpt_bases": (ours, original),
    }
    if issubclass(ours, Swapped):
        # with the original's signature, by which torch.fx names what it traces
        call = FunctionType(*(getattr(ours.forward, key) for key in _FUNCTION))
        names["forward"] = wraps(original.forward)(call)
        names["_fusedckpt_argument"] = _first_argument(original)
    return type(f"Fused{original.__name__}", (Made, ours, original), names)


def _first_argument(original: type[nn.Module]) -> str | None:
    """Return the name by which a forward's first argument can be given, None if it has none."""
    try:
        _, first, *_ = inspect.signature(original.forward).parameters.values()
    except (TypeError, ValueError):
        return None
    return first.name if first.kind is first.POSITIONAL_OR_KEYWORD else None


def is_made(kind: type[nn.Module]) -> bool:
    """Whether `subclass` made this very class."""
    return "_fusedckpt_bases" in kind.__dict__


def unfit_layer(module: nn.Module) -> str | None:
    """Return why no kernel takes a module's own parameters, None if one does."""
    given = dict(module.named_parameters(recurse=False))
    try:
        takes = validate.tensors(type(module).__name__, given, {})
    except (TypeError, ValueError) as error:
        return str(error)
    return None if takes else f"{type(module).__name__}: only eager takes a parameter's class"


class NormPlan(NamedTuple):
    """What an RMSNorm of some class computes: see `functional.rms_norm`.

    weight, eps: attribute names (weight None for a norm without one); dtypes: the pairs of x's and
    the weight's dtype for which that was seen to hold, x's twice where there is no weight.
    """

    weight: str | None
    eps: str
    offset: float
    cast: str
    dtypes: tuple[tuple[torch.dtype, torch.dtype], ...]


class Swapped(nn.Module):
    """Forward of a swapped module: ours where it computes the same, else that of its class.

    Here alone it is decided; why ours does not run is noted for `FuseReport` and `report`.
    """

    _fusedckpt_argument: str | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute as ours does, or as the original class does."""
        x = args[0] if len(args) == 1 and not kwargs else self._by_keyword(args, kwargs)
        if not dispatch.is_recorded(x):
            y = self._fused(x) if isinstance(x, Tensor) else ("arguments", "")
            if type(y) is not tuple:
                return y
            fallbacks.note(self, y)
        return super().forward(*args, **kwargs)

    def _by_keyword(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the input where it alone is given, by its name; None for any other call."""
        alone = not args and len(kwargs) == 1
        name = self._fusedckpt_argument
        return kwargs.get(name) if alone and name is not None else None

    def _fused(self, x: Tensor) -> Tensor | Fallback:
        """Return the result, or what is in the way of computing it so."""
        raise NotImplementedError


class FusedRMSNorm(Swapped):
    """Forward of an RMSNorm of any class, keeping x alone where its rule is known to hold."""

    _fusedckpt_plan: NormPlan

    def _fused(self, x: Tensor) -> Tensor | Fallback:
        plan = self._fusedckpt_plan
        weight = None if plan.weight is None else getattr(self, plan.weight)
        if not dispatch.are_plain(x, weight):
            return fallbacks.unplain(x, **{plan.weight or "weight": weight})
        if (x.dtype, x.dtype if weight is None else weight.dtype) not in plan.dtypes:
            return "dtype", x.dtype
        shape = x.shape[-1:] if weight is None else weight.shape
        eps = getattr(self, plan.eps)
        y = rms_norm(x, shape, weight, eps, offset=plan.offset, cast=plan.cast)
        spec = NormSpec("rms", weight, None, eps, plan.offset, plan.cast)
        return norm_sharing.remember(self, y, spec)

    def extra_repr(self) -> str:
        """Describe the module as its class does, and what it computes now."""
        return _described(super().extra_repr(), "rms_norm", f"cast={self._fusedckpt_plan.cast}")


class MLPPlan(NamedTuple):
    """What an MLP, gated MLP or linear with its activation of some class computes, and from what.

    kind: "mlp", "gated_mlp" or "linear_act"; linears, classes, transposed: child names, their
    classes, and whether the weight lies as [in, out], in the order of the function's arguments;
    packed: which half of the first weight comes first, "gate" or "up", "" where it has no halves;
    same: attributes that must still hold these objects; dropouts, rates: children and numbers that
    drop something inside while training; last: a child that drops from the result.
    """

    kind: str
    linears: tuple[str, ...]
    classes: tuple[type[nn.Module], ...]
    transposed: tuple[bool, ...]
    activation: str
    packed: str = ""
    same: tuple[tuple[str, Any], ...] = ()
    dropouts: tuple[str, ...] = ()
    rates: tuple[str, ...] = ()
    last: str | None = None


class FusedMLP(Swapped):
    """Forward of an MLP of any class, keeping what its save level names."""

    _fusedckpt_plan: MLPPlan
    save: str

    def _fused(self, x: Tensor) -> Tensor | Fallback:
        plan = self._fusedckpt_plan
        obstacle = _obstacle(self, plan, x)
        if obstacle is not None:
            return obstacle
        y = _COMPUTE[plan.kind](x, self, plan)
        return y if plan.last is None else self._modules[plan.last](y)  # type: ignore[misc]  # a child

    def extra_repr(self) -> str:
        """Describe the module as its class does, and what it computes now."""
        plan = self._fusedckpt_plan
        now = f"{plan.kind}, activation={plan.activation}"
        return _described(super().extra_repr(), now, f"save={self.save}")


def _described(original: str, *ours: str) -> str:
    return ", ".join([*([original] if original else []), f"fused as {ours[0]}", *ours[1:]])


def _obstacle(module: nn.Module, plan: MLPPlan, x: Tensor) -> Fallback | None:
    """Return what makes a call compute other than the plan says: replaced, watched, dropped."""
    children = module._modules
    dtypes = []
    for name, kind in zip(plan.linears, plan.classes, strict=True):
        linear = children.get(name)
        if linear is None or type(linear) is not kind:
            return "child", name
        if not dispatch.are_plain(*linear._parameters.values()):
            return "weight", f"{name}.weight"
        if has_hooks(linear):
            return "hook", name
        dtypes.append(linear.weight.dtype)  # type: ignore[union-attr]  # a linear's weight
    for name, seen in plan.same:
        found = getattr(module, name, None)
        if found is not seen:
            return "changed", name
        if isinstance(found, nn.Module) and has_hooks(found):
            return "hook", name
    for name in plan.dropouts:
        dropout: Any = children.get(name)
        if dropout is not None and dropout.training and dropout.p > 0:
            return "dropout", name
    if module.training:
        for name in plan.rates:
            if getattr(module, name) > 0:
                return "dropout", name
    if not dispatch.are_plain(x):
        return fallbacks.unplain(x)
    if all(d == x.dtype for d in dtypes) or dispatch.autocasts(x.device):
        return None
    return "dtype", x.dtype


def _tensors(module: nn.Module, plan: MLPPlan) -> list[tuple[Tensor, Tensor | None]]:
    """Return the (weight, bias) of the plan's linears, weights as [out, in] views."""
    pairs: list[tuple[Tensor, Tensor | None]] = []
    for name, is_transposed in zip(plan.linears, plan.transposed, strict=True):
        linear: Any = module._modules[name]
        pairs.append((linear.weight.t() if is_transposed else linear.weight, linear.bias))
    return pairs


def _run_mlp(x: Tensor, module: Any, plan: MLPPlan) -> Tensor:
    level = levels.resolve("mlp", None, within(module.save, MLP_LEVELS), MLP_LEVELS)
    (fc1, fc1_bias), (fc2, fc2_bias) = _tensors(module, plan)
    return mlp(x, fc1, fc1_bias, fc2, fc2_bias, plan.activation, save=level)


def _run_gated(x: Tensor, module: Any, plan: MLPPlan) -> Tensor:
    level = levels.resolve("gated_mlp", None, module.save, GATED_LEVELS)
    (gate, gate_bias), *up, (down, down_bias) = _tensors(module, plan)
    up_weight, up_bias = up[0] if up else (None, None)
    if plan.packed == "up":
        up_weight, gate = gate.chunk(2)
        up_bias, gate_bias = (None, None) if gate_bias is None else gate_bias.chunk(2)
    return gated_mlp(
        x,
        gate,
        up_weight,
        down,
        plan.activation,
        gate_bias=gate_bias,
        up_bias=up_bias,
        down_bias=down_bias,
        save=level,
    )


def _run_linear_act(x: Tensor, module: Any, plan: MLPPlan) -> Tensor:
    level = levels.resolve("linear_act", None, within(module.save, LINEAR_LEVELS), LINEAR_LEVELS)
    ((weight, bias),) = _tensors(module, plan)
    return linear_act(x, weight, bias, plan.activation, save=level)


def within(level: str, known: tuple[str, ...]) -> str:
    """Return a level, "inputs" for one that a layer without a gate does not have."""
    levels.check("fuse", level, levels.LEVELS)
    return level if level in known else "inputs"


_COMPUTE = {"mlp": _run_mlp, "gated_mlp": _run_gated, "linear_act": _run_linear_act}
