"""Weights whose gradients are computed one after the other."""

from __future__ import annotations

import pytest
import torch
from support import DEVICE, randn
from torch import Tensor, nn

import fusedckpt
from fusedckpt import functional

T, D, F = 3, 8, 12


def few_tokens() -> nn.Module:
    """An MLP with at most half as many tokens as features."""
    return fusedckpt.MLP(D, F, device=DEVICE, dtype=torch.float64)


class TwoExperts(nn.Module):
    """Two experts, each token in one."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(randn(2, 2 * F, D, dtype=torch.float64))
        self.down = nn.Parameter(randn(2, D, F, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        index = torch.tensor([[0], [1], [1]], device=x.device)
        return functional.experts(
            x, index, torch.ones_like(index, dtype=x.dtype), self.up, self.down
        )


@pytest.mark.parametrize("make", [few_tokens, TwoExperts])
def test_second_derivatives_add_to_late_gradients(make, monkeypatch):
    """Backward runs the layer's once more, where the loss has its results and its gradients."""
    torch.manual_seed(0)
    layer, x = make(), randn(T, D, dtype=torch.float64).requires_grad_()
    leaves = [x, *layer.parameters()]

    def gradients() -> list[Tensor]:
        first = torch.autograd.grad(layer(x).square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))

    found = gradients()
    with monkeypatch.context() as patch:
        patch.setattr(fusedckpt.blocks.eager.forced, "is_on", True)
        torch.testing.assert_close(found, gradients())
