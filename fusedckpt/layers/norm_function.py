"""The norms as torch ops and as an autograd Function: rows in, rows out, on Triton or ATen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt import reference
from fusedckpt.autograd import arguments, backward, custom_op, dispatch
from fusedckpt.autograd.custom_op import BELOW, below
from fusedckpt.autograd.dispatch import Around, Meta
from fusedckpt.autograd.double_backward import stand_in, twin_gradients
from fusedckpt.autograd.norm_spec import NormSpec, output_dtype, rule_of, sums_dtype
from fusedckpt.autograd.phases import Phase
from fusedckpt.kernels import aten
from fusedckpt.kernels import norm as triton_norm
from fusedckpt.kernels.norm import NormRule
from fusedckpt.kernels.runtime import as_matrix, as_vector
from fusedckpt.layers import validate


class NormCall(NamedTuple):
    """What a norm's call comes down to: see NormRule.

    num_dims: how many dimensions are normalised together; out_dtype: the result's; sums_dtype: that
    of weight and bias; direct: whether nothing traces or watches ops; kernels: the module whose
    `norm` and `norm_grad` run, None to look.
    """

    num_dims: int
    rule: NormRule
    out_dtype: torch.dtype
    sums_dtype: torch.dtype
    direct: bool = False
    kernels: Any = None

    def normalised(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return norm(x), or norm(x + residual) and x + residual."""
        if self.direct:
            return _forward(x, residual, weight, bias, self)
        args = (self.num_dims, *self.rule, self.out_dtype)
        return _norm_op.overload(x, residual, weight, bias, *args)

    def gradients(
        self,
        dys: Sequence[Tensor | None],
        x: Tensor | None,
        weight: Tensor | None,
        needs: list[bool],
    ) -> tuple[Tensor | None, ...]:
        """Return the wanted gradients: x's, the weight's and the bias's.

        dys: of the result, and of what was normalised, which is added to x's.
        """
        dy, dtotal = dys
        assert dy is not None
        if self.direct:
            return _backward(dy, dtotal, x, weight, self, needs)
        args = (self.num_dims, *self.rule, self.sums_dtype, needs)
        found = _norm_backward_op.overload(dy, dtotal, x, weight, *args)
        return tuple([grad if need else None for grad, need in zip(found, needs, strict=True)])


def _rows(x: Tensor, num_dims: int) -> Tensor:
    return x if num_dims == 1 and x.dim() == 2 and x.stride(1) == 1 else as_matrix(x, num_dims)


def _vector(weight: Tensor | None) -> Tensor | None:
    fits = weight is None or (weight.dim() == 1 and weight.is_contiguous())
    return weight if fits else as_vector(weight)


def _kernels_for(x: Tensor | Meta, dtype: torch.dtype) -> Any:
    """Return the module whose `norm` and `norm_grad` run for x, or for x and a residual."""
    on_aten = 0 in x.shape or dispatch.path_of(x.device, dtype) == "aten"
    return aten if on_aten else triton_norm


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    call: NormCall,
) -> tuple[Tensor, Tensor | None]:
    with below(BELOW):
        rows = _rows(x, call.num_dims)
        others = None if residual is None else _rows(residual, call.num_dims)
        kernels = call.kernels
        if kernels is None:
            is_wide = residual is not None and residual.dtype == torch.float64
            kernels = _kernels_for(x, torch.float64 if is_wide else x.dtype)
        y, total = kernels.norm(
            rows, others, _vector(weight), _vector(bias), call.rule, call.out_dtype
        )
        if rows is x:
            return y, total
        return y.view(x.shape), None if total is None else total.view(x.shape)


def _forward_op(x: Tensor, residual: Any, weight: Any, bias: Any, *args: Any) -> tuple[Any, Any]:
    num_dims, *rule, out_dtype = args
    call = NormCall(num_dims, NormRule(*rule), out_dtype, out_dtype)
    return _forward(x, residual, weight, bias, call)


def _forward_fake(
    x: Tensor, residual: Tensor | None, weight: Any, bias: Any, num_dims: int, *rule: Any
) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=rule[-1])
    if residual is None:
        return y, custom_op.absent(x)
    return y, x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))


