"""Units of a model that is fused with recipes run with or without them, by the plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fusedckpt
from fusedckpt import Plan
from fusedckpt.memory import saved_tensors
from fusedckpt.planning.roles import NO_RECIPES, UNCHANGED
from fusedckpt.recipes import recipe_mode

C, BLOCKS = 8, 6


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr(recipe_mode, "FLOOR_BYTES", 0)


class ConvBlock(nn.Module):
    """Convolutions with batch norms and activations, which recipes make again."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(C, C, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(C), nn.BatchNorm2d(C)
        self.act = nn.SiLU()

    def forward(self, x):
        h = self.act(self.norm1(self.conv1(x)))
        return x + self.act(self.norm2(self.conv2(h)))


class ConvBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(ConvBlock() for _ in range(BLOCKS))
        self.head = nn.Linear(C, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def saved_by(model: nn.Module, x: torch.Tensor) -> int:
    exclude = [x, *model.parameters(), *model.buffers()]
    with saved_tensors(exclude=exclude) as saved:
        output = model(x)
    del output
    return saved.nbytes


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [*model.parameters()])]


def test_a_plan_chooses_units_without_recipes():
    eager, x = ConvBlocks().double(), torch.randn(4, C, 12, 12, dtype=torch.float64)
    model = copy.deepcopy(eager)
    fusedckpt.fuse(model, recompute_elementwise=True)
    with_recipes, without = saved_by(model, x), saved_by(eager, x)
    assert with_recipes < 0.6 * without
    names = [f"blocks.{i}" for i in range(BLOCKS)]

    def planned(**options: Any) -> Plan:
        return fusedckpt.plan(model, x, units=names, progress=False, loss=loss, **options)

    def loss(y: torch.Tensor) -> torch.Tensor:
        return y.square().sum()

    free = planned(policy="none")
    assert [item.level for item in free.items] == [NO_RECIPES] * BLOCKS
    levels = {level.name: level.added_bytes for level in free.chain.units[2].levels}
    assert [*levels] == [NO_RECIPES, UNCHANGED]
    assert levels[UNCHANGED] < 0.7 * levels[NO_RECIPES]
    assert "saves no recipes" in str(free)
    free.apply(model)
    assert saved_by(model, x) == without
    assert all(map(torch.equal, step(model, x), step(eager, x)))
    free.undo(model)
    assert saved_by(model, x) == with_recipes
    # between the peaks of both some units have recipes, or are recomputed, by the times measured
    all_recipes = fusedckpt.report(model, x, loss=loss).peak_bytes
    assert free.measured_bytes is not None
    budget = (all_recipes + free.measured_bytes) // 2
    plan = planned(budget=budget)
    assert plan.measured_bytes is not None
    assert plan.measured_bytes <= budget
    assert {item.level for item in plan.items} > {NO_RECIPES}
    plan.apply(model)
    assert saved_by(model, x) < without
    assert all(map(torch.equal, step(model, x), step(eager, x)))


def test_a_model_without_recipes_offers_no_such_level():
    model, x = ConvBlocks(), torch.randn(2, C, 6, 6)
    plan = fusedckpt.plan(model, x, policy="none", progress=False, loss=lambda y: y.sum())
    assert NO_RECIPES not in {level.name for unit in plan.chain.units for level in unit.levels}


def test_a_model_is_planned_before_and_after_it_saves_recipes():
    """Both print the same, but only one of them has units without recipes."""
    model, x = ConvBlocks(), torch.randn(2, C, 6, 6)
    names = {"units": ["blocks.0", "blocks.1"], "policy": "none", "progress": False}
    fusedckpt.plan(model, x, loss=lambda y: y.sum(), **names)
    before = repr(model)
    fusedckpt.fuse(model, recompute_elementwise=True, norm=False, linear=False)
    assert repr(model) == before
    plan = fusedckpt.plan(model, x, loss=lambda y: y.sum(), **names)
    assert [item.level for item in plan.items] == [NO_RECIPES] * 2
