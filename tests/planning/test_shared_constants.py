"""A constant that several units get, such as a mask, counts once, as long as a unit saves it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedckpt import plan


class AddsMasks(nn.Module):
    """Adds masks, which no backward reads, to what a linear returns."""

    def __init__(self, masks: list[int]):
        super().__init__()
        self.linear, self.masks = nn.Linear(32, 32), masks

    def forward(self, x: Tensor, masks: list[Any]) -> Tensor:
        y = self.linear(x)
        for k in self.masks:
            y = y + masks[k]
        return x + y.tanh().exp()


class MaskedModel(nn.Module):
    """Units with two masks that the forward makes; by unit, the masks that it adds."""

    def __init__(self, masks: list[list[int]]):
        super().__init__()
        self.masks = masks
        self.first = nn.Linear(32, 32)
        self.units = nn.ModuleList(map(AddsMasks, masks))

    def forward(self, x: Tensor) -> Tensor:
        masks = [torch.full((len(x), 32), 0.5), torch.full((len(x), 32), 0.25)]
        x = self.first(x)
        for unit, added in zip(self.units, self.masks, strict=True):
            x = unit(x, [masks[k] if k in added else None for k in range(2)])
        return x


ALL = [[0, 1]] * 4
ALTERNATING = [[0], [1], [0], [1]]
SOME = [[], [0], [0, 1], []]


@pytest.mark.parametrize("masks", [ALL, ALTERNATING, SOME], ids=["all", "alternating", "some"])
@pytest.mark.parametrize("recomputed", [[], [0], [1, 2], [3], [0, 3]], ids=str)
def test_the_prediction_is_the_measured_peak_whatever_is_recomputed(masks, recomputed):
    model = MaskedModel(masks)
    policy = [model.units[i] for i in recomputed] or "none"
    found = plan(model, torch.randn(256, 32), policy=policy, progress=False)
    assert found.predicted_bytes == found.measured_bytes