def _backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor | None,
    weight: Tensor | None,
    call: NormCall,
    needs: list[bool],
) -> tuple[Tensor | None, ...]:
    with below(BELOW):
        rows = _rows(dy, call.num_dims)
        if x is None:
            wide = torch.promote_types(dy.dtype, torch.float32)
            db = rows.sum(0, dtype=wide).to(call.sums_dtype)
            return None, None, db.view(dy.shape[-call.num_dims :])
        total = None if dtotal is None else _rows(dtotal, call.num_dims)
        x_rows, scale = _rows(x, call.num_dims), _vector(weight)
        kernels = call.kernels or _kernels_for(x, x.dtype)
        dx, dw, db = kernels.norm_grad(
            rows, total, x_rows, scale, call.rule, tuple(needs), call.sums_dtype
        )
        if rows is dy:
            return dx, dw, db
        shape = dy.shape[-call.num_dims :]
        return (
            None if dx is None else dx.view(x.shape),
            None if dw is None else dw.view(shape),
            None if db is None else db.view(shape),
        )


def _backward_op(dy: Tensor, dtotal: Any, x: Any, weight: Any, *args: Any) -> tuple[Any, ...]:
    num_dims, *rule, dtype, needs = args
    call = NormCall(num_dims, NormRule(*rule), dy.dtype, dtype)
    return _backward(dy, dtotal, x, weight, call, needs)


def _backward_fake(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor | None,
    weight: Tensor | None,
    num_dims: int,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    shape, (dtype, needs) = dy.shape[-num_dims:], options[-2:]
    return (
        x.new_empty(x.shape) if needs[0] and x is not None else custom_op.absent(dy),
        dy.new_empty(shape, dtype=dtype) if needs[1] else custom_op.absent(dy),
        dy.new_empty(shape, dtype=dtype) if needs[2] else custom_op.absent(dy),
    )


def _no_gemm(*_: Any, **__: Any) -> int:
    return 0


_norm_op = custom_op.define(
    "norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, int num_dims, str kind,"
    " float eps, float offset, str cast, ScalarType out_dtype) -> (Tensor, Tensor)",
    _forward_op,
    _forward_fake,
    _no_gemm,
)
_norm_backward_op = custom_op.define(
    "norm_backward(Tensor dy, Tensor? dtotal, Tensor? x, Tensor? weight, int num_dims, str kind,"
    " float eps, float offset, str cast, ScalarType sums_dtype, bool[] needs)"
    " -> (Tensor, Tensor, Tensor)",
    _backward_op,
    _backward_fake,
    _no_gemm,
)


# F.rms_norm takes them
COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))


class NormOptions(NamedTuple):
    """The options of a call."""

    name: str
    kind: str
    normalized_shape: Any
    eps: float | None
    offset: float = 0.0
    cast: str = "torch"
    is_module: bool = False
    names: tuple[str, ...] = ("x", "residual?", "weight?", "bias?")

    def chosen(self, override: str | None, has_weight: bool = True) -> None:
        """Refuse options that mean nothing."""
        if self.kind == "layer":
            arguments.number(self.name, "eps", self.eps, 0)
        else:
            validate.rms_options(self.name, self.eps, self.offset, self.cast, has_weight)

    def settle(
        self, around: Around, x: Any, residual: Any, weight: Any, bias: Any
    ) -> NormCall | None:
        """Refuse what the norm's twin would refuse."""
        name = self.name
        self.chosen(around.level, weight is not None)
        shape = validate.normalized_shape(name, self.normalized_shape)
        dtype = getattr(x, "dtype", None)
        if self.is_module and self.kind == "rms" and dtype in COMPLEX:
            return None
        validate.tensors(name, self.names, (x, residual, weight, bias))
        validate.norm(name, x, shape, weight, bias)
        if residual is not None:
            validate.residual(name, x, residual)
            x = x._replace(dtype=torch.promote_types(x.dtype, residual.dtype))
        if self.kind == "layer":
            validate.layer_norm_dtypes(name, x, (weight, bias), around)
        if around.twin:
            return None
        spec = NormSpec(self.kind, None, None, self.eps, self.offset, self.cast)
        rule = rule_of(spec, x.dtype)
        out_dtype = output_dtype(rule, x, weight, around.autocast)
        kernels = _kernels_for(x, x.dtype) if around.direct else None
        sums = sums_dtype(x, weight, bias)
        return NormCall(len(shape), rule, out_dtype, sums, around.direct, kernels)


