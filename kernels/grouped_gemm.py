"""Grouped GEMMs over rows sorted by expert: each expert's rows times its weight, or its gradient.

The ends of experts' rows are read on the device, so that no launch waits for it: the grid is as
large as any routing needs. Weights are addressed by strides, so that [E, N, K] and [E, K, N] are
read in place. Rows of no expert come last, and are not read; products have zeros there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .gemm import finish, multiply, options_for
from .runtime import cdiv, jit_kernel, load, next_power_of_2, store, tl, triton

# programs of an expert, and elements that each clears at once
CLEARED: dict[str, Any] = {"PARTS": 32, "BLOCK": 2048}


class StoreRows(NamedTuple):
    """Operands of `store_rows`."""

    # the result [rows, N]
    y: Tensor
    # y, where the product is added to it
    total: Tensor | None = None
    # the experts' biases [E, N], None where absent
    bias: Tensor | None = None
    # the rows' scores [rows], which multiply the biases
    scores: Tensor | None = None
    # rows of all experts
    num_rows: int = 0


@triton.jit
def load_total(rm, rn, mask, n, out):
    """Return the tile that the product is added to, or 0."""
    offsets = rm[:, None] * n + rn[None, :]
    return load(out.total + offsets, mask) if out.total is not None else 0.0


@triton.jit
def store_rows(acc, total, rm, rn, mask, n, expert, out, ACTIVATION: tl.constexpr):
    """Store the sum of a product, a total and an expert's bias times the rows' scores."""
    acc += total
    if out.bias is not None:
        bias = load(out.bias + expert.to(tl.int64) * n + rn, rn < n)[None, :]
        if out.scores is not None:
            bias = load(out.scores + rm, rm < out.num_rows)[:, None] * bias
        acc += bias
    store(out.y + rm[:, None] * n + rn[None, :], acc, mask)


@triton.jit
def rows_of(ends, expert):
    """Return where an expert's rows begin and end."""
    return tl.load(ends + expert - 1, expert > 0, 0), tl.load(ends + expert)


