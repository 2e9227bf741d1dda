"""What changes between forward and backward raises; what forward itself changes, changes once."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from checkpoints import same
from support import DEVICE, randn
from torch import nn

from fusedckpt import Checkpoint, checkpoint
from fusedckpt.checkpointing import kept

GLOBAL = nn.BatchNorm1d(6).to(DEVICE)
WEIGHT = randn(4, 6, requires_grad=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("scale", torch.full((6,), 2.0))
        self.register_buffer("large", torch.zeros(70_000))
        self.to(DEVICE)

    def forward(self, x):
        return self.fc2(self.fc1(x.sin()).tanh() * self.scale + self.large[:6]).sin()


class Holder:
    def __init__(self, tensor):
        self.tensor = tensor

    def call(self, x):
        return (x * self.tensor).sin().sin()

    def __call__(self, x):
        return self.call(x) + self.tensor


def mul(x, t):
    return (x * t).sin().sin()


def add(x, t):
    return (x + t).sin().sin()


# from an argument x and a tensor t, how a checkpoint comes to read t
WAYS = {
    "argument": lambda x, t: checkpoint(add, x, t),
    "keyword": lambda x, t: checkpoint(add, x, t=t),
    "list": lambda x, t: checkpoint(lambda x, ts: add(x, ts[0]), x, [t]),
    "dict": lambda x, t: checkpoint(lambda x, ts: add(x, ts["t"]), x, {"t": t}),
    "partial": lambda x, t: checkpoint(partial(add, t=t), x),
    "nested partial": lambda x, t: checkpoint(partial(partial(add, x), t)),
    "partial in argument": lambda x, t: checkpoint(lambda x, f: f(x), x, partial(add, t=t)),
    "closure": lambda x, t: checkpoint(lambda x: add(x, t), x),
    "closure's list": lambda x, t, ts=(): (ts := [t]) and checkpoint(lambda x: add(x, ts[0]), x),
    "default": lambda x, t: checkpoint(lambda x, t=t: add(x, t), x),
    "method": lambda x, t: checkpoint(Holder(t).call, x),
    "callable": lambda x, t: checkpoint(Holder(t), x),
    "attribute": lambda x, t, h=None: (
        (h := Holder(t)) and checkpoint(lambda x: add(x, h.tensor), x)
    ),
    "view": lambda x, t: checkpoint(add, x, t[:]),
    "saved as it is": lambda x, t: checkpoint(torch.mul, x, t),
    "nested": lambda x, t: checkpoint(checkpoint, lambda x: add(x, t), x),
}


@pytest.mark.parametrize("way", WAYS)
def test_c8_changed_tensor_raises(way):
    x, t = randn(4, 6), randn(4, 6, requires_grad=False)
    y = WAYS[way](x, t)
    t.add_(1)
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        y.sum().backward()


def test_c8_changed_global_raises():
    x = randn(4, 6)
    y = checkpoint(lambda x: add(x, WEIGHT), x)
    WEIGHT.add_(1)
    with pytest.raises(RuntimeError, match="a tensor that it reads"):
        y.sum().backward()


@pytest.mark.parametrize("name", ["fc1.weight", "fc1.bias", "fc2.bias", "scale", "large"])
@pytest.mark.parametrize("make", [lambda net: net, lambda net: lambda x: net(x), Checkpoint])
def test_c8_changed_parameter_or_buffer_raises(make, name):
    net, x = Net(), randn(4, 6)
    for _ in range(2):
        checkpoint(make(net), x).sum().backward()
    y = checkpoint(make(net), x)
    with torch.no_grad():
        net.state_dict(keep_vars=True)[name].mul_(2)
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        y.sum().backward()


def test_c8_changed_after_is_fine():
    net, x = Net(), randn(4, 6)
    for _ in range(2):
        checkpoint(net, x).sum().backward()
        with torch.no_grad():
            for p in (*net.parameters(), *net.buffers()):
                p.add_(0.1)


@pytest.mark.parametrize("make_saved", dict.fromkeys([kept._make_saved, kept._Saved]))
def test_c9_segment_that_writes_its_input(monkeypatch, make_saved):
    monkeypatch.setattr(kept, "_make_saved", make_saved)

    def fn(x):
        x.mul_(2)
        return x.sin()

    y = checkpoint(fn, randn(4) * 1)
    with pytest.raises(RuntimeError, match="an argument was changed in place"):
        y.sum().backward()


def statistics(module):
    return [b.clone() for b in module.buffers()]


class Functional(nn.Module):
    """Statistics that F.batch_norm writes without a trace."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.var, training=self.training).sin()


class Average(nn.Module):
    """Buffers written in place, and replaced, by every second forward."""

    def __init__(self, turn=1):
        super().__init__()
        self.turn = turn
        self.register_buffer("in_place", torch.ones(6))
        self.register_buffer("replaced", torch.ones(70_000))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.count += 1
            if self.count % 2 == self.turn:
                self.in_place.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.replaced = self.replaced * 0.5
        return (x * self.in_place.clone() * self.replaced[:6]).sin()


STATEFUL = {
    "batchnorm": lambda: nn.BatchNorm1d(6),
    "momentum=None": lambda: nn.BatchNorm1d(6, momentum=None),
    "no statistics": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "functional": Functional,
    "average": Average,
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "old spectral": lambda: nn.utils.spectral_norm(nn.Linear(6, 6)),
}
WRAPS = {
    "module": checkpoint,
    "closure": lambda m, x: checkpoint(lambda x: m(x), x),
    "partial": lambda m, x: checkpoint(partial(lambda m, x: m(x), m), x),
    "argument": lambda m, x: checkpoint(lambda x, m: m(x), x, m),
    "nested": lambda m, x: checkpoint(checkpoint, m, x),
    "debug": partial(checkpoint, debug=True),
    "Checkpoint": lambda m, x: Checkpoint(m)(x),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", STATEFUL)
def test_c18_c32_state_is_written_once(name, wrap):
    """Through modes and micro-batches, the state and gradients are those of the plain module."""
    inputs = [torch.randn(8, 6) for _ in range(3)]

    def run(call):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 6), STATEFUL[name](), nn.Linear(6, 6)).to(DEVICE)
        found = []
        for training in (False, True, True, False):
            module.train(training)
            # all forwards before the first backward
            outputs = [call(module, x.to(DEVICE)) for x in inputs]
            sum(y.square().sum() for y in outputs).backward()
            found += statistics(module)
        return found + [p.grad for p in module.parameters()]

    expected = run(lambda module, x: module(x))
    assert all(map(same, run(WRAPS[wrap]), expected))


def test_c18_batchnorm_reached_by_a_global_and_an_attribute():
    class Trainer:
        net = None

        def call(self, x):
            return self.net(x).sin()

    trainer, x = Trainer(), randn(8, 6)
    trainer.net = nn.BatchNorm1d(6).to(DEVICE)
    checkpoint(trainer.call, x).sum().backward()
    checkpoint(lambda x: GLOBAL(x).sin(), x).sum().backward()
    assert trainer.net.num_batches_tracked == GLOBAL.num_batches_tracked == 1


def test_c32_buffer_that_is_first_written_later():
    def run(call):
        module, found = Average(turn=0).to(DEVICE), []
        for _ in range(4):
            found += torch.autograd.grad(call(module, x).square().sum(), x)
            found += statistics(module)
        return found

    x = randn(8, 6)
    assert all(map(same, run(checkpoint), run(lambda module, x: module(x))))
