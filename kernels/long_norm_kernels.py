"""The gradients of norms over rows too long for one program's registers.

A row has two or four parts, and as many programs read all of it; each writes dx of one part and
keeps its sums of dw and db. Memory is read once, as the programs of a row run at the same time, and
the later one finds the row in the L2 cache. A row longer still, misaligned, or LayerNorm's in
float32 takes two kernels: one for four numbers of each row, one for dx, dw and db by blocks of
columns.
"""

from __future__ import annotations

from .norm_kernels import as_loaded, inverse_std, round_xhat, row_sums, sums_over
from .runtime import jit_kernel, load, store, tl, triton

# adjacent elements of a row that a thread has together
ADJACENT = tl.constexpr(8)


@triton.jit
def part_columns(index: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the columns of a part of a row; the program's own is the last."""
    start = (tl.program_id(1) + 1 + index) % PARTS * BLOCK_N
    return start + tl.arange(0, BLOCK_N)[None, :]


@triton.jit
def load_part(t, rm, m, n, index: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return a part of x and of dy."""
    rn = part_columns(index, PARTS, BLOCK_N)
    mask = (rm < m) & (rn < n)
    x = tl.load(t.x + rm * t.stride_xm + rn, mask, 0.0)
    return x, tl.load(t.dy + rm * t.stride_dym + rn, mask, 0.0)


@triton.jit
def read_part(x, dy, weights, index: tl.constexpr, offset):
    """Return a part of a row, and the gradient of its normalized form; see `as_loaded`."""
    row = as_loaded(x, True).to(tl.float32)
    grad = as_loaded(dy, True).to(tl.float32)
    if len(weights) > 0:
        grad *= as_loaded(weights[index], True).to(tl.float32) + offset
    return row, grad


@triton.jit
def group_moments(row, grad):
    """Return two means of each ADJACENT adjacent elements, and sums of squares and of products.

    The sums are of differences from these means, so that a thread holds four numbers of a group
    while it waits for the means of the row, not the elements. Of equal numbers of 16 bits the mean
    is exact.
    """
    groups: tl.constexpr = row.shape[1] // ADJACENT
    row = tl.reshape(row, (groups, ADJACENT))
    grad = tl.reshape(grad, (groups, ADJACENT))
    mean = tl.sum(row, 1) / ADJACENT
    grad_mean = tl.sum(grad, 1) / ADJACENT
    row -= mean[:, None]
    grad -= grad_mean[:, None]
    return mean, grad_mean, tl.sum(row * row, 1), tl.sum(row * grad, 1)


@triton.jit
def layer_numbers(t, rm, m, weights, n, eps, offset, PARTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return x and dy of the program's part, and four numbers of the row.

    These are its mean and rstd, and the means of the gradient of xhat and of its product with xhat.
    """
    x, dy = load_part(t, rm, m, n, 0, PARTS, BLOCK_N)
    row, grad = read_part(x, dy, weights, 0, offset)
    total, grad_total, squares, products = group_moments(row, grad)
    means = (total,)
    grad_means = (grad_total,)
    for index in tl.static_range(1, PARTS):
        x, dy = load_part(t, rm, m, n, index, PARTS, BLOCK_N)
        row, grad = read_part(x, dy, weights, index, offset)
        mean, grad_mean, square, product = group_moments(row, grad)
        means = means + (mean,)
        grad_means = grad_means + (grad_mean,)
        total += mean
        grad_total += grad_mean
        squares += square
        products += product
    per_row = 1.0 / n
    mean, grad_mean, _ = sums_over(total, grad_total, None, 0)
    mean *= ADJACENT * per_row
    grad_mean *= ADJACENT * per_row
    rest = tl.zeros_like(total)
    for index in tl.static_range(PARTS):
        start = (tl.program_id(1) + 1 + index) % PARTS * BLOCK_N
        # parts end between groups, as rows do
        inside = start + tl.arange(0, BLOCK_N // ADJACENT) * ADJACENT < n
        away = tl.where(inside, means[index] - mean, 0.0)
        rest += away
        squares += away * away * ADJACENT
        products += away * ADJACENT * (grad_means[index] - grad_mean)
    # the mean was rounded: of equal numbers its error would be left, times 1 / sqrt(eps)
    rest, square, product = sums_over(rest, squares, products, 0)
    rest *= ADJACENT * per_row
    rstd = inverse_std(square * per_row - rest * rest, eps, True)
    return x, dy, mean + rest, rstd, grad_mean, product * per_row * rstd


@triton.jit
def rms_numbers(t, rm, m, weights, n, eps, offset, PARTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return x and dy of the program's part, rstd of the row, mean of xhat times its gradient."""
    x, dy = load_part(t, rm, m, n, 0, PARTS, BLOCK_N)
    row, grad = read_part(x, dy, weights, 0, offset)
    squares = row * row
    products = row * grad
    for index in tl.static_range(1, PARTS):
        x, dy = load_part(t, rm, m, n, index, PARTS, BLOCK_N)
        row, grad = read_part(x, dy, weights, index, offset)
        squares += row * row
        products += row * grad
    square, product, _ = row_sums(squares, products, None)
    rstd = inverse_std(square / n, eps, True)
    return x, dy, rstd, product / n * rstd


@jit_kernel
def split_norm_grad_kernel(
    t,
    m,
    n,
    eps,
    offset,
    LAYER: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute one part of dx of the rows of this program, and of its sums of dw and db.

    `t` is a NormGrad. A row's loads are under way while the row before it is worked on.
    """
    weights = ()
    for index in tl.static_range(PARTS):
        rn = part_columns(index, PARTS, BLOCK_N)
        if t.weight is not None:
            weights = weights + (tl.load(t.weight + rn, rn < n, 0.0),)
    dw_sum = tl.zeros((1, BLOCK_N), tl.float32)
    db_sum = tl.zeros((1, BLOCK_N), tl.float32)
    for tile in tl.range(tl.program_id(0), m, tl.num_programs(0), num_stages=STAGES):
        rm = tile + tl.arange(0, 1).to(tl.int64)[:, None]
        place = t, rm, m, weights, n, eps, offset
        if LAYER:
            x, dy, mean, rstd, grad_mean, share = layer_numbers(*place, PARTS, BLOCK_N)
        else:
            x, dy, rstd, share = rms_numbers(*place, PARTS, BLOCK_N)
        row, grad = read_part(x, dy, weights, PARTS - 1, offset)
        if LAYER:
            row -= mean
            grad -= grad_mean
        xhat = row * rstd
        grad = (grad - xhat * share) * rstd
        dout = as_loaded(dy, True).to(tl.float32)
        if t.dw is not None:
            dw_sum += dout * (round_xhat(xhat, t.x, None) if ROUND else xhat)
        if t.db is not None:
            db_sum += dout
        if t.dx is not None:
            if t.dtotal is not None:
                grad += load(t.dtotal + rm * t.stride_tm + rn, rn < n)
            store(t.dx + rm * n + rn, grad, rn < n)
    if t.dw is not None:
        tl.store(t.dw + tl.program_id(0) * n + rn, dw_sum, mask=rn < n)
    if t.db is not None:
        tl.store(t.db + tl.program_id(0) * n + rn, db_sum, mask=rn < n)


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
