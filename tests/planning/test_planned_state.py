"""Units that leave tensors for the loss or for later units, in attributes, hooks, and arguments."""

from __future__ import annotations

import gc
import re
import weakref
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from plan_models import assert_as_planned, planned
from torch import nn
from zoo import Line

WIDTH = 32
POLICIES = ["none", "all", "memory", "sqrt", "uniform:2"]


class RouterWithLoss(nn.Module):
    """Leaves its loss in an attribute."""

    def __init__(self):
        super().__init__()
        self.router, self.body = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        self.loss = scores.square().mean()
        return x + self.body(x) * scores.max(-1, keepdim=True).values


def routed():
    model = Line(*[RouterWithLoss() for _ in range(6)])
    return model, lambda y: y.square().mean() + sum(layer.loss for layer in model.units)


def hooked():
    """Return a model whose features a hook notes, and a loss that takes them."""
    features = []
    model = Line(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)])
    for layer in model.units:
        layer[1].register_forward_hook(lambda module, args, output: features.append(output))

    def loss(y):
        total = y.square().mean() + sum(x.square().mean() for x in features[-6:])
        features.clear()
        return total

    return model, loss


def committed():
    """Return a model whose units add losses to a list of the model's."""
    losses = []

    class Commits(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = self.body(x).tanh()
            losses.append((x - y).square().mean())
            return y

    model = Line(*[Commits() for _ in range(6)])

    def loss(y):
        total = y.square().mean() + sum(losses[-6:])
        losses.clear()
        return total

    return model, loss


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [routed, hooked, committed])
def test_losses_read_tensors_that_units_leave(make, policy):
    model, loss = make()
    x = torch.randn(256, WIDTH)
    found = assert_as_planned(model, x, policy, loss)
    assert found.left_out == {}
    budget = planned(model, x, budget=found.measured_bytes, loss=loss)
    assert budget.measured_bytes <= found.measured_bytes


class Sharing(nn.Module):
    """Attention that writes its keys for later layers, or reads those of an earlier one."""

    def __init__(self, reads, kind):
        super().__init__()
        self.reads, self.kind = reads, kind
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, shared):
        keys = shared[self.kind][0] if self.reads else self.k(x).sin()
        if not self.reads:
            shared[self.kind] = (keys,)
        return x + (self.q(x) @ keys.transpose(-1, -2)).softmax(-1) @ keys


class SharedKeys(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make
        kinds = [
            (False, "sliding"),
            (False, "full"),
            (False, "own"),
            (True, "sliding"),
            (True, "full"),
        ]
        self.layers = nn.ModuleList(Sharing(reads, kind) for reads, kind in kinds)

    def forward(self, x):
        shared = self.make()
        for layer in self.layers:
            x = layer(x, shared=shared)
        return x


class Shared(UserDict):
    """As transformers' KVSharingDict."""


@pytest.mark.parametrize("policy", POLICIES)
def test_layers_that_share_keys_are_recomputed(policy):
    found = assert_as_planned(SharedKeys(Shared), torch.randn(4, 32, WIDTH), policy)
    assert found.left_out == {}


class Growing(nn.Linear):
    """One that adds to an object among its arguments, as a cache of keys and values grows."""

    def forward(self, x, cache):
        y = super().forward(x).tanh()
        if cache is not None:
            cache.items.append(y.detach())
            cache.count += 1
        return y


class Grows(nn.Module):
    def __init__(self, which):
        super().__init__()
        self.layers, self.which = nn.ModuleList(Growing(WIDTH, WIDTH) for _ in range(4)), which

    def forward(self, x):
        cache = SimpleNamespace(items=[], count=0)
        for i, layer in enumerate(self.layers):
            x = layer(x, cache if i in self.which else None)
        return x


@pytest.mark.parametrize("which", [(1,), (0, 3), (2, 3)])
def test_a_unit_with_a_stateful_argument_is_left_alone(which):
    model, x = Grows(which), torch.randn(64, WIDTH)
    found = assert_as_planned(model, x, "memory")
    why = "changes its argument 1, a SimpleNamespace"
    assert found.left_out == {f"layers.{i}": why for i in which}
    advice = "if it is a cache of keys and values, pass use_cache=False to plan and to the model"
    assert str(found).endswith(f"\n  advice          {advice}")
    with pytest.raises(ValueError, match=rf"got 1000 bytes; .*; {re.escape(advice)}$"):
        planned(model, x, budget=1000)
    with pytest.raises(
        ValueError, match=r"changes its argument 1, a SimpleNamespace: if it is a cache"
    ):
        planned(Grows(range(4)), x, policy="all")


def test_tensors_in_objects_of_units_are_freed():
    references = []

    class Watched(Shared):
        def __setitem__(self, key, value):
            references.append(weakref.ref(value[0]))
            super().__setitem__(key, value)

    gc.disable()
    try:
        planned(SharedKeys(Watched), torch.randn(4, 32, WIDTH), policy="all")
        alive = sum(reference() is not None for reference in references)
    finally:
        gc.enable()
    assert alive == 0
