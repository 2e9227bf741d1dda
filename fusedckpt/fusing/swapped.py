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
from fusedckpt.fusing.held import MARK, Block, Held, Original, Part, Path, broken, child_at
from fusedckpt.layers import norm_sharing, validate
from fusedckpt.layers.linear import LEVELS as LINEAR_LEVELS
from fusedckpt.layers.linear import linear_act
from fusedckpt.layers.mlp import GATED_LEVELS, MLP_LEVELS, gated_mlp, mlp
from fusedckpt.layers.norm import layer_norm, rms_norm

# where a parameter was
_GONE = "no parameter"


@dataclass(frozen=True)
class Swap:
    """One change of class, not yet made.

    kind: "norm", "mlp" or "linear", as `fuse` switches them; change: what the report says of it;
    features: the trailing shape of what the module reads; small, sizes: a smaller such shape, and
    shapes of parameters by their ids, in which parity is checked, and numbers that are sizes, by
    path and name; empty for the real ones; parts: what the swapped module remembers for reports.
    """

    kind: str
    change: str
    to: type[nn.Module]
    attributes: dict[str, Any]
    features: tuple[int, ...]
    small: tuple[int, ...] = ()
    sizes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    numbers: dict[tuple[Path, str], Any] = field(default_factory=dict)
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
        takes = validate.dense(type(module).__name__, given)
    except (TypeError, ValueError) as error:
        return str(error)
    return None if takes else f"{type(module).__name__}: only eager takes a parameter's class"


