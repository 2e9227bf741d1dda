"""The split plan's kernels: an activation, or its gradient, over a pre-activation in memory.

Both may write over what they read, which is how the split plan needs no more memory than a fused
GEMM does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .runtime import load, store, tl, triton

BLOCK = 4096
BLOCK_M, BLOCK_N = 64, 128


@triton.jit
def act_kernel(z, h, numel, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    store(h + offsets, ACTIVATION(load(z + offsets, mask)), mask)


def act(z: Tensor, h: Tensor, activation: Any) -> None:
    """Write act(z) into h, contiguous like z; h may be z."""
    with torch.cuda.device_of(z):
        act_kernel[(triton.cdiv(z.numel(), BLOCK),)](
            z, h, z.numel(), ACTIVATION=activation, BLOCK=BLOCK, num_warps=8
        )


@triton.jit
def act_grad_kernel(
    z,
    dy,
    dz,
    db,
    m,
    n,
    stride_dym,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tiles_n = tl.cdiv(n, BLOCK_N)
    tile_m = tl.program_id(0) // tiles_n
    rm = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rm < m)[:, None] & (rn < n)[None, :]
    offsets = rm[:, None] * n + rn[None, :]
    _, grad = ACTIVATION(
        load(z + offsets, mask), load(dy + rm[:, None] * stride_dym + rn[None, :], mask)
    )
    store(dz + offsets, grad, mask)
    if db is not None:
        partial = tl.sum(tl.where(mask, grad, 0.0), axis=0)
        tl.store(db + tile_m.to(tl.int64) * n + rn, partial, mask=rn < n)


def act_grad(z: Tensor, dy: Tensor, dz: Tensor, activation: Any, needs_db: bool) -> Tensor | None:
    """Write dy * act'(z) into dz and return its column sums [N] in float32 if wanted.

    z and dz [M, N] are contiguous and may be one tensor, dy [M, N] has unit column stride.
    """
    m, n = z.shape
    tiles_m = triton.cdiv(m, BLOCK_M)
    db = z.new_empty(tiles_m, n, dtype=torch.float32) if needs_db else None
    with torch.cuda.device_of(z):
        act_grad_kernel[(tiles_m * triton.cdiv(n, BLOCK_N),)](
            z,
            dy,
            dz,
            db,
            m,
            n,
            dy.stride(0),
            ACTIVATION=activation,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            num_warps=8,
        )
    return None if db is None else db.sum(0)
