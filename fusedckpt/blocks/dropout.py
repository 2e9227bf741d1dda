"""Dropout that is replayed from a seed: drawn once per call, kept in place of a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedckpt.autograd import dispatch, private
from fusedckpt.kernels import dropout as kernels
from fusedckpt.kernels.runtime import as_matrix


def draw_seeds(x: Tensor, count: int) -> Tensor | None:
    """Draw seeds from the generator of x's device; None where torch's own dropout is to draw.

    They stay on the device, unread by the host on a GPU. Torch's draws where a program is recorded
    or compiled, and under torch.func, which could not see through ours.
    """
    if not count or torch.compiler.is_compiling() or dispatch.is_recorded(x):
        return None
    if private.are_transforms_active() or not dispatch.are_plain(x):
        return None
    return torch.randint(2**63 - 1, (count,), device=x.device)


def dropout(x: Tensor, p: float, seed: Tensor | None, first_row: int = 0) -> Tensor:
    """Return F.dropout(x, p), drawn by a seed; x [..., N] begins with `first_row` of all rows.

    With p 0 it is x itself. The gradient is dropout(dy).
    """
    if not p:
        return x
    if seed is None or x.is_meta or type(x) is not Tensor:
        # a tensor without data: only its shape is asked for
        return torch.nn.functional.dropout(x, p)
    if x.numel() == 0:
        return torch.empty_like(x)
    rows, kernel = as_matrix(x), dispatch.path_of(x.device, x.dtype)
    return kernels.dropout(rows, p, seed, first_row, kernel=kernel).view(x.shape)
