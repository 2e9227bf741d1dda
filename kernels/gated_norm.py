"""RMSNorm with a gate, norm(x) * act(gate) or norm(x * act(gate)), and its gradients.

Rows are normalized in groups of columns. A program has the rows of one group in registers, and in
backward its sums of dw beside them. Groups of more than MAX_GROUP columns, or half that in backward
in float32, are read twice, in chunks: for their sums, then for the results. Nothing but x and gate
is needed for the gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .activations import ACTIVATIONS
from .norm import (
    BESIDE_TILES,
    bytes_per_column,
    check_operands,
    num_multiprocessors,
    programs_for,
    shared_per_multiprocessor,
)
from .norm_kernels import as_loaded, inverse_std, round_xhat, row_sums, sums_over
from .partials import sum_partials
from .runtime import (
    arch,
    cdiv,
    is_exact,
    jit_kernel,
    load,
    next_power_of_2,
    row_blocks,
    store,
    tl,
    triton,
)

# columns of a group with rows that stay in registers
MAX_GROUP = 8192
# elements of a tile; backward takes more, so that few rows of sums are written
TILE = 2048
GRAD_TILE = 4096
# warps of a kernel that reads chunks
NUM_WARPS = 8
# warps that a multiprocessor runs at a time, with 128 registers a thread
WARPS = 16


class GatedNormRule(NamedTuple):
    """The formula of a norm with a gate."""

    # added to the mean square
    eps: float
    # of the gate, a name in ACTIVATIONS
    activation: str = "silu"
    # the groups of columns that are normalized apart
    groups: int = 1
    # whether norm(x * act(gate)) is computed, not norm(x) * act(gate)
    gates_first: bool = False
    # added to the weight
    offset: float = 0.0
    # "llama" rounds the normalized rows to x's dtype before the weight
    cast: str = "torch"

    @property
    def constexprs(self) -> dict[str, Any]:
        """The rule's compile-time half, as the kernels name it."""
        activation = ACTIVATIONS[self.activation].value_and_grad
        rounds = self.cast == "llama"
        return {"ACTIVATION": activation, "GATES_FIRST": self.gates_first, "ROUND": rounds}


class GatedNormOperands(NamedTuple):
    """Operands of a norm with a gate: matrices [M, N], the weight [N] or None."""

    # the input
    x: Tensor
    # the gate, before its activation
    gate: Tensor
    # multiplies the normalized rows, after the offset is added to it
    weight: Tensor | None
    # the result, contiguous
    y: Tensor
    # elements between the rows of x
    stride_xm: int
    # elements between the rows of the gate
    stride_gm: int
    # elements between the rows of the result
    stride_ym: int


class GatedNormGrad(NamedTuple):
    """Operands of the gradient of a norm with a gate: matrices [M, N], the weight [N] or None.

    The gradients that it writes are contiguous; one that is not wanted is None.
    """

    # the gradient of the result
    dy: Tensor
    # the input
    x: Tensor
    # the gate, before its activation
    gate: Tensor
    # multiplies the normalized rows, after the offset is added to it
    weight: Tensor | None
    # the gradient of x
    dx: Tensor | None
    # the gradient of the gate
    dgate: Tensor | None
    # sums of the weight's gradient over each program's rows [programs, N], float32
    dw: Tensor | None
    # elements between the rows of dy
    stride_dym: int
    # elements between the rows of x
    stride_xm: int
    # elements between the rows of the gate
    stride_gm: int
    # elements between the rows of each gradient: N
    width: int