@triton.jit
def store_zeros(y, rows, columns, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store zeros in the tile of y [M, N] that begins at a row and a column."""
    rm = rows.to(tl.int64) + tl.arange(0, BLOCK_M)
    rn = columns + tl.arange(0, BLOCK_N)
    zeros = tl.zeros((BLOCK_M, BLOCK_N), y.dtype.element_ty)
    tl.store(y + rm[:, None] * n + rn[None, :], zeros, (rm < m)[:, None] & (rn < n)[None, :])


@triton.jit
def expert_of(tile, ends, num_experts, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """Return the expert of a tile of rows, num_experts or more for none, and its first tile."""
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < num_experts
    begins = tl.load(ends + experts - 1, is_expert & (experts > 0), 0)
    tiles = tl.cdiv(tl.load(ends + experts, is_expert, 0) - begins, BLOCK_M)
    # of the experts after the last, begins is 0
    tiles = tl.where(is_expert, tiles, 0)
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    return expert, tl.sum(tl.where(experts < expert, tiles, 0), 0)


@jit_kernel
def grouped_gemm_kernel(
    x,
    w,
    out,
    ends,
    num_experts,
    n,
    k,
    stride_xm,
    stride_we,
    stride_wn,
    stride_wk,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Compute one tile of x [rows, K] times the weight of its rows' expert."""
    tiles_n = tl.cdiv(n, BLOCK_N)
    tile = tl.program_id(0) // tiles_n
    columns = tl.program_id(0) % tiles_n * BLOCK_N
    expert, first_tile = expert_of(tile, ends, num_experts, BLOCK_M, EXPERTS)
    if expert >= num_experts:
        # rows of no expert: saved, arbitrary numbers would differ from run to run
        if out.total is None:
            rows = tl.load(ends + num_experts - 1) + (tile - first_tile) * BLOCK_M
            store_zeros(out.y, rows, columns, out.num_rows, n, BLOCK_M, BLOCK_N)
        return
    begin, end = rows_of(ends, expert)
    rows = begin + (tile - first_tile) * BLOCK_M
    rm = rows.to(tl.int64) + tl.arange(0, BLOCK_M)
    column = columns.to(tl.int64)
    rn = column + tl.arange(0, BLOCK_N)
    w += expert.to(tl.int64) * stride_we
    operands = x, w, rows, columns, rm, rn, end, n, k, (stride_xm, 1, stride_wn, stride_wk)
    acc = multiply(*operands, False, False, PRECISION, BLOCK_K)
    finish(acc, rm, column, end, n, expert, out, load_total, store_rows, None, SLICES)


@jit_kernel
def grouped_grad_kernel(
    x,
    dy,
    out,
    ends,
    m,
    n,
    stride_xm,
    stride_dym,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Compute one tile of x' dy over the rows of one expert."""
    tiles_n = tl.cdiv(n, BLOCK_N)
    tiles = tl.cdiv(m, BLOCK_M) * tiles_n
    expert = tl.program_id(0) // tiles
    place = tl.program_id(0) % tiles
    begin, end = rows_of(ends, expert)
    rows = place // tiles_n * BLOCK_M
    columns = place % tiles_n * BLOCK_N
    # experts' gradients lie below each other
    above = expert.to(tl.int64) * m
    if begin >= end:
        if out.total is None:
            store_zeros(out.y + above * n, rows, columns, m, n, BLOCK_M, BLOCK_N)
        return
    rm = rows.to(tl.int64) + tl.arange(0, BLOCK_M)
    column = columns.to(tl.int64)
    rn = column + tl.arange(0, BLOCK_N)
    x += begin.to(tl.int64) * stride_xm
    dy += begin.to(tl.int64) * stride_dym
    # a chunk of rows may be long
    wide = tl.full((), 1, tl.int64)
    strides = 1, stride_xm * wide, 1, stride_dym
    operands = x, dy, rows, columns, rm, rn, m, n, end - begin, strides
    acc = multiply(*operands, False, False, PRECISION, BLOCK_K)
    finish(acc, above + rm, column, above + m, n, expert, out, load_total, store_rows, None, SLICES)


def grouped_gemm(
    x: Tensor,
    w: Tensor,
    ends: Tensor,
    y: Tensor,
    bias: Tensor | None = None,
    scores: Tensor | None = None,
    adds: bool = False,
) -> None:
    """Write x [R, K] times the weight w [E, K, N] of each row's expert into y [R, N], or add it.

    y gets zeros in the rows of no expert, which come last; where it is added to, they stay.

    ends [E]: where each expert's rows end. y, bias [E, N] and scores [R] are contiguous.
    """
    (num_rows, k) = x.shape
    (num_experts, _, n) = w.shape
    if not num_rows:
        # a tensor without numbers may have any strides
        return
    assert x.stride(1) == 1 or k == 1
    out = StoreRows(y, y if adds else None, bias, scores, num_rows)
    options = _options(x, (w.stride(1) if w.stride(2) == 1 else w.stride(2), x.stride(0)), k)
    # each expert that has rows, and the rows of none, may have one tile that is not full
    row_tiles = cdiv(num_rows, options["BLOCK_M"]) + min(num_experts + 1, num_rows)
    grid = (row_tiles * cdiv(n, options["BLOCK_N"]),)
    strides = x.stride(0), w.stride(0), w.stride(2), w.stride(1)
    experts = next_power_of_2(num_experts)
    grouped_gemm_kernel[grid](
        x, w, out, ends, num_experts, n, k, *strides, EXPERTS=experts, **options
    )


def grouped_grad(x: Tensor, dy: Tensor, ends: Tensor, dw: Tensor, adds: bool = False) -> None:
    """Write x' dy of each expert's rows into dw [E, M, N], or add it; zeros where it has no rows.

    x [R, M] and dy [R, N] have adjacent columns; dw is contiguous.
    """
    num_experts, m, n = dw.shape
    if not len(x):
        if not adds:
            dw.zero_()
        return
    assert all(t.stride(1) == 1 or t.shape[1] == 1 for t in (x, dy))
    out = StoreRows(dw, dw if adds else None)
    options = _options(x, (x.stride(0), dy.stride(0)), x.shape[0] // num_experts)
    grid = (num_experts * cdiv(m, options["BLOCK_M"]) * cdiv(n, options["BLOCK_N"]),)
    grouped_grad_kernel[grid](x, dy, out, ends, m, n, x.stride(0), dy.stride(0), **options)


@jit_kernel
def clear_unused_kernel(dw, ends, numel, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Write zeros over a part of an expert's gradient if it has no rows."""
    expert = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    begin, end = rows_of(ends, expert)
    if begin < end:
        return
    zeros = tl.zeros((BLOCK,), dw.dtype.element_ty)
    for start in range(part * BLOCK, numel, PARTS * BLOCK):
        places = start + tl.arange(0, BLOCK)
        tl.store(dw + expert.to(tl.int64) * numel + places, zeros, places < numel)


def clear_unused(dw: Tensor, ends: Tensor) -> None:
    """Write zeros over the gradients dw [E, M, N] of experts without rows; dw is contiguous."""
    assert dw.is_contiguous()
    clear_unused_kernel[len(dw) * CLEARED["PARTS"],](dw, ends, dw[0].numel(), **CLEARED)


def _options(x: Tensor, leads: tuple[int, ...], k: int) -> dict[str, Any]:
    """Return the options of a launch of operands with rows `leads` apart."""
    aligned = all(lead * x.element_size() % 16 == 0 for lead in leads)
    return options_for(x, k, False, aligned)
