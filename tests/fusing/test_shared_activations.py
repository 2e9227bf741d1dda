"""Activations that backward runs again see the state of the forward; others run once."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, randn, saved_bytes
from torch import nn
from zoo import Doubled, InlineMLP, Intermediate

import fusedckpt

T, D, WIDE = 5, 16, 48


class ScaledInline(InlineMLP):
    def forward(self, x, scale):
        return x + scale * self.fc2(self.act(self.fc1(self.norm(x))))


class Config:
    def __init__(self):
        self.beta = 1.0


class Swish(nn.Module):
    """Reads a number from everywhere that a forward may have it."""

    floor = 0.0

    def __init__(self, where: str = "beta"):
        super().__init__()
        self.where, self.beta, self.config = where, 1.0, Config()
        self.table, self.names = {"beta": 1.0}, [1.0]
        self.shift = nn.Parameter(torch.tensor(0.1))
        self.offset: torch.Tensor
        self.register_buffer("offset", torch.tensor(0.2))

    def forward(self, x):
        beta = {
            "beta": lambda: self.beta,
            "class": lambda: 1.0 + type(self).floor,
            "instance of class": lambda: 1.0 + self.floor,
            "config": lambda: self.config.beta,
            "table": lambda: self.table["beta"],
            "list": lambda: self.names[0],
            "mode": lambda: 2.0 if self.training else 0.5,
            "buffer": lambda: 1.0,
        }[self.where]()
        return x * torch.sigmoid(beta * x) + self.shift + self.offset


class Drop(nn.Module):
    def forward(self, x):
        return F.dropout(F.relu(x), 0.2, self.training)


class NoisyGELU(nn.Module):
    def __init__(self, noise: float = 0.1):
        super().__init__()
        self.noise = noise

    def forward(self, x):
        if self.training and self.noise:
            x = x + self.noise * torch.randn_like(x)
        return F.gelu(x)


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        drawn = torch.rand(x.shape, generator=self.generator, dtype=x.dtype)
        return F.relu(x) * (drawn.to(x.device) > 0.2)


class Python(nn.Module):
    def forward(self, x):
        return F.gelu(x) * (1 + random.random())


_NUMPY = np.random.default_rng(0)


class Numpy(nn.Module):
    def forward(self, x):
        return F.gelu(x) * (1 + _NUMPY.random())


_COUNT = [0]


class Counter(nn.Module):
    def forward(self, x):
        _COUNT[0] += 1
        return F.gelu(x) * (1 + 0.1 * _COUNT[0])


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        return F.gelu(x) * (1 + 0.1 * self.num_calls)


class Appends(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(1)
        return F.gelu(x) * (1 + 0.1 * len(self.seen))


class Tracks(nn.Module):
    """Writes a buffer in its forward, as a running maximum is."""

    def __init__(self):
        super().__init__()
        self.most: torch.Tensor
        self.register_buffer("most", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        with torch.no_grad():
            self.most.add_(0.1)
        return F.gelu(x) + self.most


def restart():
    torch.manual_seed(1)
    random.seed(1)
    _COUNT[0] = 0
    globals()["_NUMPY"] = np.random.default_rng(0)


def fused_and_eager(act: nn.Module) -> tuple[Any, Any, fusedckpt.FuseReport]:
    torch.manual_seed(0)
    eager: Any = ScaledInline(D, WIDE, act, nn.LayerNorm(D)).to(DEVICE, torch.float64)
    fused = copy.deepcopy(eager)
    report = fusedckpt.fuse(fused)
    return fused, eager, report


def stepped(model: Any, change, num_forwards: int = 3) -> list[torch.Tensor]:
    """Return the gradients of several forwards, with a change after each, and one backward."""
    restart()
    torch.manual_seed(2)
    x = randn(2, T, D, dtype=torch.float64)
    total: Any = 0.0
    for step in range(num_forwards):
        total = total + model(x + step, 1.0).square().mean()
        change(model.act, step)
    return list(torch.autograd.grad(total, [x, *model.parameters()], allow_unused=True))


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def set_beta(act, step):
    act.beta = 1.5 + step


def set_class(act, step):
    Swish.floor = 0.5 * (step + 1)


def set_config(act, step):
    act.config.beta = 1.5 + step


def set_table(act, step):
    act.table["beta"] = 1.5 + step


def set_list(act, step):
    act.names[0] = 1.5 + step


def write_buffer(act, step):
    act.offset.add_(0.5)


def replace_buffer(act, step):
    act.offset = act.offset + 0.5


def turn(act, step):
    act.train(not act.training)


def freeze(act, step):
    act.shift.requires_grad_(False)


@pytest.fixture(autouse=True)
def class_as_it_was():
    yield
    Swish.floor = 0.0


STATES = [
    (lambda: Swish("beta"), set_beta),
    (lambda: Swish("instance of class"), set_class),
    (lambda: Swish("config"), set_config),
    (lambda: Swish("table"), set_table),
    (lambda: Swish("list"), set_list),
    (lambda: Swish("mode"), turn),
    (lambda: Swish("buffer"), write_buffer),
    (lambda: Swish("buffer"), replace_buffer),
    (nn.Softplus, lambda act, step: setattr(act, "beta", 2 + step)),
    (nn.Softplus, lambda act, step: setattr(act, "threshold", 0.1)),
    (nn.ELU, lambda act, step: setattr(act, "alpha", 2.0 + step)),
    (nn.CELU, lambda act, step: setattr(act, "alpha", 2.0 + step)),
    (nn.LeakyReLU, lambda act, step: setattr(act, "negative_slope", 0.3)),
    (nn.Hardtanh, lambda act, step: setattr(act, "max_val", 0.3)),
    (lambda: nn.Threshold(0.1, 20.0), lambda act, step: setattr(act, "threshold", 0.5)),
    (lambda: nn.GELU("tanh"), lambda act, step: setattr(act, "approximate", "none")),
]


@pytest.mark.parametrize(("act", "change"), STATES)
def test_state_that_changes_before_backward(act, change):
    fused, eager, report = fused_and_eager(act())
    assert "act" in report.shared
    found = []
    for model in (fused, eager):
        Swish.floor = 0.0
        found.append(stepped(model, change))
    assert_same(*found)


_SLOPE = [1.0]


class Leaky(nn.Module):
    """Reads a global: no recording sees that it may change."""

    def forward(self, x):
        return F.leaky_relu(x, _SLOPE[0] / 4)


def set_global(act, step):
    _SLOPE[0] = 1.5 + step


@pytest.mark.parametrize(
    ("act", "change"), [(Leaky, set_global), (lambda: Swish("class"), set_class)]
)
def test_state_that_no_module_has(act, change):
    fused, eager, report = fused_and_eager(act())
    assert "act" in report.shared
    results = []
    for model in (fused, eager):
        _SLOPE[0], Swish.floor = 1.0, 0.0
        results.append(stepped(model, change))
    assert_same(*results)


def test_a_parameter_that_is_frozen_before_backward():
    fused, eager, _ = fused_and_eager(Swish())
    x, found = randn(2, T, D, dtype=torch.float64), []
    for model in (fused, eager):
        y = model(x, 1.0)
        model.act.shift.requires_grad_(False)
        model.zero_grad()
        y.square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    assert_same(*found)


def test_a_slope_that_is_annealed_still_saves_the_norms_input():
    fused, *_ = fused_and_eager(Swish())
    x = randn(T, D, dtype=torch.float64)
    for step in range(3):
        # x is a leaf, which does not count, as is the activation's parameter; a copied buffer does
        assert saved_bytes(lambda x: fused(x * 1, 1.0), [x]) == 8 * T * D + 8
        fused.act.beta = 1.5 + step


@pytest.mark.parametrize(
    "act",
    [Drop, NoisyGELU, nn.RReLU, OwnGenerator, Python, Numpy, Counter, Steps, Appends, Tracks],
)
def test_activations_that_another_run_would_change(act):
    """Only torch's functions run again: random numbers and counters are those of the forward."""
    fused, eager, _ = fused_and_eager(act())
    assert_same(*(stepped(model, lambda act, step: None) for model in (fused, eager)))


