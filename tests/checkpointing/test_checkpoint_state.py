"""What autograd saved raises where it changed; what forward itself changes, changes once."""

import threading
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from checkpoints import assert_as_plain, assert_same
from support import DEVICE, randn
from torch import nn
from torch.utils.checkpoint import CheckpointError

from fusedckpt import checkpoint, checkpoint_module, is_recomputing
from fusedckpt.autograd import private
from fusedckpt.autograd.private import SavedTensor
from fusedckpt.checkpointing.written_buffers import _named, written_buffers

GLOBAL = nn.BatchNorm1d(6).to(DEVICE)


class BufferNet(nn.Module):
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
def test_a_changed_tensor_raises(way):
    x, t = randn(4, 6), randn(4, 6, requires_grad=False)
    y = WAYS[way](x, t)
    t.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", ["fc1.weight", "fc2.weight", "fc1.bias", "fc2.bias", "scale"])
@pytest.mark.parametrize("make", [lambda net: net, lambda net: lambda x: net(x), checkpoint_module])
def test_a_changed_parameter_raises(make, name):
    """Those that autograd saved, as without a checkpoint; other state is left to the function."""
    net, x = BufferNet(), randn(4, 6)
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
def test_debug_finds_changed_state_that_autograd_does_not_save(name, debug):
    net, x = BufferNet(), randn(4, 6)
    y = checkpoint(net, x, debug=debug)
    net.state_dict()[name].add_(1)
    with pytest.raises(CheckpointError, match=r"do the same each time|state that has changed"):
        y.sum().backward()


def test_a_function_may_write_its_own_parameter():
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
def test_a_segment_that_writes_its_input_or_a_saved_tensor_raises(monkeypatch, make_saved, fn):
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
    "checkpoint_module": lambda m, x: checkpoint_module(m)(x),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", STATEFUL)
def test_state_is_written_once(name, wrap):
    """Through modes and micro-batches, the state and gradients are those of the plain module."""
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
    # also where the forward reads what it writes
    assert_same(grads, plain_grads)


class CountingBuffer(nn.Module):
    """Reads a buffer that it writes; another is large, and never written."""

    def __init__(self, count=4):
        super().__init__()
        self.register_buffer("scale", torch.ones(count))
        self.register_buffer("table", torch.ones(40_000))
        self.to(DEVICE)

    def forward(self, x):
        self.scale += 1
        return (x * self.scale.clone() + self.table[0]).sin()


class TwoClosures(nn.Module):
    """Calls its modules in functions that close over itself."""

    def __init__(self):
        super().__init__()
        self.first, self.second = CountingBuffer(), CountingBuffer()

    def forward(self, x, wrap):
        y = wrap(lambda x: self.first(x), x)
        return wrap(lambda x: self.second(x), y)


def gradient(call, x, steps=1):
    for _ in range(steps):
        (found,) = torch.autograd.grad(call(x).square().sum(), x)
    return found


