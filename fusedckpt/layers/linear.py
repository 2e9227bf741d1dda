"""Linear followed by an activation, keeping x alone: backward recomputes the pre-activation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedckpt import reference
from fusedckpt.autograd import backward, dispatch, donation, levels
from fusedckpt.autograd.dispatch import Around
from fusedckpt.autograd.double_backward import twin_gradients
from fusedckpt.autograd.lora import LoRA
from fusedckpt.autograd.phases import Phase
from fusedckpt.autograd.versions import Versioned
from fusedckpt.layers import adapted, constructors, linear_op, norm_sharing, validate
from fusedckpt.layers.adapted_call import AdaptedCall
from fusedckpt.layers.linear_op import Call

__all__ = ["Linear", "linear_act"]

LEVELS = ("inputs", "preact")


class _Options(NamedTuple):
    name: str
    activation: str | None
    save: str | None
    default: str = "inputs"
    kernel: str | None = None
    is_module: bool = False
    names: tuple[str, ...] = ("x", "weight", "bias?")

    def chosen(self, override: str | None) -> tuple[str, str]:
        """Return activation and save level; refuse those and kernels that there are not."""
        level = levels.chosen(self.name, (self.save, override, self.default), LEVELS)
        activation = validate.activation(self.name, self.activation)
        validate.kernel(self.name, self.kernel, "fused")
        return activation, level

    def settle(self, around: Around, x: Any, weight: Any, bias: Any) -> Call | None:
        """Refuse what F.linear would refuse."""
        name = self.name
        activation, level = self.chosen(around.level)
        validate.tensors(name, self.names, (x, weight, bias))
        validate.linear(name, x.shape, (weight, bias))
        dtype = validate.multiplied(name, around, x.dtype, {"weight": weight, "bias": bias})
        validate.runs(name, self.kernel, "fused", x, dtype)
        if around.twin:
            return None
        read, level = x._replace(dtype=dtype), level if around.grad else "inputs"
        plan = (
            linear_op.plan_of(read, activation, self.kernel, weight.shape)
            if around.direct
            else None
        )
        dtypes = dtype, weight.dtype, None if bias is None else bias.dtype
        return Call(activation, level, self.kernel, plan, around.direct, dtypes)

    def adapted(self, around: Around, x: Any, _: Any, linears: Any) -> AdaptedCall | None:
        """Settle a call with adapters by what these are beside."""
        # what is direct has a kernel chosen for it, which adapters have no use for
        call = self.settle(around._replace(direct=False), x, *linears[0])
        if call is None:
            return None
        activation = None if call.activation == "identity" else call.activation
        return AdaptedCall(call.dtypes[0], activation=activation, level=call.level)


class _LinearAct(torch.autograd.Function):
    """Keeps x, and z at level preact; each tensor only where a gradient reads it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, call: Call, phase: Phase | None
    ) -> Tensor:
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        has_z, keeps, runs = call.activation != "identity", call.level, call.level
        phase = phase if any(ctx.needs_input_grad) else None
        if phase is not None:
            keeps, runs = phase.levels or (keeps, runs)
        recomputes = has_z and keeps == "inputs"
        given = (
            x if recomputes or needs_dw else None,
            w if recomputes or needs_dx else None,
            b if recomputes else None,
        )
        like = ((*x.shape[:-1], w.shape[0]), x.dtype) if has_z and phase is not None else None
        if phase is not None:
            phase.enter(given, (like,))
        keep_z = has_z and runs == "preact"
        args = (x, w, b, call.activation, keep_z, call.kernel)
        h, z = (
            linear_op.forward(*args, call.plan)
            if call.direct
            else linear_op.FORWARD.overload(*args)
        )
        z = z if keep_z else None
        if phase is None:
            ctx.save_for_backward(*given, z)
            ctx.recall, ctx.owns_extras = None, True
        else:
            phase.save(ctx, "linear_act", given, (z,), (like,))
        ctx.set_materialize_grads(False)
        ctx.call = call
        # gradients do not read it, only theirs do, which a compiled graph has none of
        is_unread = has_z and not recomputes and not torch.compiler.is_compiling()
        ctx.unread = Versioned(b) if is_unread else None
        return h

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        begun = backward.begin(ctx, dy)
        if begun is None:
            return (None,) * 5
        assert dy is not None
        (*needs, _, _), (x, w, b, z), direct = begun
        call: Call = ctx.call
        if torch.is_grad_enabled():
            return (*_double_backward(ctx, x, w, b, dy, needs), None, None)
        args = (dy, x, w, b, z, call.activation, needs, call.kernel)
        if z is None and direct:
            found: Any = linear_op.backward(*args, call)
        else:
            ops, settled = linear_op.BACKWARD, call if direct else None
            found = donation.run(ctx, ops, (z,), args, settled)
        triples = zip(found, needs, call.dtypes, strict=True)
        grads = [grad.to(dtype) if need else None for grad, need, dtype in triples]
        return (*grads, None, None)


