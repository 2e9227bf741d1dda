"""The report names the functions whose results are made again, and where a sequence was cut."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedckpt
from fusedckpt.autograd import private
from fusedckpt.autograd.tracker import LIMIT
from fusedckpt.recipes import recipe_mode
from fusedckpt.reporting.recipe_groups import RecipeGroup

C, SIDE, ROWS = 4, 6, 3
NBYTES = ROWS * C * SIDE * SIDE * 4


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr(recipe_mode, "FLOOR_BYTES", 0)


class ConvNet(nn.Module):
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
    model, x = ConvNet(depth), torch.randn(ROWS, C, SIDE, SIDE, requires_grad=True)
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


def test_a_cut_sequence_is_named():
    report = reported(LIMIT + 1, recompute_elementwise=True)
    cut = [group for group in report.recipes if group.is_cut]
    assert [(group.functions[0], group.count, group.nbytes) for group in cut] == [
        ("softsign", 1, NBYTES)
    ]
    assert len(cut[0].functions) == LIMIT + 1
    assert "saved: its sequence was cut" in str(report)
    assert not any(
        group.is_cut for group in reported(LIMIT - 1, recompute_elementwise=True).recipes
    )


def test_a_model_without_recipes_has_no_such_table():
    report = reported(1)
    assert report.recipes == ()
    assert "recipes: functions" not in str(report)


def test_reports_say_what_recipes_would_save():
    model, x = ConvNet(2), torch.randn(ROWS, C, SIDE, SIDE, requires_grad=True)
    expected = fusedckpt.report(*_fused_with_recipes(model, x)).saved_bytes
    found = fusedckpt.fuse(model, example_inputs=x)
    (note,) = (note for note in found.notes if "recompute_elementwise" in note)
    for report in (fusedckpt.report(model, x), fusedckpt.estimate(model, x)):
        assert report.saved_bytes_with_recipes == expected
        assert report.to_dict()["saved_bytes_with_recipes"] == expected
        share = f"{1 - expected / report.saved_bytes:.0%} less is saved"
        assert share in str(report)
    # the loss of a report saves the result
    assert note.endswith(f"{report.saved_bytes - NBYTES:,} -> {expected - NBYTES:,} bytes a step")


def _fused_with_recipes(model: nn.Module, x: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    copied = copy.deepcopy(model)
    fusedckpt.fuse(copied, recompute_elementwise=True)
    return copied, x


def test_an_estimate_sees_recipes_of_small_tensors(monkeypatch):
    """A batch norm's weights are below the floor, its results above."""
    monkeypatch.setattr(recipe_mode, "FLOOR_BYTES", NBYTES)
    model, x = _fused_with_recipes(ConvNet(1), torch.randn(ROWS, C, SIDE, SIDE))
    saved = fusedckpt.estimate(model, x).saved_bytes
    assert (
        saved
        == fusedckpt.report(model, x).saved_bytes
        < fusedckpt.report(ConvNet(1), x).saved_bytes
    )


def test_an_estimate_draws_the_noise_of_dropout_again():
    layers = nn.Conv2d(C, C, 1), nn.Sigmoid(), nn.Dropout(0.5), nn.Conv2d(C, C, 1)
    model, x = _fused_with_recipes(nn.Sequential(*layers), torch.randn(ROWS, C, SIDE, SIDE))
    assert fusedckpt.estimate(model, x).saved_bytes == fusedckpt.report(model, x).saved_bytes


class Picky(ConvNet):
    """Raises where a function mode is active."""

    def forward(self, x):
        assert not private.num_function_modes()
        return super().forward(x)


def test_nothing_is_said_of_recipes_that_fail():
    model, x = Picky(1), torch.randn(ROWS, C, SIDE, SIDE)
    assert not any("recompute" in note for note in fusedckpt.fuse(model, example_inputs=x).notes)
    report = fusedckpt.report(model, x)
    assert report.saved_bytes_with_recipes is None
    assert "with recipes" not in str(report)


def test_a_compiled_function_is_not_compiled_again():
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward

    class Compiled(ConvNet):
        def forward(self, x):
            return compiled(super().forward(x))

    compiled = torch.compile(lambda x: F.softsign(x) + 1, backend=backend)
    model, x = Compiled(1), torch.randn(ROWS, C, SIDE, SIDE)
    assert fusedckpt.report(model, x).saved_bytes_with_recipes is None
    model(x).sum().backward()
    assert len(frames) == 1
