"""The eager reference of every step: plain torch code; our values and gradients match its."""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedckpt.autograd import dispatch, private
from fusedckpt.blocks.operands import linear_parts_of
from fusedckpt.kernels import dropout as dropout_kernel
from fusedckpt.kernels.activations import ACTIVATIONS, CANONICAL
from fusedckpt.kernels.gating import Gating
from fusedckpt.kernels.norm import NormRule
from fusedckpt.kernels.runtime import as_matrix


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
    forced.is_on = True
    forced.seeds = seeds
    try:
        yield
    finally:
        forced.is_on, forced.seeds = before


def draw_seeds(x: Tensor, count: int) -> Tensor | None:
    """Draw seeds from the generator of x's device; None where torch's own dropout is to draw.

    Torch's draws where a program is recorded or compiled, and under torch.func.
    """
    if not count or torch.compiler.is_compiling() or dispatch.is_traced(x):
        return None
    if private.are_transforms_active() or not dispatch.are_plain(x):
        return None
    return torch.randint(2**63 - 1, (count,), device=x.device)


def seeded_dropout(x: Tensor, p: float, seed: Tensor | None, first_row: int = 0) -> Tensor:
    """Return F.dropout(x, p), drawn by a seed; x [..., N] begins with `first_row` of all rows."""
    if not p:
        return x
    if seed is None or x.is_meta or type(x) is not Tensor:
        # a tensor without data: only its shape is asked for
        return torch.nn.functional.dropout(x, p)
    if x.numel() == 0:
        return torch.empty_like(x)
    rows = as_matrix(x)
    kernel = dispatch.path_of(x.device, x.dtype)
    return dropout_kernel.dropout(rows, p, seed, first_row, kernel=kernel).view(x.shape)


def dropout(x: Tensor, p: float, seed: Tensor | None = None) -> Tensor:
    """Return F.dropout(x, p) for an int64 seed of one element; without a seed torch draws.

    See `kernels/dropout.py` for the elements that a seed keeps.
    """
    if not p or seed is None:
        return F.dropout(x, p) if p else x
    wide = torch.promote_types(x.dtype, torch.float32)
    noise = seeded_dropout(torch.ones(x.shape, dtype=wide, device=x.device), p, seed)
    return (x * noise).to(x.dtype)


def linear(
    x: Tensor,
    weight: Any,
    bias: Tensor | None,
    seeds: Sequence[Tensor] | None = None,
    numbers: Iterator[int] | None = None,
) -> Tensor:
    """Return F.linear(x, weight, bias), of a LoRA record or quantized weight cast as by peft.

    seeds: of the call's dropouts; numbers: those of the adapters among them.
    """
    # torch dispatches on plain weights, also of other classes
    if type(weight) in (Tensor, torch.nn.Parameter):
        return F.linear(x, weight, bias)
    # torch 2.11 compiles no truth of an iterator
    numbers = itertools.count() if numbers is None else numbers
    parts = linear_parts_of("reference", "weight", weight, bias, seeds=numbers)
    dense = parts.weight.dense(None).to(x.dtype) if parts.is_quantized else parts.weight
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
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return (up + offset) * (gate * torch.sigmoid(gate * alpha))


def norm(
    rule: NormRule | Any, x: Tensor, shape: int | Sequence[int], weight: Any, bias: Any = None
) -> Tensor:
    """Return x through the norm that a rule, or a record with its fields, describes.

    Half precision is rounded once, at the end, by "torch" and "gemma"; "llama" rounds the
    normalized x before the weight, and its result has the promoted dtype.
    """
    shape = (shape,) if isinstance(shape, int) else shape
    eps = rule.eps
    if rule.kind == "layer":
        return F.layer_norm(x, shape, weight, bias, 1e-5 if eps is None else eps)
    if rule.cast == "torch":
        scale = weight + rule.offset if weight is not None and rule.offset else weight
        # on CUDA torch.compile passes a size that it left open to torch's op as an address
        return F.rms_norm(x, tuple(map(operator.index, shape)), scale, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    mean_square = wide.square().mean(dim=tuple(range(-len(shape), 0)), keepdim=True)
    xhat = wide * torch.rsqrt(mean_square + eps)
    if rule.cast == "llama":
        xhat = xhat.to(x.dtype)
        if weight is None:
            return xhat
        return (weight + rule.offset if rule.offset else weight) * xhat
    return (xhat if weight is None else xhat * (rule.offset + weight.to(wide.dtype))).to(x.dtype)
