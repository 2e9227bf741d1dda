"""policy="speed" of units that write the output of a product in place: these save everything."""

from __future__ import annotations

import pytest
import torch
from plan_models import planned
from support import DEVICE
from torch import Tensor, nn

from fusedckpt.planning.roles import PRODUCTS, UNCHANGED


class AddsShift(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 64, bias=False), nn.Linear(64, 16)
        self.shift = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h += self.shift
        return x + self.b(nn.functional.gelu(h))


class Scale(nn.Module):
    """Scores are a view of the product's output that torch gives a version of its own."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2)
        scores.mul_(0.25)
        return x + self.out(scores.softmax(-1) @ v)


class Activated(nn.Module):
    def __init__(self, activation: nn.Module | None = None):
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)
        self.activation = activation or nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(self.activation(self.a(x))))


def levels(model: nn.Module, x: Tensor) -> tuple[list[str | None], dict[str, str]]:
    """Plan for speed, check the gradients, and return the levels and the modules left out."""

    def gradients() -> list[Tensor]:
        return [*torch.autograd.grad(model(x).square().sum(), [*model.parameters()])]

    expected = gradients()
    plan = planned(model, x, policy="speed", loss=lambda y: y.square().sum())
    assert str(plan).count("in place") == len(plan.left_out)
    plan.apply(model)
    for ours, theirs in zip(gradients(), expected, strict=True):
        assert torch.equal(ours, theirs)
    return [item.level for item in plan.items], dict(plan.left_out)


@pytest.mark.parametrize("kind", [AddsShift, Scale, Activated])
def test_written_in_place(kind):
    model = nn.Sequential(*(kind() for _ in range(3))).to(DEVICE)
    chosen, left_out = levels(model, torch.randn(8, 32, 16, device=DEVICE))
    assert chosen == [UNCHANGED] * 3
    assert [*left_out] == ["0", "1", "2"]
    assert all("in place" in why for why in left_out.values())


def test_others_save_products():
    model = nn.Sequential(Activated(), Activated(nn.SiLU()), Activated()).to(DEVICE)
    chosen, left_out = levels(model, torch.randn(8, 32, 16, device=DEVICE))
    assert chosen == [UNCHANGED, PRODUCTS, UNCHANGED]
    assert left_out.keys() == {"0", "2"}
