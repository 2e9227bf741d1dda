"""The hidden layer between GEMMs, act(z) or act(gate) * up, and its gradients, in memory.

On a GPU the elementwise kernels run, elsewhere ATen in blocks of rows: the same results in the same
buffers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import elementwise
from .activations import ACTIVATIONS, Activation
from .elementwise import HiddenGrad, store_hidden_grad
from .gemm import gemm, launch_tile
from .runtime import column_sums, row_blocks, triton


def hidden(z: Tensor, up: Tensor | None, h: Tensor, activation: str, kernel: str) -> Tensor:
    """Write act(z), times `up` if given, into h, which may be z or up; all [M, N], contiguous."""
    act = ACTIVATIONS[activation]
    if kernel != "aten":
        elementwise.act(z, up, h, act.value)
    elif up is None:
        act.write(z, out=h)
    else:
        for block in row_blocks(z):
            # a block's value stays in cache until up meets it
            torch.mul(act.write(z[block], out=torch.empty_like(z[block])), up[block], out=h[block])
    return h


def hidden_grad(
    dh: Tensor,
    z: Tensor,
    up: Tensor | None,
    h: Tensor | None,
    dz: Tensor,
    dup: Tensor | None,
    activation: str,
    needs_db: tuple[bool, bool],
    kernel: str,
) -> tuple[Tensor | None, Tensor | None]:
    """Write h, dz and dup, see HiddenGrad for which may share memory; return their db, db_up [N].

    dh [M, N] has adjacent columns; the rest is contiguous. On ATen dz may share memory with z,
    where not gated with dh, where h is not wanted with up; h and dup may with any of those read.
    """
    act = ACTIVATIONS[activation]
    if kernel == "aten":
        blocks = row_blocks(z)
        # once: an allocation per block costs its page faults
        count = 2 if up is not None else int(dz is z)
        scratch = z.new_empty(count, blocks[0].stop, z.shape[1])
        for block in blocks:
            rows = [t if t is None else t[block] for t in (dh, z, up, h, dz, dup)]
            write_block(act, *rows, scratch)
        db = column_sums(dz) if needs_db[0] else None
        return db, column_sums(dup) if needs_db[1] and dup is not None else None
    db, db_up = partial_sums(z, needs_db, elementwise.row_tiles(dh))
    elementwise.act_grad(dh, HiddenGrad(z, up, h, dz, dup, db, db_up), act.value_and_grad)
    return tuple(None if t is None else t.sum(0) for t in (db, db_up))  # type: ignore[return-value]  # two


def hybrid_grad(
    dy: Tensor,
    down: Tensor,
    z: Tensor,
    up: Tensor | None,
    h: Tensor | None,
    dz: Tensor,
    dup: Tensor | None,
    activation: str,
    needs_db: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Do what `hidden_grad` does for dh = dy @ down, down [K, N], without dh leaving the chip."""
    tile = launch_tile(dy, down.t(), hybrid=True)
    db, db_up = partial_sums(z, needs_db, triton.cdiv(z.shape[0], tile.block_m))
    operands = HiddenGrad(z, up, h, dz, dup, db, db_up)
    gemm(
        dy,
        down.t(),
        operands,
        store_hidden_grad,
        ACTIVATIONS[activation].value_and_grad,
        hybrid=True,
    )
    return tuple(None if t is None else t.sum(0) for t in (db, db_up))  # type: ignore[return-value]  # two


def partial_sums(
    z: Tensor, needs: tuple[bool, bool], row_tiles: int
) -> tuple[Tensor | None, Tensor | None]:
    """Allocate the first stage of the bias gradients' sums, a row per row tile."""
    db, db_up = (
        z.new_empty(row_tiles, z.shape[1], dtype=torch.float32) if need else None for need in needs
    )
    return db, db_up


def write_block(
    act: Activation,
    dh: Tensor,
    z: Tensor,
    up: Tensor | None,
    h: Tensor | None,
    dz: Tensor,
    dup: Tensor | None,
    scratch: Tensor,
) -> None:
    """Run `hidden_grad` for some rows on ATen, with as many blocks of scratch as it takes."""
    scratch = scratch[:, : z.shape[0]]
    if up is None:
        # straight over a z that was kept, GELU's took 2.0 ms a block, by way of scratch 0.5
        place = scratch[0] if len(scratch) else dz
        act.write_grad(dh, z, place)
        if h is not None:
            act.write(z, out=h)
        if place is not dz:
            dz.copy_(place)
        return
    assert dup is not None
    value, dvalue = scratch
    act.write(z, out=value)
    torch.mul(dh, up, out=dvalue)
    # z is read for the last time, then up, then dh
    act.write_grad(dvalue, z, dz)
    if h is not None:
        torch.mul(up, value, out=dvalue)
    torch.mul(dh, value, out=dup)
    if h is not None:
        h.copy_(dvalue)
