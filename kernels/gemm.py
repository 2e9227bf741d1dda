"""The GEMM kernel: x [M, K] @ w [N, K].T, tile by tile, each tile passed to an epilogue.

w may be stored as it is or as its transpose [K, N]; both are read in place. An epilogue is two jit
functions and a record of operands, None where absent. The first function loads the operands' rows
`rm` (int64) and columns `rn`. The second gets the float32 accumulator, the loaded values, and the
number of the row tile, for sums over rows. `linear.HIDDEN_GRAD` is the hybrid variant's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .partials import partial_sums, store_summed, sum_partials
from .runtime import (
    INTERPRETED,
    TensorDescriptor,
    arch,
    cdiv,
    is_exact,
    jit_kernel,
    load,
    store,
    tl,
    triton,
)

# rows of tiles that share their columns of w in L2
GROUP_M = tl.constexpr(8)
# triton 3.6 has tensor descriptors that cannot round to TF32
DESCRIPTORS_ROUND = hasattr(TensorDescriptor, "round_f32_to_tf32")


class Tile(NamedTuple):
    """Launch options by their names in the kernel."""

    # rows of a tile of the result
    BLOCK_M: int
    # columns of a tile of the result
    BLOCK_N: int
    # elements of the contraction that one step of the main loop reads
    BLOCK_K: int
    # warps of a program
    num_warps: int
    # tiles that are loaded ahead
    num_stages: int
    # column slices that the epilogue runs in
    SLICES: int = 1


# the longest short contraction: two blocks of its tile fit on a multiprocessor, so that the
# epilogue of one overlaps with the main loop of the other
SHORT_K = 1024
# float32 without TF32 runs on the scalar units, which need small tiles
SCALAR = Tile(64, 64, 16, 8, 2)

_LONG_TILE = Tile(128, 256, 64, 8, 3, 8)
_SHORT = Tile(128, 128, 64, 8, 3, 2)
_HYBRID_LONG = Tile(256, 128, 64, 8, 3, 8)
_HYBRID_SHORT = Tile(128, 128, 64, 8, 3, 4)
_SMALL_TILE = Tile(64, 64, 32, 8, 3)
_TF32 = Tile(128, 128, 32, 8, 3, 2)
_AMPERE = Tile(128, 128, 32, 8, 3, 4)
_NARROW = Tile(128, 64, 32, 8, 3, 2)
_CDNA = Tile(128, 128, 64, 8, 2, 2)
# unequal sides, so that a test sees a swapped axis
_INTERPRETED = 5 * (Tile(32, 64, 16, 4, 1, 2),)

# (architecture family, bytes per element) -> tiles of long and short contractions, of both with a
# hybrid epilogue, and of operands that tensor descriptors cannot address; the last three need
# registers, as a hybrid epilogue reads as much as it writes
TILES = {
    ("sm_80", 2): (_AMPERE, _AMPERE, _NARROW, _NARROW, _SMALL_TILE),
    ("sm_80", 4): 5 * (_SMALL_TILE,),
    ("sm_90", 2): (_LONG_TILE, _SHORT, _HYBRID_LONG, _HYBRID_SHORT, _SMALL_TILE),
    ("sm_90", 4): (_TF32, _TF32, _SMALL_TILE, _SMALL_TILE, _SMALL_TILE),
    # 256 rows of dh spill
    ("sm_100", 2): (_LONG_TILE, _SHORT, _HYBRID_SHORT, _HYBRID_SHORT, _SMALL_TILE),
    ("sm_100", 4): (_TF32, _TF32, _SMALL_TILE, _SMALL_TILE, _SMALL_TILE),
    ("gfx9", 2): (_CDNA, _CDNA, _NARROW, _NARROW, _SMALL_TILE),
    ("gfx9", 4): 5 * (_SMALL_TILE,),
    ("interpreter", 2): _INTERPRETED,
    ("interpreter", 4): _INTERPRETED,
}


def family(arch: str) -> str:
    """Return the table's name for an architecture such as `sm_86` or `gfx942`."""
    if arch.startswith("sm_"):
        return {9: "sm_90", 10: "sm_100"}.get(int(arch[3:]) // 10, "sm_80")
    return "gfx9" if arch.startswith("gfx") else arch


def tile_for(arch: str, itemsize: int, k: int, hybrid: bool, aligned: bool, precision: str) -> Tile:
    """Return the tile of a GEMM with contraction length k on operands of `itemsize` bytes.

    aligned: whether tensor descriptors address the operands; precision: see `precision_of`.
    """
    if itemsize == 4 and precision == "ieee" and arch != "interpreter":
        return SCALAR
    tiles = TILES[family(arch), itemsize]
    return tiles[2 * hybrid + (k <= SHORT_K)] if aligned else tiles[-1]


class StoreAct(NamedTuple):
    """Operands of `store_act`: y [M, N], bias [N] or None, z [M, N] or None; rows contiguous."""

    y: Tensor
    bias: Tensor | None
    z: Tensor | None


@triton.jit
def load_bias(rm, rn, mask, n, out):
    """Return the bias of a tile's columns, or 0."""
    return load(out.bias + rn, rn < n)[None, :] if out.bias is not None else 0.0


@triton.jit
def store_act(acc, bias, rm, rn, mask, n, tile_m, out, ACTIVATION: tl.constexpr):
    """Store y = act(acc + bias) and, where z is given, the pre-activation."""
    offsets = rm[:, None] * n + rn[None, :]
    acc += bias
    if out.z is not None:
        store(out.z + offsets, acc, mask)
    store(out.y + offsets, ACTIVATION(acc, acc, is_exact(out.y))[0], mask)


class StoreActGrad(NamedTuple):
    """Operands of `store_act_grad`."""

    # the gradient of the pre-activation [M, N] that it writes
    dz: Tensor
    # the gradient of the result [M, N]
    dy: Tensor
    # elements between the rows of dy
    stride_dym: int
    # [N], None where absent
    bias: Tensor | None
    # sums of dz over each row tile [row tiles, N], where wanted
    db: Tensor | None = None


@triton.jit
def load_dy(rm, rn, mask, n, out):
    """Return dy in its own dtype, which takes half the registers, and the bias."""
    dy = tl.load(out.dy + rm[:, None] * out.stride_dym + rn[None, :], mask, 0.0)
    return dy, load_bias(rm, rn, mask, n, out)


@triton.jit
def store_act_grad(acc, loaded, rm, rn, mask, n, tile_m, out, ACTIVATION: tl.constexpr):
    """Store dz = dy * act'(acc + bias) and the row tile's part of db."""
    dy, bias = loaded
    _, dz = ACTIVATION(acc + bias, dy.to(tl.float32), is_exact(out.dz))
    store_summed(out.dz, out.db, rm[:, None] * n + rn[None, :], dz, mask, rn, n, tile_m)


ACT = (load_bias, store_act)
ACT_GRAD = (load_dy, store_act_grad)


@triton.jit
def column_slices(acc, SLICES: tl.constexpr):
    """Cut a tile into a tuple of narrower tiles without leaving registers."""
    if SLICES == 1:
        result = (acc,)
    else:
        left, right = acc.reshape(acc.shape[0], 2, acc.shape[1] // 2).permute(0, 2, 1).split()
        result = column_slices(left, SLICES // 2) + column_slices(right, SLICES // 2)
    return result


@triton.jit
def round_to_tf32(x):
    """Round float32 to TF32, to nearest, on NVIDIA."""
    return tl.inline_asm_elementwise(
        "cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def multiply(
    x,
    w,
    rows,
    columns,
    rm,
    rn,
    m,
    n,
    k,
    strides,
    TRANSPOSED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the product of rows rm, from `rows` on, and columns rn, from `columns` on; k > 0.

    strides: of x along rows and K, of w along columns and K. PRECISION: see `precision_of`.
    """
    ROUNDS: tl.constexpr = PRECISION == "rounded tf32"
    DOT: tl.constexpr = "tf32" if ROUNDS else PRECISION
    stride_xm, stride_xk, stride_wn, stride_wk = strides
    rk = tl.arange(0, BLOCK_K)
    acc = tl.zeros((rm.shape[0], rn.shape[0]), tl.float32)
    # without the assumption and this form of range, triton 3.6 serializes every wgmma of the loop
    tl.assume(k > 0)
    for start in range(0, k, BLOCK_K):
        if DESCRIPTORS:
            a = x.load([rows, start])
            if TRANSPOSED:
                b = w.load([start, columns])
            else:
                b = w.load([columns, start]).T
        else:
            inside = start + rk < k
            a_offsets = rm[:, None] * stride_xm + (start + rk)[None, :] * stride_xk
            a = tl.load(x + a_offsets, (rm < m)[:, None] & inside[None, :], 0.0)
            # one stride is 1, for which triton specializes
            b_offsets = (start + rk).to(tl.int64)[:, None] * stride_wk + rn[None, :] * stride_wn
            b = tl.load(w + b_offsets, inside[:, None] & (rn < n)[None, :], 0.0)
            if ROUNDS:
                a = round_to_tf32(a)
                b = round_to_tf32(b)
        if INTERPRETED:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=DOT)
    return acc


@triton.jit
def finish(
    acc,
    rm,
    column,
    m,
    n,
    tile,
    out,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Pass a tile to the epilogue in column slices; rm: its rows, `column`: its first, int64."""
    # slices keep the epilogue in registers; a slice is loaded before the previous is stored
    slices = column_slices(acc, SLICES)
    WIDTH: tl.constexpr = acc.shape[1] // SLICES
    rn = column + tl.arange(0, WIDTH)
    mask = (rm < m)[:, None] & (rn < n)[None, :]
    loaded = LOAD(rm, rn, mask, n, out)
    for index in tl.static_range(SLICES):
        current = loaded
        inner = mask
        if index + 1 < SLICES:
            mask = (rm < m)[:, None] & (rn + WIDTH < n)[None, :]
            loaded = LOAD(rm, rn + WIDTH, mask, n, out)
        STORE(slices[index], current, rm, rn, inner, n, tile, out, ACTIVATION)
        rn += WIDTH


@jit_kernel
def gemm_kernel(
    x,
    w,
    out,
    m,
    n,
    k,
    stride_xm,
    stride_wn,
    stride_wk,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Compute one tile. DESCRIPTORS: x and w are tensor descriptors, TRANSPOSED: w as [K, N]."""
    group = GROUP_M * tl.cdiv(n, BLOCK_N)
    place = tl.program_id(0)
    first_m = place // group * GROUP_M
    height = min(tl.cdiv(m, BLOCK_M) - first_m, GROUP_M)
    tile_m = first_m + place % group % height
    tile_n = place % group // height
    rm = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n.to(tl.int64) * BLOCK_N
    rn = column + tl.arange(0, BLOCK_N)
    rows = tile_m * BLOCK_M
    columns = tile_n * BLOCK_N
    strides = stride_xm, 1, stride_wn, stride_wk
    operands = x, w, rows, columns, rm, rn, m, n, k, strides
    acc = multiply(*operands, TRANSPOSED, DESCRIPTORS, PRECISION, BLOCK_K)
    finish(acc, rm, column, m, n, tile_m, out, LOAD, STORE, ACTIVATION, SLICES)


def gemm(
    x: Tensor,
    w: Tensor,
    out: Any,
    epilogue: tuple[Any, Any],
    activation: Any,
    needs_db: tuple[bool, bool] = (False, False),
    hybrid: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Run an epilogue over all tiles of x @ w.T; return db and db_up [N] where needed.

    x [M, K] has adjacent columns, w [N, K] adjacent columns or rows; no side is empty. hybrid: the
    epilogue reads as much as it writes.
    """
    (m, k) = x.shape
    n = w.shape[0]
    stored = as_stored(w)
    assert x.stride(1) == 1 or k == 1
    assert 1 in w.stride() or w.numel() == 1
    rounds = precision_of(x) == "rounded tf32"
    aligned = fits_descriptors(x, w) and (DESCRIPTORS_ROUND or not rounds)
    options = options_for(x, k, hybrid, aligned) | {"TRANSPOSED": stored is not w}
    # from Hopper on, tiles are loaded by tensor descriptors that the host makes
    options["DESCRIPTORS"] = aligned and family(arch()) in ("sm_90", "sm_100", "interpreter")
    block_m, block_n, block_k = (options[f"BLOCK_{side}"] for side in "MNK")
    operands: Any = x, w
    if options["DESCRIPTORS"]:
        block = [block_n, block_k] if stored is w else [block_k, block_n]
        rounding = {"round_f32_to_tf32": True} if rounds else {}
        operands = [
            TensorDescriptor(t, list(t.shape), [t.stride(0), 1], block, **rounding)
            for t, block in ((x, [block_m, block_k]), (stored, block))
        ]
    row_tiles = cdiv(m, block_m)
    sums = partial_sums(x, needs_db, row_tiles, n)
    sizes = m, n, k, x.stride(0), *w.stride()
    grid = (row_tiles * cdiv(n, block_n),)
    gemm_kernel[grid](*operands, out._replace(**sums), *sizes, *epilogue, activation, **options)
    return sum_partials(sums.get("db"), sums.get("db_up"))


def options_for(x: Tensor, k: int, hybrid: bool, aligned: bool) -> dict[str, Any]:
    """Return the tile and precision of a launch with contraction length k: see `tile_for`."""
    precision = precision_of(x)
    tile = tile_for(arch(), x.element_size(), k, hybrid, aligned, precision)
    return {"PRECISION": precision} | tile._asdict()


def precision_of(x: Tensor) -> str:
    """Return how operands of x's dtype are multiplied: "ieee", "tf32" or "rounded tf32".

    Rounded: NVIDIA's tensor cores cut float32 to TF32, off by half a digit on average, always
    towards zero, so that it is rounded to nearest before, as cuBLAS does.
    """
    if x.dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision != "tf32":
        return "ieee"
    if arch().startswith("sm_"):
        return "rounded tf32"
    # the one chip of AMD that has it: on others Triton refuses it
    return "tf32" if arch() == "gfx942" else "ieee"


def as_stored(w: Tensor) -> Tensor:
    """Return w, or its transpose where rows of w are adjacent."""
    return w.t() if w.stride(0) == 1 and w.stride(1) != 1 else w


def fits_descriptors(x: Tensor, w: Tensor) -> bool:
    """Whether tensor descriptors can address both: bases and rows on 16 bytes, rows apart."""
    return all(
        t.data_ptr() % 16 == 0 and lead * t.element_size() % 16 == 0 and lead >= t.shape[1]
        for t, lead in ((t, t.stride(0)) for t in (x, as_stored(w)))
    )
