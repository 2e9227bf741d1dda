"""linear_act as torch ops: the pre-activation recomputed, or given, on the plan that fits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusedckpt.autograd import custom_op, dispatch
from fusedckpt.kernels import linear as kernels
from fusedckpt.kernels.runtime import as_dense, as_matrix, as_vector, as_weight


def _plan(x: Tensor, kernel: str | None, n: int, k: int) -> str:
    """Return which launcher runs for tensors like x: fused, split or aten."""
    sizes = (x.numel() // max(1, x.shape[-1]), n, k)
    return dispatch.plan_for("linear_act", x, x.dtype, sizes, kernel, "fused")


def _forward(
    x: Tensor, w: Tensor, b: Tensor | None, activation: str, keep_z: bool, kernel: str | None
) -> tuple[Tensor, Tensor]:
    w, b = as_weight(w, x.dtype), as_vector(b, x.dtype)
    plan = _plan(x, kernel, *w.shape)
    h, z = kernels.linear_act(as_matrix(x), w, b, activation, keep_z, plan)
    shape = (*x.shape[:-1], w.shape[0])
    return h.view(shape), custom_op.absent(x) if z is None else z.view(shape)


def _forward_fake(
    x: Tensor, w: Tensor, b: Tensor | None, activation: str, keep_z: bool, kernel: str | None
) -> tuple[Tensor, Tensor]:
    h = x.new_empty((*x.shape[:-1], w.shape[0]))
    return h, torch.empty_like(h) if keep_z else custom_op.absent(x)


def _flops(x: Any, w: Any, *_: Any, out_shape: Any = None) -> int:
    return 2 * math.prod(x) * w[0]


linear_act_op = custom_op.define(
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
    spends: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    x2, z = None if x is None else as_matrix(x), as_dense(z)
    w, b = None if w is None else as_weight(w, dy.dtype), as_vector(b, dy.dtype)
    plan = _plan(dy, kernel, *(w.shape if w is not None else (1, 1)))
    dz, db = kernels.linear_act_dz(as_matrix(dy), x2, w, b, z, activation, needs[2], plan, spends)
    dx = dw = None
    if needs[0]:
        assert w is not None
        dx = torch.mm(dz, w).view(*dy.shape[:-1], w.shape[1])
    if needs[1]:
        assert x2 is not None
        dw = torch.mm(dz.t(), x2)
    return tuple(custom_op.absent(dy) if grad is None else grad for grad in (dx, dw, db))  # type: ignore[return-value]  # three by construction


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
    absent = custom_op.absent(dy)
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


linear_act_backward_ops = custom_op.define_spending(
    "linear_act_backward(Tensor dy, Tensor? x, Tensor? w, Tensor? b, Tensor{}? z, str activation,"
    " bool[] needs, str? kernel) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    _backward_flops,
)
