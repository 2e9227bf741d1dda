"""Models that skip units at random: steps that run all are planned, and later ones fit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from plan_models import planned
from support import DEVICE, randn
from torch import Tensor, nn
from zoo import MLP, MLPBlock

from fusedckpt import report


class Skipping(nn.Module):
    """Blocks of which each runs where a function of none says so."""

    def __init__(self, runs: Callable[[], Any], count: int = 12, hidden: int = 64):
        super().__init__()
        blocks = (MLPBlock(nn.LayerNorm(16), MLP(16, hidden)) for _ in range(count))
        self.layers = nn.ModuleList(blocks).to(DEVICE)
        self.runs = runs

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or self.runs():
                x = layer(x)
        return x.square().mean()


# half of the blocks run, or nearly all
DRAWS: dict[str, Callable[[], Any]] = {
    "torch.rand": lambda: torch.rand(()) >= 0.5,
    "torch.rand, to keep": lambda: torch.rand(1).item() < 0.5,
    "torch.rand, seldom": lambda: torch.rand(()) >= 0.05,
    "uniform_": lambda: torch.empty(()).uniform_() >= 0.5,
    "bernoulli": lambda: not torch.bernoulli(torch.tensor(0.5)),
    "random": lambda: random.random() >= 0.5,
    "random, to keep": lambda: random.random() < 0.5,
    "numpy": lambda: np.random.uniform() >= 0.5,
}


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


@pytest.mark.parametrize("name", DRAWS)
def test_all_units_are_planned(name):
    seed(1)
    model, x = Skipping(DRAWS[name]), randn(2, 8, 16)
    states = random.getstate(), repr(np.random.get_state()), torch.get_rng_state()
    plan = planned(model, x, policy="memory")
    assert [unit.name for unit in plan.chain.units] == [f"layers.{i}" for i in range(12)]
    assert not plan.left_out
    assert random.getstate() == states[0]
    assert repr(np.random.get_state()) == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert isinstance(torch.rand(3), Tensor)
    assert len(set(torch.rand(3).tolist())) == 3


@pytest.mark.parametrize("hidden", [4, 64])
@pytest.mark.parametrize("policy", ["memory", "uniform:2"])
def test_later_steps_stay_below(policy, hidden):
    model, x = Skipping(DRAWS["torch.rand"], hidden=hidden), randn(16, 32, 16)
    seed(1)
    plan = planned(model, x, policy=policy)
    plan.apply(model)
    for number in range(8):
        seed(number)
        assert report(model, x).peak_bytes <= (plan.measured_bytes or 0)


def test_own_generator_is_refused():
    """No step of it can be drawn again."""
    generator = np.random.default_rng(0)
    model = Skipping(lambda: generator.random() >= 0.5)
    with pytest.raises(ValueError, match=r"skips units at random \(layers.*rate to 0"):
        planned(model, randn(2, 8, 16), policy="all")


class WithoutLast(Skipping):
    """A model with a block that no step runs."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            self.runs()
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("runs", [bool, DRAWS["torch.rand"]])
def test_unit_that_no_step_runs(runs):
    """It is left out, as before, where the model draws no numbers, and where it does."""
    plan = planned(WithoutLast(runs, count=4), randn(2, 8, 16), policy="all")
    assert plan.left_out == {"layers.3": "is not called in a step with gradients"}


class Forces(Skipping):
    """A model whose forward takes a gradient of its blocks, as force fields do."""

    def forward(self, x: Tensor) -> Tensor:
        energy = super().forward(x)
        (forces,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy + forces.square().sum()


def test_gradients_within_the_forward():
    plan = planned(Forces(lambda: True, count=3), randn(2, 8, 16), policy="none")
    assert len(plan.chain.units) == 3


@pytest.mark.parametrize("forwards", [1, 2])
def test_gradients(forwards):
    """Of steps with several forwards, too, of which each skips others."""
    model, x = Skipping(DRAWS["torch.rand"], count=4), randn(2, 8, 16)
    seed(0)
    plan = planned(model, x, policy="uniform:1")

    def gradients() -> list[Tensor | None]:
        loss = torch.stack([model(x) for _ in range(forwards)]).sum()
        return [*torch.autograd.grad(loss, [x, *model.parameters()], allow_unused=True)]

    for number in range(30):
        seed(number)
        expected = gradients()
        plan.apply(model)
        seed(number)
        for ours, theirs in zip(gradients(), expected, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or theirs is None or torch.equal(ours, theirs)
        plan.undo()
