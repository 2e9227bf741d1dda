"""A linear layer with its activation, and the gradients of both, in one of two variants.

Fused: a GEMM kernel with an elementwise epilogue. Split: the vendor's GEMM, then an elementwise
kernel over its output, in place; on ATen the same in blocks of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .activations import ACTIVATIONS, Activation
from .gemm import ACT, ACT_GRAD, StoreAct, StoreActGrad, gemm
from .partials import partial_sums, store_summed, sum_partials
from .runtime import cdiv, column_sums, is_exact, jit_kernel, load, row_blocks, store, tl, triton

FLAT = {"BLOCK": 4096, "num_warps": 8}
ACT_TILE = {"BLOCK_M": 32, "BLOCK_N": 128, "num_warps": 8}


@jit_kernel
def act_kernel(z, up, h, stride_zm, n, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Compute some elements of h = act(z), times up where that is given; see `act_into`."""
    tile = tl.program_id(0)
    row_z = 0
    row_h = 0
    # without a stride all rows are one
    if stride_zm is not None:
        row = (tile // tl.cdiv(n, BLOCK)).to(tl.int64)
        tile = tile % tl.cdiv(n, BLOCK)
        row_z = row * stride_zm
        row_h = row * n
    offsets = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    value = load(z + row_z + offsets, mask)
    value = ACTIVATION(value, value, is_exact(h))[0]
    if up is not None:
        value *= load(up + row_z + offsets, mask)
    store(h + row_h + offsets, value, mask)


def act_into(z: Tensor, up: Tensor | None, h: Tensor, activation: Any) -> None:
    """Write act(z), times `up` if given, into h, which is contiguous.

    h may be z or up; not where these are halves of the columns of a contiguous matrix.
    """
    assert h.is_contiguous()
    assert up is None or up.stride() == z.stride()
    m = 1
    n = z.numel()
    stride = None
    if not z.is_contiguous():
        (m, n) = z.shape
        stride = z.stride(0)
        assert n == 1 or z.stride(1) == 1
    grid = (m * cdiv(n, FLAT["BLOCK"]),)
    act_kernel[grid](z, up, h, stride, n, activation, **FLAT)


class HiddenGrad(NamedTuple):
    """Operands of the gradient of a hidden layer, matrices [M, N].

    A result may be written over any operand, or over dh. h is contiguous; the other matrices may be
    halves of the columns of a contiguous one.
    """

    # the pre-activation, or the gate
    z: Tensor
    # up, where gated
    up: Tensor | None
    # the hidden layer that the pass writes, where it is wanted
    h: Tensor | None
    # the gradient of z that it writes
    dz: Tensor
    # the gradient of up that it writes
    dup: Tensor | None
    # sums of dz [row tiles, N], where wanted; a launch fills them in
    db: Tensor | None = None
    # sums of dup, likewise
    db_up: Tensor | None = None
    # elements between the rows of all but h; a launch fills it in
    stride: int = 0

    def launched(self, **sums: Tensor) -> HiddenGrad:
        """Return the operands with their stride and buffers for sums."""
        strided = (self.z, self.up, self.dz, self.dup)
        assert all(t is None or t.stride() == self.z.stride() or t.shape[0] == 1 for t in strided)
        assert self.h is None or self.h.is_contiguous()
        return self._replace(stride=self.z.stride(0), **sums)


@triton.jit
def load_hidden(rm, rn, mask, n, out):
    """Return z and up, or z twice, in their own dtype."""
    offsets = rm[:, None] * out.stride + rn[None, :]
    z = tl.load(out.z + offsets, mask, 0.0)
    return z, tl.load(out.up + offsets, mask, 0.0) if out.up is not None else z


@triton.jit
def store_hidden_grad(dh, loaded, rm, rn, mask, n, tile_m, out, ACTIVATION: tl.constexpr):
    """Store h, dz and dup of a tile of dh; every load comes before the first store."""
    offsets = rm[:, None] * out.stride + rn[None, :]
    z = loaded[0].to(tl.float32)
    up = loaded[1].to(tl.float32)
    value, dz = ACTIVATION(z, dh * up if out.up is not None else dh, is_exact(out.dz))
    if out.up is not None:
        dup = dh * value
        value = value * up
        store_summed(out.dup, out.db_up, offsets, dup, mask, rn, n, tile_m)
    if out.h is not None:
        store(out.h + rm[:, None] * n + rn[None, :], value, mask)
    store_summed(out.dz, out.db, offsets, dz, mask, rn, n, tile_m)


HIDDEN_GRAD = load_hidden, store_hidden_grad


@jit_kernel
def act_grad_kernel(
    dh, stride_dh, out, m, n, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Compute one tile of `out`, HiddenGrad, from its tile of dh."""
    tiles_n = tl.cdiv(n, BLOCK_N)
    tile_m = (tl.program_id(0) // tiles_n).to(tl.int64)
    rm = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rm < m)[:, None] & (rn < n)[None, :]
    tile = load(dh + rm[:, None] * stride_dh + rn[None, :], mask)
    loaded = load_hidden(rm, rn, mask, n, out)
    store_hidden_grad(tile, loaded, rm, rn, mask, n, tile_m, out, ACTIVATION)


def act_grad(
    dh: Tensor, out: HiddenGrad, activation: Any, needs_db: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Fill `out` from dh [M, N], columns adjacent; return db and db_up [N] where needed."""
    m, n = dh.shape
    assert dh.stride(1) == 1 or n == 1
    row_tiles = cdiv(m, ACT_TILE["BLOCK_M"])
    sums = partial_sums(dh, needs_db, row_tiles, n)
    out = out.launched(**sums)
    grid = (row_tiles * cdiv(n, ACT_TILE["BLOCK_N"]),)
    act_grad_kernel[grid](dh, dh.stride(0), out, m, n, activation, **ACT_TILE)
    return sum_partials(sums.get("db"), sums.get("db_up"))


def linear(x: Tensor, w: Tensor, b: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return x @ w.T + b by the vendor's GEMM, in `out` if given."""
    return torch.mm(x, w.t(), out=out) if b is None else torch.addmm(b, x, w.t(), out=out)


def linear_then_act(
    x: Tensor, w: Tensor, b: Tensor | None, activation: str, keep_z: bool
) -> tuple[Tensor, Tensor | None]:
    """Return h [M, N] = act(x @ w.T + b), and the pre-activation z [M, N] if `keep_z`, by one GEMM.

    x [M, K] and w [N, K] share a dtype.
    """
    h = x.new_empty(x.shape[0], w.shape[0])
    z = torch.empty_like(h) if keep_z else None
    gemm(x, w, StoreAct(h, b, z), ACT, ACTIVATIONS[activation].value_and_grad)
    return h, z


def linear_act_dz(
    dy: Tensor, x: Tensor, w: Tensor, b: Tensor | None, activation: str, needs_db: bool
) -> tuple[Tensor, Tensor | None]:
    """Return dz [M, N] = dy * act'(z) and, where needed, db [N]; z is recomputed tile by tile."""
    dz = torch.empty_like(dy, memory_format=torch.contiguous_format)
    act = ACTIVATIONS[activation].value_and_grad
    needs = (needs_db, False)
    return dz, gemm(x, w, StoreActGrad(dz, dy, dy.stride(0), b), ACT_GRAD, act, needs)[0]


def hidden(
    z: Tensor, up: Tensor | None, activation: str, kernel: str, out: Tensor | None = None
) -> Tensor:
    """Return act(z), times `up` if given, in `out` [M, N] if given, which may be z or up.

    z and up are contiguous, or halves of the columns of a contiguous matrix that `out` is not in.
    """
    act = ACTIVATIONS[activation]
    h = torch.empty_like(z, memory_format=torch.contiguous_format) if out is None else out
    if kernel != "aten":
        act_into(z, up, h, act.value_and_grad)
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

    On ATen dz may be z, or dh where not gated, or up where h is not wanted; h and dup any operand.
    """
    act = ACTIVATIONS[activation]
    if kernel != "aten":
        return act_grad(dh, grads, act.value_and_grad, needs_db)
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
