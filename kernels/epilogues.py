"""What a GEMM tile becomes: two jit functions and one record of operands each.

An epilogue's first function loads what it reads of rows `rm` (int64) and columns `rn`, the second
gets the float32 accumulator, what was loaded, and the row tile's number for what it reduces over
rows. Absent operands are None. The hybrid plan's epilogue, which turns a tile of dh into h and dz,
is elementwise.HIDDEN_GRAD.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .runtime import is_exact, load, store, tl, triton


class StoreAct(NamedTuple):
    """Operands of `store_act`: y [M, N], bias [N] or None, z [M, N] or None; rows contiguous."""

    y: Tensor
    bias: Tensor | None
    z: Tensor | None


@triton.jit
def load_bias(rm, rn, m, n, out):
    """Return the bias of a tile's columns, 0 for none."""
    bias = 0.0
    if out.bias is not None:
        bias = load(out.bias + rn, rn < n)[None, :]
    return bias


@triton.jit
def store_act(acc, bias, rm, rn, m, n, tile_m, out, ACTIVATION: tl.constexpr):
    """Y = act(acc + bias), and the pre-activation itself where z is wanted."""
    mask = (rm < m)[:, None] & (rn < n)[None, :]
    offsets = rm[:, None] * n + rn[None, :]
    acc += bias
    if out.z is not None:
        store(out.z + offsets, acc, mask)
    store(out.y + offsets, ACTIVATION(acc, is_exact(out.y)), mask)


ACT = load_bias, store_act


class StoreActGrad(NamedTuple):
    """Operands of `store_act_grad`: dz, dy [M, N], bias [N] or None, db [row tiles, N] or None."""

    dz: Tensor
    dy: Tensor
    stride_dym: int
    bias: Tensor | None
    db: Tensor | None


@triton.jit
def load_dy(rm, rn, m, n, out):
    """Return dy as it lies in memory, where it takes half the registers, and the bias."""
    mask = (rm < m)[:, None] & (rn < n)[None, :]
    dy = tl.load(out.dy + rm[:, None] * out.stride_dym + rn[None, :], mask, 0.0)
    return dy, load_bias(rm, rn, m, n, out)


@triton.jit
def store_act_grad(acc, loaded, rm, rn, m, n, tile_m, out, ACTIVATION: tl.constexpr):
    """Dz = dy * act'(acc + bias), and this row tile's share of db in float32."""
    mask = (rm < m)[:, None] & (rn < n)[None, :]
    dy, bias = loaded
    _, dz = ACTIVATION(acc + bias, dy.to(tl.float32), is_exact(out.dz))
    store(out.dz + rm[:, None] * n + rn[None, :], dz, mask)
    if out.db is not None:
        tl.store(out.db + tile_m * n + rn, tl.sum(tl.where(mask, dz, 0.0), axis=0), mask=rn < n)


ACT_GRAD = load_dy, store_act_grad
