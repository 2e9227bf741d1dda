"""Matrix products and sums of products that are rounded once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]


def writes_wider(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device has a GEMM that reads this half precision and writes float32."""
    return device.type == "cuda" and torch.version.hip is None and dtype.itemsize == 2


def product_for(device: torch.device, dtype: torch.dtype, wanted: torch.dtype) -> Product:
    """Return mm for operands of `dtype`, into float32 where wanted and a GEMM writes it."""
    if wanted == torch.float32 and writes_wider(device, dtype):
        return partial(torch.mm, out_dtype=wanted)
    return torch.mm


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to total, which has their dtype, or is float32 where they are half precision.

    Without a GEMM that writes float32, operands are widened, in blocks no larger than total.
    """
    if a.dtype == total.dtype:
        # torch's FLOP counter does not know addmm_
        torch.addmm(total, a, b, out=total)
    elif writes_wider(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        step = max(1, total.numel() // max(1, sum(total.shape)))
        for block in zip(a.split(step, 1), b.split(step), strict=True):
            torch.addmm(total, *(t.to(total.dtype) for t in block), out=total)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in at least float32."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.dtype == wide or writes_wider(a.device, a.dtype):
        return product_for(a.device, a.dtype, wide)(a, b)
    total = a.new_zeros(a.shape[0], b.shape[1], dtype=wide)
    add_product(total, a, b)
    return total
