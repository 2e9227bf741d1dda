"""Gradients of gradients: run the differentiable eager reference inside backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def stand_in(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, of one element in memory, for a tensor that no wanted gradient depends on.

    Not made from a gradient: that may be a batch of gradients, where this is one tensor.
    """
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def twin_gradients(
    twin: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Return the gradients of `twin(*inputs)` as a graph that can be differentiated again.

    `inputs` are the tensors as backward got them, so that second derivatives reach what they came
    from; each goes in through a view of its own, which keeps one tensor given twice apart.
    """
    with torch.enable_grad():
        views = [
            None
            if tensor is None
            else tensor.view_as(tensor)
            if tensor.requires_grad
            else tensor.detach().requires_grad_(need)
            for tensor, need in zip(inputs, needs, strict=True)
        ]
        outputs = twin(*views)
        pairs = [
            (output, grad)
            for output, grad in zip(
                (outputs,) if isinstance(outputs, Tensor) else outputs, grads, strict=True
            )
            if grad is not None and output.requires_grad
        ]
        found = torch.autograd.grad(
            [output for output, _ in pairs],
            [view for view, need in zip(views, needs, strict=True) if need and view is not None],
            [grad for _, grad in pairs],
            create_graph=True,
            allow_unused=True,
        )
    remaining = iter(found)
    return [next(remaining) if need else None for need in needs]
