"""act(x @ w.T + b) and its dz, each as one fused GEMM or split: a vendor GEMM, then in place."""

from __future__ import annotations

import torch
from torch import Tensor

from .activations import ACTIVATIONS
from .epilogues import ACT, ACT_GRAD, StoreAct, StoreActGrad
from .gemm import gemm, launch_tile
from .hidden import hidden, hidden_grad
from .partials import sum_partials
from .runtime import column_sums, triton


def linear_act(
    x: Tensor, w: Tensor, b: Tensor | None, activation: str, keep_z: bool, kernel: str
) -> tuple[Tensor, Tensor | None]:
    """Return h [M, N], and the pre-activation z [M, N] where it is kept.

    x [M, K] and w [N, K] share a dtype; `kernel` is "fused", "split", or "aten".
    """
    if kernel == "fused":
        h = x.new_empty(x.shape[0], w.shape[0])
        z = torch.empty_like(h) if keep_z else None
        gemm(x, w, StoreAct(h, b, z), ACT, ACTIVATIONS[activation].value)
        return h, z
    z = linear(x, w, b)
    if activation == "identity":
        return z, None
    h = hidden(z, None, torch.empty_like(z) if keep_z else z, activation, kernel)
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
    spends: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return dz [M, N] = dy * act'(z) and, where needed, db [N] in at least float32.

    Without z it is recomputed from x, w and b; dy [M, N] is only read, and so is a given z, unless
    it is spent: then dz is written over it.
    """
    if activation == "identity":
        return dy, column_sums(dy) if needs_db else None
    if z is not None:
        dz = z if spends else torch.empty_like(z)
    else:
        assert x is not None
        assert w is not None
        if kernel == "fused":
            return fused_dz(dy, x, w, b, activation, needs_db)
        z = dz = linear(x, w, b)
    found = hidden_grad(dy, z, None, None, dz, None, activation, (needs_db, False), kernel)
    return dz, found[0]


def fused_dz(
    dy: Tensor, x: Tensor, w: Tensor, b: Tensor | None, activation: str, needs_db: bool
) -> tuple[Tensor, Tensor | None]:
    """Recompute z tile by tile, each tile turned into dz before it leaves the chip."""
    dz, db = torch.empty_like(dy, memory_format=torch.contiguous_format), None
    if needs_db:
        tiles = triton.cdiv(dy.shape[0], launch_tile(x, w).block_m)
        db = dy.new_empty(tiles, dy.shape[1], dtype=torch.float32)
    operands = StoreActGrad(dz, dy, dy.stride(0), b, db)
    gemm(x, w, operands, ACT_GRAD, ACTIVATIONS[activation].value_and_grad)
    return dz, sum_partials(db, None)[0]


def linear(x: Tensor, w: Tensor, b: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return x @ w.T + b by the vendor's GEMM, in `out` if given."""
    if b is None:
        return torch.mm(x, w.t(), out=out)
    return torch.addmm(b, x, w.t(), out=out)
