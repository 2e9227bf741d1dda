"""Grouped products as torch ops, each the other's gradient: one graph under torch.compile.

Elsewhere the eager reference is a loop over experts, which every transform differentiates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedckpt.kernels import routed


def _route(x: Tensor, ends: Tensor) -> routed.Route:
    """Return a route of rows that are sorted already."""
    numbers = torch.arange(len(x), device=x.device)
    pieces = routed.pieces_of([0, *ends.tolist()])
    return routed.Route(numbers, numbers[:, None], ends, pieces)


@torch.library.custom_op("fusedckpt::grouped_product", mutates_args=())
def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return x [R, K] times the weight [E, K, N] of each row's expert, zero for no expert's."""
    return routed.product(x, weight, None, _route(x, ends))


@torch.library.custom_op("fusedckpt::grouped_weight_grad", mutates_args=())
def grouped_weight_grad(x: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    """Return x' dy of each expert's rows, [E, K, N]."""
    return routed.weight_grad(x, dy, _route(x, ends))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _of_product(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, ends = ctx.saved_tensors
    return grouped_product(dy, weight.mT, ends), grouped_weight_grad(x, dy, ends), None


def _of_weight_grad(ctx: Any, dw: Tensor) -> tuple[Tensor, Tensor, None]:
    x, dy, ends = ctx.saved_tensors
    return grouped_product(dy, dw.mT, ends), grouped_product(x, dw, ends), None


grouped_product.register_fake(lambda x, weight, ends: x.new_empty(x.shape[0], weight.shape[2]))
grouped_weight_grad.register_fake(
    lambda x, dy, ends: x.new_empty(ends.shape[0], x.shape[1], dy.shape[1])
)
grouped_product.register_autograd(_of_product, setup_context=_save)
grouped_weight_grad.register_autograd(_of_weight_grad, setup_context=_save)
