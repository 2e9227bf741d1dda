"""The norms on ATen: CPU tensors, float64 everywhere, and platforms without Triton.

Same arguments, same results and the same saved tensors as the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .norm import NormRule
from .runtime import HALF, row_blocks

_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default
# from here on two sums over rows are quicker than torch's LayerNorm, which returns its statistics
MANY = 1 << 16
WIDE = (torch.float32, torch.float64)
# squares that vector_norm adds: 14 epsilons off at most, 30 with 2,000 of them, 6,000 with 800,000
PIECE = 768


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rule: NormRule,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Normalize the rows of x [M, N], or of x + residual, which is then returned beside y."""
    total = None
    if residual is not None:
        # contiguous, as the kernel's is, for any strides of x
        dtype = torch.promote_types(x.dtype, residual.dtype)
        total = torch.add(x, residual, out=x.new_empty(x.shape, dtype=dtype))
        x = total
    if rule.kind == "layer" and out_dtype == x.dtype and has_native(x, (weight, bias)):
        return torch.native_layer_norm(x, x.shape[1:], weight, bias, rule.eps)[0], total
    if rule.kind == "rms" and out_dtype == x.dtype and x.dtype in WIDE:
        rstd = sum_squares(x).div_(x.shape[1]).add_(rule.eps).rsqrt_()
        y = torch.mul(x, rstd)
        return y if weight is None else y.mul_(scale_of(weight, rule, x.dtype)), total
    y = x.new_empty(x.shape, dtype=out_dtype)
    wide = wide_dtype(x)
    scale = scale_of(weight, rule, wide)
    for block in row_blocks(x):
        place = in_place(y, block, wide)
        _, xhat, _ = normalize(x[block].to(wide), rule, place)
        if rule.cast == "llama":
            xhat.copy_(xhat.to(x.dtype))
        if weight is not None:
            xhat.mul_(scale)
        if bias is not None:
            xhat.add_(bias)
        if place is None:
            y[block] = xhat
    return y, total


