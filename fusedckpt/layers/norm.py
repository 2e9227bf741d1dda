"""RMSNorm and LayerNorm that keep x alone: backward recomputes mean and rstd from it.

The residual-add forms keep the new residual, which is an output of theirs and kept anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt import reference
from fusedckpt.autograd import arguments, dispatch, fallbacks, phases
from fusedckpt.autograd.backward import wanted_gradients
from fusedckpt.autograd.double_backward import twin_gradients
from fusedckpt.autograd.norm_spec import NormSpec, output_dtype, rule_of
from fusedckpt.autograd.phases import Phase
from fusedckpt.kernels.norm import NormRule
from fusedckpt.layers import constructors, norm_sharing, validate
from fusedckpt.layers.norm_ops import norm_backward_op, norm_op

__all__ = ["LayerNorm", "RMSNorm", "add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]

Shape = int | Sequence[int]


class _Norm(torch.autograd.Function):
    """y = norm(x), or y, total = norm(x + residual), x + residual; keeps what it normalised."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        num_dims: int,
        rule: NormRule,
        out_dtype: torch.dtype,
        phase: Phase | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        phase = phases.settle(ctx, phase)
        needs_dx = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        needs_dw = ctx.needs_input_grad[2]
        reads_x, weight_read = needs_dx or needs_dw, weight if needs_dx else None
        if residual is None:
            phase.enter((x if reads_x else None, weight_read))
        y, total = norm_op(x, residual, weight, bias, num_dims, *rule, out_dtype)
        normalised = x if residual is None else total
        phase.save(ctx, "norm", (normalised if reads_x else None, weight_read))
        ctx.set_materialize_grads(False)
        if residual is not None and not needs_dx:
            ctx.mark_non_differentiable(total)
        ctx.num_dims, ctx.rule = num_dims, rule
        ctx.dtypes = tuple(t if t is None else t.dtype for t in (x, residual, weight, bias))
        return y if residual is None else (y, total)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dy: Tensor | None, dtotal: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        needs = wanted_gradients(ctx)[:4]
        if not any(needs):
            return (None,) * 8
        (x, weight), _ = phases.load(ctx, 2)
        wanted = [needs[0] or needs[1], needs[2], needs[3]]
        if torch.is_grad_enabled():
            dx, dw, db = _double_backward(ctx, x, weight, dy, dtotal, wanted)
        elif dy is None:
            dx, dw, db = dtotal, None, None
        else:
            dx, dw, db = norm_backward_op(dy, dtotal, x, weight, ctx.num_dims, *ctx.rule, wanted)
        grads = (
            None if grad is None or not need else grad.to(dtype)
            for grad, need, dtype in zip((dx, dx, dw, db), needs, ctx.dtypes, strict=True)
        )
        return (*grads, None, None, None, None)


