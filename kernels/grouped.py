"""Products of rows with the weights of their experts, and the gradients of weights and biases.

By torch's kernel, by ours, or by a loop over experts that have rows; see `routed.Route`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .grouped_gemm import clear_unused, grouped_gemm, grouped_grad
from .products import add_product
from .routed import Route, as_rows, blocks_of_rows, per_token, scores_by_row, scores_by_slot


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    route: Route,
    scores: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """Return the rows of x times the weight [E, K, N] of their expert, plus the bias [E, N].

    The bias is multiplied by `scores`, and all is added to `total`, where these are given.
    """
    rows = as_rows(x, route)
    if route.kernel == "torch":
        y = F.grouped_mm(rows, weight, offs=route.ends)
        y = y if total is None else as_rows(total, route).add_(y)
    else:
        y = rows.new_empty(len(rows), weight.shape[2]) if total is None else as_rows(total, route)
    if route.kernel == "triton":
        vector = None if scores is None else scores_by_row(scores, route).contiguous()
        expert_bias = None if bias is None else bias.contiguous()
        grouped_gemm(rows, weight, route.ends, y, expert_bias, vector, total is not None)
        return per_token(y, route)
    if route.kernel is None:
        for expert, part in route.pieces or ():
            # with beta 0 the first operand is not read
            beta = int(total is not None)
            torch.addmm(y[part], rows[part], weight[expert], beta=beta, out=y[part])
        if total is None:
            y[route.count :] = 0
    if bias is not None:
        s = None if scores is None else scores_by_row(scores, route)
        for part, expert_bias in _vectors_of_experts(bias, route, y):
            y[part] += expert_bias if s is None else s[part] * expert_bias
    return per_token(y, route)


def _vectors_of_experts(
    vectors: Tensor, route: Route, rows: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of rows with the vectors [E, N] of their experts, zeros of no expert's."""
    if route.pieces is not None:
        yield from ((part, vectors[expert]) for expert, part in route.pieces)
        return
    numbers = torch.arange(len(rows), device=rows.device, dtype=route.ends.dtype)
    owners = torch.searchsorted(route.ends, numbers, right=True)
    padded = F.pad(vectors, (0, 0, 0, 1))
    yield from ((part, padded[owners[part]]) for part in blocks_of_rows(rows))


def weight_grad(
    a: Tensor,
    b: Tensor,
    route: Route,
    total: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return a' b of each expert's rows, [E, M, N], added to `total` if given; else in `dtype`."""
    left = as_rows(a, route)
    right = as_rows(b, route)
    dtype = dtype or left.dtype
    if route.kernel == "torch":
        grad = _torch_weight_grad(left, right, route)
        return grad.to(dtype) if total is None else total.add_(grad)
    shape = len(route.ends), left.shape[1], right.shape[1]
    if route.kernel == "triton":
        grad = left.new_empty(shape, dtype=dtype) if total is None else total
        grouped_grad(left, right, route.ends, grad, total is not None)
        return grad
    grad = left.new_zeros(shape, dtype=dtype) if total is None else total
    for expert, part in route.pieces or ():
        add_product(grad[expert], left[part].t(), right[part])
    return grad


def _torch_weight_grad(left: Tensor, right: Tensor, route: Route) -> Tensor:
    """Return left' right of each expert's rows by torch's kernel."""
    grad = F.grouped_mm(left.t(), right, offs=route.ends)
    # an expert without rows: the kernel need not write its gradient
    if route.runs_triton:
        clear_unused(grad, route.ends)
    else:
        starts = torch.cat((route.ends.new_zeros(1), route.ends[:-1]))
        grad.masked_fill_((starts == route.ends)[:, None, None], 0)
    return grad


def weight_sum(total: Tensor | None, a: Tensor, b: Tensor, route: Route) -> Tensor:
    """Add a' b of a chunk of tokens to `total`, in at least float32."""
    return weight_grad(a, b, route, total, torch.promote_types(a.dtype, torch.float32))


def bias_grad(dy: Tensor, route: Route, scores: Tensor | None = None) -> Tensor:
    """Return the sums over each expert's rows of dy, times their scores if given, [E, N]."""
    rows = as_rows(dy, route)
    s = None if scores is None else scores_by_row(scores, route)
    wide = torch.promote_types(dy.dtype, torch.float32)
    if route.pieces is None:
        # a kernel's product, with rows of 16 bytes; it knows the experts' rows without waiting
        s = rows.new_ones(len(rows), 1) if s is None else s.to(rows.dtype)
        columns = per_token(s.repeat(1, 8), route)
        return weight_grad(columns, dy, route, dtype=wide)[:, 0].contiguous()
    db = rows.new_zeros(len(route.ends), rows.shape[1], dtype=wide)
    for expert, part in route.pieces:
        db[expert] = (rows[part] if s is None else rows[part] * s[part]).sum(0, dtype=wide)
    return db


def bias_scores_grad(dy: Tensor, bias: Tensor, route: Route) -> Tensor:
    """Return the gradient of the scores [T, K] that multiply biases."""
    rows = as_rows(dy, route)
    dscores = rows.new_zeros(len(rows), 1, dtype=torch.promote_types(dy.dtype, torch.float32))
    for part, expert_bias in _vectors_of_experts(bias, route, rows):
        torch.sum(rows[part] * expert_bias.to(dscores.dtype), 1, True, out=dscores[part])
    return scores_by_slot(dscores, route)
