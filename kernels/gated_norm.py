"""RMSNorm with a gate, norm(x) * act(gate) or norm(x * act(gate)), and its gradients.

Rows are normalised in groups of columns. A program reads the rows of one group twice, in chunks:
for their sums, then for the results. The second time they come out of the cache, so that a row may
have any width. Nothing but x and gate is needed for the gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .activations import ACTIVATIONS
from .norm import check_operands, num_multiprocessors
from .norm_kernels import inverse_std, round_xhat, row_sums
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

# elements of a tile: 8 for each thread of 8 warps
TILE = 2048
NUM_WARPS = 8
# programs of the gradient that a multiprocessor runs at a time, with 128 registers a thread
RESIDENT = 2


class GatedNormRule(NamedTuple):
    """The formula of a norm with a gate."""

    # added to the mean square
    eps: float
    # of the gate, a name in ACTIVATIONS
    activation: str = "silu"
    # the groups of columns that are normalised apart
    groups: int = 1
    # whether norm(x * act(gate)) is computed, not norm(x) * act(gate)
    gates_first: bool = False
    # added to the weight
    offset: float = 0.0
    # "llama" rounds the normalised rows to x's dtype before the weight
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
    # multiplies the normalised rows, after the offset is added to it
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
    # multiplies the normalised rows, after the offset is added to it
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
    """Compute some rows of one group of `t`, GatedNormOperands; n: the columns of a group."""
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
def read_grad(
    t, rm, first, rn, mask, n, offset, ACTIVATION: tl.constexpr, GATES_FIRST: tl.constexpr
):
    """Return a tile of x, the gate, its activation, and of the rows that are normalised.

    Then two gradients: of the scaled rows, before a later gate, and of the normalised rows.
    """
    x = load(t.x + rm * t.stride_xm + first + rn, mask)
    gate = load(t.gate + rm * t.stride_gm + first + rn, mask)
    grad = load(t.dy + rm * t.stride_dym + first + rn, mask)
    value = ACTIVATION(gate, gate, is_exact(t.dy))[0]
    if GATES_FIRST:
        row = x * value
    else:
        row = x
        grad *= value
    dxhat = grad
    if t.weight is not None:
        dxhat *= load(t.weight + first + rn, rn < n) + offset
    return x, gate, value, row, grad, dxhat


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
):
    """Compute the gradients of some tiles of rows of one group, and their sums in a row of dw."""
    first = tl.program_id(1) * n
    for tile in range(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.num_programs(0)):
        rm = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
        squares = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        products = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, n, BLOCK_N):
            rn = start + tl.arange(0, BLOCK_N)[None, :]
            mask = (rm < m) & (rn < n)
            _, _, _, row, _, dxhat = read_grad(
                t, rm, first, rn, mask, n, offset, ACTIVATION, GATES_FIRST
            )
            squares += row * row
            products += row * dxhat
        square, product, _ = row_sums(squares, products, None)
        rstd = inverse_std(square / n, eps, rm < m)
        share = product / n * rstd
        for start in range(0, n, BLOCK_N):
            rn = start + tl.arange(0, BLOCK_N)[None, :]
            mask = (rm < m) & (rn < n)
            x, gate, value, row, grad, dxhat = read_grad(
                t, rm, first, rn, mask, n, offset, ACTIVATION, GATES_FIRST
            )
            xhat = row * rstd
            drow = (dxhat - xhat * share) * rstd
            if ROUND:
                xhat = round_xhat(xhat, t.x, None)
            if t.dx is not None:
                store(t.dx + rm * t.width + first + rn, drow * value if GATES_FIRST else drow, mask)
            if t.dgate is not None:
                if GATES_FIRST:
                    dvalue = drow * x
                else:
                    dvalue = load(t.dy + rm * t.stride_dym + first + rn, mask) * xhat
                    if t.weight is not None:
                        dvalue *= load(t.weight + first + rn, rn < n) + offset
                dgate = ACTIVATION(gate, dvalue, is_exact(t.dy))[1]
                store(t.dgate + rm * t.width + first + rn, dgate, mask)
            if t.dw is not None:
                place = t.dw + tl.program_id(0) * t.width + first + rn
                # nothing was written there before the first tile
                seen = (rn < n) & (tile > tl.program_id(0))
                total = tl.load(place, mask=seen, other=0.0) + tl.sum(grad * xhat, axis=0)[None, :]
                tl.store(place, total, mask=rn < n)
        # another thread may read the sums
        tl.debug_barrier()


def tile_of(n: int) -> dict[str, int]:
    """Return the tile for groups of n columns."""
    block_n = min(TILE, next_power_of_2(n))
    return {"BLOCK_M": min(64, TILE // block_n), "BLOCK_N": block_n, "num_warps": NUM_WARPS}


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, rule: GatedNormRule, out_dtype: torch.dtype
) -> Tensor:
    """Normalise x [M, N], gated by `gate` [M, N]; matrices have adjacent columns."""
    check_operands((x, gate), (weight,))
    m, width = x.shape
    y = x.new_empty(m, width, dtype=out_dtype)
    strides = x.stride(0), gate.stride(0), width
    t = GatedNormOperands(x, gate, weight, y, *strides)
    tile = tile_of(width // rule.groups)
    grid = cdiv(m, tile["BLOCK_M"]), rule.groups
    gated_norm_kernel[grid](
        t, m, width // rule.groups, rule.eps, rule.offset, **rule.constexprs, **tile
    )
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
    tile = tile_of(width // rule.groups)
    fitting = max(1, RESIDENT * num_multiprocessors(x.device) // rule.groups)
    programs = max(1, min(cdiv(m, tile["BLOCK_M"]), fitting))
    contiguous = torch.contiguous_format
    dx, dgate = (
        torch.empty_like(like, memory_format=contiguous) if need else None
        for like, need in zip((x, gate), needs, strict=False)
    )
    dw = x.new_empty(programs, width, dtype=torch.float32) if needs[2] else None
    strides = dy.stride(0), x.stride(0), gate.stride(0), width
    t = GatedNormGrad(dy, x, gate, weight, dx, dgate, dw, *strides)
    # left to itself sm_100 takes fewer for groups of 128 columns, and spills eight bytes
    how = tile | ({"maxnreg": 128} if arch().startswith("sm_") else {})
    gated_norm_grad_kernel[programs, rule.groups](
        t, m, width // rule.groups, rule.eps, rule.offset, **rule.constexprs, **how
    )
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
    """Return x, the gate and its activation, the rows that are normalised by group, and rstd."""
    wide = _wide(x, gate)
    rows = x.to(wide)
    gates = gate.to(wide)
    value = ACTIVATIONS[rule.activation].write(gates, out=torch.empty_like(gates))
    row = (rows * value if rule.gates_first else rows).unflatten(1, (rule.groups, -1))
    return rows, gates, value, row, row.square().mean(2, keepdim=True).add_(rule.eps).rsqrt_()


def _rounded(xhat: Tensor, x: Tensor, rule: GatedNormRule) -> Tensor:
    """Round the normalised rows where the rule says so."""
    return xhat.to(x.dtype).to(xhat.dtype) if rule.cast == "llama" else xhat


def _scale(weight: Tensor | None, rule: GatedNormRule, dtype: torch.dtype) -> Tensor | None:
    return None if weight is None else weight.to(dtype) + rule.offset


def _wide(x: Tensor, gate: Tensor) -> torch.dtype:
    """Return the dtype that all is computed in: float64 for float64, float32 otherwise."""
    return torch.promote_types(torch.promote_types(x.dtype, gate.dtype), torch.float32)
