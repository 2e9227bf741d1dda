"""Weight gradients that are computed one after the other.

A layer's backward returns its gradients together, so all of them are in memory at once, where the
parameters' gradients exist already and are added to. A first weight of experts, or of an MLP of few
tokens, is therefore read through a node of its own, `WeightRead`. The layer's backward gives that
node a `LateGradient`, and autograd a tensor without memory in its place. The node computes the
gradient when the last weight's gradient has been added and freed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt.autograd.private import below, current_node, function_of
from fusedckpt.blocks.passes import scaled_weight_grad
from fusedckpt.kernels import grouped
from fusedckpt.kernels.routed import Route


class LateGradient(NamedTuple):
    """A call that computes a gradient, and the dtype of the result."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    dtype: torch.dtype

    def to(self, dtype: torch.dtype) -> LateGradient:
        """Return the gradient in another dtype."""
        return self._replace(dtype=dtype)

    def compute(self) -> Tensor:
        """Compute it, as the layer's own backward computes."""
        with below():
            return self.function(*self.args).to(self.dtype)


def late_product(dy: Tensor, x: Tensor, wanted: torch.dtype) -> LateGradient:
    """Return the gradient of a linear's weight, dy' x in its dtype, to be computed later."""
    return LateGradient(scaled_weight_grad, (dy, x, 1, wanted), wanted)


def late_weight_grad(a: Tensor, b: Tensor, route: Route) -> LateGradient:
    """Return the gradient of experts' weights, a' b of each expert's rows, to be computed later."""
    return LateGradient(grouped.weight_grad, (a, b, route), a.dtype)


def computed(gradients: Sequence[Any]) -> list[Any]:
    """Return gradients, the late ones computed."""
    return [g.compute() if isinstance(g, LateGradient) else g for g in gradients]


class WeightRead(torch.autograd.Function):
    """A weight as it is; its gradient is computed here where the reader has left that to it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        """Return a view of the weight."""
        ctx.gradient = None
        # a reader without gradients returns none
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Tensor | None:  # type: ignore[override]
        """Compute the gradient, or pass the one that came."""
        late = ctx.gradient
        ctx.gradient = None
        if late is None or dy is None:
            return dy
        gradient = late.compute()
        # the tensor without memory, to which second derivatives of the layer may have been added
        return gradient if not any(dy.stride()) else gradient.add_(dy)


def hand_over(
    ctx: Any, gradients: list[Any], like: Tensor, metas: Sequence[Any], quantized: Sequence[int]
) -> None:
    """Give late gradients to the nodes that compute them, tensors without memory in their places.

    ctx: of the layer that reads the weights; metas: of its tensors, None for an absent one;
    quantized: the places of weights that are no tensors.
    """
    # a call of the layer's node by hand, outside the engine, gets the gradients themselves
    is_by_hand = current_node() is not ctx
    # a node has edges for tensors alone
    are_tensors = [meta is not None and i not in quantized for i, meta in enumerate(metas)]
    for i, gradient in enumerate(gradients):
        if not isinstance(gradient, LateGradient):
            continue
        node = ctx.next_functions[sum(are_tensors[:i])][0]
        if function_of(node) is WeightRead and not is_by_hand:
            node.gradient = gradient
            empty = torch.zeros((), dtype=gradient.dtype, device=like.device)
            gradients[i] = empty.expand(metas[i].shape)
        else:
            gradients[i] = gradient.compute()
