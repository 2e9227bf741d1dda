"""The weights of a swapped MLP in a call: its linears as they are now, or why it cannot run
fused."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from fusedckpt.autograd import dispatch
from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.blocks.quantised import quantised
from fusedckpt.fusing import adapters
from fusedckpt.fusing.guards import child_at
from fusedckpt.fusing.mlp_match import MLPMatch, Rate, Weight
from fusedckpt.fusing.replica import Path
from fusedckpt.layers import fallbacks, sharded
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.layers.sharded import Sharding

# a linear's weight as [out, in], under the adapters that it has, and its bias
Linear = tuple[Any, Tensor | None]


def drops_of(module: nn.Module, match: MLPMatch) -> dict[str, Any]:
    """Return the dropouts that a fused call computes itself, from seeds.

    None if only the result has a dropout: that one draws as before.
    """
    hidden = _rate(module, match.hidden)
    return {"dropout": hidden, "output_dropout": _rate(module, match.last)} if hidden else {}


def _rate(module: nn.Module, rate: Rate | None) -> float:
    part: Any = None if rate is None else child_at(module, rate[0])
    return getattr(part, rate[1]) if rate is not None and part.training else 0.0


def dropped(module: nn.Module, match: MLPMatch, y: Tensor) -> Tensor:
    """Return a result after its dropout, which draws as before."""
    rate = _rate(module, match.last)
    return functional.dropout(y, rate) if rate else y


def linear_tensors_of(
    module: nn.Module, match: MLPMatch, x: Tensor, sharding: Sharding | None
) -> list[Linear] | NotFused:
    """Return the tensors of a block's linears, or why the call is not the matched one.

    A first weight with up before gate is cut in two, as programs have gate first.
    """
    rates = match.rates
    if match.hidden is not None and (sharding is not None or not module.training):
        # on shards a result is dropped after it is summed; and a module that is not in training may
        # not call a dropout that is
        rates = (*rates, match.hidden)
    for path, name in rates:
        if _rate(module, (path, name)) > 0:
            return NotFused("dropout", ".".join(path) or name)
    is_mixed = len({part.training for part in module.modules()}) > 1
    if match.last is not None and match.last[1] != "p" and is_mixed:
        # the recording does not tell which module's mode its forward goes by
        return NotFused("dropout", match.last[1])
    if sharding is None and not dispatch.are_plain(x):
        return fallbacks.unplain(x)
    linears: list[Linear] = []
    pairs = [(_parameter(module, w), _parameter(module, b)) for w, b, _ in match.block.linears]
    if sharding is not None:
        pairs = sharded.shards_of(pairs, sharding.mesh)
    for linear, (weight, bias) in zip(match.block.linears, pairs, strict=True):
        obstacle = _obstacle(module, match, linear, (weight, bias), x=x)
        if obstacle is not None:
            return obstacle
        weight = weight.t() if linear.transposed else weight
        linears.append((adapters.adapted(_outermost(module, linear), weight), bias))
    if match.block.packed == "up":
        (weight, bias), last = linears
        biases = (None, None) if bias is None else bias.chunk(2)
        linears = [*zip(weight.chunk(2), biases, strict=True)][::-1] + [last]
    return linears


def linears_of(module: nn.Module, match: MLPMatch) -> list[nn.Module] | str:
    """Return the modules with a block's weights, or why these cannot be sharded."""
    block, hidden = match.block, match.hidden
    if hidden is not None and getattr(child_at(module, hidden[0]), hidden[1]):
        return sharded.DROPS
    if block.kind == "linear_act" or block.packed or any(one.transposed for one in block.linears):
        return f"a {block.kind} with packed or transposed weights, or of one linear, stays whole"
    layers = [child_at(module, linear.weight[:-1]) for linear in block.linears]
    for linear, layer in zip(block.linears, layers, strict=True):
        outer = _outermost(module, linear)
        if type(layer) is not nn.Linear or outer is not layer or has_hooks(layer):
            name = ".".join(linear.weight[:-1])
            return f"{name} is a {type(outer).__name__} that it has to call"
    return layers  # type: ignore[return-value]  # linears


def _obstacle(
    module: nn.Module, match: MLPMatch, linear: Weight, pair: tuple[Any, Any], x: Tensor
) -> NotFused | None:
    """Return why a linear of a block cannot run fused as it is now, None if it can."""
    for tensor, path in zip(pair, linear[:2], strict=True):
        is_taken = dispatch.are_plain(tensor) or quantised(tensor) is not None
        # gone as a parametrization or sharding leaves it, or of another class
        if path is not None and (tensor is None or not is_taken):
            return NotFused("weight", ".".join(path))
    (weight, bias), layer = pair, child_at(module, linear.weight[:-1])
    dtype = (quantised(weight) or weight).dtype
    if dtype not in match.dtypes:
        return NotFused("dtype", dtype)
    is_mixed = dtype != x.dtype or (bias is not None and bias.dtype != x.dtype)
    if (is_mixed and dispatch.autocast_dtype(x.device) is None) or adapters.casts(layer, x):
        return NotFused("dtype", x.dtype)
    layer, name = _outermost(module, linear), ".".join(linear.weight[:-1])
    if layer is not module and adapters.is_lora(layer) and has_hooks(layer):
        return NotFused("hook", name)
    is_plain = quantised(weight) is None and not adapters.is_lora(layer)
    if match.block.packed == "up" and linear is match.block.linears[0] and not is_plain:
        return NotFused("packed", name)
    problem = adapters.in_the_way(layer)
    return None if problem is None else NotFused("adapter", f"{name} is {problem}")


def _outermost(module: nn.Module, linear: Weight) -> nn.Module:
    """Return the layer that computes a linear in its forward, adapters around it included."""
    path = linear.weight[:-1]
    if not path or adapters.is_lora(module):
        return module
    return child_at(module, path[:-1])._modules[path[-1]]  # type: ignore[union-attr,return-value]  # held


def _parameter(module: nn.Module, path: Path | None) -> Any:
    if path is None:
        return None
    owner: Any = child_at(module, path[:-1])
    return owner._parameters.get(path[-1])