def _double_backward(
    ctx: Any,
    x: Tensor | None,
    weight: Tensor | None,
    dy: Tensor | None,
    dtotal: Tensor | None,
    needs: list[bool],
) -> list[Tensor | None]:
    """Differentiate the twin of norm(x) beside x itself, which stands for the total."""
    num_dims, rule = ctx.num_dims, ctx.rule
    _, _, w_dtype, b_dtype = ctx.dtypes
    # what was not kept, the gradients do not depend on: zeros have the same ones
    if x is None:
        assert dy is not None
        x = torch.zeros_like(dy, dtype=ctx.dtypes[0])
    shape = x.shape[-num_dims:]
    if weight is None and w_dtype is not None:
        weight = x.new_zeros(shape, dtype=w_dtype)
    bias = None if b_dtype is None else x.new_zeros(shape, dtype=b_dtype)
    out_dtype = x.dtype if dy is None else dy.dtype

    def twin(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        wide = x if rule.cast != "torch" else x.to(out_dtype)
        return _eager(rule, wide, shape, weight, bias).to(out_dtype), x

    with torch.autocast(x.device.type, enabled=False):
        return twin_gradients(twin, (x, weight, bias), needs, (dy, dtotal))


def _eager(
    rule: NormRule | NormSpec,
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Run the eager twin of a rule."""
    if rule.kind == "layer":
        return reference.layer_norm(x, shape, weight, bias, rule.eps)  # type: ignore[arg-type]  # a checked one
    return reference.rms_norm(x, shape, weight, rule.eps, offset=rule.offset, cast=rule.cast)


def _norm(
    name: str, x: Tensor, residual: Tensor | None, normalized_shape: Shape, spec: NormSpec
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the Function for a record whose options are checked."""
    _, weight, bias, *_ = spec
    shape = validate.normalized_shape(name, normalized_shape)
    dtype = validate.norm(name, x, shape, spec, residual)
    if dtype is None or dispatch.takes_twin():
        total = x if residual is None else x + residual
        y = _eager(spec, total, shape, weight, bias)
        return y if residual is None else (y, total)
    rule = rule_of(spec, dtype)
    out_dtype = output_dtype(rule, dtype, weight, x.device)
    phase = phases.current()
    return _Norm.apply(x, residual, weight, bias, len(shape), rule, out_dtype, phase)


@dispatch.recorded_as(reference.rms_norm)
def rms_norm(
    x: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    cast: str = "torch",
) -> Tensor:
    """Return F.rms_norm(x, normalized_shape, weight + offset, eps), keeping only x for backward.

    Args:
        x: [..., *normalized_shape], float32, bfloat16, float16 or float64; statistics are taken in
            float32 (float64 for float64).
        normalized_shape: sizes of the last dimensions, which are normalised together.
        weight: normalized_shape, of any floating dtype, or None.
        eps: added to the mean square; None means the machine epsilon of the statistics' dtype.
        offset: added to the weight in float32; Gemma stores w and scales by 1 + w.
        cast: where half precision is rounded. "torch" and "gemma" round once, at the end. "llama"
            rounds the normalised x before the weight, and returns the promoted dtype.

    Returns:
        The shape and dtype of x; under GPU autocast as F.rms_norm has it; see `cast`.

    Raises:
        ValueError: shapes, devices or options do not fit.
        TypeError: not dense floating-point tensors, or an argument of another type.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.
    """
    validate.rms_options("rms_norm", eps, offset, cast, has_weight=weight is not None)
    spec = NormSpec("rms", weight, None, eps, offset, cast)
    return _norm("rms_norm", x, None, normalized_shape, spec)  # type: ignore[return-value]


@dispatch.recorded_as(reference.layer_norm)
def layer_norm(
    x: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Return F.layer_norm(x, normalized_shape, weight, bias, eps), keeping only x for backward.

    Arguments, result and errors as `rms_norm` has them; bias is normalized_shape or None, and
    dtypes that F.layer_norm refuses on x's device are refused.

    Source: Ba, Kiros and Hinton, "Layer Normalization", arXiv 1607.06450.
    """
    arguments.number("layer_norm", "eps", eps, 0)
    spec = NormSpec("layer", weight, bias, eps)
    return _norm("layer_norm", x, None, normalized_shape, spec)  # type: ignore[return-value]


@dispatch.recorded_as(reference.add_rms_norm)
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    cast: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Return rms_norm(x + residual, ...) and x + residual in one pass.

    Keeps only x + residual, the second output. x and residual have one shape; dtypes promote as
    x + residual does. Other arguments and errors as in `rms_norm`.
    """
    validate.rms_options("add_rms_norm", eps, offset, cast, has_weight=weight is not None)
    validate.tensor("add_rms_norm", "residual", residual)
    spec = NormSpec("rms", weight, None, eps, offset, cast)
    return _norm("add_rms_norm", x, residual, normalized_shape, spec)  # type: ignore[return-value]


@dispatch.recorded_as(reference.add_layer_norm)
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Return layer_norm(x + residual, ...) and x + residual in one pass.

    Keeps only x + residual, the second output. x and residual have one shape; dtypes promote as
    x + residual does. Other arguments and errors as in `layer_norm`.
    """
    arguments.number("add_layer_norm", "eps", eps, 0)
    validate.tensor("add_layer_norm", "residual", residual)
    spec = NormSpec("layer", weight, bias, eps)
    return _norm("add_layer_norm", x, residual, normalized_shape, spec)  # type: ignore[return-value]


# F.rms_norm takes them
_COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm keeping only its input for backward.

    Constructor, parameters and state_dict are nn.RMSNorm's; `offset` and `cast` are those of
    `functional.rms_norm`. The weight starts at 1 - offset, so that the scale starts at one.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        offset: float = 0.0,
        cast: str = "torch",
    ):
        affine = arguments.flag("RMSNorm", "elementwise_affine", elementwise_affine)
        validate.rms_options("RMSNorm", eps, offset, cast, has_weight=affine)
        constructors.factory("RMSNorm", device, dtype)
        shape = validate.normalized_shape("RMSNorm", normalized_shape)
        self.offset = offset
        super().__init__(shape, eps, affine, device, dtype)  # type: ignore[arg-type]
        self.cast = cast

    def reset_parameters(self) -> None:
        """Set the scale, weight + offset, to one."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., *normalized_shape]."""
        # once: a parametrization computes it
        weight = self.weight
        spec = NormSpec("rms", weight, None, self.eps, self.offset, self.cast)
        if not dispatch.are_plain(x, weight) or x.dtype in _COMPLEX:
            fallbacks.note(self, fallbacks.unplain(x, weight=weight))
            return _eager(spec, x, self.normalized_shape, weight, None)
        y = rms_norm(x, self.normalized_shape, weight, self.eps, offset=self.offset, cast=self.cast)
        return norm_sharing.remember(self, y, spec)

    def _get_name(self) -> str:
        return f"fusedckpt.{super()._get_name()}"

    def extra_repr(self) -> str:
        """Describe the layer as nn.RMSNorm does, with what differs from it."""
        extra = f", offset={self.offset}" if self.offset else ""
        return (
            super().extra_repr() + extra + (f", cast={self.cast}" if self.cast != "torch" else "")
        )


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm keeping only its input for backward; constructor and state_dict are its own."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        shape = validate.normalized_shape("LayerNorm", normalized_shape)
        arguments.number("LayerNorm", "eps", eps, 0)
        affine = arguments.flag("LayerNorm", "elementwise_affine", elementwise_affine)
        bias = arguments.flag("LayerNorm", "bias", bias)
        constructors.factory("LayerNorm", device, dtype)
        super().__init__(shape, eps, affine, bias, device, dtype)  # type: ignore[arg-type]

    def forward(self, input: Tensor) -> Tensor:
        """Normalise [..., *normalized_shape]."""
        # once: a parametrization computes them
        weight, bias = self.weight, self.bias
        if not dispatch.are_plain(input, weight, bias):
            fallbacks.note(self, fallbacks.unplain(input, weight=weight, bias=bias))
            return torch.nn.functional.layer_norm(
                input, self.normalized_shape, weight, bias, self.eps
            )
        y = layer_norm(input, self.normalized_shape, weight, bias, self.eps)
        return norm_sharing.remember(self, y, NormSpec("layer", weight, bias, self.eps))

    def _get_name(self) -> str:
        return f"fusedckpt.{super()._get_name()}"
