"""The planner on whole models: peaks, budgets, gradients, and that it leaves no trace."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from plan_models import (
    Packed,
    Pairs,
    assert_as_near,
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

MODELS = {
    "transformer": (lambda: transformer(6), tokens),
    "fused": (lambda: transformer(4, fused=True), tokens),
    "conv": (lambda: convolutional(6), images),
    "flat": (lambda: convolutional(4, flat=True), images),
    "in place": (lambda: convolutional(4, flat=True, inplace=True), images),
    "pairs": (Pairs, lambda: torch.randn(512, 64)),
    "packed": (
        lambda: nn.Sequential(*(Packed(64, 96) for _ in range(3))),
        lambda: torch.randn(512, 64),
    ),
    "encoder and decoder": (
        lambda: TwoInputs(nn.Transformer(64, 4, 2, 2, 128, batch_first=True)),
        lambda: torch.randn(8, 32, 64),
    ),
}


class TwoInputs(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x, x)


def made(name):
    model, example = MODELS[name]
    return model(), example()


def test_a_model_that_does_not_fit_is_measured_some_units_at_a_time(monkeypatch):
    model, x = transformer(4), tokens()
    whole = planned(model, x, policy="all").chain
    steps, saving = [], Meter.saving
    monkeypatch.setattr(Meter, "saving", lambda self, *a: steps.append(a[1]) or saving(self, *a))
    monkeypatch.setattr("fusedckpt.planning.measure.spare_bytes", lambda device: 0)
    parts = planned(model, x, policy="all").chain
    # where all is saved, and where all but attention is recomputed
    assert steps == 2 * [[0], [1], [2], [3]]
    for one, other in zip(whole.units, parts.units, strict=True):
        ours, theirs = one.levels[0], other.levels[0]
        assert (ours.kept, ours.backward) == pytest.approx((theirs.kept, theirs.backward), rel=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_peaks_are_as_predicted(name):
    model, x = made(name)
    optimizer = torch.optim.AdamW(model.parameters()) if name in ("fused", "conv") else None
    plans = [
        planned(model, x, policy=policy, optimizer=optimizer)
        for policy in ("none", "sqrt", "memory")
    ]
    most, _, least = (found.measured_bytes for found in plans)
    plans.append(planned(model, x, budget=(most + least) // 2, optimizer=optimizer))
    assert plans[-1].measured_bytes <= (most + least) // 2
    for found in plans:
        assert_predicted(found)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("transformer", "conv")])
@pytest.mark.parametrize("policy", ["sqrt", "memory"])
def test_a_planned_step_is_bit_equal(name, policy):
    model, x = made(name)
    plain = copy.deepcopy(model)
    found = planned(model, x, policy=policy)
    found.apply(model)
    ours, theirs = step(model, x), step(plain, x)
    if found.chunks > 1:
        # the same from run to run
        assert_equal(ours, step(model, x))
        assert_as_near(ours, theirs, step(copy.deepcopy(plain).double(), x))
    else:
        assert_equal(ours, theirs)
    assert_equal(list(model.buffers()), list(plain.buffers()))
    found.undo()
    assert_equal(step(model, x), step(plain, x))
    found.apply(model)
    model.eval(), plain.eval()
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


def noisy() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("name", ["transformer", "noisy"])
def test_budgets_are_kept_and_the_least_is_named(name):
    model, x = transformer(4), tokens()
    if name == "noisy":
        model, x = noisy(), torch.randn(512, 64)
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
        [(id(p), p.detach().clone(), id(p.grad), p._version) for p in model.parameters()],
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


@pytest.mark.parametrize("fails_at", [None, 1, 2, 5])
def test_everything_is_as_before(fails_at):
    model, x = convolutional(3), images()
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    calls = []

    def loss(output):
        return output.square().mean()

    class Fails(nn.Module):
        def forward(self, x):
            calls.append(1)
            if len(calls) == fails_at:
                raise KeyError("in the middle")
            return x

    model[2].append(Fails())
    before = state_of(model, optimizer)
    if fails_at is None:
        planned(model, x, policy="sqrt", optimizer=optimizer, loss=loss)
    else:
        with pytest.raises(KeyError):
            planned(model, x, policy="sqrt", optimizer=optimizer, loss=loss)
    after = state_of(model, optimizer)
    assert_same(before[0], after[0])
    assert_same([p[:3] for p in before[1]], [p[:3] for p in after[1]])
    assert_same(before[2:], after[2:])


def flat(*layers, count=4):
    """Return a net whose layers are units of their own."""
    return nn.Sequential(*(layer() for _ in range(count) for layer in layers))


SPEEDS = {
    "flat mlp": (lambda: flat(lambda: nn.Linear(64, 64), nn.ReLU), lambda: torch.randn(512, 64)),
    "mlp": (
        lambda: flat(lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU())),
        lambda: torch.randn(512, 64),
    ),
    "flat conv": (
        lambda: flat(lambda: nn.Conv2d(8, 8, 3), nn.GELU, lambda: nn.MaxPool2d(2, 1)),
        lambda: torch.randn(4, 8, 32, 32),
    ),
    **{name: MODELS[name] for name in ("transformer", "fused", "conv", "flat", "in place")},
}


@pytest.mark.parametrize("name", SPEEDS)
def test_speed_never_saves_more_than_a_plain_step(name):
    model, example = SPEEDS[name]
    model, x = model(), example()
    found, plain = (planned(model, x, policy=policy) for policy in ("speed", "none"))
    assert found.measured_bytes <= min(found.predicted_bytes, plain.measured_bytes)
    if name in ("transformer", "flat conv"):
        # activations are recomputed
        assert found.measured_bytes < 0.9 * plain.measured_bytes
    twin = copy.deepcopy(model)
    found.apply(model)
    assert_equal(step(model, x), step(twin, x))
