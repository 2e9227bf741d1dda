"""The planner on whole models: peaks, budgets, gradients, and that it leaves no trace."""

from __future__ import annotations

import copy
import random
from collections import Counter, deque

import numpy as np
import pytest
import torch
from plan_models import (
    PackedBlock,
    Pairs,
    assert_equal,
    assert_predicted,
    convolutional,
    images,
    planned,
    step,
    tokens,
    transformer,
)
from torch import nn

from fusedckpt.planning.meter import Meter


def flat(*layers, count=4):
    """Return a net whose layers are units of their own."""
    return nn.Sequential(*(layer() for _ in range(count) for layer in layers))


class TwoInputs(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x, x)


def rows():
    return torch.randn(512, 64)


MODELS = {
    "transformer": (lambda: transformer(4), tokens),
    "fused": (lambda: transformer(3, fused=True), tokens),
    "conv": (lambda: convolutional(4), images),
    "flat": (lambda: convolutional(3, flat=True), images),
    "in place": (lambda: convolutional(3, flat=True, inplace=True), images),
    "pairs": (Pairs, rows),
    "packed": (lambda: nn.Sequential(*(PackedBlock(64, 96) for _ in range(3))), rows),
    "encoder and decoder": (
        lambda: TwoInputs(nn.Transformer(64, 4, 2, 2, 128, batch_first=True)),
        lambda: torch.randn(8, 32, 64),
    ),
    "mlp": (lambda: flat(lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU())), rows),
    "flat conv": (
        lambda: flat(lambda: nn.Conv2d(8, 8, 3), nn.GELU, lambda: nn.MaxPool2d(2, 1)),
        lambda: torch.randn(4, 8, 32, 32),
    ),
}
# in which "speed" recomputes activations
SELECTIVE = "transformer", "flat conv"


def assert_trains_as(model, plain, x):
    """Assert that a planned step is one without a plan, bit for bit."""
    assert_equal(step(model, x), step(plain, x))
    assert_equal(list(model.buffers()), list(plain.buffers()))


@pytest.mark.parametrize("name", MODELS)
def test_peaks_are_as_predicted_and_steps_are_those_without_a_plan(name):
    make, example = MODELS[name]
    model, x = make(), example()
    optimizer = torch.optim.AdamW(model.parameters()) if name in ("fused", "conv") else None
    plans = {
        policy: planned(model, x, policy=policy, optimizer=optimizer)
        for policy in ("none", "sqrt", "memory", "speed")
    }
    peaks = {policy: found.measured_bytes for policy, found in plans.items()}
    budget = (peaks["none"] + peaks["memory"]) // 2
    plans["budget"] = planned(model, x, budget=budget, optimizer=optimizer)
    assert plans["budget"].measured_bytes <= budget
    assert peaks["speed"] <= plans["speed"].predicted_bytes
    assert peaks["speed"] <= (0.9 if name in SELECTIVE else 1.0) * peaks["none"]
    plain = copy.deepcopy(model)
    for found in plans.values():
        assert_predicted(found)
        found.apply(model)
        assert_trains_as(model, plain, x)
        found.undo()
    assert_equal(step(model, x), step(plain, x))
    plans["memory"].apply(model)
    model.eval(), plain.eval()
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


def test_a_model_that_does_not_fit_is_measured_some_units_at_a_time(monkeypatch):
    model, x = transformer(3), tokens()
    whole = planned(model, x, policy="all").chain
    steps, saving = [], Meter.at_levels
    monkeypatch.setattr(Meter, "at_levels", lambda self, *a: steps.append(a[1]) or saving(self, *a))
    monkeypatch.setattr("fusedckpt.planning.measure.spare_bytes", lambda device: 0)
    parts = planned(model, x, policy="all").chain
    # where all is saved, and where all but attention is recomputed
    assert steps == 2 * [[0], [1], [2]]
    for one, other in zip(whole.units, parts.units, strict=True):
        ours, theirs = one.levels[0], other.levels[0]
        assert (ours.added_bytes, ours.backward_peak) == pytest.approx(
            (theirs.added_bytes, theirs.backward_peak), rel=0.01
        )


