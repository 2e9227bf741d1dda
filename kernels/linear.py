"""A linear layer with its activation, and the gradients of both, in one of two variants.

Fused: one GEMM kernel with an elementwise epilogue. Split: the vendor's GEMM, then an elementwise
kernel over its output, in place; on ATen the same in blocks of rows, in the same buffers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import elementwise
from .activations import ACTIVATIONS, Activation
from .elementwise import HIDDEN_GRAD, HiddenGrad
from .gemm import ACT, ACT_GRAD, StoreAct, StoreActGrad, gemm
from .runtime import column_sums, row_blocks


def linear(x: Tensor, w: Tensor, b: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return x @ w.T + b by the vendor's GEMM, in `out` if given."""
    return torch.mm(x, w.t(), out=out) if b is None else torch.addmm(b, x, w.t(), out=out)


def linear_act(
    x: Tensor, w: Tensor, b: Tensor | None, activation: str, keep_z: bool
) -> tuple[Tensor, Tensor | None]:
    """Return h [M, N] = act(x @ w.T + b), and the pre-activation z [M, N] if `keep_z`, by one GEMM.

    x [M, K] and w [N, K] share a dtype.
    """
    h = x.new_empty(x.shape[0], w.shape[0])
    z = torch.empty_like(h) if keep_z else None
    gemm(x, w, StoreAct(h, b, z), ACT, ACTIVATIONS[activation].value)
    return h, z


def linear_act_dz(
    dy: Tensor, x: Tensor, w: Tensor, b: Tensor | None, activation: str, needs_db: bool
) -> tuple[Tensor, Tensor | None]:
    """Return dz [M, N] = dy * act'(z) and, where needed, db [N]; z is recomputed tile by tile."""
    dz = torch.empty_like(dy, memory_format=torch.contiguous_format)
    act, needs = ACTIVATIONS[activation].value_and_grad, (needs_db, False)
    return dz, gemm(x, w, StoreActGrad(dz, dy, dy.stride(0), b), ACT_GRAD, act, needs)[0]


def hidden(
    z: Tensor, up: Tensor | None, activation: str, kernel: str, out: Tensor | None = None
) -> Tensor:
    """Return act(z), times `up` if given, in `out` [M, N] if given, which may be z or up.

    All contiguous, or z and up halves of the columns of something contiguous, and `out` neither.
    """
    act = ACTIVATIONS[activation]
    h = torch.empty_like(z, memory_format=torch.contiguous_format) if out is None else out
    if kernel != "aten":
        elementwise.act(z, up, h, act.value)
    elif up is None:
        act.write(z, out=h)
    else:
        for rows in row_blocks(z):
            # the value of a block is in cache when up is read
            torch.mul(act.write(z[rows], out=torch.empty_like(z[rows])), up[rows], out=h[rows])
    return h


def hidden_grad(
    dh: Tensor, grads: HiddenGrad, activation: str, needs_db: tuple[bool, bool], kernel: str
) -> tuple[Tensor | None, Tensor | None]:
    """Write the h, dz and dup of `grads` from dh [M, N], columns adjacent; return db, db_up [N].

    On ATen dz may share memory with z; where not gated with dh; where h is not wanted with up.
    h and dup may share memory with any tensor that is read.
    """
    act = ACTIVATIONS[activation]
    if kernel != "aten":
        return elementwise.act_grad(dh, grads, act.value_and_grad, needs_db)
    on_aten = plain_on_aten if grads.up is None else gated_on_aten
    on_aten(act, dh, grads)
    db = column_sums(grads.dz) if needs_db[0] else None
    return db, column_sums(grads.dup) if needs_db[1] and grads.dup is not None else None


def hybrid_grad(
    dy: Tensor, down: Tensor, grads: HiddenGrad, activation: str, needs_db: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Do as `hidden_grad` with dh = dy @ down, down [K, N], of which no tile is stored."""
    act = ACTIVATIONS[activation].value_and_grad
    return gemm(dy, down.t(), grads.launched(), HIDDEN_GRAD, act, needs_db, hybrid=True)


def plain_on_aten(act: Activation, dh: Tensor, grads: HiddenGrad) -> None:
    """Write h = act(z) and dz = dh * act'(z), a block of rows at a time."""
    z, _, h, dz = grads[:4]
    blocks = row_blocks(z)
    # over a saved z, GELU's gradient took 2.0 ms a block, through scratch 0.5. One scratch for all
    # blocks: an allocation per block costs its page faults
    scratch = z.new_empty(blocks[0].stop, z.shape[1]) if dz is z else None
    for rows in blocks:
        place = dz[rows] if scratch is None else scratch[: rows.stop - rows.start]
        act.write_grad(dh[rows], z[rows], grad_input=place)
        if h is not None:
            act.write(z[rows], out=h[rows])
        if scratch is not None:
            dz[rows] = place


def gated_on_aten(act: Activation, dh: Tensor, grads: HiddenGrad) -> None:
    """Write h = act(z) * up, dz = dh * up * act'(z) and dup = dh * act(z), by blocks of rows."""
    z, up, h, dz, dup = grads[:5]
    assert up is not None
    assert dup is not None
    blocks = row_blocks(z)
    scratch = z.new_empty(2, blocks[0].stop, z.shape[1])
    for rows in blocks:
        value, product = scratch[:, : rows.stop - rows.start]
        act.write(z[rows], out=value)
        torch.mul(dh[rows], up[rows], out=product)
        # the last read of z, below of up, then of dh
        act.write_grad(product, z[rows], grad_input=dz[rows])
        if h is not None:
            torch.mul(up[rows], value, out=product)
        torch.mul(dh[rows], value, out=dup[rows])
        if h is not None:
            h[rows] = product
