"""Functions that schedules call besides kernels, which choose a GEMM when they run."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedckpt.blocks.quantized import QuantizedWeight
from fusedckpt.kernels import grouped
from fusedckpt.kernels import linear as kernels
from fusedckpt.kernels.linear import HiddenGrad
from fusedckpt.kernels.products import add_product, product_for, wide_product
from fusedckpt.kernels.runtime import as_weight


def scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return scale a b; the GEMM scales its float32 sum, so that no factor overflows."""
    if scale == 1:
        return torch.mm(a, b)
    # with beta 0 the first operand is not read
    return torch.addmm(a.new_empty(1, 1), a, b, beta=0, alpha=scale)


def summed(total: Tensor, part: Tensor) -> Tensor:
    """Return a sum in the dtype that torch promotes to, written over one that has it."""
    wide = torch.promote_types(total.dtype, part.dtype)
    return total.add_(part) if wide == total.dtype else part.to(wide).add_(total)


def added(
    y: Tensor, low: Tensor, weight: Tensor, scale: float, dtype: torch.dtype | None
) -> Tensor:
    """Return y + scale low W', the output of a linear and of an adapter, in a dtype if given."""
    if y.dtype == low.dtype:
        total = torch.addmm(y, low, weight.t(), alpha=scale, out=y)
    else:
        total = summed(y, scaled_product(low, weight.t(), scale))
    return total if dtype is None else total.to(dtype)


def scaled_weight_grad(dy: Tensor, x: Tensor, scale: float, wanted: torch.dtype) -> Tensor:
    """Return scale dy' x, in the weight's dtype where a GEMM writes it."""
    if scale != 1:
        return scaled_product(dy.t(), x, scale)
    return product_for(dy.device, dy.dtype, wanted)(dy.t(), x)


def scaled_weight_sum(total: Tensor | None, dy: Tensor, x: Tensor, scale: float) -> Tensor:
    """Add scale dy' x of a chunk of rows, in at least float32."""
    if scale != 1:
        return sum_of(total, wide_product(dy.t(), x).mul_(scale))
    if total is None:
        return wide_product(dy.t(), x)
    add_product(total, dy.t(), x)
    return total


# they add to the sum over earlier chunks
SUMS = (scaled_weight_sum, grouped.weight_sum)


def sum_of(total: Tensor | None, grad: Tensor) -> Tensor:
    """Add a chunk's gradient, which is in at least float32, to the total in place."""
    return grad if total is None else total.add_(grad)


def input_grad(
    dy: Tensor, weight: Tensor | QuantizedWeight, scale: float, total: Tensor | None
) -> Tensor:
    """Return scale dy W, added in place to `total`, for an adapter or a quantized weight."""
    if isinstance(weight, QuantizedWeight):
        for rows in weight.pieces(dy.dtype):
            part = dy if rows is None else dy[:, rows]
            # no name for the dense piece, which would outlive the next one's making
            total = _added_product(total, part, dense_rows(weight, rows, dy.dtype))
        assert total is not None
        return total
    dx = scaled_product(dy, weight, scale)
    return dx if total is None else summed(total, dx)


def _added_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    if total is None:
        return torch.mm(a, b)
    if total.dtype == a.dtype:
        return torch.addmm(total, a, b, out=total)
    return summed(total, torch.mm(a, b))


def dense_rows(weight: QuantizedWeight, rows: slice | None, dtype: torch.dtype) -> Tensor:
    """Return rows of a quantized weight as GEMMs read them."""
    return as_weight(weight.dense(rows), dtype)


def dequantized(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Return x W' + b for a weight of which one piece is dense at a time."""
    y = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    for rows in weight.pieces(x.dtype):
        if rows is None:
            kernels.linear(x, dense_rows(weight, None, x.dtype), bias, y)
        else:
            part = None if bias is None else bias[rows]
            y[:, rows] = kernels.linear(x, dense_rows(weight, rows, x.dtype), part)
    return y


def packed(z: Tensor, activation: str, kernel: str, out: Tensor | None = None) -> Tensor:
    """Return act(gate) * up for z that holds the columns of both."""
    gate, up = z.chunk(2, 1)
    return kernels.hidden(gate, up, activation, kernel, out)


def hidden_grads(
    dy: Tensor,
    weight: Tensor | None,
    z: Tensor,
    u: Tensor | None,
    activation: str,
    kernel: str,
    is_packed: bool,
    sums: tuple[bool, bool],
    needs_h: bool,
    h: Tensor | None = None,
    dz: Tensor | None = None,
    du: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return h, dz, du, written over those given, and the column sums of dz and du.

    dy: the gradient of h; or, with the weight of the next linear, that of its output.
    """
    gate, up = (z, u) if not is_packed else z.chunk(2, 1)
    if needs_h and h is None:
        h = torch.empty_like(gate, memory_format=torch.contiguous_format)
    dz = torch.empty_like(z) if dz is None else dz
    if u is not None and du is None:
        du = torch.empty_like(u)
    dgate, dup = (dz, du) if not is_packed else dz.chunk(2, 1)
    grads = HiddenGrad(gate, up, h, dgate, dup)
    needs_db = (sums[0], sums[0] if is_packed else sums[1])
    if weight is not None:
        db, db_up = kernels.hybrid_grad(dy, weight, grads, activation, needs_db)
    else:
        db, db_up = kernels.hidden_grad(dy, grads, activation, needs_db, kernel=kernel)
    if is_packed and sums[0]:
        assert db is not None
        assert db_up is not None
        db = torch.cat((db, db_up))
        db_up = None
    return h, dz, du, db, db_up