def noisy() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize(
    ("make", "example"), [(lambda: transformer(3), tokens), (noisy, rows)], ids=["blocks", "noisy"]
)
def test_budgets_are_kept_and_the_least_is_named(make, example):
    model, x = make(), example()
    error = "plan: the least feasible budget is"
    with pytest.raises(ValueError, match=error) as caught:
        planned(model, x, budget=1000)
    least = int(str(caught.value).split(" bytes")[0].split()[-1])
    found = planned(model, x, budget=least)
    assert found.measured_bytes <= least
    assert found.budget_bytes == least
    # what the model of memory takes too much is not in it
    with pytest.raises(ValueError, match=error):
        planned(model, x, budget=int(0.99 * least))


def state_of(model, optimizer):
    return (
        [(type(m), {k: id(v) for k, v in vars(m).items()}) for m in model.modules()],
        [(id(p), p.detach().clone(), id(p.grad)) for p in model.parameters()],
        [p.grad.clone() for p in model.parameters()],
        [b.clone() for b in model.buffers()],
        copy.deepcopy(optimizer.state_dict()),
        (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
    )


def assert_same(a, b):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        assert_same(list(a.values()), list(b.values()))
    else:
        assert a == b


@pytest.mark.parametrize("fails_at", [None, 1, 2, 4, 6])
def test_everything_is_as_before(fails_at):
    model, x = convolutional(3), images()
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    calls = []

    def loss(output):
        return output.square().mean()

    class FailsLater(nn.Module):
        def forward(self, x):
            calls.append(1)
            if len(calls) == fails_at:
                raise KeyError("in the middle")
            return x

    model[2].append(FailsLater())
    before = state_of(model, optimizer)
    if fails_at is None:
        planned(model, x, policy="sqrt", optimizer=optimizer, loss=loss)
    else:
        with pytest.raises(KeyError):
            planned(model, x, policy="sqrt", optimizer=optimizer, loss=loss)
    assert_same(before, state_of(model, optimizer))


class Stateful(nn.Linear):
    """A unit with all kinds of state that planning may change in a module."""

    def __init__(self):
        super().__init__(8, 8)
        self.calls, self.list, self.dict, self.nested = 0, [0], {"calls": 0}, {"a": [0, {"b": 0}]}
        self.counter, self.set, self.deque = Counter(), set(), deque(maxlen=3)
        self.tensor, self.array = torch.zeros(3), np.zeros(3)
        self.torch, self.python = torch.Generator().manual_seed(1), random.Random(1)
        self.numpy = [np.random.default_rng(1), np.random.RandomState(1)]

    def forward(self, x):
        return super().forward(x) * self.changed()

    def changed(self):
        self.calls += 1
        self.list[0] += 1
        self.dict["calls"] += 1
        self.nested["a"][1]["b"] += 1
        self.counter["calls"] += 1
        self.set.add(self.calls), self.deque.append(self.calls)
        self.tensor.add_(1)
        self.array += 1
        return 1 + sum(self.drawn())

    def drawn(self):
        x = torch.rand((), generator=self.torch).item()
        return [x, self.python.random(), self.numpy[0].random(), self.numpy[1].random()]

    def state(self):
        held = self.calls, self.list, self.dict, self.nested, self.counter, self.set, self.deque
        return copy.deepcopy(held), self.tensor.clone().tolist(), self.array.copy().tolist()


@pytest.mark.parametrize("policy", ["memory", "speed"])
def test_state_of_any_kind_is_as_before(policy):
    model, twin = nn.Sequential(nn.Linear(8, 8), Stateful()), Stateful()
    unit, x = model[1], torch.randn(4, 8)
    for _ in range(4):
        model(x)
    before, objects = unit.state(), {k: id(v) for k, v in vars(unit).items()}
    planned(model, x, policy=policy)
    assert unit.state() == before
    assert {k: id(v) for k, v in vars(unit).items()} == objects
    for _ in range(4):
        twin.drawn()
    assert unit.drawn() == twin.drawn()
