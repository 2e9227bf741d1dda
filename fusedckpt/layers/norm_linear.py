"""One norm feeding several linears, such as q, k and v, that keeps their common input alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt import reference
from fusedckpt.autograd import backward, dispatch
from fusedckpt.autograd.backward import is_batch
from fusedckpt.autograd.dispatch import Around
from fusedckpt.autograd.double_backward import stand_in, twin_gradients
from fusedckpt.autograd.lora import LoRA
from fusedckpt.autograd.norm_spec import NormSpec, rule_of, sums_dtype
from fusedckpt.autograd.phases import Phase
from fusedckpt.kernels.norm import NormRule
from fusedckpt.kernels.products import product_for
from fusedckpt.kernels.runtime import as_matrix, column_sums
from fusedckpt.layers import adapted, validate
from fusedckpt.layers.adapted_call import AdaptedCall
from fusedckpt.layers.mlp_call import split
from fusedckpt.layers.norm_function import NormCall

__all__ = ["norm_linear"]


class _Needs(NamedTuple):
    """Which gradients are wanted: x's and those of the norm's two, the weights', the biases'."""

    norm: list[bool]
    weights: list[bool]
    biases: list[bool]

    @classmethod
    def of(cls, flags: Sequence[bool], count: int) -> _Needs:
        """Sort those of the Function's arguments, `count` being the number of linears."""
        linears = flags[5:]
        return cls(list(flags[:3]), list(linears[:count]), list(linears[count:]))

    @property
    def dn(self) -> bool:
        """Whether the gradient of the normalised x is wanted."""
        return any(self.norm)


class NormLinearOptions(NamedTuple):
    """The options of a call; norm: a NormSpec without its tensors, of `kinds`; over: its shape."""

    name: str
    norm: NormSpec
    kinds: tuple[type, ...]
    num_linears: int
    over: Any = None
    is_module: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors: x, the norm's, weights, biases."""
        count = range(self.num_linears)
        linears = [f"weights[{i}]" for i in count] + [f"biases[{i}]?" for i in count]
        return ("x", "norm.weight?", "norm.bias?", *linears)

    def chosen(self, override: str | None) -> None:
        """Nothing is chosen."""

    def settle(
        self, around: Around, x: Any, weight: Any, bias: Any, *linears: Any
    ) -> NormCall | None:
        """Refuse linears that cannot all read norm(x)."""
        name, norm = self.name, self.norm
        if isinstance(norm, NormSpec):
            norm = norm._replace(weight=weight, bias=bias)
        validate.norm_spec(name, norm)
        validate.tensors(name, self.names, (x, weight, bias, *linears))
        if self.over is not None:
            shape = validate.normalized_shape(name, self.over)
            validate.norm(name, x, shape, weight, bias=bias)
        keys = [key.rstrip("?") for key in self.names[3:]]
        weights, biases = linears[: self.num_linears], linears[self.num_linears :]
        for i, pair in enumerate(zip(weights, biases, strict=True)):
            validate.linear(name, x.shape, pair, (keys[i], keys[i + self.num_linears]))
        read = validate.normed(name, x, norm, around)
        dtype = validate.multiplied(name, around, read, dict(zip(keys, linears, strict=True)))
        rule = rule_of(norm, x.dtype)
        sums = sums_dtype(x, weight, bias)
        return None if around.twin else NormCall(1, rule, dtype, sums, direct=around.direct)

    def adapted(self, around: Around, x: Any, norm: Any, linears: Any) -> AdaptedCall | None:
        """Settle a call with adapters by what these are beside."""
        weights, biases = zip(*linears, strict=True)
        call = self.settle(around, x, *norm, *weights, *biases)
        return None if call is None else AdaptedCall(call.out_dtype, norm=call)


