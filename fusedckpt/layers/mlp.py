"""MLP and gated MLP blocks that keep their input alone, with their norm and residual.

What a level keeps and costs, per token, D = d_model, F = d_ff, in elements and GEMM FLOPs:

    level      MLP kept   gated MLP kept   backward recomputes
    inputs     D          D                the norm and the first GEMMs: 2 D F, gated 4 D F
    gate       -          D + F            the norm and the up GEMM: 2 D F
    preact     D + F      D + 2 F          the norm, nothing else but elementwise work

The last GEMM is never recomputed, and a level keeps only what the wanted gradients read.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt import reference
from fusedckpt.autograd import dispatch, levels, phases
from fusedckpt.autograd.backward import wanted_gradients
from fusedckpt.autograd.double_backward import twin_gradients
from fusedckpt.autograd.norm_spec import NormSpec, rule_of
from fusedckpt.autograd.versioned import Versioned
from fusedckpt.kernels.mlp import Needs, Weights
from fusedckpt.layers import norm_sharing, validate
from fusedckpt.layers.mlp_ops import Options, mlp_backward_ops, mlp_op

__all__ = ["gated_mlp", "mlp"]

MLP_LEVELS = ("inputs", "preact")
GATED_LEVELS = ("inputs", "gate", "preact")


class _MLP(torch.autograd.Function):
    """Keeps x, and gate and up as the level has it; each only where a gradient reads it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *args: Any) -> Tensor:
        tensors, options, (level, phase) = args[:8], Options(*args[8:-2]), args[-2:]
        needs = Needs(*ctx.needs_input_grad[:9])
        phase = phases.settle(ctx, phase if needs.hidden else None)
        level = level if needs.hidden else "inputs"
        given = _read(needs, options, phase.keeps(level), x, Weights(*tensors))
        gated = tensors[4] is not None
        like = (*x.shape[:-1], tensors[2].shape[0]), options.dtype
        likes = (like, like if gated else None)
        phase.enter(given, likes)
        runs = phase.runs(level)
        y, gate, up = mlp_op(x, *tensors, *options, runs)
        extras = (
            gate if runs != "inputs" else None,
            up if runs == "preact" and gated else None,
        )
        phase.save(ctx, "mlp", given, extras, likes)
        ctx.set_materialize_grads(False)
        ctx.options = options
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (x, *tensors))
        if not torch.compiler.is_compiling():
            # gradients do not read them, only theirs do; of the last bias, not even theirs
            pairs = zip(given[1:-1], tensors[:-1], strict=True)
            ctx.unread = Versioned(*(t if kept is None else None for kept, t in pairs))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rest = (None,) * (len(ctx.options) + 2)
        needs = Needs(*wanted_gradients(ctx)[:9])
        if dy is None or not any(needs):
            return (None,) * 9 + rest
        (x, *tensors), (gate, up) = phases.load(ctx, 9)
        if torch.is_grad_enabled():
            return (*_double_backward(ctx, x, tensors, dy, needs), *rest)
        args = (gate, up, x, *tensors, *ctx.options, list(needs))
        found = phases.run_backward(ctx, mlp_backward_ops, (gate, up), dy, *args)
        grads = (
            grad.to(dtype) if need else None
            for grad, need, dtype in zip(found, needs, ctx.dtypes, strict=True)
        )
        return (*grads, *rest)


def _read(
    needs: Needs, options: Options, keeps: str, x: Tensor, w: Weights
) -> tuple[Tensor | None, ...]:
    """Return x and the weights, None for what no gradient reads where a level's extras are kept."""
    reads_n = needs.hidden and (keeps != "preact" or needs.gate or needs.up)
    reads_x = reads_n or (options.rule is not None and needs.dn)
    return (
        x if reads_x else None,
        *w._replace(
            norm=w.norm if reads_x else None,
            norm_bias=w.norm_bias if reads_n else None,
            gate_bias=w.gate_bias if needs.hidden and keeps == "inputs" else None,
            up_bias=w.up_bias if needs.hidden and keeps != "preact" else None,
            down_bias=None,
        ),
    )


def _double_backward(
    ctx: Any, x: Tensor | None, kept: list[Tensor | None], dy: Tensor, needs: Needs
) -> list[Tensor | None]:
    options = ctx.options
    unread = (*ctx.unread.read(), None)
    tensors = [t if t is not None else other for t, other in zip(kept, unread, strict=True)]
    if ctx.dtypes[-1] is not None:
        # no gradient depends on the last bias
        tensors[-1] = dy.new_zeros(dy.shape[-1:], dtype=ctx.dtypes[-1])
    if x is None:
        if needs.hidden:
            raise RuntimeError(
                "mlp: create_graph=True needs x, which save='preact' does not keep where the first "
                "weights are frozen: use save='inputs'"
            )
        # the last bias's gradient does not depend on x
        x = dy.new_zeros((*dy.shape[:-1], tensors[2].shape[1]))  # type: ignore[union-attr]  # gate is there

    with torch.autocast(dy.device.type, enabled=False):
        return twin_gradients(partial(_twin, options), (x, *tensors), needs, (dy,))


def _twin(options: Options, x: Tensor, *tensors: Any) -> Tensor:
    """Return what the Function computes, from torch's own differentiable operations."""
    n, w, rule = x, Weights(*tensors), options.rule
    if rule is not None:
        spec = NormSpec(rule.kind, w.norm, w.norm_bias, rule.eps, rule.offset, rule.cast)
        n = reference.apply_norm(x, spec)
    n, gate, gate_bias, up, up_bias, down, down_bias = (
        t if t is None else t.to(options.dtype) for t in (n, *w[2:])
    )
    if up is None:
        y = reference.mlp(n, gate, gate_bias, down, down_bias, options.activation)
    else:
        biases = {"gate_bias": gate_bias, "up_bias": up_bias, "down_bias": down_bias}
        y = reference.gated_mlp(n, gate, up, down, options.activation, **biases)
    return x + y if options.residual else y


