"""A tensor saved as autograd saves one, outside of any function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Keep(torch.autograd.Function):
    """Saves a tensor, as any function does."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return anchor.new_empty(0)


class SavedTensor:
    """torch's SavedTensor, made of public parts, which take some microseconds more."""

    _anchor = torch.empty(0, requires_grad=True)

    def __init__(self, tensor: Tensor, is_output: bool):
        with torch.enable_grad():
            self._output = _Keep.apply(self._anchor, tensor)

    def unpack(self) -> Tensor:
        """Return the tensor; raise if it was modified in place since."""
        return self._output.grad_fn.saved_tensors[0]


# private to torch, and not in 2.11
make_saved: Callable[..., Any] = getattr(
    getattr(torch._C, "_autograd", None), "_make_saved_tensor", SavedTensor
)