class _NormLinear(torch.autograd.Function):
    """Keeps x; the normalised x is made again in backward, once for all linears."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        call: NormCall,
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
            *[w if needs.dn else None for w in weights],
        )
        phase = phase if any(ctx.needs_input_grad) else None
        if phase is not None:
            phase.enter(given)
        n, _ = call.normalised(x, None, norm_weight, norm_bias)
        ys = tuple([_linear(n, w, b) for w, b in zip(weights, biases, strict=True)])  # type: ignore[arg-type]  # no weight is None
        if phase is None:
            ctx.save_for_backward(*given)
            ctx.recall = None
        else:
            phase.save(ctx, "norm_linear", given)
        # a linear whose result nobody used gets no gradient
        ctx.set_materialize_grads(False)
        ctx.call = call
        tensors = (x, norm_weight, norm_bias, *linears)
        ctx.likes = tuple([None if t is None else (t.shape, t.dtype) for t in tensors])
        if not needs.dn:
            used = [w or b for w, b in zip(needs.weights, needs.biases, strict=True)]
            ctx.mark_non_differentiable(*[y for y, use in zip(ys, used, strict=True) if not use])
        return ys

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        begun = backward.begin(ctx, *dys)
        if begun is None:
            return (None,) * (len(ctx.likes) + 2)
        wanted, tensors, direct = begun
        needs = _Needs.of(wanted, len(dys))
        if torch.is_grad_enabled():
            grads = _double_backward(ctx, tensors, dys, needs)
        else:
            call = ctx.call._replace(direct=direct)
            like = next(dy for dy in dys if dy is not None)
            # in the dtype that forward settled
            with dispatch.no_autocast(like.device):
                found = _gradients(call, tensors, dys, needs, likes=ctx.likes)
            grads = [
                None if grad is None or like is None else grad.to(like[1])
                for grad, like in zip(found, ctx.likes, strict=True)
            ]
        return (*grads[:3], None, None, *grads[3:])


def _linear(n: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return F.linear in the dtype of `n`, no view: autograd forbids writing into one made here."""
    b = None if bias is None else bias.to(n.dtype)
    y = torch.nn.functional.linear(as_matrix(n), weight.to(n.dtype), b)
    # into shape unseen
    return torch.ops.aten._unsafe_view(y, (*n.shape[:-1], weight.shape[0]))


def _gradients(
    call: NormCall,
    tensors: Sequence[Tensor | None],
    dys: Sequence[Tensor | None],
    needs: _Needs,
    likes: Sequence[Any],
) -> list[Tensor | None]:
    """Return the wanted gradients of x, the norm's weight and bias, the weights and the biases."""
    rows = [None if dy is None else as_matrix(dy) for dy in dys]
    dws = [dy if need else None for dy, need in zip(rows, needs.weights, strict=True)]
    if any(dy is not None for dy in dws):
        dws = _products(call, tensors, dws, likes[3 : 3 + len(dws)])
    norm = _norm_gradients(call, tensors, rows, needs.norm) if needs.dn else [None] * 3
    dbs = (
        column_sums(dy) if dy is not None and need else None
        for dy, need in zip(rows, needs.biases, strict=True)
    )
    return [*norm, *dws, *dbs]


def _products(
    call: NormCall,
    tensors: Sequence[Tensor | None],
    dys: list[Tensor | None],
    likes: Sequence[Any],
) -> list[Tensor | None]:
    """Return dy.T @ n for every dy, n being the normalised x, in its weight's dtype if possible."""
    x, weight, bias, *_ = tensors
    assert x is not None
    n = as_matrix(call.normalised(x, None, weight, bias)[0])
    found = []
    for dy, (_, dtype) in zip(dys, likes, strict=True):
        # a batch of gradients takes no other dtype
        product = product_for(n.device, n.dtype, dtype if call.direct else n.dtype)
        found.append(None if dy is None else product(dy.t(), n))
    return found


