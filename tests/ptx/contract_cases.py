"""The table of the contract tests, each row with each variant of its layer, as emulated cases."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import cases
import support
import torch

from fusedckpt.autograd import dispatch
from tests.ptx.judging import KernelCase

# rows, D and F: operands that tensor descriptors address, and sizes that fit nothing
ALIGNED, ODD = ((44,), 136, 104), ((21,), 99, 75)


def contract_cases(turn: int) -> list[KernelCase]:
    """Return each row in bfloat16 at aligned sizes, and every other one, from `turn`, at odd ones.

    Two chips take turns with the rows at odd sizes, which are in float16 or float32.
    """
    result = []
    # a linear without an activation is a product of the vendor's alone
    rows = [row for row in cases.CASES if row.name != "linear_act-identity"]
    for number, row in enumerate(rows):
        for variant in variants_of(row):
            name = f"{row.name}-{variant}"
            aligned = partial(contract, row, variant, ALIGNED, torch.bfloat16)
            result.append(KernelCase(f"contract/bf16-{name}", aligned))
            if number % 2 == turn:
                dtype = odd_dtype(row, number)
                odd = partial(contract, row, variant, ODD, dtype)
                result.append(KernelCase(f"contract/{str(dtype)[6:]}-odd-{name}", odd))
    return result


def odd_dtype(row: cases.Case, number: int) -> torch.dtype:
    """Return the dtype of a row at odd sizes: two rows in float16, then two in float32."""
    # the derivative of a clamp jumps: in half precision one number at the limit decides a row
    has_clamp = row.name.startswith("experts-bias")
    return torch.float32 if has_clamp or number // 2 % 2 else torch.float16


def variants_of(row: cases.Case) -> Iterator[str]:
    """Yield the variants of a row's layer that have kernels of their own."""
    yield "split"
    if row.name.startswith("linear_act"):
        yield "fused"
    if "mlp" in row.name:
        yield "hybrid"


def contract(row: cases.Case, variant: str, size: Any, dtype: torch.dtype) -> float:
    """Compare a row of the table with eager; return the worst ratio of errors."""
    before, dispatch._PREFERRED = dispatch._PREFERRED, variant

    def fused(*args: Any) -> Any:
        with dispatch.forced_path("triton"):
            return row.fused(*args)

    try:
        return support.compare(fused, row.eager, partial(row.inputs, *size, dtype))
    finally:
        dispatch._PREFERRED = before