class NormPlan(NamedTuple):
    """What a norm of some class computes: see `functional.rms_norm` and `layer_norm`.

    weight, eps: attribute names (weight None for a norm without one), or eps itself; dtypes: the
    pairs of x's and the weight's dtype for which that was seen to hold, x's twice where there is no
    weight; kind: "rms" or "layer"; bias: an attribute's name; casts_back: whether the result has
    x's dtype whatever autocast does; held: what must still hold.
    """

    weight: str | None
    eps: str | float
    offset: float
    cast: str
    dtypes: tuple[tuple[torch.dtype, torch.dtype], ...]
    kind: str = "rms"
    bias: str | None = None
    casts_back: bool = False
    held: tuple[Held, ...] = ()


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
    """Forward of a norm of any class, keeping x alone where its rule is known to hold."""

    _fusedckpt_plan: NormPlan

    def _fused(self, x: Tensor) -> Tensor | Fallback:
        plan, given = self._fusedckpt_plan, self._parameters
        weight = None if plan.weight is None else given.get(plan.weight)
        bias = None if plan.bias is None else given.get(plan.bias)
        if not dispatch.are_plain(x, weight, bias):
            return fallbacks.unplain(
                x, **{plan.weight or "weight": weight, plan.bias or "bias": bias}
            )
        if (changed := broken(self, plan.held)) is not None:
            return changed
        for name, tensor in ((plan.weight, weight), (plan.bias, bias)):
            if name is not None and tensor is None:
                return "changed", name
        if (x.dtype, x.dtype if weight is None else weight.dtype) not in plan.dtypes:
            return "dtype", x.dtype
        return self._normalised(plan, x, weight, bias)

    def _normalised(
        self, plan: NormPlan, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        shape = x.shape[-1:] if weight is None else weight.shape
        eps = getattr(self, plan.eps) if isinstance(plan.eps, str) else plan.eps
        if plan.kind == "layer":
            y = layer_norm(x, shape, weight, bias, eps)
        else:
            y = rms_norm(x, shape, weight, eps, offset=plan.offset, cast=plan.cast)
        if plan.casts_back and y.dtype != x.dtype:
            return y.to(x.dtype)
        return norm_sharing.remember(self, y, weight, bias)

    def extra_repr(self) -> str:
        """Describe the module as its class does, and what it computes now."""
        plan = self._fusedckpt_plan
        ours = ["layer_norm"] if plan.kind == "layer" else ["rms_norm", f"cast={plan.cast}"]
        return _described(super().extra_repr(), *ours)


class MLPPlan(NamedTuple):
    """What an MLP, gated MLP or linear with its activation of some class computes, and from what.

    held: what must still hold; rates: paths and names of numbers that drop something inside while
    training; last: the path of a child that drops from the result; dtypes: of the weights, for
    which all that was seen to hold.
    """

    block: Block
    held: tuple[Held, ...]
    rates: tuple[tuple[Path, str], ...]
    last: Path | None
    dtypes: tuple[torch.dtype, ...]


class FusedMLP(Swapped):
    """Forward of an MLP of any class, keeping what its save level names."""

    _fusedckpt_plan: MLPPlan
    save: str

    def _fused(self, x: Tensor) -> Tensor | Fallback:
        plan = self._fusedckpt_plan
        obstacle = _obstacle(self, plan, x)
        if obstacle is not None:
            return obstacle
        y = _COMPUTE[plan.block.kind](x, self, plan.block)
        return y if plan.last is None else child_at(self, plan.last)(y)  # type: ignore[misc]  # held

    def extra_repr(self) -> str:
        """Describe the module as its class does, and what it computes now."""
        block = self._fusedckpt_plan.block
        now = f"{block.kind}, activation={block.activation}"
        return _described(super().extra_repr(), now, f"save={self.save}")


def _described(original: str, *ours: str) -> str:
    return ", ".join([*([original] if original else []), f"fused as {ours[0]}", *ours[1:]])


def _obstacle(module: nn.Module, plan: MLPPlan, x: Tensor) -> Fallback | None:
    """Return what makes a call compute other than the plan says: replaced, watched, dropped."""
    found = broken(module, plan.held)
    if found is not None:
        return found
    for path, name in plan.rates:
        part: Any = child_at(module, path)
        if part.training and getattr(part, name) > 0:
            return "dropout", ".".join(path) or name
    if not dispatch.are_plain(x):
        return fallbacks.unplain(x)
    for (weight, bias), linear in zip(_given(module, plan.block), plan.block.linears, strict=True):
        for tensor, path in ((weight, linear.weight), (bias, linear.bias)):
            # gone as a parametrization or sharding leaves it, or of another class
            if path is not None and not (isinstance(tensor, Tensor) and dispatch.are_plain(tensor)):
                return "weight", ".".join(path)
        if weight.dtype not in plan.dtypes:
            return "dtype", weight.dtype
        if weight.dtype != x.dtype and not dispatch.autocasts(x.device):
            return "dtype", x.dtype
    return None


def _given(module: nn.Module, block: Block) -> list[tuple[Any, Any]]:
    """Return the (weight, bias) of a block's linears, as they are."""
    return [
        (_parameter(module, weight), None if bias is None else _parameter(module, bias))
        for weight, bias, _ in block.linears
    ]


def _parameter(module: nn.Module, path: Path) -> Any:
    owner: Any = child_at(module, path[:-1])
    return owner._parameters.get(path[-1], _GONE)


def _tensors(module: nn.Module, block: Block) -> list[tuple[Tensor, Tensor | None]]:
    """Return the (weight, bias) of a block's linears, weights as [out, in] views."""
    pairs = zip(_given(module, block), block.linears, strict=True)
    return [(weight.t() if one.transposed else weight, bias) for (weight, bias), one in pairs]


def _run_mlp(x: Tensor, module: Any, block: Block) -> Tensor:
    level = levels.resolve("mlp", None, within(module.save, MLP_LEVELS), MLP_LEVELS)
    (fc1, fc1_bias), (fc2, fc2_bias) = _tensors(module, block)
    return mlp(x, fc1, fc1_bias, fc2, fc2_bias, block.activation, save=level)


def _run_gated(x: Tensor, module: Any, block: Block) -> Tensor:
    level = levels.resolve("gated_mlp", None, module.save, GATED_LEVELS)
    (gate, gate_bias), *up, (down, down_bias) = _tensors(module, block)
    up_weight, up_bias = up[0] if up else (None, None)
    if block.packed == "up":
        up_weight, gate = gate.chunk(2)
        up_bias, gate_bias = (None, None) if gate_bias is None else gate_bias.chunk(2)
    return gated_mlp(
        x,
        gate,
        up_weight,
        down,
        block.activation,
        gate_bias=gate_bias,
        up_bias=up_bias,
        down_bias=down_bias,
        save=level,
    )


def _run_linear_act(x: Tensor, module: Any, block: Block) -> Tensor:
    level = levels.resolve("linear_act", None, within(module.save, LINEAR_LEVELS), LINEAR_LEVELS)
    ((weight, bias),) = _tensors(module, block)
    return linear_act(x, weight, bias, block.activation, save=level)


def within(level: str, known: tuple[str, ...]) -> str:
    """Return a level, "inputs" for one that a layer without a gate does not have."""
    levels.check("fuse", level, levels.LEVELS)
    return level if level in known else "inputs"


_COMPUTE = {"mlp": _run_mlp, "gated_mlp": _run_gated, "linear_act": _run_linear_act}
