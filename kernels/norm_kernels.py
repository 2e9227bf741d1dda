"""Norm kernels: of rows that fit in registers, and forward of wide rows, which pass in chunks."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .int8 import load_rows, load_scales
from .runtime import INTERPRETED, jit_kernel, load, round_to, store, tl, triton


class NormOperands(NamedTuple):
    """Operands of a norm: matrices [M, N] with adjacent columns, vectors [N]; None where absent."""

    # the input
    x: Tensor
    # added to the input before
    residual: Tensor | None
    # multiplies the normalized sum
    weight: Tensor | None
    # added to that
    bias: Tensor | None
    # the normalized sum
    y: Tensor
    # the sum of input and residual
    total: Tensor | None
    # elements between the rows of x
    stride_xm: int
    # elements between the rows of the residual
    stride_rm: int


class NormGrad(NamedTuple):
    """Operands of the gradient of a norm, as in `NormOperands`."""

    # the gradient of the result
    dy: Tensor
    # the gradient of the sum
    dtotal: Tensor | None
    # the sum, or the input where nothing is added
    x: Tensor
    # that of the norm
    weight: Tensor | None
    # the gradient of x that it writes, where wanted
    dx: Tensor | None
    # sums of the weight's gradient over each program's rows [programs, N], float32, where wanted
    dw: Tensor | None
    # sums of the bias's gradient, likewise
    db: Tensor | None
    # elements between the rows of dy
    stride_dym: int
    # elements between the rows of dtotal
    stride_tm: int
    # elements between the rows of x
    stride_xm: int


@triton.jit
def read_row(x, residual, total, x_offsets, residual_offsets, mask):
    """Read x, or the rounded sum of x and its residual, as backward will see it again."""
    row = load(x + x_offsets, mask)
    if residual is not None:
        row += load(residual + residual_offsets, mask)
        row = round_to(row, total.dtype.element_ty).to(tl.float32)
    return row


@triton.jit
def round_xhat(xhat, x, total, PACKED: tl.constexpr = None):
    """Round to the dtype of the normalized tensor: the sum where there is one, else x.

    PACKED: the dtype of x where that is in nine bits.
    """
    if PACKED is not None:
        result = round_to(xhat, PACKED)
    elif total is not None:
        result = round_to(xhat, total.dtype.element_ty)
    else:
        result = round_to(xhat, x.dtype.element_ty)
    return result.to(tl.float32)


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def add_triples(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def sums_over(a, b, c, AXIS: tl.constexpr):
    """Sum two or three tiles over an axis in one reduction; c may be None."""
    if INTERPRETED:
        # where a reduction of several tiles is a loop in Python
        sums = (tl.sum(a, AXIS), tl.sum(b, AXIS), tl.sum(b if c is None else c, AXIS))
    elif c is None:
        pair = tl.reduce((a, b), AXIS, add_pairs)
        sums = (pair[0], pair[1], pair[1])
    else:
        sums = tl.reduce((a, b, c), AXIS, add_triples)
    return sums


@triton.jit
def row_sums(a, b, c):
    """Sum two or three tiles over whole rows in one reduction, as columns; c may be None."""
    sums = sums_over(a, b, c, 1)
    return sums[0][:, None], sums[1][:, None], sums[2][:, None]


@triton.jit
def as_loaded(value, HOLDS: tl.constexpr):
    """Return a value, or None, and hide where it comes from; only on NVIDIA's GPUs.

    It waits for a reduction in its own dtype then, not as float32, which takes twice the registers.
    """
    if HOLDS and not INTERPRETED and value is not None:
        pack: tl.constexpr = 32 // value.dtype.primitive_bitwidth
        value = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [value], dtype=value.dtype, is_pure=False, pack=pack
        )
    return value


@triton.jit
def inverse_std(variance, eps, inside):
    """Return 1 / sqrt(variance + eps) of rows, 0 past the last, where eps = 0 would make NaN."""
    # a subtraction may have left less than nothing
    variance = tl.where(variance < 0.0, 0.0, variance)
    return tl.where(inside, tl.rsqrt(variance + eps), 0.0)


@triton.jit
def normalize(row, inside, mask, n, eps, LAYER: tl.constexpr):
    """Return xhat of a tile of whole rows."""
    per_row = 1.0 / n
    if LAYER:
        row = tl.where(mask, row - tl.sum(row, axis=1)[:, None] * per_row, 0.0)
        # the mean was rounded: of equal numbers its error would be left, times 1 / sqrt(eps)
        error, squares, _ = row_sums(row, row * row, None)
        error *= per_row
        row -= error
        variance = squares * per_row - error * error
    else:
        variance = tl.sum(row * row, axis=1)[:, None] * per_row
    return row * inverse_std(variance, eps, inside)


@jit_kernel
def norm_kernel(
    t,
    m,
    n,
    eps,
    offset,
    LAYER: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PACKED: tl.constexpr = None,
):
    """Normalize one tile of rows of `t`, NormOperands; PACKED: see `load_rows`.

    Every load is issued before the first reduction waits.
    """
    rm = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    rn = tl.arange(0, BLOCK_N)[None, :]
    mask = (rm < m) & (rn < n)
    if PACKED is None:
        row = read_row(t.x, t.residual, t.total, rm * t.stride_xm + rn, rm * t.stride_rm + rn, mask)
    else:
        bits = load_scales(t.x, tl.program_id(0), m, BLOCK_M, BLOCK_N, PACKED)
    if t.weight is not None:
        scale = load(t.weight + rn, rn < n) + offset
    if t.bias is not None:
        shift = load(t.bias + rn, rn < n)
    if PACKED is not None:
        # last, as it waits for the scales
        row = load_rows(t.x, rm * t.stride_xm, rn, bits, mask, PACKED)
    if t.total is not None:
        store(t.total + rm * n + rn, row, mask)
    xhat = normalize(row, rm < m, mask, n, eps, LAYER)
    if ROUND:
        xhat = round_xhat(xhat, t.x, t.total, PACKED)
    if t.weight is not None:
        xhat *= scale
    if t.bias is not None:
        xhat += shift
    store(t.y + rm * n + rn, xhat, mask)


@triton.jit
def grad_tile(row, grad, inside, mask, n, eps, LAYER: tl.constexpr):
    """Return xhat, and the gradient of the normalized rows from that of xhat.

    RMSNorm takes one reduction; LayerNorm takes two, of which the second also sums the rest of the
    mean that rounding left, see `normalize`.
    """
    per_row = 1.0 / n
    if LAYER:
        mean, grad_mean, _ = row_sums(row, grad, None)
        grad -= grad_mean * per_row
        row = tl.where(mask, row - mean * per_row, 0.0)
        error, squares, product = row_sums(row, row * row, row * grad)
        error *= per_row
        row -= error
        variance = squares * per_row - error * error
    else:
        squares, product, _ = row_sums(row * row, row * grad, None)
        variance = squares * per_row
    rstd = inverse_std(variance, eps, inside)
    xhat = row * rstd
    return xhat, (grad - xhat * (product * per_row * rstd)) * rstd


@triton.jit
def sum_halves(tile, HALVES: tl.constexpr):
    """Sum both halves of a tile's rows, where a thread has the same columns of both."""
    if HALVES:
        M: tl.constexpr = tile.shape[0] // 2
        tile = tl.sum(tl.reshape(tile, (2, M, tile.shape[1])), axis=0)
    return tile


