"""Which units a plan takes to be the same twice, and that planning leaves no trace in them."""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter, deque

import numpy as np
import pytest
import torch
from plan_models import assert_equal, convolutional, images, planned, tokens, transformer
from test_not_the_same_twice import WHY, WIDTH, OwnTorch, Python, Unit, recomputed, steps
from torch import nn

import fusedckpt
from fusedckpt import Plan, checkpoint_sequential
from fusedckpt.planning.chain import Keep

NORMS = {
    "spectral_norm": nn.utils.spectral_norm,
    "weight_norm": nn.utils.weight_norm,
    "parametrized spectral_norm": nn.utils.parametrizations.spectral_norm,
    "parametrized weight_norm": nn.utils.parametrizations.weight_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("is_settled", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_weights_that_hooks_make(name, is_settled):
    """What a power iteration no longer changes, it changes once the weights are others."""

    def make():
        torch.manual_seed(0)
        linears = [NORMS[name](nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), linears[0], nn.GELU(), linears[1])
        for _ in range(500 * is_settled):
            model(torch.randn(2, WIDTH))
        return model

    x, model, plain = torch.randn(64, WIDTH), make(), make()
    found = planned(model, x, policy="all")
    # the weights of hooks are made once for forward and recompute
    is_left = name == "parametrized spectral_norm"
    assert found.left_out == (dict.fromkeys("13", WHY) if is_left else {})
    assert recomputed(found) == list("02" if is_left else "0123")
    found.apply(model)
    assert_equal(steps(model, x), steps(plain, x))


class Shared(Unit):
    """It reads, or writes, what other units write and read, too."""

    def __init__(self, shared, reads, writes):
        super().__init__()
        self.shared, self.reads, self.writes = shared, reads, writes

    def scale(self, x):
        # the same number of them, so that numbers alone tell one from the other
        self.shared[0] += self.writes
        return 1 + self.shared[0] if self.reads else 1.0


def test_a_unit_that_reads_what_a_later_one_writes():
    def make():
        torch.manual_seed(0)
        shared = [0]
        units = [Shared(shared, *x) for x in ((0, 0), (1, 0), (0, 0), (0, 1))]
        return nn.Sequential(*units)

    x, model, plain = torch.randn(64, WIDTH), make(), make()
    found = planned(model, x, policy="all")
    assert found.left_out == {"1": WHY}
    found.apply(model)
    assert_equal(steps(model, x), steps(plain, x))


class Noisy(Unit):
    """Units that only differ in a number."""

    def __init__(self, share):
        super().__init__()
        self.share, self.generator = share, np.random.default_rng(1)

    def scale(self, x):
        return 1 + self.share * float(self.generator.random())


@pytest.mark.parametrize("noisy", range(3))
def test_each_unit_is_looked_at(noisy):
    model = nn.Sequential(*(Noisy(0.1 * (i == noisy)) for i in range(3)))
    found = planned(model, torch.randn(64, WIDTH), policy="all")
    assert found.left_out == {str(noisy): WHY}


class Straight(Unit):
    """What it returns is the same each time, its gradients are not."""

    calls = 0

    def scale(self, x):
        self.calls += 1
        soft = torch.sigmoid(x / self.calls)
        return (x > 0) + (soft - soft.detach())


def test_gradients_that_are_not_the_same_twice():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(Unit(), Straight(), Unit())

    x, model, plain = torch.randn(64, WIDTH), make(), make()
    found = planned(model, x, policy="uniform:1")
    assert found.left_out == {"1": WHY}
    found.apply(model)
    assert_equal(steps(model, x), steps(plain, x))


class Scaled(nn.Linear):
    """A buffer that is saved, and not written."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x):
        return super().forward(x).tanh() * self.scale


def frozen(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


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

    def __init__(self):
        super().__init__(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return super().forward(x)[0]


NORMAL = {
    "transformer": lambda: (transformer(3, dropout=0.2), tokens()),
    "fused": lambda: (transformer(3, fused=True, dropout=0.2), tokens()),
    "conv": lambda: (convolutional(3, flat=True), images()),
    "in place": lambda: (convolutional(3, inplace=True), images()),
    "averaging": lambda: (
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 8)),
        torch.randn(16, 8),
    ),
    **{
        f"caching {is_buffer} {count}": lambda is_buffer=is_buffer, count=count: (
            nn.Sequential(*(Caching(is_buffer, count) for _ in range(3))),
            torch.randn(9, WIDTH),
        )
        for is_buffer in (True, False)
        for count in (0, 4)
    },
    "frozen": lambda: (frozen(convolutional(3)), images()),
    "scaled": lambda: (nn.Sequential(*(Scaled() for _ in range(3))), torch.randn(4, WIDTH)),
    "recurrent": lambda: (nn.Sequential(*(Recurrent() for _ in "012")), torch.randn(4, 9, WIDTH)),
    "rrelu": lambda: (
        nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.RReLU()) for _ in range(3))),
        torch.randn(16, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("policy", ["all", "memory"])
@pytest.mark.parametrize("name", NORMAL)
def test_other_units_are_the_same(name, policy):
    torch.use_deterministic_algorithms(False)
    model, x = NORMAL[name]()
    assert WHY not in planned(model, x, policy=policy).left_out.values()


def test_normal_units_are_recomputed_after_statistics():
    model, x = convolutional(3), images()
    found = planned(model, x, policy="all")
    assert recomputed(found) == [unit.name for unit in found.chain.units if not unit.fixed]


def test_a_fused_unit_that_is_left_still_has_levels():
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(Unit(), OwnTorch(), Unit())
        fusedckpt.fuse(model)
        return model

    x, model, plain = torch.randn(64, WIDTH, requires_grad=True), make(), make()
    least = planned(make(), x, policy="memory").measured_bytes
    found = planned(model, x, budget=least)
    assert found.left_out.get("1") == WHY
    items = {found.chain.units[item.start].name: item for item in found.items}
    assert isinstance(items["1"], Keep)
    found.apply(model)
    ours, theirs = steps(model, x), steps(plain, x)
    for mine, eager in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, eager)


def test_checkpoint_sequential_restores_what_a_plan_restores(tmp_path):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(Unit(), Python(), OwnTorch(), Unit(), Python(), Unit())

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


class Stateful(Unit):
    """All that planning may change in a module without being asked to."""

    def __init__(self):
        super().__init__()
        self.calls, self.list, self.dict, self.nested = 0, [0], {"calls": 0}, {"a": [0, {"b": 0}]}
        self.counter, self.set, self.deque = Counter(), set(), deque(maxlen=3)
        self.tensor, self.array = torch.zeros(3), np.zeros(3)
        self.torch, self.python = torch.Generator().manual_seed(1), random.Random(1)
        self.numpy = [np.random.default_rng(1), np.random.RandomState(1)]

    def scale(self, x):
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


@pytest.mark.parametrize("policy", ["none", "sqrt", "memory", "speed"])
def test_planning_leaves_no_trace(policy):
    torch.manual_seed(0)
    model, twin = nn.Sequential(Unit(), Stateful()), Stateful()
    unit, x = model[1], torch.randn(8, WIDTH)
    for _ in range(4):
        model(x)
    before, objects = unit.state(), {k: id(v) for k, v in vars(unit).items()}
    planned(model, x, policy=policy)
    assert unit.state() == before
    assert {k: id(v) for k, v in vars(unit).items()} == objects
    for _ in range(4):
        twin.drawn()
    assert unit.drawn() == twin.drawn()


def test_units_that_are_called_several_times_have_buffers():
    norm = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model = nn.Sequential(norm, nn.ReLU(), norm, nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    found = planned(model, torch.randn(16, 8), policy="all")
    assert found.left_out == {"0": "is called 2 times in a step"}


def test_what_a_forward_is_in_the_middle_of_planning():
    """Units run often as they are measured; they begin where the user's model is."""
    seen = []

    class Noting(Unit):
        def __init__(self):
            super().__init__()
            self.calls = itertools.count()

        def scale(self, x):
            seen.append(next(self.calls))
            return 1.0

    found = planned(nn.Sequential(Unit(), Noting(), Unit()), torch.randn(8, WIDTH), policy="all")
    assert found.left_out == {}
    assert seen