def _double_backward(
    ctx: Any, x: Any, w: Any, b: Any, dy: Any, needs: list[bool]
) -> list[Tensor | None]:
    call: Call = ctx.call
    _, w_dtype, b_dtype = call.dtypes
    if call.activation != "identity" and (x is None or w is None):
        raise RuntimeError(
            "linear_act: create_graph=True needs x and weight, which save='preact' does not keep "
            "where one of them is frozen: use save='inputs'"
        )
    # what an identity did not keep, its gradients do not depend on: zeros have the same ones
    if x is None:
        x = dy.new_zeros((*dy.shape[:-1], w.shape[1] if w is not None else 0))
    if w is None:
        w = dy.new_zeros((dy.shape[-1], x.shape[-1]), dtype=w_dtype)
    if ctx.unread is not None:
        (b,) = ctx.unread.read()
    elif b is None and b_dtype is not None:
        b = dy.new_zeros(dy.shape[-1:], dtype=b_dtype)

    def twin(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        b = None if b is None else b.to(x.dtype)
        return reference.linear_act(x, w.to(x.dtype), b, call.activation)

    with torch.autocast(dy.device.type, enabled=False):
        return twin_gradients(twin, (x, w, b), needs, (dy,))


def linear_act(
    x: Tensor,
    weight: Tensor | LoRA,
    bias: Tensor | None = None,
    activation: str | None = "gelu",
    *,
    save: str | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Return act(F.linear(x, weight, bias)), keeping only x for backward.

    Args:
        x: [..., in_features], float32, bfloat16, float16 or float64.
        weight: [out_features, in_features], of x's dtype; under autocast of any but float64. Or a
            `LoRA` record, or a weight that dequantises, as in `mlp`.
        bias: [out_features] or None.
        activation: identity (or None), relu, relu2, leaky_relu, gelu (erf), gelu_tanh, quick_gelu,
            silu, sigmoid, tanh, softplus, mish, or their names in torch and transformers.
        save: "inputs" (the default) keeps x, in_features elements per token, and recomputes the
            pre-activation in backward: one GEMM more. "preact" keeps the pre-activation too,
            out_features elements per token, and recomputes no GEMM.
        kernel: "fused" (one Triton GEMM with the activation in its epilogue) or "split" (the
            vendor's GEMM, then an elementwise kernel in place); by default split, or as measured.

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
    options = _Options("linear_act", activation, save, kernel=kernel)
    return _run(options, x, weight, bias)


def _run(options: _Options, x: Tensor, weight: Tensor | LoRA, bias: Tensor | None) -> Tensor:
    call, phase = dispatch.settled(options, x, weight, bias)
    if call is None:
        y = adapted.run(options, ("weight",), x, (None, None), [(weight, bias)])
        return reference.linear_act(x, weight, bias, options.activation) if y is None else y
    read = x.to(call.dtypes[0])
    if phase is None and not torch.compiler.is_compiling() and hasattr(x.grad_fn, "source"):
        return norm_sharing.apply(_LinearAct, x, read, weight, bias, call, phase)
    return _LinearAct.apply(read, weight, bias, call, phase)


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
        options = _Options("Linear", self.activation, None, self.save, is_module=True)
        return _run(options, input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Describe the layer as nn.Linear does, with the activation and level after it."""
        return f"{super().extra_repr()}, activation={self.activation}, save={self.save}"
