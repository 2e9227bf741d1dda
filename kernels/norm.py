"""RMSNorm and LayerNorm over rows, forward and backward from x alone: no statistic is ever stored.

A row of up to MAX_BLOCK columns stays in registers; in backward one of up to MAX_GRAD_BLOCK, or
half that in float32, beside a program's share of dw. Longer rows go through in column chunks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .norm_kernels import (
    NormGrad,
    NormOperands,
    norm_grad_kernel,
    norm_kernel,
    wide_dw_kernel,
    wide_dx_kernel,
    wide_norm_kernel,
)
from .partials import sum_partials
from .runtime import arch, cdiv, next_power_of_2

MAX_BLOCK = 16384
MAX_GRAD_BLOCK = 8192
# the wide kernels' chunk of a row, and the tile over which they sum dw
CHUNK = 4096
DW_TILE = {"BLOCK_M": 32, "BLOCK_N": 128}
# bytes of shared memory that a block of norm_grad takes beside its tiles, for reductions and itself
BESIDE_TILES = 2048


class NormRule(NamedTuple):
    """The formula of a norm: y = xhat * (offset + weight) + bias."""

    # "rms" or "layer"
    kind: str
    # added to the mean square, or to the variance
    eps: float
    # added to the weight
    offset: float = 0.0
    # "llama" rounds xhat to x's dtype before the weight
    cast: str = "torch"

    @property
    def constexprs(self) -> dict[str, bool]:
        """The rule's compile-time half, as the kernels name it."""
        return {"LAYER": self.kind == "layer", "ROUND": self.cast == "llama"}


@lru_cache(1024)
def rows_for(n: int, share: int = 16) -> dict[str, int]:
    """Return the tile for rows of n <= MAX_BLOCK columns, of 8 elements per thread or more."""
    block_n = next_power_of_2(n)
    # sixteen where rows are long: short ones' share of dw would take more than 128 registers
    block_m = max(1, (2048 if block_n >= 1024 else 1024) // block_n)
    num_warps = max(4, min(16, block_m * block_n // (32 * share)))
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps}


def stages_for(*tensors: Tensor | None) -> int:
    """Return how many tiles of rows of these are under way in norm_grad at once, and one more.

    Then 32 KiB or more are loading, and at most 192 KiB of shared memory are taken.
    """
    if not arch().startswith("sm_"):
        return 1
    return 3 if bytes_per_column(*tensors) <= 6 else 2


def bytes_per_column(*tensors: Tensor | None) -> int:
    """Return the bytes of a column of a row, in all of these together."""
    return sum(t.element_size() for t in tensors if t is not None)


def resident_programs(
    tile: dict[str, int], stages: int, column_bytes: int, device: torch.device
) -> int:
    """Return how many programs of norm_grad a multiprocessor holds at a time.

    Registers hold 16 warps with 128 for each thread; shared memory holds the tiles that load.
    """
    loading = (stages - 1) * tile["BLOCK_M"] * tile["BLOCK_N"] * column_bytes
    fitting = shared_per_multiprocessor(device) // (loading + BESIDE_TILES)
    return max(1, min(16 // tile["num_warps"], fitting))


def check_operands(matrices: Sequence[Tensor | None], vectors: Sequence[Tensor | None]) -> None:
    """Hold a launch to the layouts that the kernels read."""
    # generators cost more
    for matrix in matrices:
        assert matrix is None or matrix.stride(1) == 1 or matrix.shape[1] == 1
    for vector in vectors:
        assert vector is None or vector.is_contiguous()


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Return over how many multiprocessors persistent programs are spread."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def shared_per_multiprocessor(device: torch.device) -> int:
    """Return the bytes of shared memory that the blocks on a multiprocessor share."""
    if device.type != "cuda":
        return sys.maxsize
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rule: NormRule,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Normalise the rows of x [M, N], or of x + residual, which is then returned beside y.

    Matrices have adjacent columns, vectors [N] are contiguous; so it is in `norm_grad`.
    """
    m, n = x.shape
    check_operands((x, residual), (weight, bias))
    y = x.new_empty(m, n, dtype=out_dtype)
    total = None
    if residual is not None:
        total = x.new_empty(m, n, dtype=torch.promote_types(x.dtype, residual.dtype))
    stride_rm = 0 if residual is None else residual.stride(0)
    t = NormOperands(
        x, residual, weight, bias, y=y, total=total, stride_xm=x.stride(0), stride_rm=stride_rm
    )
    args = t, m, n, rule.eps, rule.offset
    if n > MAX_BLOCK:
        # a whole chunk of two dtypes spills eight bytes on sm_90
        block = CHUNK if residual is None or residual.dtype == x.dtype else CHUNK // 2
        wide_norm_kernel[(m,)](*args, **rule.constexprs, BLOCK=block, num_warps=8)
    else:
        tile = rows_for(n)
        grid = (cdiv(m, tile["BLOCK_M"]),)
        norm_kernel[grid](*args, **rule.constexprs, **tile)
    return y, total


def norm_grad(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rule: NormRule,
    needs: tuple[bool, bool, bool],
    sums_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dx [M, N] (plus `dtotal`), dw [N] and db [N], each where needed.

    dw and db are rounded once, to `sums_dtype`, else they are float32.
    """
    check_operands((dy, dtotal, x), (weight,))
    (m, n) = x.shape
    share = share_for(dy, x, rule)
    wide = n * 16 > MAX_GRAD_BLOCK * share
    tile = DW_TILE if wide else rows_for(n, share)
    stages = stages_for(dy, dtotal, x)
    column_bytes = bytes_per_column(dy, dtotal, x)
    resident = 2 if wide else resident_programs(tile, stages, column_bytes, x.device)
    programs = min(cdiv(m, tile["BLOCK_M"]), resident * num_multiprocessors(x.device))
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
    dw, db = (x.new_empty(programs, n, dtype=torch.float32) if need else None for need in needs[1:])
    strides = dy.stride(0), 0 if dtotal is None else dtotal.stride(0), x.stride(0)
    t = NormGrad(dy, dtotal, x, weight, dx, dw, db, *strides)
    numbers = m, n, rule.eps, rule.offset
    if not wide:
        how = tile | {"STAGES": stages}
        if arch().startswith("sm_"):
            # left to itself sm_100 takes 64 for float32 rows of 4096, and spills eight bytes
            how["maxnreg"] = 128
        norm_grad_kernel[(programs,)](t, *numbers, **rule.constexprs, **how)
    else:
        # the statistics and dx row by row, then dw and db column by column
        stats = x.new_empty(2, m, dtype=torch.float32)
        wide_dx_kernel[(m,)](t, stats, *numbers, **rule.constexprs, BLOCK=CHUNK, num_warps=8)
        if dw is not None or db is not None:
            grid = (programs, cdiv(n, tile["BLOCK_N"]))
            stages = stages_for(dy, x)
            wide_dw_kernel[grid](t, stats, m, n, **rule.constexprs, **tile, STAGES=stages)
    return dx, *sum_partials(dw, db, sums_dtype or torch.float32)


def share_for(dy: Tensor, x: Tensor, rule: NormRule) -> int:
    """Return how many elements per thread fit 128 registers in norm_grad.

    float32 is not packed by two, and LayerNorm sums more.
    """
    wide = x.element_size() > 2 or (rule.kind == "layer" and dy.element_size() > 2)
    return 8 if wide else 16
