"""Units whose forward is not the same twice: a plan restores random states, and leaves the rest."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from plan_models import assert_equal, planned, units_of
from torch import nn

import fusedckpt
from fusedckpt.planning.chain import Segment

WIDTH = 16
WHY = "its forward is not the same twice"


class Unit(nn.Sequential):
    """An MLP whose result is scaled."""

    def __init__(self):
        super().__init__(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x):
        return x + super().forward(x) * self.scale(x)

    def scale(self, x):
        return 1.0


class Python(Unit):
    def scale(self, x):
        return random.random()


class Numpy(Unit):
    def scale(self, x):
        return torch.from_numpy(np.random.rand(*x.shape)).to(x)


class Dropped(Unit):
    """A block that is left out at random, as in stochastic depth."""

    draws = staticmethod(random.random)

    def forward(self, x):
        return x if self.draws() < 0.5 else super().forward(x)


class DroppedByNumpy(Dropped):
    draws = staticmethod(np.random.rand)


class Dropout(Unit):
    def scale(self, x):
        return nn.functional.dropout(torch.ones_like(x), 0.3)


class Statistics(Unit):
    """Running statistics are written in training, and not read."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def scale(self, x):
        return self.norm(x)


class OwnTorch(Unit):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def scale(self, x):
        return torch.rand(x.shape, generator=self.generator)


class OwnNumpy(Unit):
    def __init__(self):
        super().__init__()
        self.generators = {"noise": np.random.default_rng(3)}

    def scale(self, x):
        return float(self.generators["noise"].random())


class OwnPython(Unit):
    def __init__(self):
        super().__init__()
        self.generators = [random.Random(3)]

    def scale(self, x):
        return self.generators[0].random()


class Counting(Unit):
    calls = 0

    def scale(self, x):
        self.calls += 1
        return 1 / self.calls


class CountingInList(Unit):
    def __init__(self):
        super().__init__()
        self.calls = [0]

    def scale(self, x):
        self.calls[0] += 1
        return 1 / self.calls[0]


