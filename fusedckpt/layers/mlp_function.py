"""MLP blocks as torch ops and as an autograd Function: keeps x, and what its level names."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedckpt import reference
from fusedckpt.autograd import backward, custom_op, dispatch, donation
from fusedckpt.autograd.custom_op import BELOW, below
from fusedckpt.autograd.double_backward import stand_in, twin_gradients
from fusedckpt.autograd.norm_spec import NormSpec
from fusedckpt.autograd.phases import Phase
from fusedckpt.autograd.versions import Versioned
from fusedckpt.kernels import mlp as kernels
from fusedckpt.kernels.mlp import Block, Needs, Weights
from fusedckpt.kernels.runtime import as_dense, as_matrix, as_vector, as_weight
from fusedckpt.layers import adapted, norm_sharing
from fusedckpt.layers.mlp_call import PACKED, Args, MLPCall, MLPOptions, block_of

# the first nine arguments of both ops are x and Weights
Tensors = tuple[Tensor | None, ...]


def _laid_out(given: Weights, dtype: torch.dtype) -> Weights:
    """Lay out the weights as kernels take them, all but the norm's in the dtype of the GEMMs."""
    for i, t in enumerate(given):
        if t is not None and not (t.is_contiguous() and (i < 2 or t.dtype == dtype)):
            break
    else:
        return given
    return Weights(
        as_vector(given.norm),
        as_vector(given.norm_bias),
        as_weight(given.gate, dtype),
        as_vector(given.gate_bias, dtype),
        up=None if given.up is None else as_weight(given.up, dtype),
        up_bias=as_vector(given.up_bias, dtype),
        down=as_weight(given.down, dtype),
        down_bias=as_vector(given.down_bias, dtype),
    )


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 and x.stride(1) == 1 else as_matrix(x)


