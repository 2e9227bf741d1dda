"""The eager reference of every function: plain torch code whose values and gradients ours match.

They run under torch.func transforms, in forward-mode AD, inside double backward, and everywhere
when FUSEDCKPT_DISABLE=1. They need torch only (and the activations' table of names).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedckpt.blocks.dropout import draw_seeds
from fusedckpt.blocks.dropout import dropout as drop
from fusedckpt.blocks.norm_spec import NormSpec
from fusedckpt.blocks.operands import LoRA, Parts, count_dropouts, parts_of
from fusedckpt.kernels.activations import ACTIVATIONS, CANONICAL

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "dropout",
    "gated_mlp",
    "layer_norm",
    "linear_act",
    "mlp",
    "norm_linear",
    "rms_norm",
]


def _sizes(normalized_shape: int | Sequence[int]) -> Sequence[int]:
    return (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape


def dropout(x: Tensor, p: float, seed: Tensor | None = None) -> Tensor:
    """Return F.dropout(x, p) for an int64 seed of one element; without a seed torch draws.

    An element is kept if the bits of Philox4x64-10 at its index are at least p: see
    `kernels/dropout.py`.
    """
    if not p or seed is None:
        return F.dropout(x, p) if p else x
    wide = torch.promote_types(x.dtype, torch.float32)
    noise = drop(torch.ones(x.shape, dtype=wide, device=x.device), p, seed)
    return (x * noise).to(x.dtype)


class _Linears:
    """The linears of a call, whose dropouts take the call's seeds: its own first."""

    def __init__(
        self, x: Tensor, weights: Sequence[Any], seeds: Tensor | None, *dropouts: float
    ) -> None:
        self.count = itertools.count(sum(p > 0 for p in dropouts))
        if seeds is None:
            seeds = draw_seeds(x, count_dropouts(weights, *dropouts))
        self.seeds = seeds

    def seed(self, index: int) -> Tensor | None:
        return None if self.seeds is None else self.seeds[index]

    def __call__(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        # what nobody adapted stays torch's to dispatch
        if type(weight) in (Tensor, torch.nn.Parameter):
            return F.linear(x, weight, bias)
        return linear_of(
            x, parts_of("reference", "weight", weight, bias, seeds=self.count), self.seeds
        )


def linear_of(x: Tensor, parts: Parts, seeds: Tensor | None) -> Tensor:
    """Return a linear layer taken apart, of x, cast as torch and peft cast."""
    weight = parts.weight if parts.base is None else parts.base.dense(None).to(x.dtype)
    y = total = F.linear(x, weight, parts.bias)
    for (a, b), (scale, rate, index) in zip(parts.adapters, parts.constants, strict=True):
        seed = None if seeds is None or index is None else seeds[index]
        low = F.linear(dropout(x.to(a.dtype), rate, seed), a)
        total = total + F.linear(low, b) * scale
    return total.to(y.dtype)


def hidden(zs: Sequence[Tensor], activation: str | None) -> Tensor:
    """Return act(z), or act(gate) * up."""
    h = ACTIVATIONS[CANONICAL[activation or "identity"]].eager(zs[0])
    return h * zs[1] if len(zs) > 1 else h


def linear_act(
    x: Tensor,
    weight: Tensor | LoRA,
    bias: Tensor | None = None,
    activation: str | None = "gelu",
    *,
    seeds: Tensor | None = None,
) -> Tensor:
    """Return act(F.linear(x, weight, bias))."""
    return hidden([_Linears(x, [weight], seeds)(x, weight, bias)], activation)


def rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    cast: str = "torch",
) -> Tensor:
    """Return F.rms_norm with the rounding of torch, Llama or Gemma.

    They differ in where half precision is rounded: torch and Gemma round once, at the end; Llama
    rounds the normalised x before the weight, and its result has the promoted dtype.
    """
    shape = _sizes(normalized_shape)
    if cast == "torch":
        if weight is not None and offset:
            weight = weight + offset
        return F.rms_norm(x, shape, weight, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    mean_square = wide.square().mean(dim=tuple(range(-len(shape), 0)), keepdim=True)
    xhat = wide * torch.rsqrt(mean_square + eps)
    if cast == "llama":
        xhat = xhat.to(x.dtype)
        return xhat if weight is None else (weight + offset if offset else weight) * xhat
    return (xhat if weight is None else xhat * (offset + weight.to(wide.dtype))).to(x.dtype)


def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Return F.layer_norm."""
    return F.layer_norm(x, _sizes(normalized_shape), weight, bias, eps=eps)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    cast: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Return rms_norm(x + residual) and x + residual."""
    total = x + residual
    return rms_norm(total, normalized_shape, weight, eps, offset=offset, cast=cast), total


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Return layer_norm(x + residual) and x + residual."""
    total = x + residual
    return layer_norm(total, normalized_shape, weight, bias, eps=eps), total


def apply_norm(x: Tensor, norm: NormSpec | None) -> Tensor:
    """Return x through the norm that a record describes."""
    if norm is None:
        return x
    if norm.kind == "layer":
        eps = 1e-5 if norm.eps is None else norm.eps
        return layer_norm(x, x.shape[-1:], norm.weight, norm.bias, eps=eps)
    return rms_norm(x, x.shape[-1:], norm.weight, norm.eps, offset=norm.offset, cast=norm.cast)


def norm_linear(
    x: Tensor,
    norm: NormSpec,
    weights: Sequence[Tensor | LoRA],
    biases: Sequence[Tensor | None] | None = None,
    *,
    seeds: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return F.linear(norm(x), weight, bias) for every weight."""
    n, linear = apply_norm(x, norm), _Linears(x, weights, seeds)
    biases = [None] * len(weights) if biases is None else biases
    return tuple(linear(n, w, b) for w, b in zip(weights, biases, strict=True))


def mlp(
    x: Tensor,
    fc1_weight: Tensor | LoRA,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor | LoRA,
    fc2_bias: Tensor | None,
    activation: str = "gelu",
    *,
    norm: NormSpec | None = None,
    residual: bool = False,
    dropout: float = 0.0,
    output_dropout: float = 0.0,
    seeds: Tensor | None = None,
) -> Tensor:
    """Return F.linear(act(F.linear(norm(x), fc1)), fc2), added to x if residual."""
    linear = _Linears(x, [fc1_weight, fc2_weight], seeds, dropout, output_dropout)
    h = hidden([linear(apply_norm(x, norm), fc1_weight, fc1_bias)], activation)
    return _last(
        linear, x, h, (fc2_weight, fc2_bias), dropouts=(dropout, output_dropout), residual=residual
    )


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor | LoRA,
    up_weight: Tensor | LoRA | None,
    down_weight: Tensor | LoRA,
    activation: str = "silu",
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    norm: NormSpec | None = None,
    residual: bool = False,
    dropout: float = 0.0,
    output_dropout: float = 0.0,
    seeds: Tensor | None = None,
) -> Tensor:
    """Return F.linear(act(gate) * up, down), added to x if residual; gate and up read norm(x)."""
    weights = [gate_weight, up_weight, down_weight]
    linear, n = _Linears(x, weights, seeds, dropout, output_dropout), apply_norm(x, norm)
    if up_weight is None:
        gate, up = linear(n, gate_weight, gate_bias).chunk(2, dim=-1)
    else:
        gate, up = linear(n, gate_weight, gate_bias), linear(n, up_weight, up_bias)
    h = hidden([gate, up], activation)
    return _last(
        linear,
        x,
        h,
        (down_weight, down_bias),
        dropouts=(dropout, output_dropout),
        residual=residual,
    )


def _last(
    linear: _Linears,
    x: Tensor,
    h: Tensor,
    last: tuple[Any, Tensor | None],
    dropouts: tuple[float, float],
    residual: bool,
) -> Tensor:
    before, after = dropouts
    h = dropout(h, before, linear.seed(0) if before else None)
    y = dropout(linear(h, *last), after, linear.seed(int(before > 0)) if after else None)
    return x + y if residual else y