CALLS_OF_COUNTING = {
    "module": lambda m, wrap: partial(wrap, m),
    "method": lambda m, wrap: partial(wrap, m.forward),
    "closure": lambda m, wrap: partial(wrap, lambda x: m(x)),
    "closure of a closure": lambda m, wrap: partial(wrap, lambda x: (lambda y: m(y))(x)),
    "partial": lambda m, wrap: partial(wrap, partial(m)),
    "argument": lambda m, wrap: lambda x: wrap(lambda x, m: m(x), x, m),
    "list": lambda m, wrap: lambda x: wrap(lambda x, ms: ms[0](x), x, [m]),
    "retained": lambda m, wrap: lambda x: wrap(m, x) + 0 * wrap(m, x).detach(),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("way", CALLS_OF_COUNTING)
def test_a_recompute_begins_with_the_buffers_of_its_forward(way, steps):
    x, found = randn(2, 4), []
    for wrap in (checkpoint, lambda fn, *args: fn(*args)):
        module = CountingBuffer()
        found.append([gradient(CALLS_OF_COUNTING[way](module, wrap), x, steps), module.scale])
    assert_same(*found)


def scaled(module):
    module.scale *= 2


def by_data(module):
    module.scale.data.mul_(2)


def by_other_data(module):
    module.scale.data = module.scale.data * 2


def by_numpy(module):
    if module.scale.device.type == "cpu":
        module.scale.numpy()[...] *= 2
    else:
        module.scale.mul_(2)


def by_replacing(module):
    kept = type(module.scale)
    scale = module.scale * 2
    module.scale = nn.Parameter(scale, False) if kept is nn.Parameter else scale


STATES = {
    "buffer": lambda m, t: m.register_buffer("scale", t),
    "parameter": lambda m, t: setattr(m, "scale", nn.Parameter(t, requires_grad=False)),
    "attribute": lambda m, t: setattr(m, "scale", t),
}


class ScaledByState(nn.Module):
    def __init__(self, state, write):
        super().__init__()
        STATES[state](self, torch.ones(4, device=DEVICE))
        self.write = write

    def forward(self, x):
        self.write(self)
        return (x * self.scale.clone()).sin()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("write", [scaled, by_data, by_other_data, by_numpy, by_replacing])
@pytest.mark.parametrize("state", STATES)
def test_state_of_other_kinds_that_is_written_in_other_ways_is_restored(state, write):
    """As spectral norms of older code have it: in parameters without gradients, or attributes."""
    x, found = randn(2, 4), []
    for wrap in (checkpoint, lambda fn, *args: fn(*args)):
        module = ScaledByState(state, write)
        found.append([gradient(partial(wrap, module), x, 3), module.scale.detach()])
    assert_same(*found)


@pytest.mark.filterwarnings("error")
def test_functions_of_one_module_write_buffers_of_their_own():
    x, found = randn(2, 4), []
    for wrap in (checkpoint, lambda fn, *args: fn(*args)):
        model = TwoClosures()
        found.append([gradient(partial(model, wrap=wrap), x, 2), *model.buffers()])
    assert_same(*found)


def test_only_buffers_that_a_forward_writes_are_copied():
    module, norm, x = CountingBuffer(), nn.BatchNorm1d(4).to(DEVICE), randn(2, 4)
    checkpoint(module, x)
    checkpoint(norm, x)
    written = written_buffers(module, ())
    assert [noted.name for noted in written._noted] == ["scale"]
    assert written_buffers(norm, ()) is None
    module.eval()
    # which may write others
    assert written_buffers(module, ())._firsts


REACHED = CountingBuffer()


def test_a_buffer_that_no_call_could_note_warns_once():
    _named.clear()
    x = randn(2, 4)
    words = "CountingBuffer writes its buffer 'scale'.*Checkpoint that mod"
    with pytest.warns(UserWarning, match=words):
        checkpoint(lambda x: REACHED(x), x).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint(lambda x: REACHED(x), x).sum().backward()


def test_a_large_buffer_is_copied_after_its_first_recompute():
    _named.clear()
    x, module, plain = randn(2, 20_000), CountingBuffer(20_000), CountingBuffer(20_000)
    with pytest.warns(UserWarning, match="writes its buffer 'scale'.*Later calls copy it"):
        gradient(partial(checkpoint, module), x)
    found, expected = gradient(partial(checkpoint, module), x), gradient(plain, x, 2)
    assert torch.equal(found, expected)


def test_a_batchnorm_that_is_a_global_updates_once():
    checkpoint(lambda x: GLOBAL(x).sin(), randn(8, 6)).sum().backward()
    assert GLOBAL.num_batches_tracked == 1


@pytest.mark.parametrize("in_place", [False, True])
def test_a_batchnorm_in_compiled_code_updates_once(in_place):
    norm = nn.BatchNorm1d(6)
    module = nn.Sequential(nn.Linear(6, 6), norm, nn.Tanh()).to(DEVICE)
    module.compile(backend="eager") if in_place else None
    module = module if in_place else torch.compile(module, backend="eager")
    checkpoint(lambda x: module(x).sin(), randn(8, 6)).sum().backward()
    assert norm.num_batches_tracked == 1


def test_a_write_of_another_thread_during_a_recompute_stays():
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
