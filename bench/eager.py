"""The functions that cases compare with, in plain torch, with the arguments of `functional`.

`fusedckpt.reference` has more of them, and 20 us of checks of its own a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedckpt import NormSpec
from fusedckpt.kernels.activations import ACTIVATIONS

rms_norm = F.rms_norm
layer_norm = F.layer_norm


def add_rms_norm(x: Tensor, residual: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Return rms_norm(x + residual) and x + residual."""
    total = x + residual
    return F.rms_norm(total, *args, **options), total


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return gelu(F.linear(x, weight, bias))."""
    return F.gelu(F.linear(x, weight, bias))


def norm_linear(x: Tensor, norm: NormSpec, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return F.linear(rms_norm(x), weight) for every weight."""
    n = F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)
    return tuple([F.linear(n, weight) for weight in weights])


def mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """Return F.linear(gelu(F.linear(x, w1, b1)), w2, b2)."""
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)


def gated_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    activation: str = "silu",
    norm: NormSpec | None = None,
    residual: bool = False,
) -> Tensor:
    """Return F.linear(act(gate) * up, down), added to x if residual."""
    n = x if norm is None else F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)
    h = ACTIVATIONS[activation].eager(F.linear(n, gate)) * F.linear(n, up)
    return x + F.linear(h, down) if residual else F.linear(h, down)


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Return F.cross_entropy(F.linear(x, weight), target), in at least float32."""
    z = F.linear(x, weight)
    return F.cross_entropy(z.to(torch.promote_types(z.dtype, torch.float32)), target)


def experts(x: Tensor, index: Tensor, scores: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return the sum of each token's experts times their scores, expert by expert."""
    y = torch.zeros_like(x)
    for expert in range(len(down)):
        rows, places = (where.to(x.device) for where in torch.where(index == expert))
        gate, up = F.linear(x[rows], gate_up[expert]).chunk(2, dim=-1)
        h = F.linear(F.silu(gate) * up, down[expert]) * scores[rows, places, None]
        y = y.index_add(0, rows, h)
    return y
