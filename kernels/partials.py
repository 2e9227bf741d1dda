"""Sums over rows in two stages: row tiles or programs write rows of sums, one launch adds them."""

from __future__ import annotations

from itertools import compress
from typing import Any

import torch
from torch import Tensor

from .runtime import cdiv, jit_kernel, load, store, tl, triton

SUM_TILE = {"BLOCK_M": 256, "BLOCK_N": 16, "num_warps": 8}


def partial_sums(like: Tensor, needs: tuple[bool, bool], row_tiles: int, n: int) -> dict[str, Any]:
    """Return the float32 buffers [row_tiles, n] for `db` and `db_up` that are needed, by name."""
    names = compress(("db", "db_up"), needs)
    return {name: like.new_empty(row_tiles, n, dtype=torch.float32) for name in names}


@triton.jit
def store_summed(out, sums, offsets, value, mask, rn, n, tile_m):
    """Store a tile and, unless `sums` is None, its column sums as row `tile_m` of `sums`."""
    store(out + offsets, value, mask)
    if sums is not None:
        tl.store(sums + tile_m * n + rn, tl.sum(tl.where(mask, value, 0.0), axis=0), mask=rn < n)


@jit_kernel
def sum_partials_kernel(
    first, second, total, second_total, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Sum some columns of `first` into `total`, and of `second` into `second_total`."""
    rn = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    partials = (first, second)
    totals = (total, second_total)
    for index in tl.static_range(2):
        if partials[index] is not None:
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for start in range(0, m, BLOCK_M):
                rm = start + tl.arange(0, BLOCK_M)[:, None]
                offsets = rm.to(tl.int64) * n + rn[None, :]
                acc += load(partials[index] + offsets, (rm < m) & (rn < n)[None, :])
            store(totals[index] + rn, tl.sum(acc, axis=0), rn < n)


def sum_partials(
    first: Tensor | None, second: Tensor | None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor | None, Tensor | None]:
    """Sum one or two float32 matrices [M, N] over rows in one launch; round once, to `dtype`."""
    pair = first, second
    present = second if first is None else first
    if present is None:
        return pair
    # generators cost more
    assert first is None or first.is_contiguous()
    assert second is None or second.is_contiguous()
    m, n = present.shape
    total = None if first is None else first.new_empty(n, dtype=dtype)
    second_total = None if second is None else second.new_empty(n, dtype=dtype)
    grid = (cdiv(n, SUM_TILE["BLOCK_N"]),)
    sum_partials_kernel[grid](*pair, total, second_total, m, n, **SUM_TILE)
    return total, second_total
