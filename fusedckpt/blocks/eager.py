"""Code that the eager references of layers share: plain torch; kernels match its results."""

from __future__ import annotations

import itertools
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
