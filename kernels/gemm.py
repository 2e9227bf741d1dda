"""The one GEMM mainloop: x [M, K] @ w [N, K].T, tile by tile, each tile handed to an epilogue.

w may lie in memory as it is or as the transpose of a [K, N] matrix: both are read in place.

An epilogue is a jit function and a record of its operands, None where absent. It gets the float32
accumulator of rows `rm` (int64) and columns `rn`, and the row tile's number for what it reduces
over rows. Another is `elementwise.store_hidden_grad`, of the hybrid variant.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .runtime import INTERPRETED, IS_INTERPRETED, arch, is_exact, load, store, tl, triton
from .tiles import Tile, tile_for

GROUP_M = 8


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
    stride_w,
    STORE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SLICES: tl.constexpr,
):
    """One output tile.

    TRANSPOSED: w lies as [K, N]; DESCRIPTORS: loads go by tensor descriptor instead of pointers.
    """
    tile_m, tile_n = grouped_tile(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP_M)
    rm = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    if DESCRIPTORS:
        x_tiles = tl.make_tensor_descriptor(x, [m, k], [stride_xm, 1], [BLOCK_M, BLOCK_K])
        if TRANSPOSED:
            w_tiles = tl.make_tensor_descriptor(w, [k, n], [stride_w, 1], [BLOCK_K, BLOCK_N])
        else:
            w_tiles = tl.make_tensor_descriptor(w, [n, k], [stride_w, 1], [BLOCK_N, BLOCK_K])
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # without the assumption and this form of range, triton 3.6 serialises every wgmma of the loop
    tl.assume(k > 0)
    for start in range(0, k, BLOCK_K):
        if DESCRIPTORS:
            a = x_tiles.load([tile_m * BLOCK_M, start])
            if TRANSPOSED:
                b = w_tiles.load([start, tile_n * BLOCK_N])
            else:
                b = w_tiles.load([tile_n * BLOCK_N, start]).T
        else:
            inside = start + rk < k
            a_offsets = rm[:, None] * stride_xm + (start + rk)[None, :]
            a = tl.load(x + a_offsets, (rm < m)[:, None] & inside[None, :], 0.0)
            if TRANSPOSED:
                b_offsets = (start + rk).to(tl.int64)[:, None] * stride_w + rn[None, :]
            else:
                b_offsets = (start + rk)[:, None] + rn[None, :] * stride_w
            b = tl.load(w + b_offsets, inside[:, None] & (rn < n)[None, :], 0.0)
        if INTERPRETED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    column = tile_n.to(tl.int64) * BLOCK_N
    store_slices(acc, rm, column, m, n, tile_m, out, STORE, ACTIVATION, SLICES)


def gemm(
    x: Tensor, w: Tensor, out: NamedTuple, epilogue: Any, activation: Any, hybrid: bool = False
) -> None:
    """Run `epilogue(x @ w.T)` over all tiles.

    x [M, K] and w [N, K] have one dtype and no empty side, x adjacent columns, w those or adjacent
    rows; `hybrid` takes the tiles for epilogues that read as much as they write.
    """
    (m, k), n = x.shape, w.shape[0]
    assert x.stride(1) == 1 or k == 1
    assert 1 in w.stride() or w.numel() == 1
    tile = launch_tile(x, w, hybrid)
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
            lead_stride(w),
            STORE=epilogue,
            ACTIVATION=activation,
            TRANSPOSED=is_transposed(w),
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


def launch_tile(x: Tensor, w: Tensor, hybrid: bool = False) -> Tile:
    """Return the tile with which `gemm` covers x @ w.T."""
    precision = matmul_precision()
    return tile_for(arch(), x.element_size(), x.shape[1], hybrid, fits_descriptors(x, w), precision)


def is_transposed(w: Tensor) -> bool:
    """Whether w [N, K] lies in memory as [K, N]."""
    return w.stride(0) == 1 and w.stride(1) != 1


def matmul_precision() -> str:
    """Return the input precision of float32 products under torch's current TF32 setting."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def lead_stride(w: Tensor) -> int:
    """Return the stride of the dimension of w that is not adjacent."""
    return w.stride(1) if is_transposed(w) else w.stride(0)


def fits_descriptors(x: Tensor, w: Tensor) -> bool:
    """Whether tensor descriptors can address both: bases and rows on 16 bytes, rows apart."""
    width = w.shape[0 if is_transposed(w) else 1]
    return all(
        t.data_ptr() % 16 == 0 and stride * t.element_size() % 16 == 0 and stride >= columns
        # x goes by rows, also where its one column may have any stride
        for t, stride, columns in ((x, x.stride(0), x.shape[1]), (w, lead_stride(w), width))
    )


def descriptor_scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate the device memory in which a launch builds its tensor descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
