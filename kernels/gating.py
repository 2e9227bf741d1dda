"""The hidden layer of experts: act(gate) * up times the score of each row, and its gradients.

In Triton one kernel each way, which reads and writes every element once; on ATen the same in blocks
of rows. Rows are sorted by expert, scores lie by slot: `order` names the slot of every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .activations import ACTIVATIONS, aten, sigmoids
from .routed import Route, as_rows, blocks_of_rows, per_token, scores_by_row, scores_by_slot
from .runtime import cdiv, is_exact, jit_kernel, load, store, tl, triton

# a warp covers a row of it, 8 elements a thread
GATE_TILE = {"BLOCK_M": 4, "BLOCK_N": 256, "num_warps": 4}
# the derivative of clamp at a limit itself: torch 2.14 changed it from 1 to 0
LIMIT_PASSES = torch.__version__ < (2, 14)
PASSES = tl.constexpr(LIMIT_PASSES)


class ClampedSwiGLU(NamedTuple):
    """h = (up + offset) * gate * sigmoid(alpha * gate), gate clamped to at most `limit`, and up to
    at most `limit` in magnitude, as GptOss's experts compute it.

    is_interleaved: whether gate and up are the even and odd columns, not the halves.
    """

    alpha: float = 1.702
    limit: float = 7.0
    offset: float = 1.0
    is_interleaved: bool = True


# the name of an activation, of gate times up, or a record
Gating = str | ClampedSwiGLU


class GateRule(NamedTuple):
    """A gating as kernels take it: an activation's function, or the numbers of a ClampedSwiGLU."""

    # a device function of ACTIVATIONS; None for a ClampedSwiGLU
    activation: Any
    alpha: float | None = None
    limit: float | None = None
    offset: float | None = None


def rule_of(gating: Gating) -> GateRule:
    """Return a gating as kernels take it."""
    if isinstance(gating, ClampedSwiGLU):
        return GateRule(None, *map(float, gating[:3]))
    return GateRule(ACTIVATIONS[gating].value_and_grad)


class GateGrad(NamedTuple):
    """Operands of the gradient of a gated layer, on rows."""

    # gate, or gate and up in turn where up is None
    z: Tensor
    # up, where it is a tensor of its own
    up: Tensor | None
    # h, written over dh perhaps; None where it is not wanted
    h: Tensor | None
    # the gradient of z, laid out as z, written over it perhaps
    dz: Tensor
    # the gradient of up, likewise
    dup: Tensor | None
    # of scores, by slot, float32; None where it is not wanted
    dscores: Tensor | None
    # where each expert's rows end [E]
    ends: Tensor
    # elements between the rows of z, up, dz and dup
    stride: int