class Buffered(Unit):
    """A running mean, read as it is written."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def scale(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


class InPlain(Unit):
    """The same in a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def scale(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


class Carrying(Unit):
    """It reads a function of the arguments of the call before."""

    last = None

    def scale(self, x):
        last, self.last = self.last, x.detach().tanh()
        return self.last if last is None else last


class Spectral(Unit):
    def __init__(self, norm=nn.utils.spectral_norm):
        super().__init__()
        self.gate = norm(nn.Linear(WIDTH, WIDTH))

    def scale(self, x):
        return self.gate(x)


class Parametrized(Spectral):
    def __init__(self):
        super().__init__(nn.utils.parametrizations.spectral_norm)


# what the recompute is given as the forward was
RESTORED = [Python, Numpy, Dropped, DroppedByNumpy, Dropout, Statistics]
LEFT = [
    OwnTorch, OwnNumpy, OwnPython, Counting, CountingInList, Buffered, InPlain, Carrying,
    Spectral, Parametrized,
]  # fmt: skip


def made(kind, count=2):
    """Return a net in which units of a kind are among others."""
    torch.manual_seed(0)
    units = [unit for _ in range(count) for unit in (Unit(), kind(), Unit())]
    return nn.Sequential(*units)


def steps(model, x, count=3):
    """Return outputs and gradients of steps with other arguments each, and buffers after them."""
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    found = []
    for _ in range(count):
        model.zero_grad()
        x = x.detach().cos().requires_grad_()
        y = model(x)
        y.square().mean().backward()
        grads = [p.grad for p in (x, *model.parameters())]
        found += [y.detach(), *(torch.zeros(()) if x is None else x.clone() for x in grads)]
    return [*found, *model.buffers()]


def recomputed(found):
    """Return the names of the units in segments."""
    items = [item for item in found.items if isinstance(item, Segment)]
    return [found.chain.units[i].name for item in items for i in range(item.start, item.stop)]


POLICIES = ["all", "sqrt", "uniform:1", "memory", "speed", "budget"]


def options(policy, make, x):
    if policy != "budget":
        return {"policy": policy}
    most, least = (planned(make(), x, policy=p).measured_bytes for p in ("none", "memory"))
    return {"budget": (most + least) // 2}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", RESTORED + LEFT)
def test_gradients_are_those_without_a_plan(kind, policy):
    # so much that "speed" saves something
    x = torch.randn(1024 if policy == "speed" else 64, WIDTH, requires_grad=True)
    model, plain = made(kind), made(kind)
    planned(model, x, **options(policy, lambda: made(kind), x)).apply(model)
    assert_equal(steps(model, x), steps(plain, x))


@pytest.mark.parametrize("policy", ["all", "sqrt", "uniform:1"])
@pytest.mark.parametrize("kind", [kind for kind in RESTORED if not issubclass(kind, Dropped)])
def test_what_is_restored_is_planned(kind, policy):
    found = planned(made(kind), torch.randn(64, WIDTH), policy=policy)
    assert recomputed(found) == list("012345")
    assert WHY not in str(found)


@pytest.mark.parametrize("policy", ["all", "sqrt", "uniform:1"])
@pytest.mark.parametrize("kind", LEFT)
def test_what_is_not_the_same_twice_is_left_and_named(kind, policy):
    found = planned(made(kind), torch.randn(64, WIDTH), policy=policy)
    assert units_of(found) == list("012345")
    assert recomputed(found) == list("0235")
    assert found.left_out == {"1": WHY, "4": WHY}
    assert f"not planned     1: {WHY}" in str(found)
    assert "modifies its input" not in str(found)


def test_more_segments_than_units_that_may_be_in_one():
    units = [OwnTorch(), Unit(), OwnTorch()]
    found = planned(nn.Sequential(*units), torch.randn(64, WIDTH), policy="uniform:2")
    assert recomputed(found) == ["1"]


def test_speed_keeps_the_products_of_all_other_units():
    found = planned(made(OwnTorch, 1), torch.randn(1024, WIDTH), policy="speed")
    levels = {found.chain.units[item.start].name: item.level for item in found.items}
    assert [levels[name] for name in "012"] == ["products", "plain", "products"]


def test_no_unit_is_the_same_twice():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(*(OwnTorch() for _ in range(3)))

    x, model, plain = torch.randn(64, WIDTH), make(), make()
    for policy in ("none", "all", "sqrt", "uniform:2", "speed"):
        found = planned(model, x, policy=policy)
        assert (found.left_out, recomputed(found)) == (dict.fromkeys("012", WHY), [])
    found.apply(model)
    assert_equal(steps(model, x), steps(plain, x))


def test_checkpoint_itself_stays_as_torchs():
    unit, x = Python(), torch.randn(64, WIDTH, requires_grad=True)
    random.seed(1)
    fusedckpt.checkpoint(unit, x).sum().backward()
    ours, x.grad = x.grad, None
    random.seed(1)
    torch.utils.checkpoint.checkpoint(unit, x, use_reentrant=False).sum().backward()
    assert torch.equal(ours, x.grad)


class LayerDrop(nn.Module):
    """Layers that the model's own code leaves out at random, as wav2vec2's does."""

    def __init__(self, draws):
        super().__init__()
        self.layers, self.draws = nn.ModuleList(Unit() for _ in range(6)), draws

    def forward(self, x):
        for layer in self.layers:
            x = x if self.draws() < 0.4 else layer(x)
        return x


DRAWS = {
    "Python": random.random,
    "NumPy": lambda: np.random.rand(),
    "torch": lambda: torch.rand(()).item(),
    "own": np.random.default_rng(1).random,
}


@pytest.mark.parametrize("policy", ["all", "memory", "speed"])
@pytest.mark.parametrize("name", DRAWS)
def test_layers_that_are_left_out_at_random(name, policy):
    for seed in range(3):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        model = LayerDrop(DRAWS[name])
        plain, x = copy.deepcopy(model), torch.randn(64, WIDTH, requires_grad=True)
        found = planned(model, x, policy=policy)
        left = {"is not called in a step with gradients"}
        assert {*found.left_out.values()} <= left or name == "own"
        found.apply(model)
        if name != "own":
            assert_equal(steps(model, x), steps(plain, x))
