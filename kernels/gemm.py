"""The one GEMM mainloop: x [M, K] @ w [N, K].T, tile by tile, each tile handed to an epilogue."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .runtime import INTERPRETED, IS_INTERPRETED, arch, tl, triton, unit_stride
from .tiles import Tile, tile_for

GROUP_M = 8


@triton.jit
def halves(acc):
    """Split a tile into its left and right column halves without leaving registers."""
    return acc.reshape(acc.shape[0], 2, acc.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def grouped_tile(pid, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Number tiles so that GROUP_M rows of tiles share their columns of w in L2."""
    tiles_m = tl.cdiv(m, BLOCK_M)
    per_group = GROUP_M * tl.cdiv(n, BLOCK_N)
    first_m = pid // per_group * GROUP_M
    height = min(tiles_m - first_m, GROUP_M)
    return first_m + pid % per_group % height, pid % per_group // height


@triton.jit
def store_slices(
    acc, rm, column, m, n, tile_m, out, STORE: tl.constexpr, ACT: tl.constexpr, SLICES: tl.constexpr
):
    """Run the epilogue on column slices: a narrower tile at a time keeps it in registers."""
    if SLICES == 1:
        STORE(acc, rm, column + tl.arange(0, acc.shape[1]), m, n, tile_m, out, ACT)
    else:
        left, right = halves(acc)
        store_slices(left, rm, column, m, n, tile_m, out, STORE, ACT, SLICES // 2)
        column += left.shape[1]
        store_slices(right, rm, column, m, n, tile_m, out, STORE, ACT, SLICES // 2)


@triton.jit
def gemm_kernel(
    x,
    w,
    out,
    m,
    n,
    k,
    stride_xm,
    stride_wn,
    STORE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SLICES: tl.constexpr,
):
    """One output tile; `DESCRIPTORS` loads by tensor descriptor instead of pointers."""
    tile_m, tile_n = grouped_tile(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP_M)
    rm = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    if DESCRIPTORS:
        x_tiles = tl.make_tensor_descriptor(x, [m, k], [stride_xm, 1], [BLOCK_M, BLOCK_K])
        w_tiles = tl.make_tensor_descriptor(w, [n, k], [stride_wn, 1], [BLOCK_N, BLOCK_K])
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # without the assumption and this form of range, triton 3.6 serialises every wgmma of the loop
    tl.assume(k > 0)
    for start in range(0, k, BLOCK_K):
        if DESCRIPTORS:
            a = x_tiles.load([tile_m * BLOCK_M, start])
            b = w_tiles.load([tile_n * BLOCK_N, start])
        else:
            inside = (start + rk < k)[None, :]
            a = tl.load(
                x + rm[:, None] * stride_xm + (start + rk)[None, :], (rm < m)[:, None] & inside, 0.0
            )
            b = tl.load(
                w + rn[:, None] * stride_wn + (start + rk)[None, :], (rn < n)[:, None] & inside, 0.0
            )
        if INTERPRETED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
    column = tile_n.to(tl.int64) * BLOCK_N
    store_slices(acc, rm, column, m, n, tile_m, out, STORE, ACTIVATION, SLICES)


def gemm(x: Tensor, w: Tensor, out: NamedTuple, store: Any, activation: Any) -> None:
    """Run `store(x @ w.T)` over all tiles.

    x [M, K] and w [N, K] have one dtype and no empty side.
    """
    (m, k), n = x.shape, w.shape[0]
    x, w = unit_stride(x), unit_stride(w)
    tile = launch_tile(x, w)
    descriptors = fits_descriptors(x, w)
    if descriptors and not IS_INTERPRETED:
        triton.set_allocator(descriptor_scratch)
    grid = (triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n),)
    with torch.cuda.device_of(x):
        gemm_kernel[grid](
            x,
            w,
            out,
            m,
            n,
            k,
            x.stride(0),
            w.stride(0),
            STORE=store,
            ACTIVATION=activation,
            DESCRIPTORS=descriptors,
            PRECISION=matmul_precision(),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            GROUP_M=GROUP_M,
            SLICES=tile.slices,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


def launch_tile(x: Tensor, w: Tensor) -> Tile:
    """Return the tile with which `gemm` covers x @ w.T."""
    return tile_for(
        arch(), x.element_size(), x.shape[1], fits_descriptors(x, w), matmul_precision()
    )


def row_tiles(x: Tensor, w: Tensor) -> int:
    """Return how many row tiles `gemm(x, w, ...)` has."""
    return triton.cdiv(x.shape[0], launch_tile(unit_stride(x), unit_stride(w)).block_m)


def matmul_precision() -> str:
    """Return the input precision of float32 products under torch's current TF32 setting."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def fits_descriptors(x: Tensor, w: Tensor) -> bool:
    """Whether tensor descriptors can address both: 16-byte aligned bases and rows."""
    return all(t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 for t in (x, w))


def descriptor_scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate the device memory in which a launch builds its tensor descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