def _norm_gradients(
    call: NormCall, tensors: Sequence[Tensor | None], dys: list[Tensor | None], wanted: list[bool]
) -> list[Tensor | None]:
    """Return the wanted gradients of x and of the norm's weight and bias."""
    x, weight, _, *weights = tensors
    assert x is not None
    dn, wide = None, torch.promote_types(call.out_dtype, x.dtype)
    for dy, w in zip(dys, weights, strict=True):
        if dy is not None and w is not None:
            dn = _add_product(dn, dy, w.to(call.out_dtype), wide)
    assert dn is not None
    return list(call.gradients((dn.view(x.shape), None), x, weight, wanted))


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return total + a @ b in `dtype`, which under autocast is wider than the GEMM's own."""
    if total is None or a.dtype != dtype:
        product = torch.mm(a, b).to(dtype)
        return product if total is None else product.add_(total)
    # as `out`, not by addmm_, which FlopCounterMode does not count; a batch of gradients takes none
    batched = not torch.compiler.is_compiling() and is_batch((total, a))
    return torch.addmm(total, a, b, out=None if batched else total)


def _double_backward(
    ctx: Any, tensors: Sequence[Tensor | None], dys: Sequence[Tensor | None], needs: _Needs
) -> list[Tensor | None]:
    call: NormCall = ctx.call
    rule: NormRule = call.rule
    like = next(dy for dy in dys if dy is not None)
    # what was not kept, the gradients do not depend on
    kept = (*tensors, *(None for _ in dys))
    filled = [
        stand_in(given[0], given[1], like.device) if t is None and given is not None else t
        for t, given in zip(kept, ctx.likes, strict=True)
    ]

    def twin(x: Tensor, norm_weight: Any, norm_bias: Any, *linears: Any) -> tuple[Tensor, ...]:
        spec = NormSpec(
            rule.kind, norm_weight, norm_bias, rule.eps, offset=rule.offset, cast=rule.cast
        )
        n = reference.apply_norm(x, spec).to(call.out_dtype)
        cast = [None if t is None else t.to(call.out_dtype) for t in linears]
        pairs = zip(cast[: len(dys)], cast[len(dys) :], strict=True)
        return tuple(torch.nn.functional.linear(n, w, b) for w, b in pairs)  # type: ignore[arg-type]

    flags = [need for part in needs for need in part]
    with torch.autocast(like.device.type, enabled=False):
        return twin_gradients(twin, filled, flags, dys)


def norm_linear(
    x: Tensor,
    norm: NormSpec,
    weights: Sequence[Tensor | LoRA],
    biases: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, ...]:
    """Return F.linear(norm(x), weight, bias) for every weight, saving only x for backward.

    Eager saves norm(x) besides what the norm saves; here backward normalises x again, once for all
    linears. No GEMM is recomputed.

    Args:
        x: [..., D].
        norm: a NormSpec over D.
        weights: [N_i, D] each, of x's dtype; under autocast of any dtype but float64. Or `LoRA`
            records, or quantised weights, as in `mlp`.
        biases: [N_i] or None for each weight; None for no biases.

    Returns:
        A tuple of [..., N_i], one per weight.

    Raises:
        ValueError: no weights, another number of biases, or invalid shapes or devices.
        TypeError: tensors are not dense, not floating point, or of different dtypes.
    """
    if dispatch.is_recorded(x):
        return reference.norm_linear(x, norm, weights, biases)
    weights, biases = validate.projections("norm_linear", weights, biases)
    (bare, kinds), tensors = split(norm)
    options = NormLinearOptions("norm_linear", bare, kinds, len(weights))
    ys = run_projections(options, x, *tensors, *weights, *biases)
    return reference.norm_linear(x, norm, weights, biases) if ys is None else ys


def run_projections(options: NormLinearOptions, x: Tensor, *tensors: Any) -> Any:
    """Run the Function on x, the norm's, weights and biases, None where eager is to run."""
    call, phase = dispatch.settled(options, x, *tensors)
    if call is None:
        return _adapted(options, x, *tensors)
    return _NormLinear.apply(x, *tensors[:2], call, phase, *tensors[2:])


def _adapted(options: NormLinearOptions, x: Tensor, *tensors: Any) -> Any:
    count = options.num_linears
    norm, weights, biases = tensors[:2], tensors[2 : 2 + count], tensors[2 + count :]
    pairs = list(zip(weights, biases, strict=True))
    ys = adapted.run(options, options.names[3 : 3 + count], x, norm, linears=pairs)
    return (ys,) if isinstance(ys, Tensor) else ys
