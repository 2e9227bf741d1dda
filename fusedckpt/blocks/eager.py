"""The eager reference of every step: plain torch code; our values and gradients match its."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedckpt.blocks.dropout import dropout as drop
from fusedckpt.blocks.operands import parts_of
from fusedckpt.kernels.activations import ACTIVATIONS, CANONICAL
from fusedckpt.kernels.norm import NormRule
from fusedckpt.kernels.routed import Gating


# a thread-local, because Dynamo traces through it where a ContextVar would break the graph
class _Forced(threading.local):
    def __init__(self) -> None:
        self.is_on = False
        self.seeds: Tensor | None = None


forced = _Forced()


@contextmanager
def forcing(seeds: Tensor | None) -> Iterator[None]:
    """Run the eager reference of functions called inside; seeds: of their dropouts."""
    before = forced.is_on, forced.seeds
    forced.is_on, forced.seeds = True, seeds
    try:
        yield
    finally:
        forced.is_on, forced.seeds = before


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


def linear(
    x: Tensor,
    weight: Any,
    bias: Tensor | None,
    seeds: Sequence[Tensor] | None = None,
    numbers: Iterator[int] | None = None,
) -> Tensor:
    """Return F.linear(x, weight, bias), of a LoRA record or quantised weight cast as by peft.

    seeds: of the call's dropouts; numbers: those of the adapters' among them.
    """
    # torch dispatches on plain weights, also of other classes
    if type(weight) in (Tensor, torch.nn.Parameter):
        return F.linear(x, weight, bias)
    parts = parts_of("reference", "weight", weight, bias, seeds=numbers or itertools.count())
    dense = parts.weight if parts.base is None else parts.base.dense(None).to(x.dtype)
    y = total = F.linear(x, dense, bias)
    for (a, b), (scale, rate, number) in zip(parts.adapters, parts.constants, strict=True):
        seed = None if seeds is None or number is None else seeds[number]
        low = F.linear(dropout(x.to(a.dtype), rate, seed), a)
        total = total + F.linear(low, b) * scale
    return total.to(y.dtype)


def hidden(zs: Sequence[Tensor], activation: str | None) -> Tensor:
    """Return act(z), or act(gate) * up."""
    h = ACTIVATIONS[CANONICAL[activation or "identity"]].eager(zs[0])
    return h * zs[1] if len(zs) > 1 else h


def gated(gate: Tensor, up: Tensor, gating: Gating) -> Tensor:
    """Return act(gate) * up, or a clamped SwiGLU."""
    if isinstance(gating, str):
        return hidden([gate, up], gating)
    alpha, limit, offset, _ = gating
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + offset) * (gate * torch.sigmoid(gate * alpha))


def _sizes(normalized_shape: int | Sequence[int]) -> Sequence[int]:
    return (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape


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


def norm(rule: NormRule | Any, x: Tensor, shape: Any, weight: Any, bias: Any = None) -> Tensor:
    """Return x through the norm that a rule, or a record with its fields, describes."""
    if rule.kind == "layer":
        eps = 1e-5 if rule.eps is None else rule.eps
        return layer_norm(x, shape, weight, bias, eps)
    return rms_norm(x, shape, weight, rule.eps, offset=rule.offset, cast=rule.cast)
