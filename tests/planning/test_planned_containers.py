"""Lists and dicts among the arguments of units, which the model or the units change."""

import pytest
import torch
from plan_models import Noted, assert_as_planned
from torch import nn

from fusedckpt import plan

WIDTH, COUNT = 16, 4


def layers(width=lambda i: WIDTH):
    return nn.ModuleList(
        nn.Sequential(nn.Linear(width(i), 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))
        for i in range(COUNT)
    )


class Gathers(nn.Module):
    """Concatenates the tensors of a list, as a layer of a DenseNet does."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, features):
        return self.layer(torch.cat(features, -1))


class AppendingUnits(nn.Module):
    """Appends the output of each unit to the list that all get."""

    def __init__(self):
        super().__init__()
        self.units = nn.ModuleList(map(Gathers, layers(lambda i: (i + 1) * WIDTH)))

    def forward(self, x):
        features = [x]
        for unit in self.units:
            features.append(unit(features))
        return torch.cat(features, -1)


class Takes(nn.Module):
    """Adds the first tensor of a list to its argument."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, extras, takes_out=False):
        extra = extras.pop(0) if takes_out else extras[0]
        return x + self.layer(x + extra)


class Queue(nn.Module):
    """The model, or a unit, takes the first tensor from a list that all units get."""

    def __init__(self, by_units):
        super().__init__()
        self.units, self.by_units = nn.ModuleList(map(Takes, layers())), by_units

    def forward(self, x):
        extras = [x * i for i in range(COUNT)]
        for unit in self.units:
            x = unit(x, extras, self.by_units)
            if not self.by_units:
                extras.pop(0)
        assert not extras
        return x


class WritesItem(nn.Module):
    """A step of an encoder: reads an item of a dict and writes another."""

    def __init__(self, layer, number):
        super().__init__()
        self.layer, self.number = layer, number

    def forward(self, state):
        state[str(self.number + 1)] = self.layer(state[str(self.number)])
        state["calls"] = state.get("calls", 0) + 1
        return state


class ItemEncoder(nn.Module):
    """Returns all items that its units wrote."""

    def __init__(self):
        super().__init__()
        self.units = nn.ModuleList(WritesItem(layer, i) for i, layer in enumerate(layers()))

    def forward(self, x):
        state = {"0": x}
        for unit in self.units:
            state = unit(state)
        assert state["calls"] == COUNT
        return torch.cat([state[str(i)] for i in range(COUNT + 1)], -1)


class Stashes(nn.Module):
    """Leaves its output in a dict of another's, too, from its second step on."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.stashes = layer, False

    def forward(self, x, stash):
        y = self.layer(x)
        if self.stashes:
            stash[id(self)] = y
        return x + y


MODELS = {
    "the model appends to a list": AppendingUnits,
    "the model pops from a list": lambda: Queue(False),
    "units pop from a list": lambda: Queue(True),
    "units write to a dict": ItemEncoder,
}


def step(model, x):
    model.zero_grad()
    y = model(x)
    y.square().mean().backward()
    return [y, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("policy", ["none", "all", "sqrt", "memory", "speed"])
@pytest.mark.parametrize("name", MODELS)
def test_units_are_recomputed(name, policy):
    found = assert_as_planned(MODELS[name](), torch.randn(256, WIDTH), policy)
    assert not found.left_out
    assert not any(unit.fixed for unit in found.chain.units)


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_units_lower_the_peak(name):
    model, x = MODELS[name](), torch.randn(256, WIDTH)
    assert plan(model, x, policy="all", progress=False).measured_bytes < (
        plan(model, x, policy="none", progress=False).measured_bytes
    )


@pytest.mark.parametrize("policy", ["all", "uniform:1", "speed"])
def test_units_that_begin_to_write_after_the_plan(policy):
    """A dict that a unit of a segment got is the caller's own."""
    model, x = Noted(map(Stashes, layers())), torch.randn(64, WIDTH)
    plan(model, x, policy=policy, progress=False).apply(model)
    plain = Noted(map(Stashes, layers()))
    plain.load_state_dict(model.state_dict())
    for each in (*model.units, *plain.units):
        each.stashes = True
    for ours, eager in zip(step(model, x), step(plain, x), strict=True):
        assert torch.equal(ours, eager)