class _Norm(torch.autograd.Function):
    """y = norm(x), or y, total = norm(x + residual), x + residual; keeps what it normalised."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        call: NormCall,
        phase: Phase | None,
    ) -> Any:
        needs_x, needs_residual, needs_dw, *_ = ctx.needs_input_grad
        needs_dx = needs_x or needs_residual
        phase = phase if any(ctx.needs_input_grad) else None
        reads_x, weight_read = needs_dx or needs_dw, weight if needs_dx else None
        if residual is None and phase is not None:
            phase.enter((x if reads_x else None, weight_read))
        y, total = call.normalised(x, residual, weight, bias)
        given = (x if residual is None else total) if reads_x else None, weight_read
        if phase is None:
            ctx.save_for_backward(*given)
            ctx.recall = None
        else:
            phase.save(ctx, "norm", given)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.is_free = call, phase is None
        ctx.dtypes = tuple([t if t is None else t.dtype for t in (x, residual, weight, bias)])
        if residual is None:
            return y
        if not needs_dx:
            ctx.mark_non_differentiable(total)
        return y, total

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dy: Tensor | None, dtotal: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        begun = backward.begin(ctx, dy, dtotal)
        if begun is None:
            return (None,) * 6
        needs, (x, weight), direct = begun
        wanted = [needs[0] or needs[1], needs[2], needs[3]]
        if torch.is_grad_enabled():
            dx, dw, db = _double_backward(ctx, x, weight, dy, dtotal, wanted)
        elif dy is None:
            dx, dw, db = dtotal, None, None
        else:
            call = ctx.call if ctx.call.direct == direct else ctx.call._replace(direct=direct)
            dx, dw, db = call.gradients((dy, dtotal), x, weight, wanted)
        # autograd casts them to the dtypes of what they are of
        return dx if needs[0] else None, dx if needs[1] else None, dw, db, None, None


def _double_backward(
    ctx: Any,
    x: Tensor | None,
    weight: Tensor | None,
    dy: Tensor | None,
    dtotal: Tensor | None,
    needs: list[bool],
) -> list[Tensor | None]:
    """Differentiate the twin of norm(x) beside x itself, which stands for the total."""
    num_dims, rule = ctx.call.num_dims, ctx.call.rule
    _, _, w_dtype, b_dtype = ctx.dtypes
    # what was not kept, the gradients do not depend on
    if x is None:
        assert dy is not None
        x = stand_in(dy.shape, ctx.dtypes[0], dy.device)
    shape = x.shape[-num_dims:]
    if weight is None and w_dtype is not None:
        weight = stand_in(shape, w_dtype, x.device)
    bias = None if b_dtype is None else stand_in(shape, b_dtype, x.device)
    out_dtype = x.dtype if dy is None else dy.dtype

    def twin(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        wide = x if rule.cast != "torch" else x.to(out_dtype)
        return eager(rule, wide, shape, weight, bias).to(out_dtype), x

    with torch.autocast(x.device.type, enabled=False):
        return twin_gradients(twin, (x, weight, bias), needs, (dy, dtotal))


def eager(
    rule: NormRule | NormOptions,
    x: Tensor,
    shape: Any,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Run the eager twin of a rule."""
    if rule.kind == "layer":
        return reference.layer_norm(x, shape, weight, bias, rule.eps)  # type: ignore[arg-type]  # a checked one
    return reference.rms_norm(x, shape, weight, rule.eps, offset=rule.offset, cast=rule.cast)


def apply(
    call: NormCall, phase: Phase | None, x: Tensor, residual: Tensor | None, *parameters: Any
) -> Any:
    """Run the Function on checked tensors."""
    return _Norm.apply(x, residual, *parameters, call, phase)
