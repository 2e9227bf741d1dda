"""RMSNorm and LayerNorm over rows, forward and backward from x alone: no statistic is ever stored.

A row of up to MAX_BLOCK columns stays in registers (norm_rows), in backward one of up to
MAX_GRAD_BLOCK, as a program's share of dw takes as many again, or half that in float32; longer rows
go through in column chunks (norm_wide).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .norm_rows import norm_grad_kernel, norm_kernel
from .norm_wide import wide_dw_kernel, wide_dx_kernel, wide_norm_kernel
from .partials import sum_partials
from .runtime import arch, triton

MAX_BLOCK = 16384
MAX_GRAD_BLOCK = 8192
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

    @property
    def resident(self) -> int:
        """How many of norm_grad's programs a multiprocessor holds: 128 registers a thread."""
        return 16 // self.num_warps


@lru_cache
def rows_for(n: int, share: int = 16) -> Rows:
    """Return the tile for rows of n <= MAX_BLOCK columns: at least eight elements per thread.

    From `share` elements per thread on, warps are added, up to sixteen.
    """
    block_n = triton.next_power_of_2(n)
    # sixteen where rows are long: short ones' share of dw would take more than 128 registers
    block_m = max(1, (2048 if block_n >= 1024 else 1024) // block_n)
    return Rows(block_m, block_n, max(4, min(16, block_m * block_n // (32 * share))))


def stages_for(*tensors: Tensor | None) -> int:
    """Return how many tiles of rows of these are under way in norm_grad at once, and one more.

    Six bytes per column, such as those of bf16 x, dy and dtotal, or eight: then 32 KiB or more are
    on their way to a multiprocessor, and at most 192 KiB of its shared memory are taken.
    """
    if not arch().startswith("sm_"):
        return 1
    return 3 if sum(t.element_size() for t in tensors if t is not None) <= 6 else 2


def check_operands(matrices: Sequence[Tensor | None], vectors: Sequence[Tensor | None]) -> None:
    """Hold whoever launches to what the kernels read."""
    assert all(t is None or t.stride(1) == 1 or t.shape[1] == 1 for t in matrices)
    assert all(t is None or t.is_contiguous() for t in vectors)


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Return over how many multiprocessors persistent programs are spread."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


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
    sums_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dx [M, N] (plus `dtotal`), dw [N] and db [N] in `sums_dtype`, each where needed."""
    check_operands((dy, dtotal, x), (weight,))
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
    strides = dy.stride(0), 0 if dtotal is None else dtotal.stride(0), x.stride(0)
    wide = x.shape[1] * 16 > MAX_GRAD_BLOCK * share_for(dy, x, rule)
    launch = launch_wide_grad if wide else launch_grad
    with torch.cuda.device_of(x):
        dw, db = launch((dy, dtotal, x, weight), dx, needs[1:], strides, rule)
    return dx, *sum_partials(dw, db, sums_dtype)


def share_for(dy: Tensor, x: Tensor, rule: NormRule) -> int:
    """Return how many elements per thread fit 128 registers in norm_grad.

    Those of float32 are not packed by two while they wait, and LayerNorm sums more.
    """
    wide = x.element_size() > 2 or (rule.kind == "layer" and dy.element_size() > 2)
    return 8 if wide else 16


def partials(
    x: Tensor, needs: tuple[bool, bool], programs: int
) -> tuple[Tensor | None, Tensor | None]:
    """Allocate the shares of dw and db that programs leave, a row each."""
    dw, db = (
        x.new_empty(programs, x.shape[1], dtype=torch.float32) if need else None for need in needs
    )
    return dw, db


def launch_grad(
    inputs: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    dx: Tensor | None,
    needs: tuple[bool, bool],
    strides: tuple[int, int, int],
    rule: NormRule,
) -> tuple[Tensor | None, Tensor | None]:
    """Fill dx over whole rows, and return every program's share of dw and db."""
    dy, dtotal, x, _ = inputs
    (m, n), tile = x.shape, rows_for(x.shape[1], share_for(dy, x, rule))
    programs = min(triton.cdiv(m, tile.block_m), tile.resident * num_multiprocessors(x.device))
    dw, db = partials(x, needs, programs)
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
        STAGES=stages_for(dy, dtotal, x),
        num_warps=tile.num_warps,
    )
    return dw, db


def launch_wide_grad(
    inputs: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    dx: Tensor | None,
    needs: tuple[bool, bool],
    strides: tuple[int, int, int],
    rule: NormRule,
) -> tuple[Tensor | None, Tensor | None]:
    """Find the statistics and dx row by row, then programs' shares of dw and db by columns."""
    dy, _, x, _ = inputs
    m, n = x.shape
    row_tiles = triton.cdiv(m, DW_TILE["BLOCK_M"])
    dw, db = partials(x, needs, min(row_tiles, 2 * num_multiprocessors(x.device)))
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
    shares = db if dw is None else dw
    if shares is not None:
        wide_dw_kernel[(len(shares), triton.cdiv(n, DW_TILE["BLOCK_N"]))](
            dy,
            x,
            stats,
            dw,
            db,
            m,
            n,
            strides[0],
            strides[2],
            **rule.constexprs,
            **DW_TILE,
            STAGES=stages_for(dy, x),
        )
    return dw, db
