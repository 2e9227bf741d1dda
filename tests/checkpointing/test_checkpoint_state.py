"""What autograd saved raises where it changed; what forward itself changes, changes once."""

import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from checkpoints import assert_as_plain, assert_same, same
from support import DEVICE, randn
from torch import nn
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as stock

from fusedckpt import Checkpoint, checkpoint, is_recomputing
from fusedckpt.autograd import private
from fusedckpt.autograd.private import SavedTensor

GLOBAL = nn.BatchNorm1d(6).to(DEVICE)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("scale", torch.full((6,), 2.0))
        self.to(DEVICE)

    def forward(self, x):
        return self.fc2(self.fc1(x.sin()).tanh() * self.scale).sin()


def add(x, t):
    return (x + t).sin().sin()


# from an argument x and a tensor t, how a checkpoint comes to read t
WAYS = {
    "argument": lambda x, t: checkpoint(add, x, t),
    "keyword": lambda x, t: checkpoint(add, x, t=t),
    "list": lambda x, t: checkpoint(lambda x, ts: add(x, ts[0]), x, [t]),
    "dict": lambda x, t: checkpoint(lambda x, ts: add(x, ts["t"]), x, {"t": t}),
    "partial": lambda x, t: checkpoint(partial(add, t=t), x),
    "view": lambda x, t: checkpoint(add, x, t[:]),
    "saved as it is": lambda x, t: checkpoint(torch.mul, x, t),
    "nested": lambda x, t: checkpoint(checkpoint, add, x, t),
}


@pytest.mark.parametrize("way", WAYS)
def test_c8_changed_tensor_raises(way):
    x, t = randn(4, 6), randn(4, 6, requires_grad=False)
    y = WAYS[way](x, t)
    t.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", ["fc1.weight", "fc2.weight", "fc1.bias", "fc2.bias", "scale"])
@pytest.mark.parametrize("make", [lambda net: net, lambda net: lambda x: net(x), Checkpoint])
def test_c8_changed_parameter_raises(make, name):
    """Those that autograd saved, as without a checkpoint; other state is left to the function."""
    net, x = Net(), randn(4, 6)
    y = checkpoint(make(net), x)
    with torch.no_grad():
        net.state_dict(keep_vars=True)[name].mul_(2)
    if "weight" in name:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    else:
        y.sum().backward()


@pytest.mark.parametrize("debug", [True, "samples"])
@pytest.mark.parametrize("name", ["fc1.bias", "fc2.bias", "scale"])
def test_c8_debug_finds_changed_state_that_autograd_does_not_save(name, debug):
    net, x = Net(), randn(4, 6)
    y = checkpoint(net, x, debug=debug)
    net.state_dict()[name].add_(1)
    with pytest.raises(CheckpointError, match=r"do the same each time|state that has changed"):
        y.sum().backward()


def test_c8_a_parameter_that_the_function_itself_writes():
    w, x = nn.Parameter(randn(4)), randn(4)

    def fn(x):
        with torch.no_grad():
            w.clamp_(-0.5, 0.5)
        return (x * w).sin()

    assert_as_plain(fn, x, parameters=[w])


def writes_what_was_saved(x):
    h = x * 2
    y = h.sin()
    h.add_(1)
    return y * h.exp()


@pytest.mark.parametrize("fn", [writes_what_was_saved, lambda x: x.mul_(2).sin()])
@pytest.mark.parametrize("make_saved", dict.fromkeys([private.make_saved, SavedTensor]))
def test_c9_segment_that_writes_its_input_or_what_was_saved(monkeypatch, make_saved, fn):
    monkeypatch.setattr(private, "make_saved", make_saved)
    y = checkpoint(fn, randn(4) * 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
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


class Retries(nn.Module):
    """Its BatchNorm is written, then raises; the module catches that, and goes on."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
        self.norm.register_forward_hook(self.fail)

    def fail(self, *_):
        raise ValueError

    def forward(self, x):
        try:
            x = self.norm(x)
        except ValueError:
            x = x * 2
        return self.last(x).sin()


STATEFUL = {
    "retries": Retries,
    "script": lambda: torch.jit.script(nn.BatchNorm1d(6)),
    "batchnorm": lambda: nn.BatchNorm1d(6),
    "momentum=None": lambda: nn.BatchNorm1d(6, momentum=None),
    "functional": Functional,
    "average": Average,
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
}
WRAPS = {
    "module": checkpoint,
    "partial": lambda m, x: checkpoint(partial(lambda m, x: m(x), m), x),
    "argument": lambda m, x: checkpoint(lambda x, m: m(x), x, m),
    "nested": lambda m, x: checkpoint(checkpoint, m, x),
    "debug": partial(checkpoint, debug=True),
    "Checkpoint": lambda m, x: Checkpoint(m)(x),
}


# what the forward writes there, it reads too: gradients are those of torch's checkpoint then
READS_WHAT_IT_WRITES = ("average", "spectral")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", STATEFUL)
def test_c18_c32_state_is_written_once(name, wrap):
    """Through modes and micro-batches, the state and gradients are those of the plain module."""
    if wrap == "debug" and name in READS_WHAT_IT_WRITES:
        pytest.skip("debug says that it is not the same twice")
    inputs = [torch.randn(8, 6) for _ in range(3)]

    def run(call):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 6), STATEFUL[name](), nn.Linear(6, 6)).to(DEVICE)
        found = []
        for training in (False, True, True):
            module.train(training)
            # all forwards before the first backward
            outputs = [call(module, x.to(DEVICE)) for x in inputs]
            sum(y.square().sum() for y in outputs).backward()
            found += statistics(module)
        return found, [p.grad for p in module.parameters()]

    (state, grads), (plain_state, plain_grads) = run(WRAPS[wrap]), run(lambda m, x: m(x))
    assert_same(state, plain_state)
    if name not in READS_WHAT_IT_WRITES:
        assert_same(grads, plain_grads)


@pytest.mark.parametrize("name", READS_WHAT_IT_WRITES)
def test_c32_state_is_not_rolled_back_before_the_recompute(name):
    """The recompute starts from the state of its time, as torch's does."""

    def run(call):
        torch.manual_seed(0)
        module = STATEFUL[name]().to(DEVICE)
        return torch.autograd.grad(call(module, x).square().sum(), x)[0]

    x = randn(8, 6)
    assert same(run(checkpoint), run(partial(stock, use_reentrant=False)))


def test_c18_batchnorm_reached_by_a_global():
    checkpoint(lambda x: GLOBAL(x).sin(), randn(8, 6)).sum().backward()
    assert GLOBAL.num_batches_tracked == 1


@pytest.mark.parametrize("in_place", [False, True])
def test_c18_batchnorm_in_what_runs_as_one(in_place):
    norm = nn.BatchNorm1d(6)
    module = nn.Sequential(nn.Linear(6, 6), norm, nn.Tanh()).to(DEVICE)
    module.compile(backend="eager") if in_place else None
    module = module if in_place else torch.compile(module, backend="eager")
    checkpoint(lambda x: module(x).sin(), randn(8, 6)).sum().backward()
    assert norm.num_batches_tracked == 1


def test_c18_another_thread_loses_nothing():
    """What another thread's forward writes while this one recomputes stays."""
    norm, x = nn.BatchNorm1d(6).to(DEVICE), randn(8, 6)

    def fn(x):
        if is_recomputing():
            thread = threading.Thread(target=norm, args=(x.detach(),))
            thread.start()
            thread.join()
        return norm(x).sin().sin()

    checkpoint(fn, x).sum().backward()
    assert norm.num_batches_tracked == 2
