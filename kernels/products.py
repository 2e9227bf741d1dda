"""Sums of matrix products that are rounded once, however many there are."""

from __future__ import annotations

import torch
from torch import Tensor


def writes_wider(a: Tensor) -> bool:
    """Whether the device has a GEMM that reads this half precision and writes float32."""
    return a.is_cuda and torch.version.hip is None and a.dtype in (torch.float16, torch.bfloat16)


def product(a: Tensor, b: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a @ b, in float32 where asked and a GEMM writes it, else in their dtype."""
    if dtype == torch.float32 and writes_wider(a):
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to total, which has their dtype or is float32 where they are half precision.

    No product is rounded to half precision on its way. Where no GEMM writes wider than it reads,
    operands are widened, in blocks that together take no more memory than total.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif writes_wider(a):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        step = max(1, total.numel() // max(1, sum(total.shape)))
        for start in range(0, a.shape[1], step):
            block = slice(start, start + step)
            total.addmm_(a[:, block].to(total.dtype), b[block].to(total.dtype))


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in at least float32, to add others to."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.dtype == wide or writes_wider(a):
        return product(a, b, wide)
    total = a.new_zeros(a.shape[0], b.shape[1], dtype=wide)
    add_product(total, a, b)
    return total


def sum_of_products(*pairs: tuple[Tensor, Tensor]) -> Tensor:
    """Return the sum of a @ b over pairs; of several in half precision as float32, unrounded."""
    if len(pairs) == 1:
        return torch.mm(*pairs[0])
    total = wide_product(*pairs[0])
    for pair in pairs[1:]:
        add_product(total, *pair)
    return total