def _forward(
    x: Tensor, w: Weights, args: Args, level: str, block: Block | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    with below(BELOW):
        w, rows = _laid_out(w, args.dtype), _rows(x)
        block = block or block_of(args, rows.shape[0], w)
        y, gate, up = kernels.forward(rows, w, block, level)
        if rows is x:
            return y, gate, up
        leading = x.shape[:-1]
        return (
            y.view(*leading, w.down.shape[0]),
            None if gate is None else gate.view(*leading, gate.shape[1]),
            None if up is None else up.view(*leading, up.shape[1]),
        )


def _forward_op(x: Tensor, *args: Any) -> tuple[Any, ...]:
    return _forward(x, Weights(*args[:8]), Args(*args[8:-1]), args[-1])


def _forward_fake(x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    w, options, level = Weights(*args[:8]), Args(*args[8:-1]), args[-1]
    leading = x.shape[:-1]

    def empty(features: int, exists: bool = True) -> Tensor:
        return x.new_empty((*leading, features) if exists else (0,), dtype=options.dtype)

    f = w.gate.shape[0]
    gated = w.up is not None
    return (
        empty(w.down.shape[0]),
        empty(f, level in ("gate", "preact")),
        empty(f, level == "preact" and gated),
    )


def _forward_flops(x: Any, *args: Any, **_: Any) -> int:
    (first, d), (out, f) = args[2], args[6]
    return 2 * math.prod(x[:-1]) * (first * d * (1 if args[4] is None else 2) + f * out)


_TENSORS = (
    "Tensor? norm, Tensor? norm_bias, Tensor gate, Tensor? gate_bias, Tensor? up, Tensor? up_bias,"
    " Tensor down, Tensor? down_bias"
)
_OPTIONS = (
    "str kind, float eps, float offset, str cast, str activation, bool residual, ScalarType dtype,"
    " int? chunks, str? kernel"
)
_mlp_op = custom_op.define(
    f"mlp(Tensor x, {_TENSORS}, {_OPTIONS}, str level) -> (Tensor, Tensor, Tensor)",
    _forward_op,
    _forward_fake,
    _forward_flops,
)


def _backward(
    dy: Tensor,
    gate: Tensor | None,
    up: Tensor | None,
    x: Tensor | None,
    *args: Any,
    donates: bool = False,
) -> tuple[Tensor | None, ...]:
    """Take the op's arguments, and then the Block where that is settled."""
    w, options, needs = Weights(*args[:8]), Args(*args[8:17]), Needs(*args[17])
    with below(BELOW):
        rows, x_rows = _rows(dy), None if x is None else _rows(x)
        block = (args[18] if len(args) > 18 else None) or block_of(options, rows.shape[0], w)
        w = _laid_out(w, options.dtype)
        gate, up = None if gate is None else as_dense(gate), None if up is None else as_dense(up)
        found = kernels.backward(
            rows, x_rows, w, gate, up=up, block=block, needs=needs, donates=donates
        )
        if rows is not dy and "x" in found:
            found["x"] = found["x"].view(*dy.shape[:-1], w.gate.shape[1])
        if len(args) > 18:
            return tuple(map(found.get, Needs._fields))
        likes = zip(Needs._fields, _grad_likes(dy, x, args), strict=True)
        # each sum goes as it is rounded, not after all of them
        return tuple(
            [found.pop(name).to(dtype) if name in found else None for name, (_, dtype) in likes]
        )


def _backward_fake(
    dy: Tensor, gate: Tensor | None, up: Tensor | None, x: Tensor | None, *args: Any
) -> tuple[Tensor, ...]:
    return tuple(
        dy.new_empty(shape, dtype=dtype) if need else custom_op.absent(dy)
        for need, (shape, dtype) in zip(args[-1], _grad_likes(dy, x, args), strict=True)
    )


def _grad_likes(
    dy: Tensor, x: Tensor | None, args: tuple[Any, ...]
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of every gradient, x's first; wide for what was not given."""
    (first, d), (out, f) = args[2].shape, args[6].shape
    wide = torch.promote_types(dy.dtype, torch.float32)
    shapes = ((d,), (d,), (first, d), (first,), (first, d), (first,), (out, f), (out,))
    dx = (*dy.shape[:-1], d), dy.dtype if x is None else x.dtype
    pairs = zip(shapes, args[:8], strict=True)
    return [dx, *((shape, wide if t is None else t.dtype) for shape, t in pairs)]


def _backward_flops(dy: Any, gate: Any, up: Any, x: Any, *args: Any, **_: Any) -> int:
    (first, d), (out, f), gated, needs = args[2], args[6], args[4] is not None, Needs(*args[-1])
    if not needs.hidden:
        return 0
    recomputed = (gate is None) + (gated and up is None)
    gemms = recomputed + needs.gate + needs.up + (needs.dn * (2 if gated else 1))
    return 2 * math.prod(dy[:-1]) * (first * d * gemms + f * out * (needs.dz + needs.down))


_GRADS = ", ".join(["Tensor"] * len(Needs._fields))
_mlp_backward_ops = custom_op.define_donating(
    "mlp_backward(Tensor dy, Tensor{}? kept_gate, Tensor{}? kept_up, Tensor? x,"
    f" {_TENSORS}, {_OPTIONS}, bool[] needs) -> ({_GRADS})",
    _backward,
    _backward_fake,
    _backward_flops,
)


class _MLP(torch.autograd.Function):
    """Keeps x, and gate and up as the level has it; each only where a gradient reads it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *args: Any) -> Tensor:
        *tensors, call, phase = args
        w, needs = Weights(*tensors), Needs(*ctx.needs_input_grad[:9])
        reads_hidden = needs.hidden
        phase: Phase | None = phase if reads_hidden else None
        keeps = runs = call.level if reads_hidden else "inputs"
        likes = ()
        if phase is not None:
            keeps, runs = phase.levels or (keeps, runs)
            if w.is_packed and runs == "gate":
                # one GEMM makes both
                runs = "preact"
            like = (*x.shape[:-1], w.gate.shape[0]), call.options.dtype
            likes = (like, None if w.up is None else like)
        given = _read(needs, reads_hidden, call.options.kind != "none", keeps, x=x, w=w)
        if phase is not None:
            phase.enter(given, likes)
        if call.direct:
            y, gate, up = _forward(x, w, call.options, runs, block=call.block)
        else:
            y, gate, up = _mlp_op.overload(x, *tensors, *call.options, runs)
        gate = gate if runs != "inputs" else None
        up = up if runs == "preact" and w.up is not None else None
        if phase is None:
            ctx.save_for_backward(*given, gate, up)
            ctx.recall, ctx.owns_extras = None, True
        else:
            phase.save(ctx, "mlp", given, (gate, up), likes)
        ctx.set_materialize_grads(False)
        ctx.call = call
        if not torch.compiler.is_compiling():
            # gradients do not read them, only theirs do; of the last bias, not even theirs
            pairs = zip(given[1:-1], tensors[:-1], strict=True)
            unread = [t if kept is None else None for kept, t in pairs]
            ctx.unread = Versioned(*unread) if [t for t in unread if t is not None] else None
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        begun = backward.begin(ctx, dy)
        if begun is None:
            return (None,) * 11
        flags, (x, *tensors, gate, up), direct = begun
        assert dy is not None
        needs, call = Needs(*flags[:9]), ctx.call
        if torch.is_grad_enabled():
            return (*_double_backward(ctx, x, tensors, dy, needs=needs), None, None)
        args = (dy, gate, up, x, *tensors, *call.options, list(needs))
        if direct and gate is None and up is None:
            found: Any = _backward(*args, call.block)
        else:
            block = call.block if direct else None
            found = donation.run(ctx, _mlp_backward_ops, (gate, up), args, settled=block)
        grads = list(found)
        del found
        for i, (need, dtype) in enumerate(zip(needs, call.dtypes, strict=True)):
            # each sum goes as it is rounded, not after all of them
            grads[i] = grads[i].to(dtype) if need else None
        return (*grads, None, None)


def _read(
    needs: Needs, hidden: bool, has_norm: bool, keeps: str, x: Tensor, w: Weights
) -> tuple[Tensor | None, ...]:
    """Return x and the weights, None for what no gradient reads where a level's extras are kept.

    hidden: whether any gradient reads the hidden layer.
    """
    reads_n = hidden and (keeps != "preact" or needs.gate or needs.up)
    reads_x = reads_n or (has_norm and needs.dn)
    return (
        x if reads_x else None,
        *w._replace(
            norm=w.norm if reads_x else None,
            norm_bias=w.norm_bias if reads_n else None,
            gate_bias=w.gate_bias if hidden and keeps == "inputs" else None,
            up_bias=w.up_bias if hidden and keeps != "preact" else None,
            down_bias=None,
        ),
    )


def _double_backward(
    ctx: Any, x: Tensor | None, kept: list[Tensor | None], dy: Any, needs: Needs
) -> list[Tensor | None]:
    call: MLPCall = ctx.call
    unread = (None,) * 8 if ctx.unread is None else (*ctx.unread.read(), None)
    tensors = [t if t is not None else other for t, other in zip(kept, unread, strict=True)]
    if call.dtypes[-1] is not None:
        # no gradient depends on the last bias
        tensors[-1] = stand_in(dy.shape[-1:], call.dtypes[-1], dy.device)
    if x is None:
        if needs.hidden:
            raise RuntimeError(
                "mlp: create_graph=True needs x, which save='preact' does not save where the first "
                "weights are frozen: use save='inputs'"
            )
        # the last bias's gradient does not depend on x
        shape = (*dy.shape[:-1], tensors[2].shape[1])  # type: ignore[union-attr]  # gate is there
        x = stand_in(shape, dy.dtype, dy.device)

    with torch.autocast(dy.device.type, enabled=False):
        return twin_gradients(partial(_twin, call.options), (x, *tensors), needs, (dy,))


def _twin(options: Args, x: Tensor, *tensors: Any) -> Tensor:
    """Return what the Function computes, from torch's own differentiable operations."""
    n, w, rule = x, Weights(*tensors), options.rule
    if rule is not None:
        spec = NormSpec(
            rule.kind, w.norm, w.norm_bias, rule.eps, offset=rule.offset, cast=rule.cast
        )
        n = reference.apply_norm(x, spec)
    cast: Any = (t if t is None else t.to(options.dtype) for t in (n, *w[2:]))
    n, gate, gate_bias, up, up_bias, down, down_bias = cast
    if up is None and not w.is_packed:
        y = reference.mlp(
            n, gate, gate_bias, down, fc2_bias=down_bias, activation=options.activation
        )
    else:
        biases = {"gate_bias": gate_bias, "up_bias": up_bias, "down_bias": down_bias}
        y = reference.gated_mlp(n, gate, up, down, activation=options.activation, **biases)
    return x + y if options.residual else y


def run(options: MLPOptions, x: Tensor, *tensors: Any) -> Tensor | None:
    """Run the Function for a call on x and Weights, None where the eager reference is to run."""
    if options.dropout or options.output_dropout:
        return _adapted(options, x, *tensors)
    call, phase = dispatch.settled(options, x, *tensors)
    if call is None:
        return _adapted(options, x, *tensors)
    # a checkpoint's forward and recompute save alike, whatever the level in either
    is_free = phase is None or phase.levels is None
    if options.linears == PACKED and is_free and call.level == "gate":
        # one is kept: views, whose gradients autograd puts together again
        *norm, weight, bias, _, _, down, down_bias = tensors
        gate, up = weight.chunk(2)
        gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2)
        tensors = (*norm, gate, gate_bias, up, up_bias, down, down_bias)
    # a norm casts as it writes
    casts = options.norm is None and x.dtype != call.options.dtype
    read = x.to(call.options.dtype) if casts else x
    shares = phase is None and options.norm is None and not torch.compiler.is_compiling()
    if shares and hasattr(x.grad_fn, "source"):
        y = norm_sharing.apply(_MLP, x, read, *tensors, call, phase)
    else:
        y = _MLP.apply(read, *tensors, call, phase)
    return x + y if call.adds_after else y


def _adapted(options: MLPOptions, x: Tensor, *tensors: Any) -> Tensor | None:
    *norm, gate, gate_bias, up, up_bias, down, down_bias = tensors
    keys = tuple([f"{key}_weight" for key in options.linears])
    up = [] if up is None else [(up, up_bias)]
    linears = [(gate, gate_bias), *up, (down, down_bias)]
    dropouts = options.dropout, options.output_dropout
    return adapted.run(options, keys, x, norm, linears=linears, dropouts=dropouts)