def norm_grad(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rule: NormRule,
    needs: tuple[bool, bool, bool],
    sums_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dx [M, N] (plus `dtotal`), dw [N] and db [N], each where needed.

    dw and db are rounded once, to `sums_dtype`, else they are at least float32.
    """
    # below float32 torch's sums over rows are of half precision too: 4 % off after 3000 in bfloat16
    fits = dy.dtype == x.dtype and x.dtype in WIDE and sums_dtype in (None, x.dtype)
    # without dx no weight is saved, nor read
    fits &= rule.kind == "layer" and (weight is not None or not (needs[0] and needs[1]))
    if fits and has_native(x, (weight,)):
        return native_grad(dy, dtotal, x, weight, rule.eps, needs)
    wide = wide_dtype(x)
    scale = scale_of(weight, rule, wide)
    rounds = rule.cast == "llama" and x.dtype != wide
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
    dw = db = None
    # an RMSNorm of such rows needs no temporary besides dx: twice as many rows fit
    is_in_place = rule.kind == "rms" and x.dtype == wide
    # in half precision a LayerNorm makes four: of dy, x, its centred rows and xhat
    num_tensors = 4 if rule.kind == "layer" and x.dtype in HALF else 1
    for block in row_blocks(x[:, ::2] if is_in_place else x, num_tensors):
        dout = dy[block].to(wide)
        place = None if dx is None else in_place(dx, block, wide)
        row, xhat, rstd = normalize(x[block].to(wide), rule, place)
        if needs[1] and rounds:
            dw = plus(dw, (dout * xhat.to(x.dtype)).sum(0))
        product = xhat.mul_(dout)
        if needs[1] and not rounds:
            dw = plus(dw, product.sum(0))
        if needs[2]:
            db = plus(db, dout.sum(0))
        if dx is not None:
            grad = row_grad(product, dout, row, rstd, scale, rule.kind)
            if dtotal is not None:
                grad.add_(dtotal[block])
            if place is None:
                dx[block] = grad
    dw, db = (t if t is None else t.to(sums_dtype or wide) for t in (dw, db))
    return dx, dw, db


def row_grad(
    product: Tensor, dout: Tensor, row: Tensor, rstd: Tensor, scale: Tensor | float, kind: str
) -> Tensor:
    """Return the gradient of rows, written over the product of xhat and the result's gradient."""
    share = product.mul_(scale).mean(1, keepdim=True).mul_(rstd)
    grad = torch.mul(dout, scale, out=product)
    if kind == "layer":
        grad.sub_(grad.mean(1, keepdim=True))
    return grad.addcmul_(row, share, value=-1.0).mul_(rstd)


def plus(total: Tensor | None, part: Tensor) -> Tensor:
    """Add a block's sums to those before it, in float64: there may be thousands of blocks."""
    return part if total is None else total.double().add_(part)


def has_native(x: Tensor, weights: tuple[Tensor | None, ...]) -> bool:
    """Whether torch's own LayerNorm kernels, the faster ones on a CPU, take these dtypes."""
    if x.device.type != "cpu" or x.shape[1] == 0:
        return False
    for weight in weights:
        # float32 goes beside half precision
        dtypes = (x.dtype,) if x.dtype == torch.float64 else (x.dtype, torch.float32)
        if weight is not None and weight.dtype not in dtypes:
            return False
    return True


def native_grad(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Find the rows' statistics again, then run torch's LayerNorm backward."""
    mean, rstd = layer_statistics(x, weight, eps)
    # the bias gives its gradient only a shape, and so does the weight where dx is not wanted
    bias = x.new_empty(x.shape[1]) if weight is None else weight
    weight = bias if needs[1] else weight
    dx, dw, db = _layer_norm_backward(dy, x, x.shape[1:], mean, rstd, weight, bias, needs)
    if dx is not None and dtotal is not None:
        dx.add_(dtotal)
    return dx, dw, db


def layer_statistics(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and rstd of rows, as torch's LayerNorm has them."""
    if x.numel() >= MANY:
        n = x.shape[1]
        mean = x.mean(1, keepdim=True)
        squares = sum_squares(x)
        # a mean far from zero, its square above the variance, would cost digits of the difference
        if float(torch.addcmul(squares, mean, mean, value=-2 * n).min()) > 0:
            variance = squares.addcmul_(mean, mean, value=-n).div_(n)
            return mean, variance.add_(eps).rsqrt_()
    # with weight and bias its quicker kernel runs
    return torch.native_layer_norm(x, x.shape[1:], weight, weight, eps)[1:]


def sum_squares(x: Tensor) -> Tensor:
    """Return the sum of squares of rows, as a column.

    vector_norm adds them one after the other, which costs digits: a long row goes in pieces.
    """
    n = x.shape[1]
    size = n // max(1, -(-n // PIECE))
    if size == n:
        return torch.linalg.vector_norm(x, 2, 1, True).square_()
    rest = n % size
    pieces = x[:, : n - rest].unflatten(1, (-1, size))
    squares = torch.linalg.vector_norm(pieces, 2, 2).square_().sum(1, keepdim=True)
    return squares.add_(sum_squares(x[:, n - rest :])) if rest else squares


def normalize(
    row: Tensor, rule: NormRule, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows (centred, for LayerNorm), xhat, in `out` or else a new tensor, and rstd."""
    if rule.kind == "layer":
        row = row - row.mean(1, keepdim=True)
        # the mean was rounded: of equal numbers that would be left, times 1 / sqrt(eps)
        row -= row.mean(1, keepdim=True)
    xhat = torch.mul(row, row, out=out)
    rstd = xhat.mean(1, keepdim=True).add_(rule.eps).rsqrt_()
    return row, torch.mul(row, rstd, out=xhat), rstd


def in_place(result: Tensor, block: slice, dtype: torch.dtype) -> Tensor | None:
    """Return a block of a result to compute in, None where it is rounded to another dtype."""
    return result[block] if result.dtype == dtype else None


def scale_of(weight: Tensor | None, rule: NormRule, dtype: torch.dtype) -> Tensor | float:
    """Return offset + weight in the compute dtype, 1 without a weight."""
    if weight is None:
        return 1.0
    return weight.to(dtype) + rule.offset if rule.offset else weight.to(dtype)


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that sums run in: float64 for float64, float32 otherwise."""
    return torch.promote_types(x.dtype, torch.float32)
