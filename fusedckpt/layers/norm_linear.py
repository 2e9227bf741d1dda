"""One norm feeding several linears, such as q, k and v, that keeps their common input alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt import reference
from fusedckpt.autograd import dispatch, phases
from fusedckpt.autograd.backward import wanted_gradients
from fusedckpt.autograd.double_backward import twin_gradients
from fusedckpt.autograd.norm_spec import NormSpec, rule_of
from fusedckpt.autograd.phases import Phase
from fusedckpt.kernels.norm import NormRule
from fusedckpt.kernels.runtime import as_matrix, column_sums
from fusedckpt.layers import validate
from fusedckpt.layers.norm_ops import norm_backward_op, norm_op

__all__ = ["norm_linear"]

_is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor  # type: ignore[attr-defined]


class _Needs(NamedTuple):
    """Which gradients are wanted: x's and those of the norm's two, the weights', the biases'."""

    norm: list[bool]
    weights: list[bool]
    biases: list[bool]

    @classmethod
    def of(cls, flags: Sequence[bool], count: int) -> _Needs:
        """Sort those of the Function's arguments, `count` being the number of linears."""
        return cls(list(flags[:3]), list(flags[6 : 6 + count]), list(flags[6 + count :]))

    @property
    def dn(self) -> bool:
        """Whether the gradient of the normalised x is wanted."""
        return any(self.norm)


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
        needs = _Needs.of(ctx.needs_input_grad, count)
        reads_x = needs.dn or any(needs.weights)
        given = (
            x if reads_x else None,
            norm_weight if reads_x else None,
            norm_bias if any(needs.weights) else None,
            *(w if needs.dn else None for w in weights),
        )
        phase = phases.settle(ctx, phase)
        phase.enter(given)
        n, _ = norm_op(x, None, norm_weight, norm_bias, 1, *rule, dtype)
        ys = tuple(_linear(n, w, b) for w, b in zip(weights, biases, strict=True))  # type: ignore[arg-type]  # no weight is None
        phase.save(ctx, "norm_linear", given)
        # a linear whose result nobody used gets no gradient
        ctx.set_materialize_grads(False)
        ctx.rule, ctx.dtype = rule, dtype
        tensors = (x, norm_weight, norm_bias, *linears)
        ctx.likes = tuple(None if t is None else (t.shape, t.dtype) for t in tensors)
        if not needs.dn:
            used = [w or b for w, b in zip(needs.weights, needs.biases, strict=True)]
            ctx.mark_non_differentiable(*(y for y, use in zip(ys, used, strict=True) if not use))
        return ys

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        wanted = wanted_gradients(ctx)
        if all(dy is None for dy in dys) or not any(wanted):
            return (None,) * (len(ctx.likes) + 3)
        needs = _Needs.of(wanted, len(dys))
        tensors, _ = phases.load(ctx, 3 + len(dys))
        if torch.is_grad_enabled():
            grads = _double_backward(ctx, tensors, dys, needs)
        else:
            with _no_autocast(dys):
                found = _gradients(ctx, tensors, dys, needs)
            grads = [
                None if grad is None or like is None else grad.to(like[1])
                for grad, like in zip(found, ctx.likes, strict=True)
            ]
        return (*grads[:3], None, None, None, *grads[3:])