@jit_kernel
def gated_norm_kernel(
    t,
    m,
    n,
    eps,
    offset,
    ACTIVATION: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute some rows of one group of `t`, GatedNormOperands; n: the columns of a group.

    Every load is issued before the reduction waits.
    """
    rm = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    first = tl.program_id(1) * n
    rn = tl.arange(0, BLOCK_N)[None, :]
    mask = (rm < m) & (rn < n)
    row = load(t.x + rm * t.stride_xm + first + rn, mask)
    gate = load(t.gate + rm * t.stride_gm + first + rn, mask)
    if t.weight is not None:
        scale = load(t.weight + first + rn, rn < n) + offset
    value = ACTIVATION(gate, gate, is_exact(t.y))[0]
    if GATES_FIRST:
        row *= value
    xhat = row * inverse_std(tl.sum(row * row, axis=1)[:, None] / n, eps, rm < m)
    if ROUND:
        xhat = round_xhat(xhat, t.x, None)
    if t.weight is not None:
        xhat *= scale
    store(t.y + rm * t.stride_ym + first + rn, xhat if GATES_FIRST else xhat * value, mask)


@jit_kernel
def wide_gated_norm_kernel(
    t,
    m,
    n,
    eps,
    offset,
    ACTIVATION: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute what gated_norm_kernel does, in chunks of columns."""
    rm = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    inside = rm < m
    first = tl.program_id(1) * n
    squares = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, n, BLOCK_N):
        rn = start + tl.arange(0, BLOCK_N)[None, :]
        mask = inside & (rn < n)
        row = load(t.x + rm * t.stride_xm + first + rn, mask)
        if GATES_FIRST:
            gate = load(t.gate + rm * t.stride_gm + first + rn, mask)
            row *= ACTIVATION(gate, gate, is_exact(t.y))[0]
        squares += row * row
    rstd = inverse_std(tl.sum(squares, axis=1)[:, None] / n, eps, inside)
    for start in range(0, n, BLOCK_N):
        rn = start + tl.arange(0, BLOCK_N)[None, :]
        mask = inside & (rn < n)
        row = load(t.x + rm * t.stride_xm + first + rn, mask)
        gate = load(t.gate + rm * t.stride_gm + first + rn, mask)
        value = ACTIVATION(gate, gate, is_exact(t.y))[0]
        xhat = (row * value if GATES_FIRST else row) * rstd
        if ROUND:
            xhat = round_xhat(xhat, t.x, None)
        if t.weight is not None:
            xhat *= load(t.weight + first + rn, rn < n) + offset
        store(t.y + rm * t.stride_ym + first + rn, xhat if GATES_FIRST else xhat * value, mask)


@triton.jit
def read_tiles(t, rm, at, mask, CACHE: tl.constexpr):
    """Return tiles of x, the gate and dy in float32."""
    x = tl.load(t.x + rm * t.stride_xm + at, mask, 0.0, cache_modifier=CACHE)
    gate = tl.load(t.gate + rm * t.stride_gm + at, mask, 0.0, cache_modifier=CACHE)
    dy = tl.load(t.dy + rm * t.stride_dym + at, mask, 0.0, cache_modifier=CACHE)
    return x.to(tl.float32), gate.to(tl.float32), dy.to(tl.float32)


@triton.jit
def gated_rows(t, x, gate, dy, weight, offset, ACTIVATION: tl.constexpr, GATES_FIRST: tl.constexpr):
    """Return the activation of a tile of the gate, and the rows that are normalized.

    Then two gradients: of the scaled rows, before a later gate, and of the normalized rows.
    """
    value = ACTIVATION(gate, gate, is_exact(t.dy))[0]
    if GATES_FIRST:
        row = x * value
        grad = dy
    else:
        row = x
        grad = dy * value
    dxhat = grad
    if weight is not None:
        dxhat *= weight.to(tl.float32) + offset
    return value, row, grad, dxhat