def test_an_attribute_that_turns_noise_on():
    fused, eager, report = fused_and_eager(NoisyGELU(0.0))
    assert "act" in report.shared

    def louder(act, step):
        act.noise = 0.2

    assert_same(*(stepped(model, louder) for model in (fused, eager)))


def test_an_attribute_that_turns_noise_off_again():
    fused, *_ = fused_and_eager(NoisyGELU(0.0))
    x = randn(T, D, dtype=torch.float64)
    counts = []
    for noise in (0.0, 0.2, 0.0):
        fused.act.noise = noise
        counts.append(saved_bytes(lambda x: fused(x * 1, 1.0), [x]))
    assert counts[0] == counts[2] < counts[1]


def test_an_activation_that_is_parametrized_since_runs_once():
    fused, eager, _ = fused_and_eager(nn.PReLU())

    for model in (fused, eager):
        nn.utils.parametrize.register_parametrization(model.act, "weight", Doubled())
    assert_same(*(stepped(model, lambda act, step: None) for model in (fused, eager)))


class Apart(nn.Module):
    """An MLP in two modules, behind a sum."""

    def __init__(self):
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(D), Intermediate(D, WIDE, nn.GELU())
        self.narrow = nn.Sequential(nn.Linear(WIDE, D), nn.Dropout(0.0))

    def forward(self, x):
        return self.norm(x + self.narrow(self.wide(x + 1)))


@pytest.mark.parametrize("level", ["inputs", "preact"])
def test_a_linear_behind_a_fused_activation_saves_no_more(level):
    eager = Apart().to(DEVICE)
    fused = copy.deepcopy(eager)
    report = fusedckpt.fuse(fused)
    assert report.swapped["wide"] == "Intermediate -> linear_act (gelu)"
    x = randn(T, D)
    # inputs of the wide linear and of the norm; at "preact" also the activation's input and result
    wide = {"inputs": 0, "preact": 2 * WIDE}[level]
    with fusedckpt.saving(level):
        assert saved_bytes(fused, [x]) == T * (2 * D + wide) * 4
        results = []
        for model in (eager, fused):
            y = model(x)
            wanted = [x, *model.parameters()]
            results.append([y, *torch.autograd.grad(y.square().sum(), wanted)])
    torch.testing.assert_close(*results)
