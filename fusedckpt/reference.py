"""The eager twin of every function: plain torch code that ours must match, value and gradient.

They run under torch.func transforms, in forward-mode AD, inside double backward, and everywhere
when FUSEDCKPT_DISABLE=1. They need torch only (and the activations' table of names).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedckpt.autograd.norm_spec import NormSpec
from fusedckpt.kernels.activations import ACTIVATIONS, CANONICAL

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "gated_mlp",
    "layer_norm",
    "linear_act",
    "mlp",
    "norm_linear",
    "rms_norm",
]


def _sizes(normalized_shape: int | Sequence[int]) -> Sequence[int]:
    return (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape


def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = "gelu"
) -> Tensor:
    """Return act(F.linear(x, weight, bias))."""
    act = ACTIVATIONS[CANONICAL[activation or "identity"]]
    return act.eager(F.linear(x, weight, bias))


def rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    cast: str = "torch",
) -> Tensor:
    """Return F.rms_norm as torch, Llama or Gemma write it.

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
    return F.layer_norm(x, _sizes(normalized_shape), weight, bias, eps)


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
    return layer_norm(total, normalized_shape, weight, bias, eps), total


def apply_norm(x: Tensor, norm: NormSpec | None) -> Tensor:
    """Return x through the norm that a record describes."""
    if norm is None:
        return x
    if norm.kind == "layer":
        eps = 1e-5 if norm.eps is None else norm.eps
        return layer_norm(x, x.shape[-1:], norm.weight, norm.bias, eps)
    return rms_norm(x, x.shape[-1:], norm.weight, norm.eps, offset=norm.offset, cast=norm.cast)


def norm_linear(
    x: Tensor,
    norm: NormSpec,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, ...]:
    """Return F.linear(norm(x), weight, bias) for every weight."""
    n = apply_norm(x, norm)
    biases = [None] * len(weights) if biases is None else biases
    return tuple(F.linear(n, w, b) for w, b in zip(weights, biases, strict=True))


def mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    activation: str = "gelu",
    *,
    norm: NormSpec | None = None,
    residual: bool = False,
) -> Tensor:
    """Return F.linear(act(F.linear(norm(x), fc1)), fc2), added to x if residual."""
    h = linear_act(apply_norm(x, norm), fc1_weight, fc1_bias, activation)
    y = F.linear(h, fc2_weight, fc2_bias)
    return x + y if residual else y


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    activation: str = "silu",
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    norm: NormSpec | None = None,
    residual: bool = False,
) -> Tensor:
    """Return F.linear(act(gate) * up, down), added to x if residual; gate and up read norm(x)."""
    n = apply_norm(x, norm)
    if up_weight is None:
        gate, up = F.linear(n, gate_weight, gate_bias).chunk(2, dim=-1)
    else:
        gate, up = F.linear(n, gate_weight, gate_bias), F.linear(n, up_weight, up_bias)
    h = ACTIVATIONS[CANONICAL[activation]].eager(gate) * up
    y = F.linear(h, down_weight, down_bias)
    return x + y if residual else y
