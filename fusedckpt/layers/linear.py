"""Linear followed by an activation, keeping x alone: backward recomputes the pre-activation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt import reference
from fusedckpt.autograd import dispatch, levels, phases
from fusedckpt.autograd.backward import wanted_gradients
from fusedckpt.autograd.double_backward import twin_gradients
from fusedckpt.autograd.phases import Phase
from fusedckpt.autograd.versioned import Versioned
from fusedckpt.layers import constructors, norm_sharing, validate
from fusedckpt.layers.linear_ops import linear_act_backward_ops, linear_act_op

__all__ = ["Linear", "linear_act"]

LEVELS = ("inputs", "preact")


class _LinearAct(torch.autograd.Function):
    """Keeps x, and z at level preact; each tensor only where a gradient reads it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        activation: str,
        level: str,
        kernel: str | None,
        phase: Phase | None,
    ) -> Tensor:
        phase = phases.settle(ctx, phase)
        needs_dx, needs_dw, _ = ctx.needs_input_grad[:3]
        has_z = activation != "identity"
        recomputes = has_z and phase.keeps(level) == "inputs"
        given = (
            x if recomputes or needs_dw else None,
            w if recomputes or needs_dx else None,
            b if recomputes else None,
        )
        like = ((*x.shape[:-1], w.shape[0]), x.dtype) if has_z else None
        phase.enter(given, (like,))
        keep_z = has_z and phase.runs(level) == "preact"
        h, z = linear_act_op(x, w, b, activation, keep_z, kernel)
        phase.save(ctx, "linear_act", given, (z if keep_z else None,), (like,))
        ctx.set_materialize_grads(False)
        ctx.activation, ctx.kernel = activation, kernel
        ctx.w_dtype, ctx.b_dtype = w.dtype, None if b is None else b.dtype
        # gradients do not read it, only theirs do, which a compiled graph has none of
        is_unread = has_z and not recomputes and not torch.compiler.is_compiling()
        ctx.unread = Versioned(b) if is_unread else None
        return h

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        needs = wanted_gradients(ctx)[:3]
        if dy is None or not any(needs):
            return (None,) * 7
        (x, w, b), (z,) = phases.load(ctx, 3)
        if torch.is_grad_enabled():
            grads = _double_backward(ctx, x, w, b, dy, needs)
            return (*grads, None, None, None, None)
        args = (x, w, b, z, ctx.activation, needs, ctx.kernel)
        dx, dw, db = phases.run_backward(ctx, linear_act_backward_ops, (z,), dy, *args)
        return (
            dx if needs[0] else None,
            dw.to(ctx.w_dtype) if needs[1] else None,
            db.to(ctx.b_dtype) if needs[2] else None,
            None,
            None,
            None,
            None,
        )


def _double_backward(
    ctx: Any, x: Any, w: Any, b: Any, dy: Tensor, needs: list[bool]
) -> list[Tensor | None]:
    if ctx.activation != "identity" and (x is None or w is None):
        raise RuntimeError(
            "linear_act: create_graph=True needs x and weight, which save='preact' does not keep "
            "where one of them is frozen: use save='inputs'"
        )
    # what an identity did not keep, its gradients do not depend on: zeros have the same ones
    if x is None:
        x = dy.new_zeros((*dy.shape[:-1], w.shape[1] if w is not None else 0))
    if w is None:
        w = dy.new_zeros((dy.shape[-1], x.shape[-1]), dtype=ctx.w_dtype)
    if ctx.unread is not None:
        (b,) = ctx.unread.read()
    elif b is None and ctx.b_dtype is not None:
        b = dy.new_zeros(dy.shape[-1:], dtype=ctx.b_dtype)

    def twin(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        b = None if b is None else b.to(x.dtype)
        return reference.linear_act(x, w.to(x.dtype), b, ctx.activation)

    with torch.autocast(dy.device.type, enabled=False):
        return twin_gradients(twin, (x, w, b), needs, (dy,))


@dispatch.recorded_as(reference.linear_act)
def linear_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = "gelu",
    *,
    save: str | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Return act(F.linear(x, weight, bias)), keeping only x for backward.

    Args:
        x: [..., in_features], float32, bfloat16, float16 or float64.
        weight: [out_features, in_features], of x's dtype; under autocast of any but float64.
        bias: [out_features] or None.
        activation: identity (or None), relu, relu2, leaky_relu, gelu (erf), gelu_tanh, quick_gelu,
            silu, sigmoid, tanh, softplus, mish, or their names in torch and transformers.
        save: "inputs" (the default) keeps x, in_features elements per token, and recomputes the
            pre-activation in backward: one GEMM more. "preact" keeps the pre-activation too,
            out_features elements per token, and recomputes no GEMM.
        kernel: "fused" (one Triton GEMM with the activation in its epilogue) or "split" (the
            vendor's GEMM, then an elementwise kernel in place); by default chosen by shape.

    Returns:
        [..., out_features], in the dtype that F.linear would give.

    Raises:
        ValueError: shapes, devices, activation, level or kernel do not fit, or no Triton runs here
            and `kernel` is "fused".
        TypeError: not dense floating-point tensors (a DTensor or a nested tensor is none), of
            dtypes that F.linear refuses, or an argument of another type.

    Tensors of other classes with ops of their own, and those of inference mode where gradients are
    wanted, go through the eager equivalent.
    """
    level = levels.resolve("linear_act", save, "inputs", LEVELS)
    return _linear_act("linear_act", x, weight, bias, activation, level, kernel)


def _linear_act(
    name: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    level: str,
    kernel: str | None = None,
) -> Tensor:
    activation = validate.activation(name, activation)
    dtype = validate.linear(name, x, weight, bias, kernel)
    if dtype is None or dispatch.takes_twin():
        return reference.linear_act(x, weight, bias, activation)
    level = level if torch.is_grad_enabled() else "inputs"
    args = (weight, bias, activation, level, kernel, phases.current())
    return norm_sharing.apply(_LinearAct, x, x.to(dtype), *args)


class Linear(nn.Linear):
    """nn.Linear followed by an activation, keeping only its input for backward.

        y = act(F.linear(x, weight, bias))

    Constructor, parameters and state_dict are nn.Linear's; `activation` and `save` are those of
    `functional.linear_act`, with no activation by default.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
        save: str = "inputs",
    ):
        activation = validate.activation("Linear", activation)
        levels.check("Linear", save, LEVELS)
        sizes = constructors.linear("Linear", in_features, out_features, bias, device, dtype)
        super().__init__(*sizes, device, dtype)
        self.activation = activation
        self.save = save

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        if dispatch.is_recorded(input):
            return reference.linear_act(input, self.weight, self.bias, self.activation)
        level = levels.resolve("Linear", None, self.save, LEVELS)
        weight, bias = self.weight, self.bias
        if not dispatch.are_plain(input, weight, bias):
            activation = validate.activation("Linear", self.activation)
            return reference.linear_act(input, weight, bias, activation)
        return _linear_act("Linear", input, weight, bias, self.activation, level)

    def extra_repr(self) -> str:
        """Describe the layer as nn.Linear does, with the activation and level after it."""
        return f"{super().extra_repr()}, activation={self.activation}, save={self.save}"
