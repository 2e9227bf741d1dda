"""Units whose forward is not the same twice: a plan restores random states, and leaves the rest."""

from __future__ import annotations

import copy
import random
from itertools import cycle

import numpy as np
import pytest
import torch
from plan_models import (
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
from fusedckpt import Plan, checkpoint_sequential
from fusedckpt.checkpointing import determinism

WIDTH = 16
WHY = "a second run of its forward gives other results"


class ScaledUnit(nn.Sequential):
    """An MLP whose result is scaled by a function of the module and its input."""

    def __init__(self, scale=lambda unit, x: 1.0, **state):
        super().__init__(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.scale = scale
        for name, value in state.items():
            if name == "buffer":
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x):
        y, scale = super().forward(x), self.scale(self, x)
        return x if scale is None else x + y * scale


def dropped(draw):
    """Return a block that is left out at random, as in stochastic depth."""
    return lambda: ScaledUnit(lambda unit, x: None if draw() < 0.5 else 1.0)


def counting(unit, x):
    unit.calls[0] += 1
    return 1 / unit.calls[0]


def straight(unit, x):
    """Scale by a function that is the same each time, its gradients are not."""
    unit.calls[0] += 1
    soft = torch.sigmoid(x / unit.calls[0])
    return (x > 0) + (soft - soft.detach())


def averaging(name):
    def scale(unit, x):
        mean = getattr(unit, name)
        mean.lerp_(x.detach().mean(0), 0.1)
        return x - mean

    return lambda: ScaledUnit(scale, **{name: torch.zeros(WIDTH)})


def carrying(unit, x):
    """Read a function of the arguments of the call before."""
    last, unit.last = unit.last, x.detach().tanh()
    return unit.last if last is None else last


def gated(norm):
    return lambda: ScaledUnit(lambda unit, x: unit.gate(x), gate=norm(nn.Linear(WIDTH, WIDTH)))


def drawing(draw, make):
    return lambda: ScaledUnit(lambda unit, x: draw(unit.state["drawn"], x), state={"drawn": make()})


# units whose recompute gets the random states and buffers of the forward
RESTORED = {
    "Python": lambda: ScaledUnit(lambda unit, x: random.random()),
    "NumPy": lambda: ScaledUnit(lambda unit, x: torch.from_numpy(np.random.rand(*x.shape)).to(x)),
    "dropout": lambda: ScaledUnit(lambda unit, x: nn.functional.dropout(torch.ones_like(x), 0.3)),
    # running statistics are written in training, and not read
    "statistics": lambda: ScaledUnit(lambda unit, x: unit.norm(x), norm=nn.BatchNorm1d(WIDTH)),
    "weight_norm": gated(nn.utils.parametrizations.weight_norm),
    # a recompute finds buffers that the forward reads and writes as that did
    "buffered": averaging("buffer"),
    "in a plain tensor": averaging("mean"),
    "spectral": gated(nn.utils.spectral_norm),
    "parametrized": gated(nn.utils.parametrizations.spectral_norm),
}
DROPPED = {
    "dropped": dropped(lambda: random.random()),
    "dropped by NumPy": dropped(lambda: np.random.rand()),
}
LEFT = {
    "own torch": drawing(
        lambda g, x: torch.rand(x.shape, generator=g), lambda: torch.Generator().manual_seed(3)
    ),
    "own NumPy": drawing(lambda g, x: float(g.random()), lambda: np.random.default_rng(3)),
    "own Python": drawing(lambda g, x: g.random(), lambda: random.Random(3)),
    "counting": lambda: ScaledUnit(counting, calls=[0]),
    "straight": lambda: ScaledUnit(straight, calls=[0]),
    "carrying": lambda: ScaledUnit(carrying, last=None),
}
KINDS = {**RESTORED, **DROPPED, **LEFT}


def made(name, count=2):
    """Return a net in which units of a kind are among others."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(unit for _ in range(count) for unit in (ScaledUnit(), KINDS[name](), ScaledUnit()))
    )


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
    items = [item for item in found.items if item.level is None]
    return [found.chain.units[i].name for item in items for i in range(item.start, item.stop)]


# segments of several units, and another policy for each kind in turn
CHOSEN = [(name, "uniform:1") for name in KINDS]
CHOSEN += zip(KINDS, cycle(["budget", "all", "speed"]), strict=False)


@pytest.mark.parametrize(("name", "policy"), CHOSEN)
def test_gradients_are_those_without_a_plan(name, policy):
    # so much that "speed" saves something
    x = torch.randn(1024 if policy == "speed" else 64, WIDTH, requires_grad=True)
    model, plain, options = made(name), made(name), {"policy": policy}
    if policy == "budget":
        most, least = (planned(made(name), x, policy=p).measured_bytes for p in ("none", "memory"))
        options = {"budget": (most + least) // 2}
    found = planned(model, x, **options)
    if name in LEFT:
        assert found.left_out == {"1": WHY, "4": WHY}
        assert f"not planned     1: {WHY}" in str(found)
        assert "modifies its input" not in str(found)
    elif name in RESTORED:
        assert found.left_out == {}
    if policy in ("all", "uniform:1") and name not in DROPPED:
        assert units_of(found) == list("012345")
        assert recomputed(found) == list("0235" if name in LEFT else "012345")
    found.apply(model)
    assert_equal(steps(model, x), steps(plain, x))


def test_a_unit_that_draws_from_a_generator_of_its_own():
    """Also where its results are the same: a recompute would draw the next numbers."""

    def keep(unit, x):
        return None if torch.rand((), generator=unit.generator) < 0 else 1.0

    def make():
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        return nn.Sequential(
            ScaledUnit(keep, generator=generator), ScaledUnit(), ScaledUnit()
        ), generator

    x = torch.randn(64, WIDTH, requires_grad=True)
    (model, ours), (plain, theirs) = make(), make()
    found = planned(model, x, policy="all")
    assert found.left_out == {"0": WHY}
    found.apply(model)
    assert_equal(steps(model, x), steps(plain, x))
    assert torch.equal(ours.get_state(), theirs.get_state())


def test_units_between_and_none_at_all():
    make = LEFT["own torch"]
    x = torch.randn(64, WIDTH)
    found = planned(nn.Sequential(make(), ScaledUnit(), make()), x, policy="uniform:2")
    assert recomputed(found) == ["1"]
    model = three(make)()
    for policy in ("none", "all", "sqrt", "uniform:2", "speed"):
        found = planned(model, x, policy=policy)
        assert (found.left_out, recomputed(found)) == (dict.fromkeys("012", WHY), [])
    found = planned(made("own torch", 1), torch.randn(1024, WIDTH), policy="speed")
    assert [item.level for item in found.items] == ["products", "plain", "products"]


class LayerDrop(nn.Module):
    """Layers that the model's own code leaves out at random, as wav2vec2's does."""

    def __init__(self, draws):
        super().__init__()
        self.layers, self.draws = nn.ModuleList(ScaledUnit() for _ in range(6)), draws

    def forward(self, x):
        for layer in self.layers:
            x = x if self.draws() < 0.4 else layer(x)
        return x


DRAWS = {
    "Python": random.random,
    "NumPy": lambda: np.random.rand(),
    "torch": lambda: torch.rand(()).item(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_layers_that_are_left_out_at_random(name):
    for seed, policy in enumerate(("memory", "speed")):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        model = LayerDrop(DRAWS[name])
        plain, x = copy.deepcopy(model), torch.randn(64, WIDTH, requires_grad=True)
        found = planned(model, x, policy=policy)
        assert not found.left_out
        found.apply(model)
        assert_equal(steps(model, x), steps(plain, x))


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_a_power_iteration_that_has_converged(norm):
    """What it no longer changes, it changes once the weights are others."""

    def make():
        torch.manual_seed(0)
        linears = [norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), linears[0], nn.GELU(), linears[1])
        for _ in range(500):
            model(torch.randn(2, WIDTH))
        return model

    x, model, plain = torch.randn(64, WIDTH), make(), make()
    found = planned(model, x, policy="all")
    assert found.left_out == {}
    found.apply(model)
    assert_equal(steps(model, x), steps(plain, x))


def test_a_unit_that_reads_what_a_later_one_writes():
    """And units of one class that differ in a number: each is looked at."""

    def scale(unit, x):
        # the same number of reads and writes, so that numbers alone tell one from the other
        unit.shared[0] += unit.writes
        return 1 + unit.shared[0] if unit.reads else 1.0

    def make():
        torch.manual_seed(0)
        shared, ways = [0], ((0, 0), (1, 0), (0, 0), (0, 1))
        units = [ScaledUnit(scale, reads=reads, writes=writes) for reads, writes in ways]
        for unit in units:
            unit.shared = shared
        return nn.Sequential(*units)

    x, model, plain = torch.randn(64, WIDTH), make(), make()
    found = planned(model, x, policy="all")
    assert found.left_out == {"1": WHY}
    found.apply(model)
    assert_equal(steps(model, x), steps(plain, x))


class Caching(nn.Linear):
    """Tables that are made in the first call, or replaced for longer sequences, and then read."""

    def __init__(self, is_buffer, count):
        super().__init__(WIDTH, WIDTH)
        self.count = count
        table = torch.zeros(count, 1) if count else None
        if is_buffer:
            self.register_buffer("table", table, persistent=False)
        else:
            self.table = table
        with torch.inference_mode():
            self.inferred = torch.ones(WIDTH)

    def forward(self, x):
        if self.count < len(x):
            self.count, self.table = len(x), torch.arange(len(x))[:, None].sin()
        return super().forward(x).tanh() * self.table * self.inferred.clone()


class Recurrent(nn.LSTM):
    """It saves memory that nobody wrote."""

    def forward(self, x):
        return super().forward(x)[0]


def three(make):
    return lambda: nn.Sequential(*(make() for _ in range(3)))


NORMAL = {
    "transformer": lambda: transformer(3, dropout=0.2),
    "fused": lambda: transformer(3, fused=True, dropout=0.2),
    "conv": lambda: convolutional(3, flat=True),
    "in place": lambda: convolutional(3, inplace=True),
    "averaging": lambda: nn.Sequential(
        nn.Linear(WIDTH, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 8)
    ),
    "caching a buffer": three(lambda: Caching(True, 0)),
    "caching a tensor": three(lambda: Caching(False, 4)),
    "recurrent": three(lambda: Recurrent(WIDTH, WIDTH, batch_first=True)),
    "rrelu": three(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU())),
}


@pytest.mark.parametrize("name", NORMAL)
def test_other_units_are_the_same(name):
    torch.use_deterministic_algorithms(False)
    model, inputs = NORMAL[name](), {"transformer": tokens, "fused": tokens}
    x = {**inputs, "conv": images, "in place": images}.get(name, lambda: torch.randn(9, WIDTH))()
    found = planned(model, x[None] if name == "recurrent" else x, policy="all")
    assert found.left_out == {}
    assert recomputed(found) == [unit.name for unit in found.chain.units if not unit.fixed]


def test_a_fused_unit_that_is_left_still_has_levels():
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(ScaledUnit(), LEFT["own torch"](), ScaledUnit())
        fusedckpt.fuse(model)
        return model

    x, model, plain = torch.randn(64, WIDTH, requires_grad=True), make(), make()
    least = planned(make(), x, policy="memory").measured_bytes
    found = planned(model, x, budget=least)
    assert found.left_out.get("1") == WHY
    assert "1" not in recomputed(found)
    found.apply(model)
    torch.testing.assert_close(steps(model, x), steps(plain, x))


def test_checkpoint_sequential_restores_what_a_plan_restores(tmp_path):
    def make():
        torch.manual_seed(0)
        python, own = RESTORED["Python"], LEFT["own torch"]
        return nn.Sequential(ScaledUnit(), python(), own(), ScaledUnit(), python(), ScaledUnit())

    x, model, plain = torch.randn(64, WIDTH, requires_grad=True), make(), make()
    planned(model, x, policy="uniform:2").save(tmp_path / "plan.json")
    found = Plan.load(tmp_path / "plan.json")
    assert found.left_out == {"2": WHY}

    class Planned(nn.Module):
        def __init__(self):
            super().__init__()
            self.functions = model

        def forward(self, x):
            return checkpoint_sequential(self.functions, found, x)

    assert_equal(steps(Planned(), x), steps(plain, x))


def _scaled_by_held(unit, x):
    return unit.held.mean()


def _written(unit, x):
    unit.held.add_(1)
    return unit.held.mean()


def _replaced(unit, x):
    unit.held = unit.held * 2
    return unit.held.mean()


@pytest.mark.parametrize("scale", [_scaled_by_held, _written, _replaced])
# a recompute finds small ones as the forward did
@pytest.mark.parametrize("value", [torch.ones(1 << 15), torch.full((8,), torch.nan), torch.ones(0)])
def test_copies_of_plain_tensors_are_compared(scale, value, monkeypatch):
    # as on a GPU, where tensors are noted by copies
    monkeypatch.setattr(determinism, "CHECKSUMMED", ())
    model = nn.Sequential(*(ScaledUnit(scale, held=value.clone()) for _ in range(3)))
    found = planned(model, torch.randn(4, WIDTH), policy="all")
    # a mean of no number, or of NaN, is the same however often it changes
    changes = scale is not _scaled_by_held and value.nanmean().isfinite()
    assert found.left_out == (dict.fromkeys("012", WHY) if changes else {})
