"""The report names the functions whose results are made again, and where a chain was cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedckpt
from fusedckpt.autograd.tracker import LIMIT
from fusedckpt.fusing import recipe_mode
from fusedckpt.reporting.recipe_groups import RecipeGroup

C, SIDE, ROWS = 4, 6, 3
NBYTES = ROWS * C * SIDE * SIDE * 4


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr(recipe_mode, "FLOOR_BYTES", 0)


class Net(nn.Module):
    def __init__(self, depth: int):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(C, C, 1), nn.Conv2d(C, C, 1)
        self.norm, self.depth = nn.BatchNorm2d(C), depth

    def forward(self, x):
        x = self.conv2(F.relu(self.norm(self.conv1(x))))
        for _ in range(self.depth):
            x = F.softsign(x)
        return self.conv1(x)


def reported(depth: int, **options: bool) -> fusedckpt.MemoryReport:
    model, x = Net(depth), torch.randn(ROWS, C, SIDE, SIDE, requires_grad=True)
    fusedckpt.fuse(model, **options)
    return fusedckpt.report(model, x, loss=lambda y: y.square().mean())


def test_the_functions_of_recipes_are_named():
    report = reported(1, recompute_elementwise=True)
    groups = {group.functions: group for group in report.recipes}
    assert groups["relu", "batch_norm"] == RecipeGroup(("relu", "batch_norm"), False, 1, NBYTES)
    assert groups["softsign",] == RecipeGroup(("softsign",), False, 1, NBYTES)
    (line,) = (line for line in str(report).splitlines() if "relu, batch_norm" in line)
    assert "1.7 KiB" in line
    assert "made again" in line
    assert report.to_dict()["recipes"][0]["nbytes"] == NBYTES


def test_a_cut_chain_is_named():
    report = reported(LIMIT + 1, recompute_elementwise=True)
    cut = [group for group in report.recipes if group.is_cut]
    assert [(group.functions[0], group.count, group.nbytes) for group in cut] == [
        ("softsign", 1, NBYTES)
    ]
    assert len(cut[0].functions) == LIMIT + 1
    assert "saved: its chain was cut" in str(report)
    assert not any(
        group.is_cut for group in reported(LIMIT - 1, recompute_elementwise=True).recipes
    )


def test_a_model_without_recipes_has_no_such_table():
    report = reported(1)
    assert report.recipes == ()
    assert "recipes" not in str(report)
