"""Linear with its activation as torch ops: what they compute, their fakes, and their FLOPs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt.autograd import custom_op, dispatch
from fusedckpt.autograd.custom_op import BELOW, below
from fusedckpt.autograd.dispatch import Meta
from fusedckpt.kernels import linear as kernels
from fusedckpt.kernels.products import product
from fusedckpt.kernels.runtime import as_dense, as_matrix, as_vector, as_weight


class Call(NamedTuple):
    """What a call comes down to; dtypes: of x in the GEMMs, weight and bias."""

    activation: str
    level: str
    kernel: str | None
    plan: str | None
    direct: bool
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None]


def plan_of(x: Tensor | Meta, activation: str, kernel: str | None, weight: tuple[int, ...]) -> str:
    """Return which launcher runs for tensors like x: fused, split or aten."""
    (n, k), rows = weight, math.prod(x.shape[:-1])
    # an identity has nothing to fuse
    kernel = "split" if activation == "identity" and kernel is None else kernel
    return dispatch.plan_for("linear_act", x, x.dtype, (rows, n, k), kernel, "fused")


def forward(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    activation: str,
    keep_z: bool,
    kernel: str | None,
    plan: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return h, and the pre-activation z if it is kept."""
    with below(BELOW):
        x2, w, b = as_matrix(x), as_weight(w, x.dtype), as_vector(b, x.dtype)
        plan = plan or plan_of(x, activation, kernel, w.shape)
        h, z = kernels.linear_act(x2, w, b, activation, keep_z, plan)
        if x2 is x:
            return h, z
        shape = (*x.shape[:-1], w.shape[0])
        return h.view(shape), None if z is None else z.view(shape)


def _forward_fake(
    x: Tensor, w: Tensor, b: Tensor | None, activation: str, keep_z: bool, kernel: str | None
) -> tuple[Tensor, Tensor]:
    h = x.new_empty((*x.shape[:-1], w.shape[0]))
    return h, torch.empty_like(h) if keep_z else custom_op.absent(x)


def _flops(x: Any, w: Any, *_: Any, out_shape: Any = None) -> int:
    return 2 * math.prod(x) * w[0]


FORWARD = custom_op.define(
    "linear_act(Tensor x, Tensor w, Tensor? b, str activation, bool keep_z, str? kernel)"
    " -> (Tensor, Tensor)",
    forward,
    _forward_fake,
    _flops,
)


def backward(
    dy: Tensor,
    x: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    z: Tensor | None,
    activation: str,
    needs: list[bool],
    kernel: str | None,
    call: Call | None = None,
    spends: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the wanted gradients of x, w and b; `spends`: z may be written over."""
    plan, dtype = (None, None) if call is None else (call.plan, call.dtypes[1])
    with below(BELOW):
        x2, z = None if x is None else as_matrix(x), as_dense(z)
        w, b = None if w is None else as_weight(w, dy.dtype), as_vector(b, dy.dtype)
        plan = plan or plan_of(dy, activation, kernel, (1, 1) if w is None else w.shape)
        args = (activation, needs[2], plan, spends)
        (dz, db), dx, dw = kernels.linear_act_dz(as_matrix(dy), x2, w, b, z, *args), None, None
        if needs[0] and w is not None:
            dx = torch.mm(dz, w).view(*dy.shape[:-1], w.shape[1])
        if needs[1] and x2 is not None:
            dw = product(dz.t(), x2, dtype)
        return dx, dw, db


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


BACKWARD = custom_op.define_spending(
    "linear_act_backward(Tensor dy, Tensor? x, Tensor? w, Tensor? b, Tensor{}? z, str activation,"
    " bool[] needs, str? kernel) -> (Tensor, Tensor, Tensor)",
    backward,
    _backward_fake,
    _backward_flops,
)