@triton.jit
def both_halves(tile, HALVES: tl.constexpr):
    """Return a tile of which both halves of rows are this, see `sum_halves`."""
    if HALVES:
        M: tl.constexpr = tile.shape[0]
        N: tl.constexpr = tile.shape[1]
        tile = tl.reshape(tl.broadcast_to(tile[None, :, :], (2, M, N)), (2 * M, N))
    return tile


@jit_kernel
def norm_grad_kernel(
    t,
    m,
    n,
    eps,
    offset,
    LAYER: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    HALVES: tl.constexpr,
    PACKED: tl.constexpr = None,
):
    """Compute dx of the row tiles of this program, and its sums of dw and db in registers.

    `t` is a NormGrad, PACKED see `load_rows`. A tile's loads are under way while the tiles before
    it are worked on.
    """
    rn = tl.arange(0, BLOCK_N)[None, :]
    if t.weight is not None:
        # of one row a thread would get fewer columns than of rows, and the rows another layout
        zeros = tl.zeros((BLOCK_M // 2 if HALVES else 1, 1), tl.int32)
        scale = load(t.weight + zeros + rn, rn < n) + offset
    dw_sum = tl.zeros((BLOCK_M // 2 if HALVES else BLOCK_M, BLOCK_N), tl.float32)
    db_sum = dw_sum
    tiles = tl.cdiv(m, BLOCK_M)
    bits = load_scales(t.x, tl.program_id(0), m, BLOCK_M, BLOCK_N, PACKED)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        rm = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
        mask = (rm < m) & (rn < n)
        if PACKED is not None:
            # too few for a copy that is under way for tiles: those of the next tile
            others = load_scales(t.x, tile + tl.num_programs(0), m, BLOCK_M, BLOCK_N, PACKED)
        row = load_rows(t.x, rm * t.stride_xm, rn, bits, mask, PACKED)
        if PACKED is not None:
            bits = others
        dout = load(t.dy + rm * t.stride_dym + rn, mask)
        grad = dout * both_halves(scale, HALVES) if t.weight is not None else dout
        xhat, grad = grad_tile(row, grad, rm < m, mask, n, eps, LAYER)
        if t.db is not None:
            db_sum += sum_halves(dout, HALVES)
        if t.dw is not None:
            dw = dout * (round_xhat(xhat, t.x, None, PACKED) if ROUND else xhat)
            dw_sum += sum_halves(dw, HALVES)
        if t.dx is not None:
            if t.dtotal is not None:
                # on its way since the tile before, like the others; read from there this late, it
                # spares registers
                grad += load(t.dtotal + rm * t.stride_tm + rn, mask)
            store(t.dx + rm * n + rn, grad, mask)
    if t.dw is not None:
        tl.store(t.dw + tl.program_id(0) * n + rn, tl.sum(dw_sum, axis=0)[None, :], mask=rn < n)
    if t.db is not None:
        tl.store(t.db + tl.program_id(0) * n + rn, tl.sum(db_sum, axis=0)[None, :], mask=rn < n)


@triton.jit
def wide_stats(x, residual, total, n, eps, LAYER: tl.constexpr, BLOCK: tl.constexpr):
    """Return mean (0 for RMSNorm) and rstd of the row at `x`, centred before it is squared."""
    mean = 0.0
    if LAYER:
        acc = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, n, BLOCK):
            rn = start + tl.arange(0, BLOCK)
            acc += read_row(x, residual, total, rn, rn, rn < n)
        mean = tl.sum(acc, axis=0) / n
    error = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        rn = start + tl.arange(0, BLOCK)
        row = read_row(x, residual, total, rn, rn, rn < n)
        row = tl.where(rn < n, row - mean, 0.0)
        squares += row * row
        if LAYER:
            error += row
    variance = tl.sum(squares, axis=0) / n
    if LAYER:
        # the mean was rounded: of equal numbers its error would be left, times 1 / sqrt(eps)
        rest = tl.sum(error, axis=0) / n
        mean += rest
        variance -= rest * rest
        variance = tl.where(variance < 0.0, 0.0, variance)
    return mean, tl.rsqrt(variance + eps)


@jit_kernel
def wide_norm_kernel(
    t, m, n, eps, offset, LAYER: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr
):
    """Normalize one row of `t`, NormOperands, in chunks of columns."""
    rm = tl.program_id(0).to(tl.int64)
    x = t.x + rm * t.stride_xm
    residual = t.residual
    if residual is not None:
        residual += rm * t.stride_rm
    mean, rstd = wide_stats(x, residual, t.total, n, eps, LAYER, BLOCK)
    for start in range(0, n, BLOCK):
        rn = start + tl.arange(0, BLOCK)
        mask = rn < n
        row = read_row(x, residual, t.total, rn, rn, mask)
        if t.total is not None:
            store(t.total + rm * n + rn, row, mask)
        xhat = (row - mean) * rstd
        if ROUND:
            xhat = round_xhat(xhat, x, t.total)
        if t.weight is not None:
            xhat *= load(t.weight + rn, mask) + offset
        if t.bias is not None:
            xhat += load(t.bias + rn, mask)
        store(t.y + rm * n + rn, xhat, mask)
