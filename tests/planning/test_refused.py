"""What plan refuses before any work, what it names, and what it leaves as it is."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from plan_models import (
    Chain,
    assert_equal,
    assert_predicted,
    convolutional,
    images,
    planned,
    step,
    tokens,
    transformer,
    units_of,
)
from torch import nn

import fusedckpt
from fusedckpt import Checkpoint, checkpoint_sequential
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
    with pytest.raises(ValueError, match=r"^plan: .* with data"):
        planned(copy.deepcopy(model).to("meta"), x, policy="all")
    found = planned(model, x, policy="all")
    found.apply(model)
    with pytest.raises(ValueError, match=r"^plan: a plan is applied"):
        planned(model, x, policy="all")
    found.undo()
    model.blocks[0].compile(backend="eager")
    with pytest.raises(ValueError, match=r"^plan: .*got blocks.0 compiled.*apply the plan, then"):
        planned(model, x, policy="all")
    model = transformer(2)
    model.blocks[1] = torch.compile(model.blocks[1])
    with pytest.raises(ValueError, match=r"^plan: .*compiled"):
        planned(model, x, policy="all")


@dataclass
class State:
    x: torch.Tensor


class Stateful(nn.Linear):
    def forward(self, state):
        return State(super().forward(state.x))


class InCheckpoints(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.units, self.run = nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), run

    def forward(self, x):
        return self.run(self.units, x)


def _stock(units, x):
    for unit in units:
        x = torch.utils.checkpoint.checkpoint(unit, x, use_reentrant=False)
    return x


@pytest.mark.parametrize("run", [_stock, lambda units, x: checkpoint_sequential(units, 2, x)])
def test_checkpoints_around_units_are_named(run):
    x = torch.randn(8, 16)
    with pytest.raises(ValueError, match=r"^plan: unit units.0 runs inside a checkpoint: .*take"):
        planned(InCheckpoints(run), x, policy="all", loss=torch.sum)
    model = nn.Sequential(Checkpoint(nn.Sequential(nn.Linear(16, 16), nn.ReLU())), nn.Linear(16, 1))
    planned(model, x, policy="all", loss=torch.sum)


@pytest.mark.parametrize("is_modules", [False, True])
def test_reentrant_checkpoints_around_units_are_named(is_modules):
    def run(units, x):
        for unit in units:
            fn = unit if is_modules else lambda x, unit=unit: unit(x)
            x = torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=True)
        return x

    x = torch.randn(8, 16, requires_grad=True)
    told = r"^plan: unit units.0 runs inside a reentrant checkpoint, .*use_reentrant=False"
    with pytest.raises(ValueError, match=told):
        planned(InCheckpoints(run), x, policy="all", loss=torch.sum)

    def frozen(units, x):
        with torch.no_grad():
            x = units[0](x)
        return units[3](units[2](units[1](x)))

    # without one it is as ever
    found = planned(InCheckpoints(frozen), x, policy="all", loss=torch.sum)
    assert found.left_out == {"units.0": "is not called in a step with gradients"}


def test_dataclasses_between_units_are_named():
    model = nn.Sequential(Stateful(16, 16), Stateful(16, 16))
    with pytest.raises(ValueError, match=r"0 returns a dataclass, State, .*let it return a tensor"):
        planned(model, State(torch.randn(8, 16)), policy="all", loss=lambda state: state.x.sum())


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
        "units.0": "returns nothing that requires a gradient",
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


class Notes(nn.Module):
    def __init__(self):
        super().__init__()
        self.units = nn.ModuleList(Noting(16, 16) for _ in range(3))

    def forward(self, x):
        notes = {}
        for unit in self.units:
            x = unit(x, notes)
        return x + sum(notes.values())


class OnlyNotes(Notes):
    """Nothing reaches the loss but by way of the dict."""

    def forward(self, x):
        notes = {}
        for unit in self.units:
            unit(x if not notes else [*notes.values()][-1], notes)
        return sum(notes.values())


def test_an_output_that_goes_through_a_dict_is_as_predicted():
    found = planned(OnlyNotes(), torch.randn(1024, 16), policy="all")
    assert_predicted(found)


@pytest.mark.parametrize("policy", ["all", "memory"])
@pytest.mark.parametrize("kind", [Notes, OnlyNotes])
def test_units_that_write_into_a_dict_stay(kind, policy):
    model, x = kind(), torch.randn(8, 16)
    plain = copy.deepcopy(model)
    found = planned(model, x, policy=policy)
    assert all(unit.fixed for unit in found.chain.units)
    found.apply(model)
    assert_equal(step(model, x), step(plain, x))


def test_units_that_write_into_their_input_stay():
    model, x = convolutional(4, flat=True, inplace=True), images()
    found = planned(model, x, policy="all")
    fixed = [unit.name for unit in found.chain.units if unit.fixed]
    assert fixed == ["3", "6", "9", "12"]
    assert "unchanged, modifies its input" in str(found)


def test_nested_tensors_are_refused():
    x = torch.nested.nested_tensor([torch.randn(n, 16) for n in (3, 5)], layout=torch.jagged)
    with pytest.raises(ValueError, match="dense or sparse tensors to be measured with, got a nest"):
        fusedckpt.plan(
            nn.Sequential(nn.Linear(16, 16), nn.ReLU()),
            x,
            loss=lambda y: y.values().sum(),
            progress=False,
            policy="all",
        )


@pytest.mark.parametrize("fused", [False, True])
def test_caches_are_refused(fused):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2,
    )  # fmt: skip
    model, x = transformers.LlamaForCausalLM(config), tokens()
    if fused:
        # which is called at each of its levels
        fusedckpt.fuse(model)
    with pytest.raises(ValueError, match=r"^plan: .*past_key_values.*\(\.\.\., use_cache=False\)"):
        planned(model, input_ids=x, labels=x, policy="all")


def test_a_hopeless_budget_is_not_tried(monkeypatch):
    """What takes more may not fit the device at all."""
    monkeypatch.setattr("fusedckpt.planning.trials.spare_bytes", lambda device: 0)
    tried = []
    monkeypatch.setattr(Trials, "tried", lambda self, found: tried.append(found))
    with pytest.raises(ValueError, match="plan: the least feasible budget is"):
        planned(transformer(2), tokens(), budget="10KiB")
    assert not tried


class Siamese(nn.Module):
    """One encoder for two inputs, and a head."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(16, 16) for _ in range(encoder))
        self.head = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def encode(self, x):
        for layer in self.encoder:
            x = layer(x).relu()
        return x

    def forward(self, x):
        x = self.encode(x) - self.encode(-x)
        for layer in self.head:
            x = layer(x).relu()
        return x