@triton.jit
def store_gated_grads(
    t,
    x,
    gate,
    dy,
    weight,
    offset,
    rstd,
    share,
    at,
    mask,
    ACTIVATION: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Store dx and dgate of a tile at `at`, where wanted; return the terms of dw."""
    value, row, grad, dxhat = gated_rows(t, x, gate, dy, weight, offset, ACTIVATION, GATES_FIRST)
    xhat = row * rstd
    drow = (dxhat - xhat * share) * rstd
    if ROUND:
        xhat = round_xhat(xhat, t.x, None)
    if t.dx is not None:
        store(t.dx + at, drow * value if GATES_FIRST else drow, mask)
    if t.dgate is not None:
        if GATES_FIRST:
            dvalue = drow * x
        else:
            dvalue = dy * xhat
            if weight is not None:
                dvalue *= weight.to(tl.float32) + offset
        store(t.dgate + at, ACTIVATION(gate, dvalue, is_exact(t.dy))[1], mask)
    return grad * xhat


@triton.jit
def places_of(rm, rn, first, m, n):
    """Return the columns of a tile of a group that begins at `first`, and which values it has."""
    return first + rn, (rm < m) & (rn < n)


@triton.jit
def blocks_of(WIDTH: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the columns of a row's blocks: of BLOCK_N, then of an eighth of that or more.

    Each has a power of two: 5120 have 4096 and 1024, of which no thread computes in vain.
    """
    blocks = ()
    for index in tl.static_range(WIDTH // BLOCK_N):
        blocks = blocks + (index * BLOCK_N + tl.arange(0, BLOCK_N)[None, :],)
    for index in tl.static_range(1, 4):
        if WIDTH & (BLOCK_N >> index):
            larger = BLOCK_N >> index - 1
            rn = WIDTH // larger * larger + tl.arange(0, BLOCK_N >> index)[None, :]
            blocks = blocks + (rn,)
    return blocks


@triton.jit
def thread_sums(tile, LANES: tl.constexpr):
    """Return LANES sums of adjacent elements of a row, as many for blocks of any size."""
    return tl.sum(tl.reshape(tile, (LANES, tile.shape[1] // LANES)), 1)


@triton.jit
def gated_totals(
    t,
    rm,
    first,
    m,
    n,
    blocks,
    weights,
    offset,
    ACTIVATION: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    HOLDS: tl.constexpr,
):
    """Return the sums over rows of their squares, and of their products with dxhat."""
    if LANES:
        squares = tl.zeros((LANES,), tl.float32)
    else:
        squares = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    products = squares
    for index in tl.static_range(len(blocks)):
        at, mask = places_of(rm, blocks[index], first, m, n)
        x, gate, dy = read_tiles(t, rm, at, mask, "")
        weight = None if t.weight is None else as_loaded(weights[index], HOLDS)
        _, row, _, dxhat = gated_rows(t, x, gate, dy, weight, offset, ACTIVATION, GATES_FIRST)
        if LANES:
            squares += thread_sums(row * row, LANES)
            products += thread_sums(row * dxhat, LANES)
        else:
            squares += row * row
            products += row * dxhat
    if LANES:
        # numbers, as a tile would have another layout than those of rows
        square, product, _ = sums_over(squares, products, None, 0)
    else:
        square, product, _ = row_sums(squares, products, None)
    return square, product


@jit_kernel
def gated_norm_grad_kernel(
    t,
    m,
    n,
    eps,
    offset,
    ACTIVATION: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    HOLDS: tl.constexpr,
):
    """Compute the gradients of some tiles of rows of one group, and their sums of dw in registers.

    `t` is a GatedNormGrad. A tile's loads are under way while the tile before it is worked on. A
    tile has blocks of columns, see `blocks_of`: values that only one block needs reuse the
    registers. LANES: see `thread_sums`, 0 if all blocks have one size.
    """
    first = tl.program_id(1) * n
    per_row = 1.0 / n
    blocks = blocks_of(WIDTH, BLOCK_N)
    weights = ()
    sums = ()
    for index in tl.static_range(len(blocks)):
        rn = blocks[index]
        if t.weight is not None:
            weights = weights + (tl.load(t.weight + first + rn, rn < n, 0.0),)
        sums = sums + (tl.zeros((BLOCK_M, rn.shape[1]), tl.float32),)
    tiles = tl.cdiv(m, BLOCK_M)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        rm = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
        square, product = gated_totals(
            *(t, rm, first, m, n, blocks, weights, offset),
            *(ACTIVATION, GATES_FIRST, BLOCK_M, BLOCK_N, LANES, HOLDS),
        )
        rstd = inverse_std(square * per_row, eps, rm < m)
        share = product * per_row * rstd
        added = ()
        for index in tl.static_range(len(blocks)):
            at, mask = places_of(rm, blocks[index], first, m, n)
            # once more, out of the cache: held meanwhile they would take too many registers
            x, gate, dy = read_tiles(t, rm, at, mask, ".cg")
            weight = None if t.weight is None else as_loaded(weights[index], HOLDS)
            # a tuple of arguments may not hold None
            terms = store_gated_grads(
                *(t, x, gate, dy),
                weight,
                *(offset, rstd, share, rm * t.width + at, mask, ACTIVATION, GATES_FIRST, ROUND),
            )
            added = added + (sums[index] + terms if t.dw is not None else sums[index],)
        sums = added
    if t.dw is not None:
        for index in tl.static_range(len(blocks)):
            place = t.dw + tl.program_id(0) * t.width + first + blocks[index]
            tl.store(place, tl.sum(sums[index], axis=0)[None, :], mask=blocks[index] < n)


@jit_kernel
def wide_gated_norm_grad_kernel(
    t,
    m,
    n,
    eps,
    offset,
    ACTIVATION: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute what gated_norm_grad_kernel does, in chunks of columns, dw in memory."""
    first = tl.program_id(1) * n
    for tile in range(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.num_programs(0)):
        rm = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
        squares = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        products = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, n, BLOCK_N):
            rn = start + tl.arange(0, BLOCK_N)[None, :]
            mask = (rm < m) & (rn < n)
            x, gate, dy = read_tiles(t, rm, first + rn, mask, "")
            weight = None if t.weight is None else load(t.weight + first + rn, rn < n)
            _, row, _, dxhat = gated_rows(t, x, gate, dy, weight, offset, ACTIVATION, GATES_FIRST)
            squares += row * row
            products += row * dxhat
        square, product, _ = row_sums(squares, products, None)
        rstd = inverse_std(square / n, eps, rm < m)
        share = product / n * rstd
        for start in range(0, n, BLOCK_N):
            rn = start + tl.arange(0, BLOCK_N)[None, :]
            mask = (rm < m) & (rn < n)
            x, gate, dy = read_tiles(t, rm, first + rn, mask, "")
            weight = None if t.weight is None else load(t.weight + first + rn, rn < n)
            terms = store_gated_grads(
                *(t, x, gate, dy),
                weight,
                *(
                    offset,
                    rstd,
                    share,
                    rm * t.width + first + rn,
                    mask,
                    ACTIVATION,
                    GATES_FIRST,
                    ROUND,
                ),
            )
            if t.dw is not None:
                place = t.dw + tl.program_id(0) * t.width + first + rn
                # nothing was written there before the first tile
                seen = (rn < n) & (tile > tl.program_id(0))
                total = tl.load(place, mask=seen, other=0.0) + tl.sum(terms, axis=0)[None, :]
                tl.store(place, total, mask=rn < n)
        # another thread may read the sums
        tl.debug_barrier()


def tile_of(n: int, size: int) -> dict[str, int]:
    """Return a tile of `size` elements, or of one row, for groups of n columns."""
    block_n = next_power_of_2(n)
    return {"BLOCK_M": max(1, min(64, size // block_n)), "BLOCK_N": block_n}


def warps_of(tile: dict[str, int], share: int) -> int:
    """Return the warps of a tile with `share` elements for each thread, 4 to 16."""
    return max(4, min(WARPS, tile["BLOCK_M"] * tile["BLOCK_N"] // (32 * share)))


def chunk_of(n: int) -> dict[str, int]:
    """Return the tile of a kernel that reads rows of n columns in chunks."""
    return tile_of(min(n, TILE), TILE) | {"num_warps": NUM_WARPS}


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, rule: GatedNormRule, out_dtype: torch.dtype
) -> Tensor:
    """Normalize x [M, N], gated by `gate` [M, N]; matrices have adjacent columns."""
    check_operands((x, gate), (weight,))
    m, width = x.shape
    n = width // rule.groups
    y = x.new_empty(m, width, dtype=out_dtype)
    strides = x.stride(0), gate.stride(0), width
    t = GatedNormOperands(x, gate, weight, y, *strides)
    kernel = gated_norm_kernel
    tile = tile_of(n, TILE)
    tile["num_warps"] = warps_of(tile, 16)
    if n > MAX_GROUP:
        kernel = wide_gated_norm_kernel
        tile = chunk_of(n)
    grid = cdiv(m, tile["BLOCK_M"]), rule.groups
    kernel[grid](t, m, n, rule.eps, rule.offset, **rule.constexprs, **tile)
    return y


def gated_norm_grad(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    rule: GatedNormRule,
    needs: tuple[bool, bool, bool],
    sums_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dx, dgate [M, N] and dw [N], each where needed; dw in `sums_dtype`, else float32."""
    check_operands((dy, x, gate), (weight,))
    m, width = x.shape
    n = width // rule.groups
    # elements of each thread: float32 is not packed by two
    share = 8 if max(t.element_size() for t in (dy, x, gate)) > 2 else 16
    kernel = wide_gated_norm_grad_kernel
    tile = chunk_of(n)
    columns = next_power_of_2(n)
    how: dict[str, Any] = {}
    if n * 16 <= MAX_GROUP * share:
        kernel = gated_norm_grad_kernel
        tile = tile_of(n, GRAD_TILE)
        # of several rows sixteen elements of a thread spill 4 bytes on sm_100, 20 on sm_120
        is_one = tile["BLOCK_M"] == 1
        tile["num_warps"] = warps_of(tile, share if is_one else 8)
        is_nvidia = arch().startswith("sm_")
        columns = tile["BLOCK_N"]
        if is_one:
            part = columns // 8
            columns = cdiv(n, part) * part
            # two of a half spill on sm_100 where the gate comes last; rows of other widths take
            # loads of two bytes, whose addresses fill the registers
            eighths = (2 if arch() == "sm_100" else 4) if n % 16 == 0 else 1
            tile["BLOCK_N"] = part * eighths
        lanes = 32 * tile["num_warps"] if columns % tile["BLOCK_N"] else 0
        how = {"WIDTH": columns, "LANES": lanes}
        how |= {"STAGES": 2 if is_nvidia else 1, "HOLDS": is_nvidia}
    if arch().startswith("sm_"):
        # left to itself sm_100 takes fewer for groups of 128 columns, and spills eight bytes
        how["maxnreg"] = 128
    # two tiles of each are on their way, one to be read again
    loading = 2 * bytes_per_column(dy, x, gate) * tile["BLOCK_M"] * columns
    fitting = shared_per_multiprocessor(x.device) // (loading + BESIDE_TILES)
    resident = max(1, min(WARPS // tile["num_warps"], fitting))
    units = num_multiprocessors(x.device)
    programs = programs_for(m, tile["BLOCK_M"], resident, units, rule.groups)
    contiguous = torch.contiguous_format
    dx, dgate = (
        torch.empty_like(like, memory_format=contiguous) if need else None
        for like, need in zip((x, gate), needs, strict=False)
    )
    dw = x.new_empty(programs, width, dtype=torch.float32) if needs[2] else None
    strides = dy.stride(0), x.stride(0), gate.stride(0), width
    t = GatedNormGrad(dy, x, gate, weight, dx, dgate, dw, *strides)
    kernel[programs, rule.groups](t, m, n, rule.eps, rule.offset, **rule.constexprs, **tile, **how)
    dw, _ = sum_partials(dw, None, sums_dtype or torch.float32)
    return dx, dgate, dw


def gated_norm_aten(
    x: Tensor, gate: Tensor, weight: Tensor | None, rule: GatedNormRule, out_dtype: torch.dtype
) -> Tensor:
    """Compute `gated_norm` on ATen: CPU tensors, float64, and platforms without Triton."""
    y = x.new_empty(x.shape, dtype=out_dtype)
    scale = _scale(weight, rule, _wide(x, gate))
    for block in row_blocks(x):
        _, _, value, row, rstd = _rows(x[block], gate[block], rule)
        xhat = row.mul_(rstd) if rule.gates_first else row * rstd
        xhat = _rounded(xhat, x, rule).flatten(1)
        xhat = xhat if scale is None else xhat.mul_(scale)
        y[block] = xhat if rule.gates_first else xhat.mul_(value)
    return y


def gated_norm_grad_aten(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    rule: GatedNormRule,
    needs: tuple[bool, bool, bool],
    sums_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute `gated_norm_grad` on ATen; without `sums_dtype` dw is at least float32."""
    wide = _wide(x, gate)
    groups = rule.groups
    scale = _scale(weight, rule, wide)
    act = ACTIVATIONS[rule.activation]
    dx, dgate = (
        like.new_empty(like.shape) if need else None
        for like, need in zip((x, gate), needs, strict=False)
    )
    dw = x.new_zeros(x.shape[1], dtype=wide) if needs[2] else None
    for block in row_blocks(x):
        rows, gates, value, row, rstd = _rows(x[block], gate[block], rule)
        dout = dy[block].to(wide)
        xhat = row * rstd
        grad = dout if rule.gates_first else dout * value
        dxhat = (grad if scale is None else grad * scale).unflatten(1, (groups, -1))
        drow = (dxhat - xhat * (xhat * dxhat).mean(2, keepdim=True)).mul_(rstd).flatten(1)
        xhat = _rounded(xhat, x, rule).flatten(1)
        if dx is not None:
            dx[block] = drow * value if rule.gates_first else drow
        if dw is not None:
            dw += (grad * xhat).sum(0)
        if dgate is not None:
            dvalue = drow * rows if rule.gates_first else dout * xhat
            if scale is not None and not rule.gates_first:
                dvalue *= scale
            dgate[block] = act.write_grad(dvalue, gates, grad_input=dvalue)
    return dx, dgate, None if dw is None else dw.to(sums_dtype or wide)


def _rows(x: Tensor, gate: Tensor, rule: GatedNormRule) -> tuple[Tensor, ...]:
    """Return x, the gate and its activation, the rows that are normalized by group, and rstd."""
    wide = _wide(x, gate)
    rows = x.to(wide)
    gates = gate.to(wide)
    value = ACTIVATIONS[rule.activation].write(gates, out=torch.empty_like(gates))
    row = (rows * value if rule.gates_first else rows).unflatten(1, (rule.groups, -1))
    return rows, gates, value, row, row.square().mean(2, keepdim=True).add_(rule.eps).rsqrt_()


def _rounded(xhat: Tensor, x: Tensor, rule: GatedNormRule) -> Tensor:
    """Round the normalized rows where the rule says so."""
    return xhat.to(x.dtype).to(xhat.dtype) if rule.cast == "llama" else xhat


def _scale(weight: Tensor | None, rule: GatedNormRule, dtype: torch.dtype) -> Tensor | None:
    return None if weight is None else weight.to(dtype) + rule.offset


def _wide(x: Tensor, gate: Tensor) -> torch.dtype:
    """Return the dtype that all is computed in: float64 for float64, float32 otherwise."""
    return torch.promote_types(torch.promote_types(x.dtype, gate.dtype), torch.float32)
