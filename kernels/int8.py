"""Values in nine bits: int8 codes, and a scale of 16 bits for each group of 16 in a row.

A value is a code times its group's scale, which is the largest magnitude of the group / 127: the
error is at most 1/250 of that. Where one value is much larger than the others, as channels of
trained models are, those would lose their digits. So a group whose mean magnitude is below a
quarter of its largest one is curved: a value is the square of its code, with its sign, times the
scale. The error is then at most 1/125 of the geometric mean of a value's own magnitude and the
largest one: less on the whole, by that mean.

A scale is the upper half of a float32, rounded up: it has float32's range, where float16's would
overflow for values above 8.3e6 and lose digits below 8e-3. Its last bit says whether the group is
curved, its sign whether it has special values. The least scale is 2**-126: values of half of that
and less become 0, as -0 does. A code times its scale may lie half a step outside of the range of
x's dtype: it is cut to the largest finite number.

Special are NaN, infinities and the largest finite number, with which masks are filled. They are
kept: code -128 is NaN, and in a group that has any of them 127 and 126 are infinity and that
number, and the others are rounded to multiples of their own largest magnitude / 125.

Codes and scales are one tensor of bytes, `packed_nbytes`: one allocation, which moves as one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .runtime import cdiv, jit_kernel, load, round_to, row_blocks, store, tl, triton

GROUP = 16
IN_GROUP = tl.constexpr(GROUP)
# groups of a program: 16 elements for each of 128 threads
GROUPS = 128
# so that the scales begin where a launch is remembered, see launch.py
ALIGNMENT = 16
# the integer n is the low byte of n + 1.5 * 2**23 in float32: an addition rounds to the nearest
ROUNDER = tl.constexpr(12582912.0)
LEAST_SCALE = tl.constexpr(2.0**-126)
# a group with no larger value is not curved: its scale would be less than the least
LEAST_CURVED = tl.constexpr(2.0**-100)
INFINITY = tl.constexpr(float("inf"))
# of float32, of a block's size, which torch's ops make
_TEMPORARIES = 8
PACKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def packed_layout(m: int, n: int) -> tuple[int, int]:
    """Return the place of the scales in a packed tensor, and the bytes of all, for [M, N]."""
    start = cdiv(m * n, ALIGNMENT) * ALIGNMENT
    return start, start + 2 * m * cdiv(n, GROUP)


def packed_nbytes(m: int, n: int) -> int:
    """Return the bytes of x [M, N], packed: 9/8 a value, and less than 16 + 2 M beyond that."""
    return packed_layout(m, n)[1]


@triton.jit
def places_of(n, num_groups, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Return the program's groups, their rows, their columns, and which of these exist."""
    in_row = tl.cdiv(n, GROUP)
    groups = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = (groups // in_row).to(tl.int64)[:, None]
    columns = (groups % in_row * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    mask = (groups < num_groups)[:, None] & (columns < n)
    return groups, rows, columns, mask


@triton.jit
def larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def signed_root(value):
    """Return the root of each magnitude, with the sign of the value."""
    root = tl.sqrt(tl.abs(value)).to(tl.uint32, bitcast=True)
    sign = value.to(tl.uint32, bitcast=True) & 0x80000000
    return (root | sign).to(tl.float32, bitcast=True)


@jit_kernel
def pack_int8_kernel(
    x,
    stride_xm,
    stride_xn,
    codes,
    scales,
    n,
    num_groups,
    LARGEST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write codes and scales of some groups of x [M, N]; LARGEST: the most that its dtype holds."""
    groups, rows, columns, mask = places_of(n, num_groups, GROUP, BLOCK)
    value = load(x + rows * stride_xm + columns.to(tl.int64) * stride_xn, mask)
    magnitude = tl.abs(value)
    largest = tl.reduce(magnitude, 1, larger_or_nan)
    has_special = tl.where(largest < LARGEST, 0, 1)
    # seldom: most programs have no such value, and skip both branches
    any_special = tl.max(has_special, 0) > 0
    usual = magnitude
    if any_special:
        usual = tl.where(magnitude < LARGEST, magnitude, 0.0)
        largest = tl.max(usual, 1)
    total = tl.sum(usual, 1)
    count = tl.minimum(n - groups % tl.cdiv(n, GROUP) * GROUP, GROUP).to(tl.float32)
    is_curved = (total * 4 < largest * count) & (largest > LEAST_CURVED)
    limit = tl.where(has_special > 0, 125.0, 127.0)
    limit = tl.where(is_curved, limit * limit, limit)
    step = tl.maximum(tl.div_rn(largest, limit), LEAST_SCALE)
    bits = (step.to(tl.uint32, bitcast=True) + 0x1FFFF) >> 17 << 17
    scaled = value * tl.div_rn(1.0, bits.to(tl.float32, bitcast=True))[:, None]
    scaled = tl.where(is_curved[:, None], signed_root(scaled), scaled)
    # the low byte, of a negative integer too
    code = (scaled + ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)
    if any_special:
        size = tl.where(magnitude == LARGEST, 126, 127)
        special = tl.where(value != value, -128, tl.where(value < 0, -size, size))
        code = tl.where(magnitude < LARGEST, code, special.to(tl.int8))
    tl.store(codes + rows * n + columns, code, mask)
    flags = is_curved.to(tl.int32) | (has_special << 15)
    scale = (bits >> 16).to(tl.int32) | flags
    tl.store(scales + groups, scale.to(tl.int16), groups < num_groups)


@triton.jit
def value_of(code, bits, LARGEST: tl.constexpr):
    """Return the values of codes in float32; bits: the scales of their groups."""
    code = code.to(tl.float32)
    bits = bits.to(tl.int32)
    scale = ((bits & 0x7FFE) << 16).to(tl.float32, bitcast=True)
    is_curved = (bits & 1) != 0
    size = tl.abs(code)
    # exact, as one of both is 0
    factor = size * tl.where(is_curved, scale, 0.0) + tl.where(is_curved, 0.0, scale)
    # the least of the codes that are special, which a group without any does not have: the largest
    # number, infinity, NaN
    first = tl.where((bits & 0x8000) != 0, 126.0, 256.0)
    factor = tl.where(size >= first, INFINITY, factor)
    most = tl.where(size > first, INFINITY, LARGEST)
    size = tl.where(size > 127.0, float("nan"), tl.minimum(size * factor, most))
    # no product comes last: with a sum of the reader it would be rounded once, not twice
    sign = code.to(tl.uint32, bitcast=True) & 0x80000000
    return (size.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def largest_of(dtype: tl.constexpr):
    """Return the largest finite number of a dtype."""
    if dtype == tl.float16:
        largest: tl.constexpr = 65504.0
    elif dtype == tl.bfloat16:
        largest: tl.constexpr = 3.3895313892515355e38
    else:
        largest: tl.constexpr = 3.4028234663852886e38
    return largest


@triton.jit
def load_scales(x, tile, m, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr):
    """Load the scales of a tile of rows, where `load_rows` reads nine bits."""
    if DTYPE is None:
        bits = None
    else:
        rm = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
        groups = tl.arange(0, BLOCK_N // IN_GROUP)[None, :]
        mask = (rm < m) & (groups < x.stride_sm)
        bits = tl.load(x.scales + rm * x.stride_sm + groups, mask, other=0)
    return bits


@triton.jit
def load_rows(x, starts, rn, bits, mask, DTYPE: tl.constexpr):
    """Load rows as float32; DTYPE: None, or that of rows in nine bits, which are `PackedMatrix`.

    These have the bits that `unpack_int8_kernel` would write, and the same threads get them.
    """
    if DTYPE is None:
        rows = load(x + starts + rn, mask)
    else:
        # a thread would load 16 codes, and with them 16 elements of each other tensor
        codes = tl.max_contiguous(x.codes + starts + rn, (1, 128 // DTYPE.primitive_bitwidth))
        code = tl.load(codes, mask, other=0)
        wide = bits[:, :, None].broadcast_to(bits.shape[0], bits.shape[1], IN_GROUP)
        value = value_of(code, wide.reshape(code.shape), largest_of(DTYPE))
        rows = round_to(value, DTYPE).to(tl.float32)
    return rows


@jit_kernel
def unpack_int8_kernel(
    codes,
    scales,
    x,
    n,
    num_groups,
    LARGEST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write some groups of x [M, N], contiguous; LARGEST: the most that its dtype holds."""
    groups, rows, columns, mask = places_of(n, num_groups, GROUP, BLOCK)
    places = rows * n + columns
    code = tl.load(codes + places, mask, 0)
    bits = tl.load(scales + groups, groups < num_groups, 0)
    store(x + places, value_of(code, bits[:, None], LARGEST), mask)


def pack_int8(x: Tensor, kernel: str, packed: Tensor | None = None) -> Tensor:
    """Return x [M, N], of any strides, as codes and scales in one tensor of bytes.

    packed: where to write them, int8 [packed_nbytes(M, N)]; a new tensor by default.
    """
    m, n = x.shape
    if packed is None:
        packed = torch.empty(packed_nbytes(m, n), dtype=torch.int8, device=x.device)
    codes, scales = codes_and_scales(packed, m, n)
    groups = scales.numel()
    largest = torch.finfo(x.dtype).max
    if groups and kernel == "aten":
        for rows in row_blocks(x, _TEMPORARIES):
            _pack_rows(x[rows], codes[rows], scales[rows], largest)
    elif groups:
        strides = x.stride()
        tile = {"LARGEST": largest, "GROUP": GROUP, "BLOCK": GROUPS, "num_warps": 4}
        pack_int8_kernel[(cdiv(groups, GROUPS),)](x, *strides, codes, scales, n, groups, **tile)
    return packed


def unpack_int8(packed: Tensor, out: Tensor, kernel: str) -> Tensor:
    """Write the values of a packed tensor into `out` [M, N], contiguous, and return it."""
    codes, scales = codes_and_scales(packed, *out.shape)
    return _unpack(codes, scales, out, kernel)


def _unpack(codes: Tensor, scales: Tensor, out: Tensor, kernel: str) -> Tensor:
    n = out.shape[1]
    largest = torch.finfo(out.dtype).max
    groups = scales.numel()
    if groups and kernel == "aten":
        for rows in row_blocks(out, _TEMPORARIES):
            _unpack_rows(codes[rows], scales[rows], out[rows], largest)
    elif groups:
        tile = {"LARGEST": largest, "GROUP": GROUP, "BLOCK": GROUPS, "num_warps": 4}
        unpack_int8_kernel[(cdiv(groups, GROUPS),)](codes, scales, out, n, groups, **tile)
    return out


class PackedMatrix(NamedTuple):
    """Rows in nine bits, as `load_rows` reads them."""

    # [M, N], contiguous
    codes: Tensor
    # int16 [M, N / 16], rounded up, contiguous
    scales: Tensor
    # elements between the rows of scales
    stride_sm: int


class PackedRows:
    """A contiguous matrix [M, N] in nine bits, which launchers of rows take in a tensor's place.

    Where no kernel runs, on ATen, it is unpacked first.
    """

    __slots__ = ("device", "dtype", "matrix", "shape")

    def __init__(self, packed: Tensor, m: int, n: int, dtype: torch.dtype):
        codes, scales = codes_and_scales(packed, m, n)
        self.matrix = PackedMatrix(codes, scales, scales.stride(0))
        self.shape = codes.shape
        self.dtype = dtype
        self.device = packed.device

    def dim(self) -> int:
        """Return the number of dimensions."""
        return 2

    def stride(self, dim: int) -> int:
        """Return the elements between rows, or between columns."""
        return self.matrix.codes.stride(dim)

    def element_size(self) -> int:
        """Return the bytes of a value that is unpacked: its tiles are those of a tensor's."""
        return self.dtype.itemsize

    def new_empty(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a new tensor."""
        return self.matrix.codes.new_empty(*sizes, dtype=dtype or self.dtype)

    @property
    def constexprs(self) -> dict[str, Any]:
        """The constant by which kernels read this, see `load_rows`."""
        return {"PACKED": getattr(tl, str(self.dtype).removeprefix("torch."))}

    def unpacked(self) -> Tensor:
        """Return the tensor, for kernels that do not read nine bits."""
        codes, scales, _ = self.matrix
        return _unpack(codes, scales, self.new_empty(*self.shape), "triton")


def codes_and_scales(packed: Tensor, m: int, n: int) -> tuple[Tensor, Tensor]:
    """Return the codes [M, N] and the scales [M, N / 16], int16, of a packed x [M, N]."""
    start = packed_layout(m, n)[0]
    scales = packed[start:].view(torch.int16).view(m, cdiv(n, GROUP))
    return packed[: m * n].view(m, n), scales


def _pack_rows(x: Tensor, codes: Tensor, scales: Tensor, largest: float) -> None:
    m, n = x.shape
    values = torch.zeros(m, scales.shape[1] * GROUP, dtype=torch.float32, device=x.device)
    values[:, :n] = x
    values = values.view(m, -1, GROUP)
    magnitude = values.abs()
    is_special = ~(magnitude < largest)
    usual = magnitude.masked_fill(is_special, 0.0)
    most = usual.amax(-1)
    has_special = is_special.any(-1)
    count = torch.full_like(most, GROUP)
    count[:, -1] = n - (scales.shape[1] - 1) * GROUP
    is_curved = (usual.sum(-1) * 4 < most * count) & (most > LEAST_CURVED.value)
    limit = torch.where(has_special, 125.0, 127.0)
    step = most / torch.where(is_curved, limit * limit, limit)
    bits = (step.clamp_(min=LEAST_SCALE.value).view(torch.int32) + 0x1FFFF) >> 17 << 17
    scaled = magnitude * bits.view(torch.float32).reciprocal()[..., None]
    rounded = torch.where(is_curved[..., None], scaled.sqrt(), scaled).round_()
    special = torch.where(magnitude == largest, 126.0, 127.0)
    rounded = torch.where(is_special, special, rounded)
    rounded = torch.where(values < 0, -rounded, rounded).masked_fill_(values.isnan(), -128.0)
    codes.copy_(rounded.view(m, -1)[:, :n])
    scales.copy_(((bits >> 16) | is_curved) - (has_special.int() << 15))


def _unpack_rows(codes: Tensor, scales: Tensor, out: Tensor, largest: float) -> None:
    n = out.shape[1]
    bits = scales.int().repeat_interleave(GROUP, 1)[:, :n]
    scale = ((bits & 0x7FFE) << 16).view(torch.float32)
    # -128 has no magnitude in eight bits
    size = codes.int().abs_()
    values = torch.where(bits & 1 != 0, size * size, size) * scale
    values.clamp_(max=largest)
    has_special = bits < 0
    values.masked_fill_(has_special & (size == 127), float("inf"))
    values.masked_fill_(has_special & (size == 126), largest)
    values = torch.where(codes < 0, -values, values)
    out.copy_(values.masked_fill_(codes == -128, float("nan")))
