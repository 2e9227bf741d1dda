"""One norm feeding several linears, such as q, k and v, that keeps their common input alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedckpt import reference
from fusedckpt.autograd import custom_op, dispatch, phases
from fusedckpt.autograd.double_backward import twin_gradients
from fusedckpt.autograd.phases import Phase
from fusedckpt.kernels.norm import NormRule
from fusedckpt.kernels.runtime import as_matrix, column_sums
from fusedckpt.layers import validate
from fusedckpt.layers.norm_ops import norm_op, row_kernels
from fusedckpt.layers.norm_spec import NormSpec, rule_of

__all__ = ["norm_linear"]

# what the op's lists hold where there is no tensor
Tensors = list[Tensor | None]


def _backward(
    dys: list[Tensor],
    x: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weights: list[Tensor],
    kind: str,
    eps: float,
    offset: float,
    cast: str,
    needs: list[bool],
) -> list[Tensor]:
    """Return dx, the norm's dw and db, then all weights' gradients, then all biases'."""
    rule, dtype = NormRule(kind, eps, offset, cast), dys[0].dtype
    wanted = _Needs(needs)
    rows = [as_matrix(dy) for dy in dys]
    found: Tensors = [None] * len(needs)
    if any(wanted.weights):
        assert x is not None
        kernels = row_kernels(x)
        n = kernels.norm(as_matrix(x), None, norm_weight, norm_bias, rule, dtype)[0]
        for i, need in enumerate(wanted.weights):
            found[3 + i] = torch.mm(rows[i].t(), n) if need else None
        del n
    for i, need in enumerate(wanted.biases):
        found[3 + len(weights) + i] = column_sums(rows[i]) if need else None
    if any(wanted.norm):
        assert x is not None
        dn = torch.mm(rows[0], weights[0].to(dtype))
        for dy, w in zip(rows[1:], weights[1:], strict=True):
            dn.addmm_(dy, w.to(dtype))
        kernels = row_kernels(x)
        grads = kernels.norm_grad(dn, None, as_matrix(x), norm_weight, rule, tuple(wanted.norm))
        found[:3] = [grads[0] if grads[0] is None else grads[0].view(x.shape), *grads[1:]]
    return [custom_op.absent(dys[0]) if grad is None else grad for grad in found]


class _Needs:
    """Which gradients are wanted: x's and the norm's, the weights', the biases'."""

    def __init__(self, needs: Sequence[bool]):
        count = (len(needs) - 3) // 2
        self.norm = list(needs[:3])
        self.weights = list(needs[3 : 3 + count])
        self.biases = list(needs[3 + count :])


def _backward_fake(
    dys: list[Tensor],
    x: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weights: list[Tensor],
    *rest: Any,
) -> list[Tensor]:
    needs = rest[-1]
    wide = torch.promote_types(dys[0].dtype, torch.float32)
    d = weights[0].shape[1]
    dx = ((*dys[0].shape[:-1], d), dys[0].dtype if x is None else x.dtype)
    likes = [dx, ((d,), wide), ((d,), wide), *((w.shape, dys[0].dtype) for w in weights)]
    likes += [(w.shape[:1], wide) for w in weights]
    return [
        dys[0].new_empty(shape, dtype=dtype) if need else custom_op.absent(dys[0])
        for need, (shape, dtype) in zip(needs, likes, strict=True)
    ]


def _backward_flops(dys: Any, x: Any, nw: Any, nb: Any, weights: Any, *rest: Any, **_: Any) -> int:
    needs = _Needs(rest[4])
    rows = math.prod(dys[0][:-1])
    gemms = (
        2 * rows * math.prod(w) * (need + any(needs.norm))
        for w, need in zip(weights, needs.weights, strict=True)
    )
    return sum(gemms)


_backward_op = custom_op.define(
    "norm_linear_backward(Tensor[] dys, Tensor? x, Tensor? norm_weight, Tensor? norm_bias,"
    " Tensor[] weights, str kind, float eps, float offset, str cast, bool[] needs) -> Tensor[]",
    _backward,
    _backward_fake,
    _backward_flops,
)


