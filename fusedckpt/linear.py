"""Linear followed by an activation, keeping x alone: backward recomputes the pre-activation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt import _check, _dispatch, _ops, levels, reference
from fusedckpt._autograd import twin_gradients
from fusedckpt.kernels import linear as kernels
from fusedckpt.kernels.runtime import arch, as_matrix
from fusedckpt.kernels.tiles import gains_by_fusion

__all__ = ["Linear", "linear_act"]

LEVELS = ("inputs", "preact")


def _plan(x: Tensor, kernel: str | None, n: int, k: int) -> str:
    """Return which launcher runs for tensors like x: fused, split or aten."""
    if 0 in (x.numel(), n, k) or _dispatch.path_of(x.device, x.dtype) == "aten":
        return "aten"
    if kernel is None:
        return "fused" if gains_by_fusion(arch(), x.element_size(), k) else "split"
    return kernel


def _forward(
    x: Tensor, w: Tensor, b: Tensor | None, activation: str, keep_z: bool, kernel: str | None
) -> tuple[Tensor, Tensor]:
    w, b = w.to(x.dtype), None if b is None else b.to(x.dtype)
    plan = _plan(x, kernel, *w.shape)
    h, z = kernels.linear_act(as_matrix(x), w, b, activation, keep_z, plan)
    shape = (*x.shape[:-1], w.shape[0])
    return h.view(shape), _ops.absent(x) if z is None else z.view(shape)


def _forward_fake(
    x: Tensor, w: Tensor, b: Tensor | None, activation: str, keep_z: bool, kernel: str | None
) -> tuple[Tensor, Tensor]:
    h = x.new_empty((*x.shape[:-1], w.shape[0]))
    return h, torch.empty_like(h) if keep_z else _ops.absent(x)


def _flops(x: Any, w: Any, *_: Any, out_shape: Any = None) -> int:
    return 2 * math.prod(x) * w[0]


_op = _ops.define(
    "linear_act(Tensor x, Tensor w, Tensor? b, str activation, bool keep_z, str? kernel)"
    " -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    _flops,
)


def _backward(
    dy: Tensor,
    x: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    z: Tensor | None,
    activation: str,
    needs: list[bool],
    kernel: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    x2, z2 = (None if t is None else as_matrix(t) for t in (x, z))
    w, b = (None if t is None else t.to(dy.dtype) for t in (w, b))
    plan = _plan(dy, kernel, *(w.shape if w is not None else (1, 1)))
    dz, db = kernels.linear_act_dz(as_matrix(dy), x2, w, b, z2, activation, needs[2], plan)
    dx = dw = None
    if needs[0]:
        assert w is not None
        dx = torch.mm(dz, w).view(*dy.shape[:-1], w.shape[1])
    if needs[1]:
        assert x2 is not None
        dw = torch.mm(dz.t(), x2)
    return tuple(_ops.absent(dy) if grad is None else grad for grad in (dx, dw, db))  # type: ignore[return-value]  # three by construction


def _backward_fake(
    dy: Tensor,
    x: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    z: Tensor | None,
    activation: str,
    needs: list[bool],
    kernel: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    n = dy.shape[-1]
    wide = torch.promote_types(dy.dtype, torch.float32)
    absent = _ops.absent(dy)
    return (
        dy.new_empty((*dy.shape[:-1], w.shape[1])) if needs[0] and w is not None else absent,
        dy.new_empty((n, x.shape[-1])) if needs[1] and x is not None else absent,
        dy.new_empty((n,), dtype=wide) if needs[2] else absent,
    )


def _backward_flops(
    dy: Any, x: Any, w: Any, b: Any, z: Any, activation: str, needs: list[bool], *_: Any, **__: Any
) -> int:
    recomputes = z is None and activation != "identity"
    k = x[-1] if x is not None else w[1] if w is not None else 0
    return 2 * math.prod(dy) * k * (recomputes + needs[0] + needs[1])


_backward_op = _ops.define(
    "linear_act_backward(Tensor dy, Tensor? x, Tensor? w, Tensor? b, Tensor? z, str activation,"
    " bool[] needs, str? kernel) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    _backward_flops,
)


class _LinearAct(torch.autograd.Function):
    """Keeps x, and z at level preact; each tensor only where a gradient reads it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        activation: str,
        keep_z: bool,
        kernel: str | None,
    ) -> Tensor:
        h, z = _op(x, w, b, activation, keep_z, kernel)
        needs_dx, needs_dw, _ = ctx.needs_input_grad[:3]
        # b is read by recomputation and, at preact, by double backward
        has_z = activation != "identity"
        recomputes = has_z and not keep_z
        ctx.save_for_backward(
            x if recomputes or needs_dw else None,
            w if recomputes or needs_dx else None,
            b if has_z else None,
            z if keep_z else None,
        )
        ctx.activation, ctx.kernel = activation, kernel
        ctx.w_dtype, ctx.b_dtype = w.dtype, None if b is None else b.dtype
        return h

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        needs = list(ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():
            return (*_double_backward(ctx, dy, needs), None, None, None)
        x, w, b, z = ctx.saved_tensors
        dx, dw, db = _backward_op(dy, x, w, b, z, ctx.activation, needs, ctx.kernel)
        return (
            dx if needs[0] else None,
            dw.to(ctx.w_dtype) if needs[1] else None,
            db.to(ctx.b_dtype) if needs[2] else None,
            None,
            None,
            None,
        )


def _double_backward(ctx: Any, dy: Tensor, needs: list[bool]) -> list[Tensor | None]:
    x, w, b, z = ctx.saved_tensors
    if z is not None and (x is None or w is None):
        raise RuntimeError(
            "linear_act: create_graph=True needs x and weight, which save='preact' does not keep "
            "where one of them is frozen: use save='inputs'"
        )
    # what an identity did not keep, its gradients do not depend on: zeros have the same ones
    if x is None:
        x = dy.new_zeros((*dy.shape[:-1], w.shape[1] if w is not None else 0))
    if w is None:
        w = dy.new_zeros((dy.shape[-1], x.shape[-1]), dtype=ctx.w_dtype)
    if b is None and ctx.b_dtype is not None:
        b = dy.new_zeros(dy.shape[-1:], dtype=ctx.b_dtype)

    def twin(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        b = None if b is None else b.to(x.dtype)
        return reference.linear_act(x, w.to(x.dtype), b, ctx.activation)

    with torch.autocast(dy.device.type, enabled=False):
        return twin_gradients(twin, (x, w, b), needs, (dy,))


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
        TypeError: not dense floating-point tensors, or of different dtypes.
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
    activation = _check.activation(name, activation)
    _check.linear(name, x, weight, bias)
    dtype = _dispatch.compute_dtype(x.device, x.dtype)
    autocast = _dispatch.autocasts(x.device)
    _check.same_dtype(name, dtype, autocast, weight=weight, bias=bias)
    _check.kernel(name, kernel, _dispatch.path_of(x.device, dtype))
    if _dispatch.takes_twin():
        return reference.linear_act(x, weight, bias, activation)
    keep_z = level == "preact" and activation != "identity" and torch.is_grad_enabled()
    return _LinearAct.apply(x.to(dtype), weight, bias, activation, keep_z, kernel)


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
        activation = _check.activation("Linear", activation)
        _check.level("Linear", save, LEVELS)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation
        self.save = save

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        level = levels.resolve("Linear", None, self.save, LEVELS)
        return _linear_act("Linear", input, self.weight, self.bias, self.activation, level)

    def extra_repr(self) -> str:
        """Describe the layer as nn.Linear does, with the activation and level after it."""
        return f"{super().extra_repr()}, activation={self.activation}, save={self.save}"
