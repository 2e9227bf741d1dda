"""fuse leaves the state outside of modules as it was, though it runs their code."""

import gc
import random
import sys
import types

import pytest
import torch
from own_mlps import D, H
from support import DEVICE, randn
from torch import nn
from zoo import MLP, LlamaRMSNorm

from fusedckpt import fuse, plan, report

LOSSES = []
NESTED = types.SimpleNamespace(losses={"aux": []}, calls=0)
COUNT = 0
GENERATOR = torch.Generator()
RANDOM = random.Random(0)
HERE = sys.modules[__name__]


def closure():
    count = 0

    def increase():
        nonlocal count
        count += 1

    return increase, lambda: count


INCREASE, COUNTED = closure()


def append(y):
    LOSSES.append(y.square().mean())


def append_in_an_object(y):
    NESTED.losses["aux"].append(y.mean())
    NESTED.calls += 1


def append_to_a_default(y, losses=[]):  # noqa: B006  # that is the case
    losses.append(y)


def count(y):
    global COUNT
    COUNT += 1


def count_in_a_closure(y):
    INCREASE()


def count_in_the_class(y):
    WritingMLP.calls += 1


def count_in_a_module(y):
    HERE.COUNT += 1  # type: ignore[attr-defined]  # of this module


def draw(y):
    return torch.randint(9, (), generator=GENERATOR).item()


def draw_in_python(y):
    return RANDOM.random()


def state():
    """Return all that these functions write."""
    defaults: tuple = append_to_a_default.__defaults__ or ()
    lists = LOSSES, NESTED.losses["aux"], defaults[0]
    counts = NESTED.calls, COUNT, COUNTED(), WritingMLP.calls
    return *map(len, lists), *counts, GENERATOR.get_state().tolist(), RANDOM.getstate()


class WritingMLP(MLP):
    calls = 0

    def forward(self, x):
        y = super().forward(x)
        WRITE(y)
        return y


class WritingNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        y = super().forward(hidden_states)
        WRITE(y)
        return y


WRITE = append
WRITES = [append, append_in_an_object, append_to_a_default, count, count_in_a_closure]
WRITES += [count_in_the_class, count_in_a_module, draw, draw_in_python]


@pytest.mark.parametrize(("kind", "sizes"), [(WritingMLP, (D, H)), (WritingNorm, (D,))])
@pytest.mark.parametrize("write", WRITES)
def test_the_state_outside_is_put_back(kind, sizes, write, monkeypatch):
    monkeypatch.setattr(HERE, "WRITE", write)
    module = kind(*sizes).to(DEVICE)
    before = state()
    report = fuse(module)
    assert state() == before
    # or the swapped module would not write it
    assert report.swapped == {}
    assert report.left[""].key in ("writes", "random", "values")
    module(randn(3, D))
    if write is append:
        assert [loss.device.type for loss in LOSSES] == [DEVICE.type]
        LOSSES.clear()


def test_garbage_collected_meanwhile_is_not_of_the_forward(monkeypatch):
    collections = []

    def count_collections(phase, info):
        collections.append(phase)

    monkeypatch.setattr(HERE, "WRITE", id)
    gc.callbacks.append(count_collections)
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        report = fuse(WritingMLP(D, H).to(DEVICE))
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(count_collections)
    assert collections
    assert [*report.swapped] == [""]
    assert gc.isenabled()


def _close_over(model):
    """Hooks that count in the model, and scale a weight of another module."""

    def count(module, args, y):
        model.calls += 1
        model.seen.append(y)
        model.steps.add_(1)

    def scale(module, args):
        module.weight.data.mul_(2)
        model[1].fc1.bias.data.add_(1)

    model.calls, model.seen = 0, []
    model.register_buffer("steps", torch.zeros(1))
    model[0].register_forward_hook(count)
    model[0].register_forward_pre_hook(scale)


def test_models_that_hooks_close_over_stay():
    x = randn(3, D)
    runs = {
        "fuse": lambda model: fuse(model, example_inputs=(x,)),
        "report": lambda model: report(model, x),
        "plan": lambda model: plan(model, x, policy="all", progress=False),
    }
    for name, run in runs.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(D), MLP(D, H)).to(DEVICE)
        _close_over(model)
        before = [p.detach().clone() for p in model.parameters()]
        run(model)
        assert (model.calls, len(model.seen), model.steps.item()) == (0, 0, 0), name
        torch.testing.assert_close([p.detach() for p in model.parameters()], before)
