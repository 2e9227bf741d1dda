"""Errors of plan before any work, the names in them, and that nothing is changed."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from budgets import Called
from plan_models import (
    Chain,
    Noted,
    assert_as_planned,
    assert_equal,
    convolutional,
    images,
    planned,
    tokens,
    transformer,
    units_of,
)
from torch import nn

import fusedckpt
from fusedckpt import checkpoint_module, checkpoint_sequential
from fusedckpt.planning.budget import bytes_of
from fusedckpt.planning.trials import Trials

WRONG = {
    "no budget": ({}, ValueError),
    "two budgets": ({"budget": 10, "activation_budget": 10}, ValueError),
    "budget and policy": ({"budget": 10, "policy": "all"}, ValueError),
    "negative": ({"budget": -1}, ValueError),
    "unit": ({"budget": "20 parsecs"}, ValueError),
    "share": ({"budget": 1.5}, ValueError),
    "bool": ({"budget": np.True_}, ValueError),
    "policy": ({"policy": "best"}, ValueError),
    "uniform": ({"policy": "uniform:0"}, ValueError),
    "too uniform": ({"policy": "uniform:99"}, ValueError),
    "number": ({"policy": 3}, ValueError),
    "empty": ({"policy": []}, ValueError),
    "module": ({"policy": ["blocks.0", "nowhere"]}, ValueError),
    "nested": ({"policy": "all", "units": ["blocks.0", "blocks.0.mlp"]}, ValueError),
    "twice": ({"policy": "all", "units": ["blocks.0", "blocks.0"]}, ValueError),
    "one name": ({"policy": "all", "units": "blocks"}, TypeError),
    "root": ({"policy": "all", "units": [""]}, ValueError),
    "stranger": ({"policy": "all", "units": [nn.Linear(1, 1)]}, ValueError),
    "both": ({"policy": ["blocks.0"], "units": ["blocks.1"]}, ValueError),
    "loss": ({"policy": "all", "loss": 3}, TypeError),
    "optimizer": ({"policy": "all", "optimizer": 3}, TypeError),
    "another's optimizer": (
        {"policy": "all", "optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())},
        ValueError,
    ),
    "group": ({"policy": "all", "group": "dp"}, TypeError),
    "no unit": ({"budget": "0.8"}, ValueError),
}


@pytest.mark.parametrize(
    ("budget", "nbytes"),
    [(np.int64(3), 3), (np.uint8(3), 3), ("1.5 KiB", 1536), ("2kB", 2000), ("0.1MiB", 104857)],
)
def test_budgets_in_bytes(budget, nbytes):
    found = bytes_of("plan", budget, torch.device("cpu"))
    assert type(found) is int
    assert found == nbytes
    share = bytes_of("plan", np.float64(0.5), torch.device("cpu"))
    assert share == bytes_of("plan", 0.5, torch.device("cpu"))


@pytest.mark.parametrize("budget", [True, 0, np.int64(-1), 1.5, "20 parsecs", [1]])
def test_a_wrong_budget_is_named_with_its_type(budget):
    with pytest.raises(ValueError, match=rf"^plan: a budget is .* of type {type(budget).__name__}"):
        bytes_of("plan", budget, torch.device("cpu"))


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_before_any_work(name):
    options, error = WRONG[name]
    model = transformer(2)
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    with pytest.raises(error, match=r"^plan: "):
        planned(model, tokens(), **options)


def test_models_that_cannot_be_planned():
    model, x = transformer(2), tokens()
    with pytest.raises(TypeError, match=r"^plan: "):
        planned(lambda: None, x, policy="all")
    with pytest.raises(ValueError, match=r"^plan: .* have no data"):
        planned(copy.deepcopy(model).to("meta"), x, policy="all")
    found = planned(model, x, policy="all")
    found.apply(model)
    with pytest.raises(ValueError, match=r"^plan: another plan is applied"):
        planned(model, x, policy="all")
    found.undo()
    model.blocks[0].compile(backend="eager")
    with pytest.raises(ValueError, match=r"^plan: .*blocks.0 is compiled.*apply the plan, then"):
        planned(model, x, policy="all")
    model = transformer(2)
    model.blocks[1] = torch.compile(model.blocks[1])
    with pytest.raises(ValueError, match=r"^plan: .*compiled"):
        planned(model, x, policy="all")


def linears(count=4):
    return [nn.Linear(16, 16) for _ in range(count)]


def under(run):
    """Return a model whose units run by a function of them and the input."""
    return Called(lambda model, x: run(model.units, x), units=linears())


def each(**options):
    def run(units, x):
        for unit in units:
            x = torch.utils.checkpoint.checkpoint(unit, x, **options)
        return x

    return run


def test_checkpoints_around_units_are_named():
    x = torch.randn(8, 16, requires_grad=True)
    for run in (each(use_reentrant=False), lambda units, x: checkpoint_sequential(units, 2, x)):
        told = r"^plan: unit units.0 runs inside a checkpoint, .*remove"
        with pytest.raises(ValueError, match=told):
            planned(under(run), x, policy="all", loss=torch.sum)
    told = r"^plan: expected a unit .*outside of reentrant checkpoints: units.0 is not called"
    with pytest.raises(ValueError, match=told):
        planned(under(each(use_reentrant=True)), x, policy="all", loss=torch.sum)
    model = nn.Sequential(
        checkpoint_module(nn.Sequential(nn.Linear(16, 16), nn.ReLU())), nn.Linear(16, 1)
    )
    planned(model, x, policy="all", loss=torch.sum)


@dataclass
class State:
    x: torch.Tensor


class ReturnsState(nn.Linear):
    def forward(self, state):
        return State(super().forward(state.x))


def test_dataclasses_between_units_are_planned_and_freed():
    model, x = nn.Sequential(*(ReturnsState(16, 16) for _ in range(4))), torch.randn(8, 16)

    def run():
        model.zero_grad()
        output = model(State(x))
        output.x.square().sum().backward()
        return weakref.ref(output.x), [p.grad for p in model.parameters()]

    _, expected = run()
    gc.disable()
    try:
        for policy in ("all", "uniform:1"):
            found = planned(model, State(x), policy=policy, loss=lambda state: state.x.sum())
            # an object that one unit hands to another would hold the segment of both
            assert not any(unit.joined for unit in found.chain.units)
            assert abs(found.predicted_bytes - found.measured_bytes) <= 0.01 * found.measured_bytes
            found.apply(model)
            output, gradients = run()
            found.undo()
            assert_equal(gradients, expected)
            assert output() is None
    finally:
        gc.enable()


class Appending(nn.Linear):
    """Changes an object among its arguments, as a router that notes its loss does."""

    def forward(self, x, losses):
        losses.found.append(super().forward(x).sum())
        return super().forward(x)


def test_arguments_that_units_change_are_named():
    model = Called(lambda m, x: m.units[1](m.units[0](x, m.losses), m.losses),
                   units=[Appending(16, 16), Appending(16, 16)])  # fmt: skip
    model.losses = SimpleNamespace(found=[])
    with pytest.raises(ValueError, match=r"changes its argument 1, a SimpleNamespace: "):
        planned(model, torch.randn(8, 16), policy="all")


def test_units_by_name_and_as_modules():
    model, x = transformer(4), tokens()
    found = planned(model, x, policy=["blocks.3", model.blocks[1]])
    assert units_of(found) == ["blocks.1", "blocks.3"]
    assert found.policy == "checkpoint: blocks.3, blocks.1"
    assert found.measured_bytes <= found.predicted_bytes
    found = planned(model, x, policy="uniform:1", units=[block.mlp for block in model.blocks])
    assert units_of(found) == [f"blocks.{i}.mlp" for i in range(4)]


def test_what_is_no_unit_is_said():
    shared = nn.Linear(16, 16)
    model = Chain([nn.Linear(16, 16), shared, nn.Linear(16, 16), nn.Linear(16, 16)], [0, 1, 1, 2])
    model.units[0].requires_grad_(False)
    found = planned(model, torch.randn(8, 16), policy="all")
    assert found.left_out == {
        "units.0": "returns no tensor that requires a gradient",
        "units.1": "is called 2 times in a step",
        "units.3": "is not called in a step with gradients",
    }
    assert "not planned     units.1: is called 2 times" in str(found)
    with pytest.raises(ValueError, match=r"runs exactly once.*units.1 is called 2 times"):
        planned(model, torch.randn(8, 16), policy="all", units=["units.1"])


class Noting(nn.Linear):
    def forward(self, x, notes):
        notes[self] = y = super().forward(x).relu()
        return y


class OnlyNoted(Noted):
    """Nothing reaches the loss but by way of the dict."""

    def forward(self, x):
        notes = {}
        for unit in self.units:
            unit(x if not notes else [*notes.values()][-1], notes)
        return sum(notes.values())


@pytest.mark.parametrize("policy", ["all", "memory"])
@pytest.mark.parametrize("kind", [Noted, OnlyNoted])
def test_units_that_write_into_a_dict_are_recomputed(kind, policy):
    model = kind(Noting(16, 16) for _ in range(3))
    found = assert_as_planned(model, torch.randn(8, 16), policy)
    assert not any(unit.fixed for unit in found.chain.units)


def test_units_that_write_into_their_input_stay():
    model, x = convolutional(4, flat=True, inplace=True), images()
    found = planned(model, x, policy="all")
    fixed = [unit.name for unit in found.chain.units if unit.fixed]
    assert fixed == ["3", "6", "9", "12"]
    assert "unchanged, modifies its input" in str(found)


def test_nested_tensors_are_refused():
    x = torch.nested.nested_tensor([torch.randn(n, 16) for n in (3, 5)], layout=torch.jagged)
    with pytest.raises(ValueError, match="gets a nested tensor, which plan cannot measure"):
        fusedckpt.plan(
            nn.Sequential(nn.Linear(16, 16), nn.ReLU()),
            x,
            loss=lambda y: y.values().sum(),
            progress=False,
            policy="all",
        )


def test_a_hopeless_budget_is_not_tried(monkeypatch):
    """What takes more may not fit the device at all."""
    monkeypatch.setattr("fusedckpt.planning.trials.spare_bytes", lambda device: 0)
    tried = []
    monkeypatch.setattr(Trials, "try_plan", lambda self, found: tried.append(found))
    with pytest.raises(ValueError, match="plan: the least feasible budget is"):
        planned(transformer(2), tokens(), budget="10KiB")
    assert not tried


def siamese(count):
    """Return one encoder for two inputs, and a head."""

    def encode(model, x):
        for layer in model.encoder:
            x = layer(x).relu()
        return x

    def call(model, x):
        x = encode(model, x) - encode(model, -x)
        for layer in model.head:
            x = layer(x).relu()
        return x

    return Called(call, encoder=linears(count), head=linears(2))


def test_the_least_budget_names_what_was_left_out():
    least = (
        r"^plan: the least feasible .*budget is \d+ bytes \(.*\), got 1000 bytes; .*; not planned"
    )
    for kind, count, others in (("budget", 6, "5 more"), ("activation_budget", 2, "1 more")):
        told = rf"{least}: encoder\.0 and {others} \(is called 2 times in a step\)$"
        with pytest.raises(ValueError, match=told):
            planned(siamese(count), torch.randn(64, 16), **{kind: 1000})


def test_a_model_without_modules_is_refused():
    with pytest.raises(ValueError, match=r"^plan: expected .* modules .* Linear without any$"):
        planned(nn.Linear(16, 16), torch.randn(8, 16), policy="all")


def test_a_step_without_a_batch_or_a_loss_is_refused():
    with pytest.raises(ValueError, match=r"^plan: .* got empty tensors of \[0, 16\]$"):
        planned(nn.Sequential(*linears()), torch.randn(0, 16), policy="all")
    model = Called(lambda model, x: None, units=linears())
    with pytest.raises(ValueError, match=r"^plan: the output of Called, None, has neither a loss"):
        planned(model, torch.randn(8, 16), policy="all")


def test_eval_mode_is_named():
    model, x = nn.Sequential(*linears()), torch.randn(8, 16)
    assert str(planned(model.eval(), x, policy="none")).startswith("Plan for Sequential, in eval")
    assert "eval" not in str(planned(model.train(), x, policy="none"))


def twice(inner):
    return Called(lambda model, x: model.inner(model.inner(x)), inner=inner)


NO_UNITS = {
    "all twice": (twice(nn.Linear(16, 16)), "inner is called 2 times in a step"),
    "a part that is frozen": (
        twice(nn.Sequential(nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 16))),
        r"inner\.1 is called 2 times in a step",
    ),
    "many": (
        Called(lambda m, x: m.tower(m.tower(x)), tower=nn.Sequential(*linears(6))),
        r"tower.0 is called 2 times in a step; .*; 3 more: name other modules in units=$",
    ),
    "one in a list": (
        Called(lambda m, x: sum(cell(x) for cell in m.cells), cells=linears(1) * 5),
        "cells.0 is called 5 times in a step",
    ),
}


@pytest.mark.parametrize("name", NO_UNITS)
def test_a_model_without_units_is_refused(name):
    model, why = NO_UNITS[name]
    with pytest.raises(ValueError, match=f"^plan: .*that runs exactly once, .*{why}"):
        planned(model, torch.randn(8, 16), policy="all")
