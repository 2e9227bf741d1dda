"""The norms as torch ops: rows in, rows out, on Triton or ATen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedckpt.autograd import custom_op, dispatch
from fusedckpt.kernels import aten
from fusedckpt.kernels import norm as triton_norm
from fusedckpt.kernels.norm import NormRule
from fusedckpt.kernels.runtime import as_matrix, as_vector


def row_kernels(x: Tensor) -> Any:
    """Return the module whose `norm` and `norm_grad` run for x."""
    on_aten = x.numel() == 0 or dispatch.path_of(x.device, x.dtype) == "aten"
    return aten if on_aten else triton_norm


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    num_dims: int,
    kind: str,
    eps: float,
    offset: float,
    cast: str,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    rule = NormRule(kind, eps, offset, cast)
    matrix, residual_matrix = (None if t is None else as_matrix(t, num_dims) for t in (x, residual))
    widest = x if residual is None or residual.dtype != torch.float64 else residual
    y, total = row_kernels(widest).norm(
        matrix, residual_matrix, as_vector(weight), as_vector(bias), rule, out_dtype
    )
    return y.view(x.shape), custom_op.absent(x) if total is None else total.view(x.shape)


def _forward_fake(
    x: Tensor, residual: Tensor | None, weight: Any, bias: Any, num_dims: int, *rule: Any
) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=rule[-1])
    if residual is None:
        return y, custom_op.absent(x)
    return y, x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))


def _backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor | None,
    weight: Tensor | None,
    num_dims: int,
    kind: str,
    eps: float,
    offset: float,
    cast: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    shape = dy.shape[-num_dims:]
    wide = torch.promote_types(dy.dtype, torch.float32)
    if x is None:
        absent = custom_op.absent(dy)
        return absent, absent.clone(), as_matrix(dy, num_dims).sum(0, dtype=wide).view(shape)
    dx, dw, db = row_kernels(x).norm_grad(
        as_matrix(dy, num_dims),
        None if dtotal is None else as_matrix(dtotal, num_dims),
        as_matrix(x, num_dims),
        as_vector(weight),
        NormRule(kind, eps, offset, cast),
        tuple(needs),
    )
    return (
        custom_op.absent(dy) if dx is None else dx.view(x.shape),
        custom_op.absent(dy) if dw is None else dw.view(shape),
        custom_op.absent(dy) if db is None else db.view(shape),
    )


def _backward_fake(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor | None,
    weight: Tensor | None,
    num_dims: int,
    kind: str,
    eps: float,
    offset: float,
    cast: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    shape = dy.shape[-num_dims:]
    wide = torch.promote_types((dy if x is None else x).dtype, torch.float32)
    return (
        x.new_empty(x.shape) if needs[0] and x is not None else custom_op.absent(dy),
        dy.new_empty(shape, dtype=wide) if needs[1] else custom_op.absent(dy),
        dy.new_empty(shape, dtype=wide) if needs[2] else custom_op.absent(dy),
    )


def _no_gemm(*_: Any, **__: Any) -> int:
    return 0


norm_op = custom_op.define(
    "norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, int num_dims, str kind,"
    " float eps, float offset, str cast, ScalarType out_dtype) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    _no_gemm,
)
norm_backward_op = custom_op.define(
    "norm_backward(Tensor dy, Tensor? dtotal, Tensor? x, Tensor? weight, int num_dims, str kind,"
    " float eps, float offset, str cast, bool[] needs) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    _no_gemm,
)
