"""What a GEMM tile becomes: one jit function and one record of operands each.

An epilogue gets the float32 accumulator of rows `rm` (int64) and columns `rn`, and the row tile's
number for what it reduces over rows. Absent operands are None. The hybrid plan's epilogue, which
turns a tile of dh into h and dz, is elementwise.store_hidden_grad.
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
def store_act(acc, rm, rn, m, n, tile_m, out, ACTIVATION: tl.constexpr):
    """Y = act(acc + bias), and the pre-activation itself where z is wanted."""
    mask = (rm < m)[:, None] & (rn < n)[None, :]
    offsets = rm[:, None] * n + rn[None, :]
    if out.bias is not None:
        acc += load(out.bias + rn, rn < n)[None, :]
    if out.z is not None:
        store(out.z + offsets, acc, mask)
    store(out.y + offsets, ACTIVATION(acc, is_exact(out.y)), mask)


class StoreActGrad(NamedTuple):
    """Operands of `store_act_grad`: dz, dy [M, N], bias [N] or None, db [row tiles, N] or None."""

    dz: Tensor
    dy: Tensor
    stride_dym: int
    bias: Tensor | None
    db: Tensor | None


@triton.jit
def store_act_grad(acc, rm, rn, m, n, tile_m, out, ACTIVATION: tl.constexpr):
    """Dz = dy * act'(acc + bias), and this row tile's share of db in float32."""
    mask = (rm < m)[:, None] & (rn < n)[None, :]
    if out.bias is not None:
        acc += load(out.bias + rn, rn < n)[None, :]
    dy = load(out.dy + rm[:, None] * out.stride_dym + rn[None, :], mask)
    _, dz = ACTIVATION(acc, dy, is_exact(out.dz))
    store(out.dz + rm[:, None] * n + rn[None, :], dz, mask)
    if out.db is not None:
        tl.store(out.db + tile_m * n + rn, tl.sum(tl.where(mask, dz, 0.0), axis=0), mask=rn < n)
