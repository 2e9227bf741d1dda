"""RMSNorm and LayerNorm over rows, forward and backward from x alone: no statistic is ever stored.

A row of up to MAX_BLOCK columns stays in registers (norm_rows); longer rows go through in column
chunks (norm_wide), since one tile of 16384 columns spills.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .norm_rows import norm_grad_kernel, norm_kernel
from .norm_wide import wide_dw_kernel, wide_dx_kernel, wide_norm_kernel
from .runtime import triton

MAX_BLOCK = 8192
# the wide kernels' chunk of a row, and the tile over which they sum dw
CHUNK = 4096
DW_TILE = {"BLOCK_M": 32, "BLOCK_N": 128}


class NormRule(NamedTuple):
    """What a norm computes: y = xhat * (offset + weight) + bias.

    `kind` is "rms" or "layer"; cast "llama" rounds xhat to x's dtype before the weight.
    """

    kind: str
    eps: float
    offset: float = 0.0
    cast: str = "torch"

    @property
    def constexprs(self) -> dict[str, bool]:
        """The rule's compile-time half, as the kernels name it."""
        return {"LAYER": self.kind == "layer", "ROUND": self.cast == "llama"}


class Rows(NamedTuple):
    """A launch over whole rows: block sizes and warps for rows of one length."""

    block_m: int
    block_n: int
    num_warps: int


def rows_for(n: int) -> Rows:
    """Return the tile for rows of n <= MAX_BLOCK columns: at least eight elements per thread."""
    block_n = triton.next_power_of_2(n)
    block_m = max(1, 1024 // block_n)
    return Rows(block_m, block_n, max(4, min(16, block_n // 512)))


def check_operands(matrices: Sequence[Tensor | None], vectors: Sequence[Tensor | None]) -> None:
    """Hold whoever launches to what the kernels read."""
    assert all(t is None or t.stride(1) == 1 or t.shape[1] == 1 for t in matrices)
    assert all(t is None or t.is_contiguous() for t in vectors)


@lru_cache
def num_programs(device: torch.device) -> int:
    """Return how many programs a kernel of persistent rows gets: two per multiprocessor."""
    if device.type != "cuda":
        return 2
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rule: NormRule,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Normalise the rows of x [M, N], or of x + residual, which is then returned beside y.

    Matrices have adjacent columns, weight and bias [N] are contiguous; so it is in `norm_grad`.
    """
    m, n = x.shape
    check_operands((x, residual), (weight, bias))
    y = x.new_empty(m, n, dtype=out_dtype)
    total = None
    if residual is not None:
        total = x.new_empty(m, n, dtype=torch.promote_types(x.dtype, residual.dtype))
    strides = x.stride(0), 0 if residual is None else residual.stride(0)
    operands = x, residual, weight, bias, y, total, m, n, *strides, rule.eps, rule.offset
    with torch.cuda.device_of(x):
        if n > MAX_BLOCK:
            # a whole chunk of two dtypes spills eight bytes on sm_90
            block = CHUNK if residual is None or residual.dtype == x.dtype else CHUNK // 2
            wide_norm_kernel[(m,)](*operands, **rule.constexprs, BLOCK=block, num_warps=8)
        else:
            tile = rows_for(n)
            norm_kernel[(triton.cdiv(m, tile.block_m),)](
                *operands,
                **rule.constexprs,
                BLOCK_M=tile.block_m,
                BLOCK_N=tile.block_n,
                num_warps=tile.num_warps,
            )
    return y, total


def norm_grad(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rule: NormRule,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dx [M, N] (plus `dtotal`), dw [N] and db [N] (float32), each where needed."""
    (m, n), wide = x.shape, x.shape[1] > MAX_BLOCK
    check_operands((dy, dtotal, x), (weight,))
    rows_per_step = DW_TILE["BLOCK_M"] if wide else rows_for(n).block_m
    programs = min(triton.cdiv(m, rows_per_step), num_programs(x.device))
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
    dw, db = (x.new_empty(programs, n, dtype=torch.float32) if need else None for need in needs[1:])
    strides = dy.stride(0), 0 if dtotal is None else dtotal.stride(0), x.stride(0)
    inputs = dy, dtotal, x, weight
    with torch.cuda.device_of(x):
        if wide:
            launch_wide_grad(inputs, dx, dw, db, strides, programs, rule)
        else:
            tile = rows_for(n)
            norm_grad_kernel[(programs,)](
                *inputs,
                dx,
                dw,
                db,
                m,
                n,
                *strides,
                rule.eps,
                rule.offset,
                **rule.constexprs,
                BLOCK_M=tile.block_m,
                BLOCK_N=tile.block_n,
                num_warps=tile.num_warps,
            )
    return dx, None if dw is None else dw.sum(0), None if db is None else db.sum(0)


def launch_wide_grad(
    inputs: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    dx: Tensor | None,
    dw: Tensor | None,
    db: Tensor | None,
    strides: tuple[int, int, int],
    programs: int,
    rule: NormRule,
) -> None:
    """Find the statistics and dx row by row, then sum dw and db column by column."""
    dy, _, x, _ = inputs
    m, n = x.shape
    stats = x.new_empty(2, m, dtype=torch.float32)
    wide_dx_kernel[(m,)](
        *inputs,
        dx,
        stats,
        m,
        n,
        *strides,
        rule.eps,
        rule.offset,
        **rule.constexprs,
        BLOCK=CHUNK,
        num_warps=8,
    )
    if dw is not None or db is not None:
        wide_dw_kernel[(programs, triton.cdiv(n, DW_TILE["BLOCK_N"]))](
            dy, x, stats, dw, db, m, n, strides[0], strides[2], **rule.constexprs, **DW_TILE
        )
