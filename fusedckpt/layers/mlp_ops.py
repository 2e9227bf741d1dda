"""MLP blocks as torch ops: what `kernels.mlp` computes, behind a schema of fixed arity."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt.autograd import custom_op, dispatch
from fusedckpt.kernels import mlp as kernels
from fusedckpt.kernels.mlp import Block, Needs, Weights
from fusedckpt.kernels.norm import NormRule
from fusedckpt.kernels.runtime import as_dense, as_matrix, as_vector, as_weight

# the first nine arguments of both ops are x and Weights
Tensors = tuple[Tensor | None, ...]


class Options(NamedTuple):
    """The constants of a call, as the ops take them; kind "none" is no norm."""

    kind: str
    eps: float
    offset: float
    cast: str
    activation: str
    residual: bool
    dtype: torch.dtype
    chunks: int | None
    kernel: str | None

    @property
    def rule(self) -> NormRule | None:
        """The norm, None for none."""
        return None if self.kind == "none" else NormRule(*self[:4])


def block_of(options: Options, rows: int, w: Weights) -> Block:
    """Settle what the caller left open: the plan, and into how many chunks rows are cut."""
    (f, d), gemms = w.gate.shape, 2 if w.up is None else 3
    # the GEMM that a hybrid plan does itself contracts over the output features
    op, sizes = "mlp" if w.up is None else "gated_mlp", (rows, f, w.down.shape[0])
    kernel = dispatch.plan_for(op, w.gate, options.dtype, sizes, options.kernel, "hybrid")
    kernel = kernel if d else "aten"
    chunks = options.chunks or kernels.chunks_for(rows, d, f, gemms, w.down.element_size())
    return Block(options.rule, options.activation, options.residual, kernel, chunks)


def cast_weights(tensors: Tensors, dtype: torch.dtype) -> Weights:
    """Lay out the weights as kernels take them, all but the norm's in the dtype of the GEMMs."""
    given = Weights(*tensors)  # type: ignore[arg-type]
    return Weights(
        as_vector(given.norm),
        as_vector(given.norm_bias),
        as_weight(given.gate, dtype),
        as_vector(given.gate_bias, dtype),
        None if given.up is None else as_weight(given.up, dtype),
        as_vector(given.up_bias, dtype),
        as_weight(given.down, dtype),
        as_vector(given.down_bias, dtype),
    )


def _forward(x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    options, level = Options(*args[8:-1]), args[-1]
    w = cast_weights(args[:8], options.dtype)
    rows = as_matrix(x)
    y, gate, up = kernels.forward(rows, w, block_of(options, rows.shape[0], w), level)
    leading = x.shape[:-1]
    return (
        y.view(*leading, w.down.shape[0]),
        *(custom_op.absent(y) if t is None else t.view(*leading, t.shape[1]) for t in (gate, up)),
    )  # type: ignore[return-value]  # three


def _forward_fake(x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    w, options, level = Weights(*args[:8]), Options(*args[8:-1]), args[-1]
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
    (f, d), out = args[2], args[6][0]
    return 2 * math.prod(x[:-1]) * f * (d * (1 if args[4] is None else 2) + out)


_TENSORS = (
    "Tensor? norm, Tensor? norm_bias, Tensor gate, Tensor? gate_bias, Tensor? up, Tensor? up_bias,"
    " Tensor down, Tensor? down_bias"
)
_OPTIONS = (
    "str kind, float eps, float offset, str cast, str activation, bool residual, ScalarType dtype,"
    " int? chunks, str? kernel"
)
mlp_op = custom_op.define(
    f"mlp(Tensor x, {_TENSORS}, {_OPTIONS}, str level) -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    _forward_flops,
)


def _backward(
    dy: Tensor,
    gate: Tensor | None,
    up: Tensor | None,
    x: Tensor | None,
    *args: Any,
    spends: bool = False,
) -> tuple[Tensor, ...]:
    options, needs = Options(*args[8:-1]), Needs(*args[-1])
    w = cast_weights(args[:8], options.dtype)
    dy_rows, x_rows = as_matrix(dy), None if x is None else as_matrix(x)
    gate, up = as_dense(gate), as_dense(up)
    block = block_of(options, dy_rows.shape[0], w)
    found = kernels.backward(dy_rows, x_rows, w, gate, up, block, needs, spends)
    return tuple(
        found[name].to(dtype).view(shape) if name in found else custom_op.absent(dy)
        for name, (shape, dtype) in zip(Needs._fields, _grad_likes(dy, x, args), strict=True)
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
    (f, d), out = args[2].shape, args[6].shape[0]
    wide = torch.promote_types(dy.dtype, torch.float32)
    shapes = ((d,), (d,), (f, d), (f,), (f, d), (f,), (out, f), (out,))
    dx = (*dy.shape[:-1], d), dy.dtype if x is None else x.dtype
    pairs = zip(shapes, args[:8], strict=True)
    return [dx, *((shape, wide if t is None else t.dtype) for shape, t in pairs)]


def _backward_flops(dy: Any, gate: Any, up: Any, x: Any, *args: Any, **_: Any) -> int:
    (f, d), out, gated, needs = args[2], args[6][0], args[4] is not None, Needs(*args[-1])
    if not needs.hidden:
        return 0
    recomputed = (gate is None) + (gated and up is None)
    first = recomputed + needs.gate + needs.up + (needs.dn * (2 if gated else 1))
    return 2 * math.prod(dy[:-1]) * f * (d * first + out * (needs.dz + needs.down))


_GRADS = ", ".join(["Tensor"] * len(Needs._fields))
mlp_backward_ops = custom_op.define_spending(
    "mlp_backward(Tensor dy, Tensor{}? kept_gate, Tensor{}? kept_up, Tensor? x,"
    f" {_TENSORS}, {_OPTIONS}, bool[] needs) -> ({_GRADS})",
    _backward,
    _backward_fake,
    _backward_flops,
)