class _Call(NamedTuple):
    """The options that mlp and gated_mlp share."""

    activation: str
    norm: NormSpec | None
    residual: bool
    level: str
    chunks: int | None
    kernel: str | None


def _mlp(call: _Call, x: Tensor, dtype: torch.dtype, linears: validate.Linears) -> Tensor:
    """Run the Function over checked (weight, bias) pairs: gate, up (or no such), down."""
    rule = None if call.norm is None else rule_of(call.norm, x.dtype)
    # a norm casts as it writes
    read = x if rule is not None else x.to(dtype)
    adds = call.residual and x.dtype == dtype
    constants = rule or ("none", 0.0, 0.0, "torch")
    options = Options(*constants, call.activation, adds, dtype, call.chunks, call.kernel)
    norm_weights = (None, None) if call.norm is None else (call.norm.weight, call.norm.bias)
    (gate, *up, down) = linears.values()
    tensors = (*norm_weights, *gate, *(up[0] if up else (None, None)), *down)
    level = call.level if torch.is_grad_enabled() else "inputs"
    args = (*tensors, *options, level, phases.current())
    y = norm_sharing.apply(_MLP, x, read, *args) if rule is None else _MLP.apply(read, *args)
    return x + y if call.residual and not adds else y


@dispatch.recorded_as(reference.mlp)
def mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    activation: str = "gelu",
    *,
    norm: NormSpec | None = None,
    residual: bool = False,
    save: str | None = None,
    chunks: int | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Return F.linear(act(F.linear(norm(x), fc1)), fc2), added to x if residual; keeps only x.

    Args:
        x: [..., D], float32, bfloat16, float16 or float64.
        fc1_weight, fc1_bias: [F, D], and [F] or None, of x's dtype; under autocast of any but
            float64.
        fc2_weight, fc2_bias: [D_out, F], and [D_out] or None.
        activation: as in `linear_act`.
        norm: a NormSpec over D applied before fc1, or None; it adds nothing to what is kept.
        residual: add x to the result; D_out must be D.
        save: "inputs" (the default) or "preact", see the table at the top of this module.
        chunks: cut the tokens into so many chunks, forward and backward. That divides the F-wide
            temporaries, in backward 4 F bytes per token in half precision (gated 6 F), and weight
            gradients accumulate in float32, 4 bytes per weight. By default one, unless the
            temporaries pass 512 MiB and cutting them saves more than the accumulators take.
        kernel: "split" (vendor GEMMs and elementwise kernels in place) or "hybrid" (the GEMM of dh
            turns it into h and dz in its epilogue); by default chosen by shape.

    Returns:
        [..., D_out].

    Raises:
        ValueError: shapes, devices, activation, level, chunks or kernel do not fit.
        TypeError: not dense floating-point tensors, or of different dtypes.
    """
    level = levels.resolve("mlp", save, "inputs", MLP_LEVELS)
    activation = validate.activation("mlp", activation)
    linears = {"fc1": (fc1_weight, fc1_bias), "fc2": (fc2_weight, fc2_bias)}
    dtype = validate.mlp("mlp", x, linears, norm, residual, chunks, kernel)
    if dtype is None or dispatch.takes_twin():
        weights = (fc1_weight, fc1_bias, fc2_weight, fc2_bias)
        return reference.mlp(x, *weights, activation, norm=norm, residual=residual)
    call = _Call(activation, norm, residual, level, chunks, kernel)
    return _mlp(call, x, dtype, linears)


@dispatch.recorded_as(reference.gated_mlp)
def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    activation: str = "silu",
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    norm: NormSpec | None = None,
    residual: bool = False,
    save: str | None = None,
    chunks: int | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Return F.linear(act(gate) * up, down), added to x if residual; keeps only x.

    gate = F.linear(norm(x), gate_weight, gate_bias), up likewise: SwiGLU with silu, GEGLU with
    gelu, ReGLU with relu.

    Args:
        x: [..., D].
        gate_weight, up_weight: [F, D] each; or up_weight None and gate_weight packed, [2 F, D]
            with the gate's rows first, and gate_bias likewise.
        down_weight: [D_out, F].
        save: "inputs" (the default), "gate" or "preact", see the table at the top of this module.

    The other arguments, the result and the errors are those of `mlp`.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.
    """
    level = levels.resolve("gated_mlp", save, "inputs", GATED_LEVELS)
    activation = validate.activation("gated_mlp", activation)
    linears = {"gate": (gate_weight, gate_bias), "up": (up_weight, up_bias)}
    packed = up_weight is None
    if packed:
        validate.no_bias("gated_mlp", up_bias)
        del linears["up"]
    linears["down"] = (down_weight, down_bias)
    dtype = validate.mlp("gated_mlp", x, linears, norm, residual, chunks, kernel, packed)
    if dtype is None or dispatch.takes_twin():
        biases = {"gate_bias": gate_bias, "up_bias": up_bias, "down_bias": down_bias}
        weights = (gate_weight, up_weight, down_weight)
        return reference.gated_mlp(x, *weights, activation, **biases, norm=norm, residual=residual)
    if packed:
        # views: autograd puts their gradients together again
        halves = gate_weight.chunk(2)
        biases = (None, None) if gate_bias is None else gate_bias.chunk(2)
        gate, up = zip(halves, biases, strict=True)
        linears = {"gate": gate, "up": up, "down": linears["down"]}
    call = _Call(activation, norm, residual, level, chunks, kernel)
    return _mlp(call, x, dtype, linears)
