"""The gradient of norms over rows of 768 columns in half precision: a warp has a whole row.

A row is three blocks of 256 columns. In one block of 1024 a quarter of all threads would compute
nothing, and four warps would wait for one another at each reduction. x, dy and the weight stay in
registers in 16 bits, as sums of dw and db fill the others.
"""

from __future__ import annotations

from .int8 import IN_GROUP, load_rows
from .long_norm_kernels import read_part
from .norm_kernels import inverse_std, round_xhat, row_sums
from .runtime import jit_kernel, load, store, tl, triton


@triton.jit
def columns_of(index: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the columns of a block of rows."""
    return index * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]


@triton.jit
def weights_of(weight, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load the weight for each row, as a thread would get other columns of a single one."""
    weights = ()
    if weight is not None:
        rows = tl.zeros((BLOCK_M, 1), tl.int32)
        for index in tl.static_range(PARTS):
            weights = weights + (tl.load(weight + rows + columns_of(index, BLOCK_N)),)
    return weights


@triton.jit
def zero_blocks(PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return zeros of all blocks."""
    blocks = ()
    for _ in tl.static_range(PARTS):
        blocks = blocks + (tl.zeros((BLOCK_M, BLOCK_N), tl.float32),)
    return blocks


@triton.jit
def load_bits(
    x,
    tile,
    m,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Load the scales of a tile's blocks, where `load_rows` reads nine bits."""
    bits = ()
    if PACKED is not None:
        rm = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
        for index in tl.static_range(PARTS):
            groups = columns_of(index, BLOCK_N // IN_GROUP)
            bits = bits + (tl.load(x.scales + rm * x.stride_sm + groups, rm < m, 0),)
    return bits


@triton.jit
def load_block(t, rm, m, bits, index: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr):
    """Return a block of x and of dy, in 16 bits; PACKED: see `load_rows`."""
    rn = columns_of(index, BLOCK_N)
    mask = (rm < m) & (rn >= 0)
    if PACKED is None:
        x = tl.load(t.x + rm * t.stride_xm + rn, mask, 0.0)
    else:
        x = load_rows(t.x, rm * t.stride_xm, rn, bits[index], mask, PACKED).to(PACKED)
    return x, tl.load(t.dy + rm * t.stride_dym + rn, mask, 0.0)


@triton.jit
def centred(xs, dys, weights, index: tl.constexpr, offset, mean, grad_mean):
    """Return a block of rows and of their gradients, less their means."""
    row, grad = read_part(xs[index], dys[index], weights, index, offset)
    return row - mean, grad - grad_mean


@triton.jit
def row_numbers(xs, dys, weights, inside, n, eps, offset, LAYER: tl.constexpr):
    """Return mean and rstd of rows, and the means of the gradient of xhat and of both's product.

    Sums of a block at a time take fewer registers than a block of sums.
    """
    mean = 0.0
    grad_mean = 0.0
    rest = 0.0
    square = 0.0
    product = 0.0
    if LAYER:
        for index in tl.static_range(len(xs)):
            row, grad = read_part(xs[index], dys[index], weights, index, offset)
            sums = row_sums(row, grad, None)
            mean += sums[0]
            grad_mean += sums[1]
        mean /= n
        grad_mean /= n
    for index in tl.static_range(len(xs)):
        row, grad = centred(xs, dys, weights, index, offset, mean, grad_mean)
        if LAYER:
            sums = row_sums(row, row * row, row * grad)
            rest += sums[0]
            square += sums[1]
            product += sums[2]
        else:
            sums = row_sums(row * row, row * grad, None)
            square += sums[0]
            product += sums[1]
    variance = square / n
    if LAYER:
        # the mean was rounded: of equal numbers its error would be left, times 1 / sqrt(eps)
        rest /= n
        mean += rest
        variance -= rest * rest
    rstd = inverse_std(variance, eps, inside)
    return mean, grad_mean, rstd, product / n * rstd


@jit_kernel
def warp_norm_grad_kernel(
    t,
    m,
    n,
    eps,
    offset,
    LAYER: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr = None,
):
    """Compute what norm_grad_kernel does, of rows of n = PARTS * BLOCK_N columns."""
    weights = weights_of(t.weight, PARTS, BLOCK_M, BLOCK_N)
    dw_sums = zero_blocks(PARTS, BLOCK_M, BLOCK_N)
    db_sums = dw_sums
    tiles = tl.cdiv(m, BLOCK_M)
    bits = load_bits(t.x, tl.program_id(0), m, PARTS, BLOCK_M, BLOCK_N, PACKED)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        rm = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
        # too few for a copy that is under way for tiles: those of the next tile
        others = load_bits(t.x, tile + tl.num_programs(0), m, PARTS, BLOCK_M, BLOCK_N, PACKED)
        xs = ()
        dys = ()
        for index in tl.static_range(PARTS):
            x, dy = load_block(t, rm, m, bits, index, BLOCK_N, PACKED)
            xs = xs + (x,)
            dys = dys + (dy,)
        bits = others
        numbers = row_numbers(xs, dys, weights, rm < m, n, eps, offset, LAYER)
        mean, grad_mean, rstd, share = numbers
        dws = ()
        dbs = ()
        for index in tl.static_range(PARTS):
            rn = columns_of(index, BLOCK_N)
            row, grad = centred(xs, dys, weights, index, offset, mean, grad_mean)
            xhat = row * rstd
            if t.dx is not None:
                dx = (grad - xhat * share) * rstd
                if t.dtotal is not None:
                    dx += load(t.dtotal + rm * t.stride_tm + rn, rm < m)
                store(t.dx + rm * n + rn, dx, rm < m)
            dout = dys[index].to(tl.float32)
            dw = dout * (round_xhat(xhat, t.x, None, PACKED) if ROUND else xhat)
            dws = dws + (dw_sums[index] + dw if t.dw is not None else dw_sums[index],)
            dbs = dbs + (db_sums[index] + dout if t.db is not None else db_sums[index],)
        dw_sums = dws
        db_sums = dbs
    for index in tl.static_range(PARTS):
        place = tl.program_id(0) * n + columns_of(index, BLOCK_N)
        if t.dw is not None:
            tl.store(t.dw + place, tl.sum(dw_sums[index], axis=0)[None, :])
        if t.db is not None:
            tl.store(t.db + place, tl.sum(db_sums[index], axis=0)[None, :])
