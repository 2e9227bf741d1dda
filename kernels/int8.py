"""Values in nine bits: int8 codes, and a scale of 16 bits for each group of 16 in a row.

The step of a group is its largest magnitude / 127, and a value is rounded to the nearest multiple
of it: the error is at most 1/252 of the group's largest magnitude. A group is small, so a large
value takes digits from 15 neighbours only.

A scale is the upper half of a float32, rounded up: it has float32's range, where float16's would
overflow for values above 8.3e6 and lose digits below 8e-3. The least scale is 2**-126: values of
half of that and less become 0, as -0 does. A code times its scale may lie half a step outside of
the range of x's dtype: it is cut to the largest finite number.

NaN and infinities are kept: code -128 is NaN, and in a group that has any of them, which the sign
of its scale says, codes 127 and -127 are the infinities, and its finite values are rounded to
multiples of their largest magnitude / 126.

Codes and scales are one tensor of bytes, `packed_nbytes`: one allocation, which moves as one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .runtime import cdiv, jit_kernel, load, row_blocks, store, tl, triton

GROUP = 16
# groups of a program: 16 elements for each of 128 threads
BLOCK = 128
# so that the scales begin where a launch is remembered, see launch.py
ALIGNMENT = 16
# the integer n is the low byte of n + 1.5 * 2**23 in float32: an addition rounds to the nearest
ROUNDER = tl.constexpr(12582912.0)
LEAST_SCALE = tl.constexpr(2.0**-126)
INFINITY = tl.constexpr(float("inf"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


@jit_kernel
def pack_int8_kernel(
    x,
    stride_xm,
    stride_xn,
    codes,
    scales,
    n,
    num_groups,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write codes and scales of some groups of x [M, N]."""
    groups, rows, columns, mask = places_of(n, num_groups, GROUP, BLOCK)
    value = load(x + rows * stride_xm + columns.to(tl.int64) * stride_xn, mask)
    magnitude = tl.abs(value)
    is_finite = magnitude < INFINITY
    largest = tl.max(tl.where(is_finite, magnitude, 0.0), 1)
    has_special = tl.max(tl.where(is_finite, 0, 1), 1)
    step = tl.maximum(largest * tl.where(has_special > 0, 1 / 126, 1 / 127), LEAST_SCALE)
    bits = (step.to(tl.uint32, bitcast=True) + 0xFFFF) >> 16
    inverse = tl.div_rn(1.0, (bits << 16).to(tl.float32, bitcast=True))
    shifted = value * inverse[:, None] + ROUNDER
    special = tl.where(value != value, -128, tl.where(value > 0, 127, -127))
    code = tl.where(is_finite, shifted.to(tl.int32, bitcast=True), special)
    tl.store(codes + rows * n + columns, code.to(tl.int8), mask)
    tl.store(scales + groups, (bits | (has_special << 15)).to(tl.int16), groups < num_groups)


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
    """Write some groups of x [M, N], contiguous; LARGEST: the largest number of its dtype."""
    groups, rows, columns, mask = places_of(n, num_groups, GROUP, BLOCK)
    places = rows * n + columns
    code = tl.load(codes + places, mask, 0).to(tl.int32)
    bits = tl.load(scales + groups, groups < num_groups, 0).to(tl.int32)
    has_special = ((bits & 0x8000) != 0)[:, None]
    scale = ((bits & 0x7FFF) << 16).to(tl.float32, bitcast=True)
    value = code.to(tl.float32) * scale[:, None]
    value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    value = tl.where(has_special & (code == 127), INFINITY, value)
    value = tl.where(has_special & (code == -127), -INFINITY, value)
    store(x + places, tl.where(code == -128, float("nan"), value), mask)


def pack_int8(x: Tensor, kernel: str) -> Tensor:
    """Return x [M, N], of any strides, as codes and scales in one tensor of bytes."""
    m, n = x.shape
    packed = torch.empty(packed_nbytes(m, n), dtype=torch.int8, device=x.device)
    codes, scales = codes_and_scales(packed, m, n)
    groups = scales.numel()
    if groups and kernel == "aten":
        for rows in row_blocks(x):
            _pack_rows(x[rows], codes[rows], scales[rows])
    elif groups:
        strides = x.stride()
        tile = {"GROUP": GROUP, "BLOCK": BLOCK, "num_warps": 4}
        pack_int8_kernel[(cdiv(groups, BLOCK),)](x, *strides, codes, scales, n, groups, **tile)
    return packed


def unpack_int8(packed: Tensor, out: Tensor, kernel: str) -> Tensor:
    """Write the values of a packed tensor into `out` [M, N], contiguous, and return it."""
    m, n = out.shape
    codes, scales = codes_and_scales(packed, m, n)
    largest = torch.finfo(out.dtype).max
    groups = scales.numel()
    if groups and kernel == "aten":
        for rows in row_blocks(out):
            _unpack_rows(codes[rows], scales[rows], out[rows], largest)
    elif groups:
        tile = {"LARGEST": largest, "GROUP": GROUP, "BLOCK": BLOCK, "num_warps": 4}
        unpack_int8_kernel[(cdiv(groups, BLOCK),)](codes, scales, out, n, groups, **tile)
    return out


def codes_and_scales(packed: Tensor, m: int, n: int) -> tuple[Tensor, Tensor]:
    """Return the codes [M, N] and the scales [M, N / 16], int16, of a packed x [M, N]."""
    start = packed_layout(m, n)[0]
    scales = packed[start:].view(torch.int16).view(m, cdiv(n, GROUP))
    return packed[: m * n].view(m, n), scales


def _pack_rows(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    m, n = x.shape
    values = torch.zeros(m, scales.shape[1] * GROUP, dtype=torch.float32, device=x.device)
    values[:, :n] = x
    values = values.view(m, -1, GROUP)
    magnitude = values.abs()
    is_special = ~(magnitude < float("inf"))
    largest = magnitude.masked_fill_(is_special, 0.0).amax(-1)
    has_special = is_special.any(-1)
    step = largest * torch.where(has_special, 1 / 126, 1 / 127).to(largest.dtype)
    bits = (step.clamp_(min=LEAST_SCALE.value).view(torch.int32) + 0xFFFF) >> 16
    inverse = (bits << 16).view(torch.float32).reciprocal()
    rounded = (values * inverse[..., None]).round_()
    special = torch.where(values > 0, 127.0, -127.0).masked_fill_(values.isnan(), -128.0)
    rounded = torch.where(is_special, special, rounded)
    codes.copy_(rounded.view(m, -1)[:, :n])
    scales.copy_(bits - (has_special.int() << 15))


def _unpack_rows(codes: Tensor, scales: Tensor, out: Tensor, largest: float) -> None:
    n = out.shape[1]
    bits = scales.int()
    scale = ((bits & 0x7FFF) << 16).view(torch.float32).repeat_interleave(GROUP, 1)[:, :n]
    values = (codes * scale).clamp_(-largest, largest)
    has_special = (bits < 0).repeat_interleave(GROUP, 1)[:, :n]
    values.masked_fill_(has_special & (codes == 127), float("inf"))
    values.masked_fill_(has_special & (codes == -127), -float("inf"))
    out.copy_(values.masked_fill_(codes == -128, float("nan")))
