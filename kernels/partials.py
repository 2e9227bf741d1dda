"""The second stage of sums over rows: what programs or row tiles summed alone becomes one row."""

from __future__ import annotations

import torch
from torch import Tensor

from .runtime import load, store, tl, triton

BLOCK_M, BLOCK_N = 128, 32


@triton.jit
def sum_rows(partial, total, m, n, rn, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, m, BLOCK_M):
        rm = start + tl.arange(0, BLOCK_M)[:, None]
        acc += load(partial + rm.to(tl.int64) * n + rn[None, :], (rm < m) & (rn < n)[None, :])
    store(total + rn, tl.sum(acc, axis=0), rn < n)


@triton.jit
def sum_partials_kernel(
    first, second, total, second_total, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    rn = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if first is not None:
        sum_rows(first, total, m, n, rn, BLOCK_M, BLOCK_N)
    if second is not None:
        sum_rows(second, second_total, m, n, rn, BLOCK_M, BLOCK_N)


def sum_partials(
    first: Tensor | None, second: Tensor | None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor | None, Tensor | None]:
    """Sum one or two float32 matrices [M, N] over rows in one launch, rounded once, to `dtype`."""
    given = second if first is None else first
    if given is None:
        return None, None
    assert all(t is None or t.is_contiguous() for t in (first, second))
    m, n = given.shape
    total, second_total = (
        None if t is None else t.new_empty(n, dtype=dtype) for t in (first, second)
    )
    with torch.cuda.device_of(given):
        sum_partials_kernel[(triton.cdiv(n, BLOCK_N),)](
            first,
            second,
            total,
            second_total,
            m,
            n,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            num_warps=8,
        )
    return total, second_total
