"""act(x @ w.T + b) and its dz, each as one fused GEMM or split: a vendor GEMM, then in place."""

from __future__ import annotations

import torch
from torch import Tensor

from . import elementwise
from .activations import ACTIVATIONS
from .epilogues import StoreAct, StoreActGrad, store_act, store_act_grad
from .gemm import gemm, row_tiles
from .runtime import unit_stride


def linear_act(
    x: Tensor, w: Tensor, b: Tensor | None, activation: str, keep_z: bool, kernel: str
) -> tuple[Tensor, Tensor | None]:
    """Return h [M, N], and the pre-activation z [M, N] where it is kept.

    x [M, K] and w [N, K] share a dtype; `kernel` is "fused", "split", or "aten".
    """
    act = ACTIVATIONS[activation]
    if kernel == "fused":
        h = x.new_empty(x.shape[0], w.shape[0])
        z = torch.empty_like(h) if keep_z else None
        gemm(x, w, StoreAct(h, b, z), store_act, act.value)
        return h, z
    z = preactivation(x, w, b)
    if activation == "identity" and not keep_z:
        return z, None
    h = torch.empty_like(z) if keep_z else z
    if kernel == "aten":
        act.write(z, h)
    else:
        elementwise.act(z, h, act.value)
    return h, z if keep_z else None


def linear_act_dz(
    dy: Tensor,
    x: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    z: Tensor | None,
    activation: str,
    needs_db: bool,
    kernel: str,
) -> tuple[Tensor, Tensor | None]:
    """Return dz [M, N] = dy * act'(z) and, where needed, db [N] in at least float32.

    Without z it is recomputed from x, w and b; dy [M, N] and a given z are only read.
    """
    act = ACTIVATIONS[activation]
    if activation == "identity":
        return dy, column_sums(dy) if needs_db else None
    if z is None and kernel == "fused":
        assert x is not None
        assert w is not None
        dz = dy.new_empty(dy.shape)
        db = dy.new_empty(row_tiles(x, w), w.shape[0], dtype=torch.float32) if needs_db else None
        dy = unit_stride(dy)
        operands = StoreActGrad(dz, dy, dy.stride(0), b, db)
        gemm(x, w, operands, store_act_grad, act.value_and_grad)
        return dz, None if db is None else db.sum(0)
    if z is None:
        assert x is not None
        assert w is not None
        z = dz = preactivation(x, w, b)
    else:
        dz = torch.empty_like(z)
    if kernel == "aten":
        act.write_grad(dy, z, dz)
        return dz, column_sums(dz) if needs_db else None
    return dz, elementwise.act_grad(z, unit_stride(dy), dz, act.value_and_grad, needs_db)


def preactivation(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """Return x @ w.T + b by the vendor's GEMM."""
    return torch.mm(x, w.t()) if b is None else torch.addmm(b, x, w.t())


def column_sums(dz: Tensor) -> Tensor:
    """Sum over rows in at least float32."""
    return dz.sum(0, dtype=torch.promote_types(dz.dtype, torch.float32))