@triton.jit
def gate_values(
    gate,
    up,
    dh,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Return h and the gradients of gate and up, those from dh."""
    if ACTIVATION is not None:
        value, dgate = ACTIVATION(gate, dh * up, EXACT)
        dup = dh * value
        h = value * up
    else:
        # a NaN passes both
        low = tl.where(gate > LIMIT, LIMIT, gate)
        factor = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + OFFSET
        s, rest = sigmoids(ALPHA * low, EXACT)
        value = low * s
        dgate = dh * factor * (s + ALPHA * value * rest)
        dgate = tl.where(gate <= LIMIT if PASSES else gate < LIMIT, dgate, 0.0)
        dup = tl.where(tl.abs(up) <= LIMIT if PASSES else tl.abs(up) < LIMIT, dh * value, 0.0)
        h = value * factor
    return h, dgate, dup


@triton.jit
def load_pair(z, up, rm, start, m, n, stride, WIDTH: tl.constexpr):
    """Return tiles of gate and up from column `start` on; without `up` z has both in turn."""
    inside = (rm < m)[:, None]
    if up is not None:
        rn = start + tl.arange(0, WIDTH)
        mask = inside & (rn < n)[None, :]
        offsets = rm[:, None] * stride + rn[None, :]
        gate = load(z + offsets, mask)
        factor = load(up + offsets, mask)
    else:
        rn = start * 2 + tl.arange(0, 2 * WIDTH)
        pairs = load(z + rm[:, None] * stride + rn[None, :], inside & (rn < 2 * n)[None, :])
        gate, factor = pairs.reshape(rm.shape[0], WIDTH, 2).split()
    return gate, factor


@triton.jit
def store_pair(dz, dup, gate, factor, rm, start, m, n, stride, WIDTH: tl.constexpr):
    """Store tiles of the gradients of gate and up where `load_pair` loads these."""
    inside = (rm < m)[:, None]
    if dup is not None:
        rn = start + tl.arange(0, WIDTH)
        mask = inside & (rn < n)[None, :]
        offsets = rm[:, None] * stride + rn[None, :]
        store(dz + offsets, gate, mask)
        store(dup + offsets, factor, mask)
    else:
        rn = start * 2 + tl.arange(0, 2 * WIDTH)
        pairs = tl.join(gate, factor).reshape(rm.shape[0], 2 * WIDTH)
        offsets = rm[:, None] * stride + rn[None, :]
        store(dz + offsets, pairs, inside & (rn < 2 * n)[None, :])


@jit_kernel
def gate_kernel(
    z,
    up,
    scores,
    order,
    h,
    m,
    n,
    stride,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute one tile of h."""
    tiles_n = tl.cdiv(n, BLOCK_N)
    rm = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    start = tl.program_id(0) % tiles_n * BLOCK_N
    rn = start + tl.arange(0, BLOCK_N)
    score = load(scores + tl.load(order + rm, rm < m, 0), rm < m)[:, None]
    gate, factor = load_pair(z, up, rm, start, m, n, stride, BLOCK_N)
    value, _, _ = gate_values(gate, factor, gate, ACTIVATION, ALPHA, LIMIT, OFFSET, is_exact(h))
    store(h + rm[:, None] * n + rn[None, :], value * score, (rm < m)[:, None] & (rn < n)[None, :])


@jit_kernel
def gate_grad_kernel(
    dh,
    scores,
    order,
    out,
    m,
    n,
    num_experts,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute whole rows; every load of a tile comes before its first store."""
    rm = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    slots = tl.load(order + rm, rm < m, 0)
    score = load(scores + slots, rm < m)[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, n, BLOCK_N):
        rn = start + tl.arange(0, BLOCK_N)
        mask = (rm < m)[:, None] & (rn < n)[None, :]
        offsets = rm[:, None] * n + rn[None, :]
        grad = load(dh + offsets, mask)
        gate, factor = load_pair(out.z, out.up, rm, start, m, n, out.stride, BLOCK_N)
        h, dz, dup = gate_values(
            gate, factor, grad * score, ACTIVATION, ALPHA, LIMIT, OFFSET, is_exact(out.dz)
        )
        acc += grad * h
        if out.h is not None:
            store(out.h + offsets, h * score, mask)
        store_pair(out.dz, out.dup, dz, dup, rm, start, m, n, out.stride, BLOCK_N)
    if out.dscores is not None:
        # numbers in the rows of no expert are arbitrary
        is_routed = rm < tl.load(out.ends + num_experts - 1)
        tl.store(out.dscores + slots, tl.where(is_routed, tl.sum(acc, 1), 0.0), rm < m)


def gate_and_up(z: Tensor, u: Tensor | None, gating: Gating) -> Sequence[Tensor]:
    """Return the rows of gate and up: z has both, unless u is up."""
    if u is not None:
        return z, u
    is_interleaved = isinstance(gating, ClampedSwiGLU) and gating.is_interleaved
    return (z[:, ::2], z[:, 1::2]) if is_interleaved else z.chunk(2, 1)


def gated(z: Tensor, u: Tensor | None, scores: Tensor, route: Route, gating: Gating) -> Tensor:
    """Return act(gate) * up times the score of each row; z has both, unless u is up."""
    z = as_rows(z, route)
    u = None if u is None else as_rows(u, route)
    gate, up = gate_and_up(z, u, gating)
    h = gate.new_empty(gate.shape)
    if route.runs_triton:
        _launch_gate(z, gate, up, scores, route, h, gating)
        return per_token(h, route)
    s = scores_by_row(scores, route)
    for rows in blocks_of_rows(gate):
        value, factor = _value(*_wide(gate[rows], up[rows]), gating)
        torch.mul(value.mul_(factor), s[rows], out=h[rows])
    return per_token(h, route)


def _launch_gate(
    z: Tensor,
    gate: Tensor,
    up: Tensor,
    scores: Tensor,
    route: Route,
    h: Tensor,
    gating: Gating,
) -> None:
    """Write h by one kernel."""
    m, n = h.shape
    grid = (cdiv(m, GATE_TILE["BLOCK_M"]) * cdiv(n, GATE_TILE["BLOCK_N"]),)
    operands = *_pair(z, gate, up), scores.contiguous(), route.order, h
    gate_kernel[grid](*operands, m, n, z.stride(0), *rule_of(gating), **GATE_TILE)


def _pair(z: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the kernels' operands of gate and up: only z where they are its columns in turn."""
    return (z, None) if gate.stride(1) == 2 else (gate, up)


def gated_grad(
    dh: Tensor,
    z: Tensor,
    u: Tensor | None,
    scores: Tensor,
    route: Route,
    gating: Gating,
    needs: tuple[bool, bool],
    h: Tensor | None = None,
    dz: Tensor | None = None,
    du: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Return h, dz, du and the gradient of scores; needs: whether the first and the last.

    dh is the gradient of h. h may be written over dh, dz over z, du over u.
    """
    dz = torch.empty_like(z) if dz is None else dz
    du = torch.empty_like(u) if du is None and u is not None else du
    h = torch.empty_like(dh) if h is None and needs[0] else h
    dhs, zs, dzs = (as_rows(t, route) for t in (dh, z, dz))
    us, dus, hs = (None if t is None else as_rows(t, route) for t in (u, du, h))
    pair = gate_and_up(zs, us, gating)
    grads = gate_and_up(dzs, dus, gating)
    wide = torch.promote_types(z.dtype, torch.float32)
    if route.runs_triton:
        dscores = scores.new_empty(scores.shape, dtype=wide) if needs[1] else None
        operands = *_pair(zs, *pair), hs, *_pair(dzs, *grads), dscores
        _launch_gate_grad(dhs, scores, GateGrad(*operands, route.ends, zs.stride(0)), route, gating)
        return h, dz, du, dscores
    s = scores_by_row(scores, route)
    ds = s.new_empty(s.shape, dtype=wide)
    for rows in blocks_of_rows(dhs):
        grad, gate, up = _wide(dhs[rows], *[t[rows] for t in pair])
        value, factor = _value(gate, up, gating)
        product = value * factor
        if needs[1]:
            torch.sum(grad * product, 1, True, out=ds[rows])
        # scores may be wider
        grad = (grad * s[rows]).to(grad.dtype)
        if hs is not None:
            torch.mul(product, s[rows], out=hs[rows])
        _write_grads(grad, value, factor, gate, up, gating, (grads[0][rows], grads[1][rows]))
    return h, dz, du, scores_by_slot(ds, route) if needs[1] else None


def _launch_gate_grad(
    dh: Tensor, scores: Tensor, out: GateGrad, route: Route, gating: Gating
) -> None:
    """Fill `out` by one kernel."""
    m, n = dh.shape
    sizes = m, n, len(route.ends)
    grid = (cdiv(m, GATE_TILE["BLOCK_M"]),)
    gate_grad_kernel[grid](
        dh, scores.contiguous(), route.order, out, *sizes, *rule_of(gating), **GATE_TILE
    )


def _wide(*tensors: Tensor) -> list[Tensor]:
    """Return a block's tensors in at least float32: values between them are not rounded."""
    return [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]


def _value(gate: Tensor, up: Tensor, gating: Gating) -> tuple[Tensor, Tensor]:
    """Return act(gate), in a buffer of its own, and the factor that multiplies it."""
    if isinstance(gating, str):
        return ACTIVATIONS[gating].write(gate, out=gate.new_empty(gate.shape)), up
    gate = gate.clamp(max=gating.limit)
    up = up.clamp(-gating.limit, gating.limit)
    return torch.sigmoid(gate * gating.alpha).mul_(gate), up + gating.offset


def _write_grads(
    dh: Tensor,
    value: Tensor,
    factor: Tensor,
    gate: Tensor,
    up: Tensor,
    gating: Gating,
    to: tuple[Tensor, Tensor],
) -> None:
    """Write the gradients of gate and up, each perhaps over itself."""
    dvalue = dh * factor
    dfactor = value.mul_(dh)
    if isinstance(gating, str):
        to[0].copy_(ACTIVATIONS[gating].write_grad(dvalue, gate, grad_input=dvalue))
        to[1].copy_(dfactor)
        return
    # gate sigmoid(alpha gate) is silu(alpha gate) / alpha
    dgate = aten.silu_backward(dvalue, gate.clamp(max=gating.limit) * gating.alpha)
    # of a NaN too the gradient is zero, as torch's clamp has it
    passes = torch.le if LIMIT_PASSES else torch.lt
    to[0].copy_(dgate.masked_fill_(passes(gate, gating.limit).logical_not_(), 0))
    to[1].copy_(dfactor.masked_fill_(passes(up.abs(), gating.limit).logical_not_(), 0))
