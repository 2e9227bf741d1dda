"""Norm kernels for rows that fit in registers: several short rows, or one long one, per program."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .runtime import load, round_to, store, tl, triton


class Norm(NamedTuple):
    """Operands of a norm: matrices [M, N] with adjacent columns, vectors [N]; None where absent."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    y: Tensor
    total: Tensor | None
    stride_xm: int
    stride_rm: int


class NormGrad(NamedTuple):
    """Operands of its gradient: dw and db [programs, N] take float32 sums over rows."""

    dy: Tensor
    dtotal: Tensor | None
    x: Tensor
    weight: Tensor | None
    dx: Tensor | None
    dw: Tensor | None
    db: Tensor | None
    stride_dym: int
    stride_tm: int
    stride_xm: int


@triton.jit
def read_row(x, residual, total, x_offsets, residual_offsets, mask):
    """Read x, or the rounded sum of x and its residual: what backward will see again."""
    row = load(x + x_offsets, mask)
    if residual is not None:
        row += load(residual + residual_offsets, mask)
        row = round_to(row, total.dtype.element_ty).to(tl.float32)
    return row


@triton.jit
def round_xhat(xhat, x, total):
    """Round to the dtype of what was normalised: the sum where there is one, else x."""
    if total is not None:
        result = round_to(xhat, total.dtype.element_ty)
    else:
        result = round_to(xhat, x.dtype.element_ty)
    return result.to(tl.float32)


@triton.jit
def row_mean(tile, n):
    """Average whole rows, as a column; n is loop-invariant, and so is its reciprocal."""
    return (tl.sum(tile, axis=1) * (1.0 / n))[:, None]


@triton.jit
def normalise(row, mask, n, eps, LAYER: tl.constexpr):
    """Return xhat and rstd of a tile of whole rows."""
    if LAYER:
        row = tl.where(mask, row - row_mean(row, n), 0.0)
        # the mean was rounded: of equal numbers that would be left, times 1 / sqrt(eps)
        row = tl.where(mask, row - row_mean(row, n), 0.0)
    rstd = tl.rsqrt(row_mean(row * row, n) + eps)
    # rows past the last are zeros, which eps = 0 would turn into NaN
    return tl.where(mask, row * rstd, 0.0), rstd


@triton.jit
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
):
    """Several whole rows per program; `t` is a Norm."""
    rm = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    rn = tl.arange(0, BLOCK_N)[None, :]
    mask = (rm < m) & (rn < n)
    row = read_row(t.x, t.residual, t.total, rm * t.stride_xm + rn, rm * t.stride_rm + rn, mask)
    if t.total is not None:
        store(t.total + rm * n + rn, row, mask)
    xhat, _ = normalise(row, mask, n, eps, LAYER)
    if ROUND:
        xhat = round_xhat(xhat, t.x, t.total)
    if t.weight is not None:
        xhat *= load(t.weight + rn, rn < n) + offset
    if t.bias is not None:
        xhat += load(t.bias + rn, rn < n)
    store(t.y + rm * n + rn, xhat, mask)


@triton.jit
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
):
    """Each program takes every so many-th row tile and keeps its share of dw, db in registers."""
    rn = tl.arange(0, BLOCK_N)[None, :]
    if t.weight is not None:
        scale = load(t.weight + rn, rn < n) + offset
    dw_sum = tl.zeros((1, BLOCK_N), tl.float32)
    db_sum = tl.zeros((1, BLOCK_N), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.num_programs(0)):
        rm = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
        mask = (rm < m) & (rn < n)
        xhat, rstd = normalise(load(t.x + rm * t.stride_xm + rn, mask), mask, n, eps, LAYER)
        dxhat = load(t.dy + rm * t.stride_dym + rn, mask)
        if t.db is not None:
            db_sum += tl.sum(dxhat, axis=0)[None, :]
        if t.dw is not None:
            factor = round_xhat(xhat, t.x, None) if ROUND else xhat
            dw_sum += tl.sum(dxhat * factor, axis=0)[None, :]
        if t.dx is not None:
            if t.weight is not None:
                dxhat *= scale
            grad = dxhat - xhat * row_mean(dxhat * xhat, n)
            if LAYER:
                grad -= row_mean(dxhat, n)
            grad *= rstd
            if t.dtotal is not None:
                grad += load(t.dtotal + rm * t.stride_tm + rn, mask)
            store(t.dx + rm * n + rn, grad, mask)
    if t.dw is not None:
        tl.store(t.dw + tl.program_id(0) * n + rn, dw_sum, mask=rn < n)
    if t.db is not None:
        tl.store(t.db + tl.program_id(0) * n + rn, db_sum, mask=rn < n)