def _linear(n: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return F.linear in the dtype of `n`, no view: autograd forbids writing into one made here."""
    b = None if bias is None else bias.to(n.dtype)
    y = torch.nn.functional.linear(as_matrix(n), weight.to(n.dtype), b)
    # into shape unseen
    return torch.ops.aten._unsafe_view(y, (*n.shape[:-1], weight.shape[0]))


def _no_autocast(dys: Sequence[Tensor | None]) -> AbstractContextManager[Any]:
    """Keep products in the dtype that forward settled."""
    device = next(dy.device for dy in dys if dy is not None)
    on = dispatch.autocasts(device)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def _gradients(
    ctx: Any, tensors: Sequence[Tensor | None], dys: Sequence[Tensor | None], needs: _Needs
) -> list[Tensor | None]:
    """Return the wanted gradients of x, the norm's weight and bias, the weights and the biases."""
    rows = [None if dy is None else as_matrix(dy) for dy in dys]
    dws = [dy if need else None for dy, need in zip(rows, needs.weights, strict=True)]
    if any(dy is not None for dy in dws):
        dws = _products(ctx, tensors, dws)
    norm = _norm_gradients(ctx, tensors, rows, needs.norm) if needs.dn else [None] * 3
    dbs = (
        column_sums(dy) if dy is not None and need else None
        for dy, need in zip(rows, needs.biases, strict=True)
    )
    return [*norm, *dws, *dbs]


def _products(
    ctx: Any, tensors: Sequence[Tensor | None], dys: list[Tensor | None]
) -> list[Tensor | None]:
    """Return dy.T @ n for every dy, n being the normalised x."""
    x, weight, bias, *_ = tensors
    assert x is not None
    n = as_matrix(norm_op(x, None, weight, bias, 1, *ctx.rule, ctx.dtype)[0])
    return [None if dy is None else torch.mm(dy.t(), n) for dy in dys]


def _norm_gradients(
    ctx: Any, tensors: Sequence[Tensor | None], dys: list[Tensor | None], wanted: list[bool]
) -> list[Tensor | None]:
    """Return the wanted gradients of x and of the norm's weight and bias."""
    x, weight, _, *weights = tensors
    assert x is not None
    dn, wide = None, torch.promote_types(ctx.dtype, x.dtype)
    for dy, w in zip(dys, weights, strict=True):
        if dy is not None and w is not None:
            dn = _add_product(dn, dy, w.to(ctx.dtype), wide)
    assert dn is not None
    grads = norm_backward_op(dn.view(x.shape), None, x, weight, 1, *ctx.rule, wanted)
    return [grad if need else None for grad, need in zip(grads, wanted, strict=True)]


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return total + a @ b in `dtype`, which under autocast is wider than the GEMM's own."""
    if total is None or a.dtype != dtype:
        product = torch.mm(a, b).to(dtype)
        return product if total is None else product.add_(total)
    # as `out`, not by addmm_, which FlopCounterMode does not count; a batch of gradients takes none
    is_batched = not torch.compiler.is_compiling() and _is_batched(a)
    return torch.addmm(total, a, b, out=None if is_batched else total)


def _double_backward(
    ctx: Any, tensors: Sequence[Tensor | None], dys: Sequence[Tensor | None], needs: _Needs
) -> list[Tensor | None]:
    rule: NormRule = ctx.rule
    like = next(dy for dy in dys if dy is not None)
    # what was not kept, the gradients do not depend on: zeros have the same ones
    kept = (*tensors, *(None for _ in dys))
    filled = [
        like.new_zeros(shape[0], dtype=shape[1]) if t is None and shape is not None else t
        for t, shape in zip(kept, ctx.likes, strict=True)
    ]

    def twin(x: Tensor, norm_weight: Any, norm_bias: Any, *linears: Any) -> tuple[Tensor, ...]:
        spec = NormSpec(rule.kind, norm_weight, norm_bias, rule.eps, rule.offset, rule.cast)
        n = reference.apply_norm(x, spec).to(ctx.dtype)
        cast = [None if t is None else t.to(ctx.dtype) for t in linears]
        pairs = zip(cast[: len(dys)], cast[len(dys) :], strict=True)
        return tuple(torch.nn.functional.linear(n, w, b) for w, b in pairs)  # type: ignore[arg-type]

    flags = [need for part in needs for need in part]
    with torch.autocast(like.device.type, enabled=False):
        return twin_gradients(twin, filled, flags, dys)


@dispatch.recorded_as(reference.norm_linear)
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
