"""Linears under peft's LoRA, or quantized: the linear below, and the operand for its weight.

peft wraps a linear: the wrapper has the linear as `base_layer` and, by adapters' names, the two
small linears, the scale and the dropout. A wrapper's function may change from call to call, as
adapters are switched, merged or disabled, so it is read in every call, before or after `fuse`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd.dispatch import are_plain, autocast_dtype, has_hooks
from fusedckpt.blocks.operands import LoRA
from fusedckpt.blocks.quantized import quantized
from fusedckpt.fusing.swap import made_of

# told by name: none of these libraries is imported
_LORA = (
    "peft.tuners.lora.layer.Linear",
    "peft.tuners.lora.bnb.Linear4bit",
    "peft.tuners.lora.torchao.TorchaoLoraLinear",
)
# the linear that dequantizes its weight, then multiplies as nn.Linear does
_DEQUANTISING = ("Linear4bit", "bitsandbytes.nn.modules")
_PARTS = ("lora_A", "lora_B", "lora_dropout")


def is_lora(layer: nn.Module) -> bool:
    """Whether a layer is peft's LoRA around a linear."""
    if "base_layer" not in layer._modules:
        return False
    made = made_of(type(layer))
    kind = type(layer) if made is None else made[1]
    return f"{kind.__module__}.{kind.__qualname__}" in _LORA


def base_of(layer: nn.Module) -> nn.Module:
    """Return the linear below adapters, a layer without any as it is."""
    while is_lora(layer):
        layer = layer._modules["base_layer"]  # type: ignore[assignment]  # peft's has one
    return layer


def is_dequantizing(layer: nn.Module) -> bool:
    """Whether a layer is a linear of a class of its own that computes nn.Linear's function."""
    return (type(layer).__name__, type(layer).__module__) == _DEQUANTISING


def casts(layer: Any, x: Tensor) -> bool:
    """Whether a linear that dequantizes, without autocast, computes in another dtype than x."""
    if not is_dequantizing(layer):
        return False
    is_set = layer.compute_type_is_set or x.dtype == torch.float16
    compute_dtype = layer.compute_dtype if is_set else None
    return any(dtype not in (None, x.dtype) for dtype in (compute_dtype, autocast_dtype(x.device)))


def dense(layer: nn.Module) -> nn.Module:
    """Return the nn.Linear that a dequantizing linear computes, any other layer as it is."""
    if not is_dequantizing(layer):
        return layer
    linear: Any = layer
    weight = quantized(linear.weight)
    dtype = torch.float32 if weight is None else weight.dtype
    shape = linear.in_features, linear.out_features
    return nn.Linear(*shape, linear.bias is not None, device="meta", dtype=dtype)


def bare(layer: nn.Module) -> nn.Module:
    """Return the nn.Linear below adapters and quantization, any other layer as it is."""
    return dense(base_of(layer))


def rebuilt(module: nn.Module, change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Return a module with layers below it changed: a copy over the same parameters, or itself."""
    children = {
        name: child if child is None else change(rebuilt(child, change))
        for name, child in module._modules.items()
    }
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__, _modules=children)
    return copy


def in_the_way(layer: nn.Module) -> str | None:
    """Return the part of a wrapper that is no plain LoRA now, None if all of it is."""
    problem = adapted(layer, None)
    return problem if isinstance(problem, str) else None


def adapted(layer: nn.Module, weight: Any) -> Any:
    """Return the operand for a layer's weight: the weight, under the adapters active now.

    Where a part of a wrapper is no plain LoRA now, its description is returned, a string.
    """
    if not is_lora(layer):
        return weight
    lora: Any = layer
    is_disabled = lora.disable_adapters
    is_merged = lora.merged
    if is_disabled and is_merged:
        return "an adapter that the next call unmerges"
    records = []
    for name in () if is_disabled or is_merged else _active(lora):
        a, b, dropout = parts = [lora._modules[part]._modules[name] for part in _PARTS]
        problem = _difference_from_lora(lora, name, parts)
        if problem is not None:
            return problem
        rate = dropout.p if dropout.training and isinstance(dropout, nn.Dropout) else 0.0
        factors = a._parameters["weight"], b._parameters["weight"]
        records.append((*factors, float(lora.scaling[name]), rate))
    weight = adapted(lora._modules["base_layer"], weight)
    if not isinstance(weight, str):
        for *factors, rate in records:
            weight = LoRA(weight, *factors, dropout=rate)
    return weight


def described_layers(module: nn.Module) -> Hashable:
    """Return the state of the adapters below a module, equal for modules with adapters alike."""
    return tuple(
        (path, in_the_way(layer), *(_sizes(layer, name) for name in _active(layer)))
        for path, layer in module.named_modules()
        if is_lora(layer)
    )


def _active(lora: Any) -> list[str]:
    names = lora._modules["lora_A"]._modules
    return [name for name in lora.active_adapters if name in names]


def _difference_from_lora(lora: Any, name: str, parts: list[Any]) -> str | None:
    """Return how an adapter differs from s B(A(dropout(x))), None where it does not."""
    variant = lora.lora_variant.get(name)
    if variant is not None:
        return f"a {type(variant).__name__.removesuffix('LinearVariant')}"
    a, b, dropout = parts
    if type(a) is not nn.Linear or type(b) is not nn.Linear or has_hooks(a, b, dropout):
        return "an adapter that is hooked or sharded"
    weights = a._parameters["weight"], b._parameters["weight"]
    if b._parameters["bias"] is not None or not are_plain(*weights):
        return "an adapter with a bias or with weights of another class"
    scale = lora.scaling[name]
    is_real = type(scale) in (float, int) or isinstance(scale, Real)
    if not (is_real and math.isfinite(scale)):
        return "an adapter with a scale that is not a finite number"
    return None if type(dropout) in (nn.Dropout, nn.Identity) else f"a {type(dropout).__name__}"


def _sizes(lora: Any, name: str) -> Hashable:
    a = lora.lora_A[name].weight
    rate = getattr(lora.lora_dropout[name], "p", 0.0)
    return name, a.shape, a.dtype, lora.scaling[name], rate
