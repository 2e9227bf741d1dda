"""Activations with a derivative of four steps, saved as codes of two bits.

The value is exact. The code of z is the number of boundaries below z; the derivative is the slope
of its code. A byte holds four codes: byte j of a row those of columns j, j + Q, j + 2 Q and j + 3 Q
for Q bytes in a row, in bits 0, 2, 4 and 6. So every access is to adjacent elements.

Comparisons and products are in float32, in float64 for float64. A NaN has the first code: its slope
is zero.

Source: Yang et al., "Reducing Fine-Tuning Memory Overhead by Approximate and Memory-Sharing
Backpropagation", arXiv 2406.16282.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .activations import ACTIVATIONS
from .runtime import (
    cdiv,
    is_exact,
    jit_kernel,
    load,
    next_power_of_2,
    row_blocks,
    store,
    tl,
    triton,
)

# bytes that a program makes or reads: 236 registers of a thread with 4096, and AMD's spill
MAX_COLUMNS = 1024


class FourSteps(NamedTuple):
    """A derivative of four slopes, with three boundaries between them."""

    boundaries: tuple[float, float, float]
    slopes: tuple[float, float, float, float]


def four_steps(weights: tuple[float, ...], boundaries: tuple[float, float, float]) -> FourSteps:
    """Return the derivative of the sum of a relu(x - c) over weights a and boundaries c."""
    return FourSteps(boundaries, (0.0, weights[0], weights[0] + weights[1], 1.0))


# the paper's constants
APPROXIMATE = {
    "gelu": four_steps(
        (-0.04922261145617846, 1.0979632065417297, -0.048740595085551286),
        (-3.1858810036855245, -0.001178821281161997, 3.190832613414926),
    ),
    "silu": four_steps(
        (-0.04060357190528599, 1.080925428529668, -0.040321856624382146),
        (-6.3050461001646445, -0.0008684942046214787, 6.325815242089708),
    ),
}


def width_of(n: int) -> int:
    """Return the number of bytes for n codes."""
    return -(-n // 4)


def launch_of(m: int, n: int) -> tuple[tuple[int], dict[str, int]]:
    """Return the grid and the tile for m rows of n columns: part of a row for each program."""
    width = width_of(n)
    block = max(128, min(MAX_COLUMNS, next_power_of_2(width)))
    return (m * cdiv(width, block),), {"BLOCK": block, "num_warps": min(8, block // 128)}


@triton.jit
def part_of_row(n, BLOCK: tl.constexpr):
    """Return the bytes of a row's codes, the program's row, and its bytes in it."""
    quarter = tl.cdiv(n, 4)
    tiles = tl.cdiv(quarter, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    rn = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return quarter, row, rn


@jit_kernel
def coded_act_kernel(
    z,
    h,
    codes,
    n,
    ACTIVATION: tl.constexpr,
    C0: tl.constexpr,
    C1: tl.constexpr,
    C2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute part of a row of h = act(z), and its codes; C0 to C2: the boundaries."""
    quarter, row, rn = part_of_row(n, BLOCK)
    packed = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(4):
        columns = rn + i * quarter
        mask = (rn < quarter) & (columns < n)
        value = load(z + row * n + columns, mask)
        code = (value > C0).to(tl.int32) + (value > C1).to(tl.int32) + (value > C2).to(tl.int32)
        # past the last column zeros were loaded
        packed |= tl.where(mask, code, 0) << (2 * i)
        store(h + row * n + columns, ACTIVATION(value, value, is_exact(h))[0], mask)
    tl.store(codes + row * quarter + rn, packed.to(tl.uint8), rn < quarter)


