"""A stack of two blocks of other people's kind, behind a factor, so that gradients pass each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.zoo.model import Inputs, Model

OWN = "own code"
OWN_CNN = "own code, CNN"


class Stack(nn.Module):
    """Two blocks behind a factor."""

    def __init__(self, block: Callable[[], nn.Module]):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))
        self.blocks = nn.ModuleList([block(), block()])

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.factor
        for block in self.blocks:
            x = block(x)
        return x


def owned(shape: torch.Size, block: Callable[[], nn.Module], group: str = OWN) -> Model:
    """Return the model of two blocks, and its input, of a shape that the blocks keep."""

    def build(parts: int) -> tuple[nn.Module, Inputs]:
        return Stack(block), {"x": torch.randn(shape)}

    return Model(group, "torch", 0, build)
