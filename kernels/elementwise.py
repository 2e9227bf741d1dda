"""The split variant's kernels: activations, or their gradients, over GEMM outputs in memory.

h is act(gate) * up in a gated layer, else act(z). The gradient kernel may write over its operands,
so that the split variant needs no more memory than a fused GEMM.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .partials import partial_sums, store_summed, sum_partials
from .runtime import is_exact, load, store, tl, triton

FLAT = {"BLOCK": 4096, "num_warps": 8}
TILE = {"BLOCK_M": 32, "BLOCK_N": 128, "num_warps": 8}


@triton.jit
def act_kernel(z, up, h, stride_zm, n, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    tile, row_z, row_h = tl.program_id(0), 0, 0
    # without a stride all rows are one
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
    """Write act(z), times `up` if given, into h.

    All are contiguous, and h may be z or up; or z and up are halves of the columns of a contiguous
    matrix, and h is neither.
    """
    assert h.is_contiguous()
    assert up is None or up.stride() == z.stride()
    m, n, stride = 1, z.numel(), None
    if not z.is_contiguous():
        (m, n), stride = z.shape, z.stride(0)
        assert n == 1 or z.stride(1) == 1
    grid = (m * triton.cdiv(n, FLAT["BLOCK"]),)
    with torch.cuda.device_of(z):
        act_kernel[grid](z, up, h, stride, n, activation, **FLAT)


class HiddenGrad(NamedTuple):
    """Operands of the gradient of a hidden layer, [M, N] or None.

    Reads z (the gate, where gated) and up; writes h where wanted, dz and dup, each over any operand
    that is read, or over dh. up and dup are None where the layer is not gated. h is contiguous; the
    others are contiguous or halves of the columns of a contiguous matrix. A launch fills in db and
    db_up [row tiles, N] where wanted, and the row stride of z, up, dz and dup.
    """

    z: Tensor
    up: Tensor | None
    h: Tensor | None
    dz: Tensor
    dup: Tensor | None
    db: Tensor | None = None
    db_up: Tensor | None = None
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
    z, up = loaded[0].to(tl.float32), loaded[1].to(tl.float32)
    value, dz = ACTIVATION(z, dh * up if out.up is not None else dh, is_exact(out.dz))
    if out.up is not None:
        dup, value = dh * value, value * up
        store_summed(out.dup, out.db_up, offsets, dup, mask, rn, n, tile_m)
    if out.h is not None:
        store(out.h + rm[:, None] * n + rn[None, :], value, mask)
    store_summed(out.dz, out.db, offsets, dz, mask, rn, n, tile_m)


HIDDEN_GRAD = load_hidden, store_hidden_grad


@triton.jit
def act_grad_kernel(
    dh, stride_dh, out, m, n, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
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
    row_tiles = triton.cdiv(m, TILE["BLOCK_M"])
    sums = partial_sums(dh, needs_db, row_tiles, n)
    out, grid = out.launched(**sums), (row_tiles * triton.cdiv(n, TILE["BLOCK_N"]),)
    with torch.cuda.device_of(dh):
        act_grad_kernel[grid](dh, dh.stride(0), out, m, n, activation, **TILE)
    return sum_partials(sums.get("db"), sums.get("db_up"))
