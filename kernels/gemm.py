"""The one GEMM mainloop: x [M, K] @ w [N, K].T, tile by tile, each tile handed to an epilogue.

w may lie in memory as it is or as the transpose of a [K, N] matrix: both are read in place.

An epilogue is two jit functions and a record of their operands, None where absent. The first loads
what it reads of rows `rm` (int64) and columns `rn`; the second gets the float32 accumulator, what
was loaded, and the row tile's number for what it reduces over rows. Another is
`elementwise.HIDDEN_GRAD`, of the hybrid variant.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .runtime import INTERPRETED, TensorDescriptor, arch, is_exact, load, store, tl, triton
from .tiles import Tile, has_tensor_maps, tile_for

GROUP_M = 8


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


@triton.jit
def column_slices(acc, SLICES: tl.constexpr):
    """Cut a tile into a tuple of narrower ones without leaving registers."""
    if SLICES == 1:
        result = (acc,)
    else:
        left, right = acc.reshape(acc.shape[0], 2, acc.shape[1] // 2).permute(0, 2, 1).split()
        result = column_slices(left, SLICES // 2) + column_slices(right, SLICES // 2)
    return result


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
    acc,
    rm,
    column,
    m,
    n,
    tile_m,
    out,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Run the epilogue on column slices: a narrower tile at a time keeps it in registers.

    What a slice reads is on its way before the slice before it is written.
    """
    WIDTH: tl.constexpr = acc.shape[1] // SLICES
    slices = column_slices(acc, SLICES)
    rn = column + tl.arange(0, WIDTH)
    loaded = LOAD(rm, rn, m, n, out)
    for index in tl.static_range(SLICES):
        current = loaded
        if index + 1 < SLICES:
            loaded = LOAD(rm, rn + WIDTH, m, n, out)
        STORE(slices[index], current, rm, rn, m, n, tile_m, out, ACTIVATION)
        rn += WIDTH


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
    LOAD: tl.constexpr,
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

    TRANSPOSED: w lies as [K, N]; DESCRIPTORS: x and w are tensor descriptors instead of pointers.
    """
    tile_m, tile_n = grouped_tile(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP_M)
    rm = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # without the assumption and this form of range, triton 3.6 serialises every wgmma of the loop
    tl.assume(k > 0)
    for start in range(0, k, BLOCK_K):
        if DESCRIPTORS:
            a = x.load([tile_m * BLOCK_M, start])
            if TRANSPOSED:
                b = w.load([start, tile_n * BLOCK_N])
            else:
                b = w.load([tile_n * BLOCK_N, start]).T
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
    store_slices(acc, rm, column, m, n, tile_m, out, LOAD, STORE, ACTIVATION, SLICES)


def gemm(
    x: Tensor,
    w: Tensor,
    out: NamedTuple,
    epilogue: tuple[Any, Any],
    activation: Any,
    hybrid: bool = False,
) -> None:
    """Run an epilogue, what it loads and what it does with a tile of x @ w.T, over all tiles.

    x [M, K] and w [N, K] have one dtype and no empty side, x adjacent columns, w those or adjacent
    rows; `hybrid` takes the tiles for epilogues that read as much as they write.
    """
    (m, k), n = x.shape, w.shape[0]
    assert x.stride(1) == 1 or k == 1
    assert 1 in w.stride() or w.numel() == 1
    tile = launch_tile(x, w, hybrid)
    descriptors = has_tensor_maps(arch()) and fits_descriptors(x, w)
    grid = (triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n),)
    with torch.cuda.device_of(x):
        gemm_kernel[grid](
            describe(x, tile.block_m, tile.block_k) if descriptors else x,
            describe(w, tile.block_n, tile.block_k) if descriptors else w,
            out,
            m,
            n,
            k,
            x.stride(0),
            lead_stride(w),
            LOAD=epilogue[0],
            STORE=epilogue[1],
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
    return tile_for(
        arch(),
        x.element_size(),
        x.shape[1],
        hybrid,
        descriptors=fits_descriptors(x, w),
        precision=precision,
    )


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


def describe(t: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe tiles [rows, columns] of t to the copy engine, or their transposes as t lies."""
    block = [rows, columns]
    if is_transposed(t):
        t, block = t.t(), block[::-1]
    return TensorDescriptor(t, list(t.shape), [t.stride(0), 1], block)
