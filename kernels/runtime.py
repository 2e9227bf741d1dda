"""Triton where it exists, and the differences between compiled and interpreted kernels.

In Triton's interpreter (`TRITON_INTERPRET=1` at import) bf16 arithmetic is wrong and casts to bf16
truncate, so kernels load through `load`, compute in float32 and store through `store`.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # no wheel for this platform: every tensor takes the ATen path
    triton: Any = SimpleNamespace(jit=lambda fn: fn)
    tl: Any = SimpleNamespace(constexpr=lambda value: value)
    libdevice = TensorDescriptor = None  # type: ignore[assignment]

HAS_TRITON = hasattr(triton, "__version__")
# fixed for the process when triton was imported
IS_INTERPRETED = bool(HAS_TRITON and triton.knobs.runtime.interpret)
INTERPRETED = tl.constexpr(IS_INTERPRETED)
# `triton.jit` of a function that the host launches
jit_kernel: Any = triton.jit
if HAS_TRITON and not IS_INTERPRETED:
    from .launch import Kernel

    jit_kernel = Kernel
# float64 always runs on ATen
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# half precision
HALF = (torch.bfloat16, torch.float16)
# of a block of rows on a CPU: its float32 temporaries then stay in cache
BLOCK_ELEMENTS = 1 << 19


def arch() -> str:
    """Name the target that a launch compiles for: `sm_90`, `gfx942`, ... or `interpreter`."""
    if IS_INTERPRETED:
        return "interpreter"
    driver = triton.runtime.driver.active
    device = driver.get_current_device()
    if device not in _archs:
        target = driver.get_current_target()
        _archs[device] = f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)
    return _archs[device]


# by device
_archs: dict[Any, str] = {}


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least n, 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


# an op passes every tensor through one of these four functions; they copy where no view will do
def as_matrix(x: Tensor, num_dims: int = 1) -> Tensor:
    """Return x as [M, N] with adjacent columns, N the product of its last `num_dims` dimensions."""
    dims = x.dim()
    if dims > 2 and num_dims == 1:
        x = x.flatten(0, -2)
    elif dims != 2 or num_dims != 1:
        x = x.reshape(math.prod(x.shape[:-num_dims]), math.prod(x.shape[-num_dims:]))
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def as_weight(w: Tensor, dtype: torch.dtype) -> Tensor:
    """Return w [N, K] or [E, N, K] in a dtype, with adjacent columns or adjacent rows."""
    w = w if w.dtype == dtype else w.to(dtype)
    return w if 1 in w.stride()[-2:] else w.contiguous()


def as_vector(x: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    """Return a bias or a norm's weight as [N], contiguous, in `dtype` if given."""
    if x is None:
        return None
    x = x if x.dim() == 1 else x.reshape(-1)
    return x.to(dtype or x.dtype).contiguous()


def column_sums(x: Tensor) -> Tensor:
    """Sum x [M, N] over rows in at least float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.dtype == wide or x.device.type != "cpu":
        return x.sum(0, dtype=wide)
    # on a CPU torch first copies all that it sums to float32, which is twice as large as x
    first, *rest = row_blocks(x)
    total = x[first].sum(0, dtype=wide)
    for rows in rest:
        total += x[rows].sum(0, dtype=wide)
    return total


def row_blocks(x: Tensor, num_tensors: int = 1) -> list[slice]:
    """Cut x [M, N] into blocks of rows that fit a core's cache: one off the CPU, one of no rows.

    num_tensors: of float32 that a block makes for a while.

    Of a meta tensor it returns the first block, as no numbers are computed: its temporary tensors
    are those of all blocks. In float64 meta tensors may have values, see `estimate`.
    """
    m, n = x.shape
    step = max(1, BLOCK_ELEMENTS // max(n * num_tensors, 1))
    if m <= step or x.device.type not in ("cpu", "meta"):
        return [slice(0, m)]
    if x.is_meta and x.dtype != torch.float64:
        return [slice(0, step)]
    return [slice(start, min(start + step, m)) for start in range(0, m, step)]


@triton.jit
def round_to(value, dtype: tl.constexpr):
    """Round float32 to dtype, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # the carry would turn some NaNs into infinities
        rounded = tl.where(value == value, rounded, 0x7FC0)
        result = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = value.to(dtype)
    return result


@triton.jit
def is_exact(pointer):
    """Whether a store through the pointer keeps all digits of float32."""
    return pointer.dtype.element_ty == tl.float32


@triton.jit
def load(pointer, mask):
    """Load as float32, zero where masked."""
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store(pointer, value, mask):
    """Store float32 values in the dtype of the pointer, rounded to nearest even."""
    tl.store(pointer, round_to(value, pointer.dtype.element_ty), mask=mask)
