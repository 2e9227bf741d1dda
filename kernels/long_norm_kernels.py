"""The gradients of norms over rows too long for one program's registers.

RMSNorm's: a row has two or four parts, and as many programs read all of it; each writes dx of one
part and keeps its sums of dw. Memory is read once, as the programs of a row run at the same time,
and who is behind finds the row in the L2 cache. LayerNorm's sums of dw and db leave no registers
for that. It takes two kernels, as does any row longer still or misaligned: one for four numbers of
each row, one for dx, dw and db by blocks of columns.
"""

from __future__ import annotations

from .norm_kernels import as_loaded, inverse_std, round_xhat, row_sums
from .runtime import jit_kernel, load, store, tl, triton


@triton.jit
def read_part(x, dy, weight, offset):
    """Return a part of a row, and the gradient of its normalized form; see `as_loaded`."""
    row = as_loaded(x, True).to(tl.float32)
    grad = as_loaded(dy, True).to(tl.float32)
    if weight is not None:
        grad *= as_loaded(weight, True).to(tl.float32) + offset
    return row, grad


@jit_kernel
def split_norm_grad_kernel(
    t,
    m,
    n,
    eps,
    offset,
    ROUND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute one part of RMSNorm's dx of the rows of this program, and of its sums of dw.

    `t` is a NormGrad. A row's loads are under way while the row before it is worked on.
    """
    columns = ()
    weights = ()
    for index in tl.static_range(PARTS):
        # its own part is the first
        start = (tl.program_id(1) + index) % PARTS * BLOCK_N
        rn = start + tl.arange(0, BLOCK_N)[None, :]
        columns = columns + (rn,)
        weights = weights + (None if t.weight is None else tl.load(t.weight + rn, rn < n, 0.0),)
    rn = columns[0]
    dw_sum = tl.zeros((1, BLOCK_N), tl.float32)
    per_row = 1.0 / n
    for tile in tl.range(tl.program_id(0), m, tl.num_programs(0), num_stages=STAGES):
        rm = tile + tl.arange(0, 1).to(tl.int64)[:, None]
        xs = ()
        dys = ()
        for index in tl.static_range(PARTS):
            at = columns[index]
            mask = (rm < m) & (at < n)
            xs = xs + (tl.load(t.x + rm * t.stride_xm + at, mask, 0.0),)
            dys = dys + (tl.load(t.dy + rm * t.stride_dym + at, mask, 0.0),)
        row, grad = read_part(xs[0], dys[0], weights[0], offset)
        squares = row * row
        products = row * grad
        for index in tl.static_range(1, PARTS):
            row, grad = read_part(xs[index], dys[index], weights[index], offset)
            squares += row * row
            products += row * grad
        square, product, _ = row_sums(squares, products, None)
        rstd = inverse_std(square * per_row, eps, True)
        row, grad = read_part(xs[0], dys[0], weights[0], offset)
        xhat = row * rstd
        grad = (grad - xhat * (product * per_row * rstd)) * rstd
        if t.dw is not None:
            dout = as_loaded(dys[0], True).to(tl.float32)
            dw_sum += dout * (round_xhat(xhat, t.x, None) if ROUND else xhat)
        if t.dx is not None:
            if t.dtotal is not None:
                grad += load(t.dtotal + rm * t.stride_tm + rn, rn < n)
            store(t.dx + rm * n + rn, grad, rn < n)
    if t.dw is not None:
        tl.store(t.dw + tl.program_id(0) * n + rn, dw_sum, mask=rn < n)


@triton.jit
def read_dxhat(dy, weight, offset, rn, mask):
    """Read dy times the norm's scale."""
    dxhat = load(dy + rn, mask)
    if weight is not None:
        dxhat *= load(weight + rn, mask) + offset
    return dxhat


@jit_kernel
def wide_stats_kernel(t, stats, m, n, eps, offset, LAYER: tl.constexpr, BLOCK: tl.constexpr):
    """Compute four numbers of one row: mean and rstd, and where dx is wanted two means.

    These are the means of the gradient of xhat, and of its product with xhat; RMSNorm has no mean
    of either kind, and reads the row once.
    """
    rm = tl.program_id(0).to(tl.int64)
    x = t.x + rm * t.stride_xm
    dy = t.dy + rm * t.stride_dym
    mean = 0.0
    grad_mean = 0.0
    if LAYER:
        rows = tl.zeros((1, BLOCK), tl.float32)
        grads = tl.zeros((1, BLOCK), tl.float32)
        for start in range(0, n, BLOCK):
            rn = start + tl.arange(0, BLOCK)[None, :]
            rows += load(x + rn, rn < n)
            if t.dx is not None:
                grads += read_dxhat(dy, t.weight, offset, rn, rn < n)
        mean, grad_mean, _ = row_sums(rows, grads, None)
        mean /= n
        grad_mean /= n
    error = tl.zeros((1, BLOCK), tl.float32)
    squares = tl.zeros((1, BLOCK), tl.float32)
    products = tl.zeros((1, BLOCK), tl.float32)
    for start in range(0, n, BLOCK):
        rn = start + tl.arange(0, BLOCK)[None, :]
        row = load(x + rn, rn < n)
        if LAYER:
            row = tl.where(rn < n, row - mean, 0.0)
            error += row
        squares += row * row
        if t.dx is not None:
            products += row * (read_dxhat(dy, t.weight, offset, rn, rn < n) - grad_mean)
    rest, square, product = row_sums(error, squares, products)
    # the mean was rounded: of equal numbers its error would be left, times 1 / sqrt(eps)
    rest /= n
    rstd = inverse_std(square / n - rest * rest, eps, True)
    at = stats + rm + tl.zeros((1, 1), tl.int64)
    tl.store(at, mean + rest)
    tl.store(at + m, rstd)
    tl.store(at + 2 * m, grad_mean + tl.zeros((1, 1), tl.float32))
    tl.store(at + 3 * m, product / n * rstd)


@jit_kernel
def wide_grad_kernel(
    t,
    stats,
    m,
    n,
    offset,
    LAYER: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute dx of some columns of this program's row tiles, and sum dw and db over these."""
    rn = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    dw_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    scale = 1.0
    if t.weight is not None:
        scale = load(t.weight + rn, rn < n) + offset
    tiles = tl.cdiv(m, BLOCK_M)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        rm = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
        mask = (rm < m) & (rn < n)
        row = load(t.x + rm * t.stride_xm + rn, mask)
        dout = load(t.dy + rm * t.stride_dym + rn, mask)
        rstd = load(stats + m + rm, rm < m)
        if LAYER:
            row -= load(stats + rm, rm < m)
        xhat = row * rstd
        if t.dw is not None:
            dw_sum += dout * (round_xhat(xhat, t.x, None) if ROUND else xhat)
        if t.db is not None:
            db_sum += dout
        if t.dx is not None:
            grad = dout * scale - xhat * load(stats + 3 * m + rm, rm < m)
            if LAYER:
                grad -= load(stats + 2 * m + rm, rm < m)
            grad *= rstd
            if t.dtotal is not None:
                grad += load(t.dtotal + rm * t.stride_tm + rn, mask)
            store(t.dx + rm * n + rn, grad, mask)
    if t.dw is not None:
        tl.store(t.dw + tl.program_id(0) * n + rn, tl.sum(dw_sum, axis=0)[None, :], mask=rn < n)
    if t.db is not None:
        tl.store(t.db + tl.program_id(0) * n + rn, tl.sum(db_sum, axis=0)[None, :], mask=rn < n)