@jit_kernel
def coded_grad_kernel(
    dh,
    stride_dh,
    codes,
    dz,
    n,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    S3: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute part of a row of dz from dh and the codes; S0 to S3: the slopes."""
    quarter, row, rn = part_of_row(n, BLOCK)
    packed = tl.load(codes + row * quarter + rn, rn < quarter, 0).to(tl.int32)
    for i in tl.static_range(4):
        columns = rn + i * quarter
        mask = (rn < quarter) & (columns < n)
        code = (packed >> (2 * i)) & 3
        low = tl.where(code == 0, S0, S1)
        high = tl.where(code == 2, S2, S3)
        slope = tl.where(code < 2, low, high)
        store(dz + row * n + columns, load(dh + row * stride_dh + columns, mask) * slope, mask)


def coded_act(
    z: Tensor, activation: str, kernel: str, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return act(z), z contiguous [M, N], in `out` if given, which may be z; and its codes."""
    (m, n) = z.shape
    steps = APPROXIMATE[activation]
    codes = z.new_empty(m, width_of(n), dtype=torch.uint8)
    h = torch.empty_like(z, memory_format=torch.contiguous_format) if out is None else out
    if kernel != "aten":
        (grid, tile) = launch_of(m, n)
        act = ACTIVATIONS[activation].value_and_grad
        coded_act_kernel[grid](z.contiguous(), h, codes, n, act, *steps.boundaries, **tile)
        return h, codes
    for rows in row_blocks(z):
        codes[rows] = encoded(z[rows], steps)
    ACTIVATIONS[activation].write(z, out=h)
    return h, codes


def coded_grad(
    dh: Tensor, codes: Tensor, activation: str, kernel: str, out: Tensor | None = None
) -> Tensor:
    """Return dh [M, N], columns adjacent, times the slopes of codes, in `out`, which may be dh."""
    (m, n) = dh.shape
    slopes = APPROXIMATE[activation].slopes
    dz = torch.empty_like(dh, memory_format=torch.contiguous_format) if out is None else out
    if kernel != "aten":
        grid, tile = launch_of(m, n)
        coded_grad_kernel[grid](dh, dh.stride(0), codes, dz, n, *slopes, **tile)
        return dz
    tables = tables_of(slopes, torch.promote_types(dh.dtype, torch.float32), dh.device)
    for rows in row_blocks(dh):
        places = codes[rows].int().view(-1)
        for table, columns in zip(tables, quarters(n), strict=True):
            slope = table.index_select(0, places).view(*codes[rows].shape)
            part = dh[rows, columns]
            torch.mul(part, slope[:, : part.shape[1]], out=dz[rows, columns])
    return dz


def quarters(n: int) -> Iterator[slice]:
    """Yield the columns of the codes in bits 0, 2, 4 and 6."""
    width = width_of(n)
    return (slice(i * width, min((i + 1) * width, n)) for i in range(4))


def encoded(z: Tensor, steps: FourSteps) -> Tensor:
    """Return the codes of a block of rows, packed."""
    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    first, *others = [above(wide, boundary) for boundary in steps.boundaries]
    for other in others:
        first += other
    codes = first.new_zeros(z.shape[0], width_of(z.shape[1]))
    for i, columns in enumerate(quarters(z.shape[1])):
        part = first[:, columns]
        codes[:, : part.shape[1]].add_(part, alpha=4**i)
    return codes


def above(z: Tensor, boundary: float) -> Tensor:
    """Return z > boundary as uint8, the boundary rounded to z's dtype."""
    if z.device.type != "cpu":
        return (z > boundary).view(torch.uint8)
    # on a CPU torch compares 0.5 M elements in 0.3 ms, numpy in 0.03
    values = z.numpy()
    return torch.from_numpy(np.greater(values, values.dtype.type(boundary)).view(np.uint8))


@lru_cache
def tables_of(
    slopes: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Return for each code in a byte the slope by the byte's value."""
    bytes_ = range(256)
    return tuple(
        torch.tensor([slopes[byte >> shift & 3] for byte in bytes_], dtype=dtype, device=device)
        for shift in (0, 2, 4, 6)
    )
