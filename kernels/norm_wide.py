"""Norm kernels for rows too long for registers: a row goes through in chunks, several times.

dw and db get a kernel of their own, over column tiles, with the statistics that the row kernel
found: 8 bytes per row that live as long as the backward call.
"""

from __future__ import annotations

from .norm_rows import read_row, round_xhat
from .runtime import load, store, tl, triton


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


@triton.jit
def wide_norm_kernel(
    t, m, n, eps, offset, LAYER: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr
):
    rm = tl.program_id(0).to(tl.int64)
    x, residual = t.x + rm * t.stride_xm, t.residual
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


@triton.jit
def read_dxhat(dy, weight, offset, rn, mask):
    """Read dy times the norm's scale."""
    dxhat = load(dy + rn, mask)
    if weight is not None:
        dxhat *= load(weight + rn, mask) + offset
    return dxhat


@triton.jit
def wide_dx_kernel(
    t, stats, m, n, eps, offset, LAYER: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr
):
    """One row of dx where it is wanted, and the row's statistics for wide_dw_kernel."""
    rm = tl.program_id(0).to(tl.int64)
    x, dy = t.x + rm * t.stride_xm, t.dy + rm * t.stride_dym
    mean, rstd = wide_stats(x, None, None, n, eps, LAYER, BLOCK)
    tl.store(stats + rm, mean)
    tl.store(stats + m + rm, rstd)
    if t.dx is not None:
        dxhat_sum = tl.zeros((BLOCK,), tl.float32)
        product_sum = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, n, BLOCK):
            rn = start + tl.arange(0, BLOCK)
            dxhat = read_dxhat(dy, t.weight, offset, rn, rn < n)
            dxhat_sum += dxhat
            product_sum += dxhat * (load(x + rn, rn < n) - mean) * rstd
        dxhat_mean = tl.sum(dxhat_sum, axis=0) / n if LAYER else 0.0
        product_mean = tl.sum(product_sum, axis=0) / n
        for start in range(0, n, BLOCK):
            rn = start + tl.arange(0, BLOCK)
            xhat = (load(x + rn, rn < n) - mean) * rstd
            dxhat = read_dxhat(dy, t.weight, offset, rn, rn < n)
            grad = (dxhat - xhat * product_mean - dxhat_mean) * rstd
            if t.dtotal is not None:
                grad += load(t.dtotal + rm * t.stride_tm + rn, rn < n)
            store(t.dx + rm * n + rn, grad, rn < n)


@triton.jit
def wide_dw_kernel(
    t,
    stats,
    m,
    n,
    LAYER: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A column tile's share of dw and db over every so many-th row tile."""
    rn = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    dw_sum = tl.zeros((BLOCK_N,), tl.float32)
    db_sum = tl.zeros((BLOCK_N,), tl.float32)
    tiles = tl.cdiv(m, BLOCK_M)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        rm = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = (rm < m)[:, None] & (rn < n)[None, :]
        row = load(t.x + rm[:, None] * t.stride_xm + rn[None, :], mask)
        grad = load(t.dy + rm[:, None] * t.stride_dym + rn[None, :], mask)
        if LAYER:
            row -= load(stats + rm, rm < m)[:, None]
        xhat = row * load(stats + m + rm, rm < m)[:, None]
        if ROUND:
            xhat = round_xhat(xhat, t.x, None)
        dw_sum += tl.sum(grad * xhat, axis=0)
        db_sum += tl.sum(grad, axis=0)
    if t.dw is not None:
        tl.store(t.dw + tl.program_id(0) * n + rn, dw_sum, mask=rn < n)
    if t.db is not None:
        tl.store(t.db + tl.program_id(0) * n + rn, db_sum, mask=rn < n)