class _NormLinear(torch.autograd.Function):
    """Keeps x; the normalised x is made again in backward, once for all linears."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        rule: NormRule,
        dtype: torch.dtype,
        phase: Phase | None,
        *linears: Tensor | None,
    ) -> tuple[Tensor, ...]:
        count = len(linears) // 2
        weights, biases = linears[:count], linears[count:]
        needs = (*ctx.needs_input_grad[:3], *ctx.needs_input_grad[6:])
        reads_x = any(needs[: 3 + count])
        given = (x if reads_x else None, norm_weight, norm_bias, *linears)
        phase = phases.settle(ctx, phase)
        phase.enter(given)
        n, _ = norm_op(x, None, norm_weight, norm_bias, 1, *rule, dtype)
        # two-dimensional, and put into shape unseen: autograd forbids writing into a view made here
        rows = as_matrix(n)
        ys = tuple(
            torch.ops.aten._unsafe_view(
                torch.nn.functional.linear(rows, w.to(dtype), None if b is None else b.to(dtype)),  # type: ignore[union-attr]
                (*n.shape[:-1], w.shape[0]),  # type: ignore[union-attr]
            )
            for w, b in zip(weights, biases, strict=True)
        )
        phase.save(ctx, "norm_linear", given)
        ctx.rule, ctx.dtype, ctx.needs, ctx.count = rule, dtype, needs, count
        if not any(needs[:3]):
            frozen = [not (needs[3 + i] or needs[3 + count + i]) for i in range(count)]
            ctx.mark_non_differentiable(*(y for y, still in zip(ys, frozen, strict=True) if still))
        return ys

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, norm_weight, norm_bias, *linears), _ = phases.load(ctx, 3 + 2 * ctx.count)
        if torch.is_grad_enabled():
            grads = _double_backward(ctx, x, norm_weight, norm_bias, linears, dys)
        else:
            weights = linears[: ctx.count]
            found = _backward_op(
                list(dys), x, norm_weight, norm_bias, weights, *ctx.rule, list(ctx.needs)
            )
            likes = (x, norm_weight, norm_bias, *linears)
            grads = [
                grad.to(like.dtype) if need else None
                for grad, need, like in zip(found, ctx.needs, likes, strict=True)
            ]
        return (*grads[:3], None, None, None, *grads[3:])


def _double_backward(
    ctx: Any, x: Any, norm_weight: Any, norm_bias: Any, linears: list[Any], dys: Sequence[Tensor]
) -> list[Tensor | None]:
    if x is None:
        # only biases: their gradients do not depend on x
        x = dys[0].new_zeros((*dys[0].shape[:-1], linears[0].shape[1]))
    rule: NormRule = ctx.rule

    def twin(x: Tensor, norm_weight: Any, norm_bias: Any, *linears: Any) -> tuple[Tensor, ...]:
        spec = NormSpec(rule.kind, norm_weight, norm_bias, rule.eps, rule.offset, rule.cast)
        n = reference.apply_norm(x, spec).to(ctx.dtype)
        cast = [None if t is None else t.to(ctx.dtype) for t in linears]
        pairs = zip(cast[: ctx.count], cast[ctx.count :], strict=True)
        return tuple(torch.nn.functional.linear(n, w, b) for w, b in pairs)  # type: ignore[arg-type]

    with torch.autocast(x.device.type, enabled=False):
        return twin_gradients(twin, (x, norm_weight, norm_bias, *linears), ctx.needs, dys)


def norm_linear(
    x: Tensor,
    norm: NormSpec,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, ...]:
    """Return F.linear(norm(x), weight, bias) for every weight, keeping only x for backward.

    Eager keeps norm(x) besides what the norm keeps; here backward normalises x again, once for all
    the linears. No GEMM is recomputed.

    Args:
        x: [..., D].
        norm: a NormSpec over D.
        weights: [N_i, D] each, of x's dtype; under autocast of any but float64.
        biases: [N_i] or None for each weight; None for no biases.

    Returns:
        A tuple of [..., N_i], one per weight.

    Raises:
        ValueError: no weights, not as many biases, shapes or devices that do not fit.
        TypeError: not dense floating-point tensors, or of different dtypes.
    """
    weights = validate.several("norm_linear", "weights", weights)
    none = [None] * len(weights)
    biases = none if biases is None else validate.several("norm_linear", "biases", biases)
    dtype = validate.projections("norm_linear", x, norm, weights, biases)
    if dtype is None or dispatch.takes_twin():
        return reference.norm_linear(x, norm, weights, biases)
    constants = rule_of(norm, x.dtype), dtype, phases.current()
    return _NormLinear.apply(x, norm.weight, norm.bias, *constants, *weights, *biases)
