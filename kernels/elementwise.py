"""The split variant's kernels: activations, or their gradients, over GEMM outputs in memory.

A gated layer's h is act(gate) * up, a plain one's act(z). The gradient kernel may write over what
it reads: so the split variant needs no more memory than a fused GEMM.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .runtime import is_exact, load, store, tl, triton

BLOCK = 4096
BLOCK_M, BLOCK_N = 32, 128


@triton.jit
def act_kernel(z, up, h, stride_zm, n, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    tile, row_z, row_h = tl.program_id(0), 0, 0
    # else all rows are one
    if stride_zm is not None:
        row = (tile // tl.cdiv(n, BLOCK)).to(tl.int64)
        tile, row_z, row_h = tile % tl.cdiv(n, BLOCK), row * stride_zm, row * n
    offsets = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    value = ACTIVATION(load(z + row_z + offsets, mask), is_exact(h))
    if up is not None:
        value *= load(up + row_z + offsets, mask)
    store(h + row_h + offsets, value, mask)


def act(z: Tensor, up: Tensor | None, h: Tensor, activation: Any) -> None:
    """Write act(z), times `up` if given, into h; all contiguous, and h may be z or up.

    Or z and up are halves of the columns of something contiguous, and h is neither.
    """
    assert h.is_contiguous()
    assert up is None or up.stride() == z.stride()
    m, n, stride = 1, z.numel(), None
    if not z.is_contiguous():
        (m, n), stride = z.shape, z.stride(0)
        assert n == 1 or z.stride(1) == 1
    with torch.cuda.device_of(z):
        act_kernel[(m * triton.cdiv(n, BLOCK),)](
            z, up, h, stride, n, ACTIVATION=activation, BLOCK=BLOCK, num_warps=8
        )


class HiddenGrad(NamedTuple):
    """Where the gradient of a hidden layer is read and written: [M, N], or None.

    Read: z (the gate, where gated) and up. Written: h, dz, dup. Each written one may be one of
    those read, or dh; h is None where it is not wanted, up and dup where the layer is not gated.
    h is contiguous; all others are, or are halves of the columns of something contiguous.
    db and db_up [row tiles, N] take float32 column sums of dz and dup, None where not wanted;
    stride: between rows of z, up, dz and dup. `launched` fills in these three.
    """

    z: Tensor
    up: Tensor | None
    h: Tensor | None
    dz: Tensor
    dup: Tensor | None
    db: Tensor | None = None
    db_up: Tensor | None = None
    stride: int = 0

    def launched(self, needs_db: tuple[bool, bool], row_tiles: int) -> HiddenGrad:
        """Return what a kernel takes, with the first stage of bias gradients, a row per tile."""
        z = self.z
        strided = (z, self.up, self.dz, self.dup)
        assert all(t is None or t.stride() == z.stride() or t.shape[0] == 1 for t in strided)
        assert self.h is None or self.h.is_contiguous()
        db, db_up = (
            z.new_empty(row_tiles, z.shape[1], dtype=torch.float32) if need else None
            for need in needs_db
        )
        return self._replace(db=db, db_up=db_up, stride=z.stride(0))


@triton.jit
def load_hidden(rm, rn, m, n, out):
    """Return z and up, where there is one, as they lie in memory."""
    mask = (rm < m)[:, None] & (rn < n)[None, :]
    offsets = rm[:, None] * out.stride + rn[None, :]
    z = tl.load(out.z + offsets, mask, 0.0)
    if out.up is not None:
        result = (z, tl.load(out.up + offsets, mask, 0.0))
    else:
        result = (z, z)
    return result


@triton.jit
def store_hidden_grad(dh, loaded, rm, rn, m, n, tile_m, out, ACTIVATION: tl.constexpr):
    """H, dz and dup of one tile from its dh: every read comes before the first write."""
    mask = (rm < m)[:, None] & (rn < n)[None, :]
    offsets = rm[:, None] * out.stride + rn[None, :]
    z, up = loaded[0].to(tl.float32), loaded[1].to(tl.float32)
    if out.up is not None:
        value, dz = ACTIVATION(z, dh * up, is_exact(out.dz))
        dup = dh * value
        value *= up
        store(out.dup + offsets, dup, mask)
        if out.db_up is not None:
            partial = tl.sum(tl.where(mask, dup, 0.0), axis=0)
            tl.store(out.db_up + tile_m * n + rn, partial, mask=rn < n)
    else:
        value, dz = ACTIVATION(z, dh, is_exact(out.dz))
    if out.h is not None:
        store(out.h + rm[:, None] * n + rn[None, :], value, mask)
    store(out.dz + offsets, dz, mask)
    if out.db is not None:
        partial = tl.sum(tl.where(mask, dz, 0.0), axis=0)
        tl.store(out.db + tile_m * n + rn, partial, mask=rn < n)


HIDDEN_GRAD = load_hidden, store_hidden_grad


@triton.jit
def act_grad_kernel(
    dh,
    stride_dhm,
    out,
    m,
    n,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tiles_n = tl.cdiv(n, BLOCK_N)
    tile_m = (tl.program_id(0) // tiles_n).to(tl.int64)
    rm = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rm < m)[:, None] & (rn < n)[None, :]
    tile = load(dh + rm[:, None] * stride_dhm + rn[None, :], mask)
    loaded = load_hidden(rm, rn, m, n, out)
    store_hidden_grad(tile, loaded, rm, rn, m, n, tile_m, out, ACTIVATION)


def act_grad(dh: Tensor, out: HiddenGrad, activation: Any) -> None:
    """Fill `out`, launched, from dh [M, N], which has unit column stride."""
    m, n = dh.shape
    assert dh.stride(1) == 1 or n == 1
    with torch.cuda.device_of(dh):
        act_grad_kernel[(row_tiles(dh) * triton.cdiv(n, BLOCK_N),)](
            dh,
            dh.stride(0),
            out,
            m,
            n,
            ACTIVATION=activation,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            num_warps=8,
        )


def row_tiles(dh: Tensor) -> int:
    """Return how many row tiles `act_grad` sums over."""
    return triton.cdiv(dh.shape[0], BLOCK_M)