def test_the_least_budget_names_what_was_left_out():
    least = r"^plan: the least feasible .*budget is \d+ bytes \(.*\), got 1000 bytes; not planned: "
    for kind, count, others in (("budget", 6, "5 others"), ("activation_budget", 2, "1 other")):
        told = rf"{least}encoder\.0 and {others} \(is called 2 times in a step\)$"
        with pytest.raises(ValueError, match=told):
            planned(Siamese(count), torch.randn(64, 16), **{kind: 1000})


class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(self.inner(x))


NO_UNITS = {
    "no parts": (nn.Linear(16, 16), "it has no parts"),
    "all twice": (Twice(nn.Linear(16, 16)), "inner is called 2 times in a step"),
    "a part that is frozen": (
        Twice(nn.Sequential(nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 16))),
        r"inner\.1 is called 2 times in a step",
    ),
}


@pytest.mark.parametrize("name", NO_UNITS)
def test_units_are_only_asked_for_where_some_can_be_named(name):
    model, why = NO_UNITS[name]
    with pytest.raises(ValueError, match=f"that runs exactly once: .*{why}") as caught:
        planned(model, torch.randn(8, 16), policy="all")
    assert "units=" not in str(caught.value)


def test_units_that_could_be_named_are():
    model = nn.Sequential(Twice(nn.Linear(16, 16)), Twice(nn.Linear(16, 16)))
    told = r"that runs exactly once, name some with units=, such as 0, 1: 0\.inner is called 2"
    with pytest.raises(ValueError, match=told):
        planned(model, torch.randn(8, 16), policy="all", units=["0.inner", "1.inner"])
