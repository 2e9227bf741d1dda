"""The weights and dropouts of a fused MLP, read in each call as they are now."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from fusedckpt.autograd import dispatch
from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.blocks.quantised import quantised
from fusedckpt.fusing import adapters
from fusedckpt.fusing.guards import child_at
from fusedckpt.fusing.mlp_match import LinearPaths, MLPMatch, Rate
from fusedckpt.fusing.replica import Path
from fusedckpt.layers import fallbacks, sharded
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.layers.sharded import Sharding

# a linear's weight as [out, in], under the adapters that it has, and its bias
LinearOperands = tuple[Any, Tensor | None]


def dropouts_from_seeds(module: nn.Module, match: MLPMatch) -> dict[str, Any]:
    """Return the dropouts that a fused call computes itself, from seeds.

    Empty if only the result has a dropout: that one draws as before.
    """
    hidden = _rate_now(module, match.hidden_rate)
    result = _rate_now(module, match.result_rate)
    return {"dropout": hidden, "output_dropout": result} if hidden else {}


def _rate_now(module: nn.Module, rate: Rate | None) -> float:
    """Return the rate by which a dropout drops now; 0 in eval mode, or without a dropout."""
    if rate is None:
        return 0.0
    path, attribute = rate
    owner: Any = child_at(module, path)
    return getattr(owner, attribute) if owner.training else 0.0


def with_result_dropout(module: nn.Module, match: MLPMatch, y: Tensor) -> Tensor:
    """Return a result after its dropout, which draws as before."""
    rate = _rate_now(module, match.result_rate)
    return functional.dropout(y, rate, inplace=match.writes_result) if rate else y


def linear_operands(
    module: nn.Module, match: MLPMatch, x: Tensor, sharding: Sharding | None
) -> list[LinearOperands] | NotFused:
    """Return the weights and biases of a block, or why the call is not the matched one.

    A first weight with up before gate is cut in two, as programs have gate first.
    """
    obstacle = _dropout_obstacle(module, match, is_sharded=sharding is not None)
    if obstacle is not None:
        return obstacle
    if sharding is None and not dispatch.are_plain(x):
        return fallbacks.fallback_of(x)
    pairs = [
        (_parameter(module, linear.weight), _parameter(module, linear.bias))
        for linear in match.block.linears
    ]
    if sharding is not None:
        pairs = sharded.shards_of(pairs, sharding.mesh)
    operands: list[LinearOperands] = []
    for linear, (weight, bias) in zip(match.block.linears, pairs, strict=True):
        obstacle = _linear_obstacle(module, match, linear, (weight, bias), x=x)
        if obstacle is not None:
            return obstacle
        weight = weight.t() if linear.is_transposed else weight
        operands.append((adapters.adapted(_outermost(module, linear), weight), bias))
    return _gate_first(operands) if match.block.packed == "up" else operands


def _dropout_obstacle(module: nn.Module, match: MLPMatch, is_sharded: bool) -> NotFused | None:
    """Return why the dropouts that are on now cannot be fused, None if they can."""
    rates = match.zero_rates
    if match.hidden_rate is not None and (is_sharded or not module.training):
        # on shards a result is dropped after it is summed; and a module that is not in training may
        # not call a dropout that is
        rates = (*rates, match.hidden_rate)
    for path, attribute in rates:
        if _rate_now(module, (path, attribute)) > 0:
            return NotFused("dropout", ".".join(path) or attribute)
    is_mixed = len({part.training for part in module.modules()}) > 1
    if match.result_rate is not None and match.result_rate[1] != "p" and is_mixed:
        # the recording does not tell which module's mode the forward reads
        return NotFused("dropout", match.result_rate[1])
    return None


def _gate_first(operands: list[LinearOperands]) -> list[LinearOperands]:
    """Cut a first weight with up before gate in two, and put gate first."""
    (weight, bias), last = operands
    up, gate = weight.chunk(2)
    up_bias, gate_bias = (None, None) if bias is None else bias.chunk(2)
    return [(gate, gate_bias), (up, up_bias), last]


def shardable_linears(module: nn.Module, match: MLPMatch) -> list[nn.Module] | str:
    """Return the modules with a block's weights, or why these cannot be sharded."""
    block = match.block
    if match.hidden_rate is not None:
        path, attribute = match.hidden_rate
        if getattr(child_at(module, path), attribute):
            return sharded.DROPS
    is_transposed = any(linear.is_transposed for linear in block.linears)
    if block.kind == "linear_act" or block.packed or is_transposed:
        return f"a {block.kind} with packed or transposed weights, or of one linear, stays whole"
    layers = [child_at(module, _layer_path(linear)) for linear in block.linears]
    for linear, layer in zip(block.linears, layers, strict=True):
        outer = _outermost(module, linear)
        if type(layer) is not nn.Linear or outer is not layer or has_hooks(layer):
            name = ".".join(_layer_path(linear))
            return f"{name} is a {type(outer).__name__} that it has to call"
    return layers  # type: ignore[return-value]  # linears


def _linear_obstacle(
    module: nn.Module, match: MLPMatch, linear: LinearPaths, operands: LinearOperands, x: Tensor
) -> NotFused | None:
    """Return why a linear of a block cannot run fused as it is now, None if it can."""
    weight, bias = operands
    name = ".".join(_layer_path(linear))
    for tensor, path in ((weight, linear.weight), (bias, linear.bias)):
        is_taken = dispatch.are_plain(tensor) or quantised(tensor) is not None
        # gone as a parametrization or sharding leaves it, or of another class
        if path is not None and (tensor is None or not is_taken):
            return NotFused("weight", ".".join(path))
    dtype = (quantised(weight) or weight).dtype
    if dtype not in match.dtypes:
        return NotFused("dtype", dtype)
    is_mixed = dtype != x.dtype or (bias is not None and bias.dtype != x.dtype)
    is_uncast = is_mixed and dispatch.autocast_dtype(x.device) is None
    if is_uncast or adapters.casts(child_at(module, _layer_path(linear)), x):
        return NotFused("dtype", x.dtype)
    outermost = _outermost(module, linear)
    is_adapted = adapters.is_lora(outermost)
    if outermost is not module and is_adapted and has_hooks(outermost):
        return NotFused("hook", name)
    is_plain = quantised(weight) is None and not is_adapted
    if match.block.packed == "up" and linear is match.block.linears[0] and not is_plain:
        return NotFused("packed", name)
    problem = adapters.in_the_way(outermost)
    return None if problem is None else NotFused("adapter", f"{name} is {problem}")


def _layer_path(linear: LinearPaths) -> Path:
    """Return the path of the layer that has a linear's weight."""
    return linear.weight[:-1]


def _outermost(module: nn.Module, linear: LinearPaths) -> nn.Module:
    """Return the layer that computes a linear in its forward, adapters around it included."""
    path = _layer_path(linear)
    if not path or adapters.is_lora(module):
        return module
    return child_at(module, path[:-1])._modules[path[-1]]  # type: ignore[union-attr,return-value]  # guarded


def _parameter(module: nn.Module, path: Path | None) -> Any:
    if path is None:
        return None
    owner: Any = child_at(module, path[:-1])
    return owner._parameters.get(path[-1])
