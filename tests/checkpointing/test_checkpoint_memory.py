"""What a checkpoint leaves behind: nothing (C13, C29); and what it costs beside torch's."""

import gc
import weakref

import pytest
import torch
from checkpoints import stock
from support import DEVICE, calls, randn
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import fusedckpt
from fusedckpt import Checkpoint, checkpoint, is_recomputing
from fusedckpt.autograd.dispatch import forced_path


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Probe(nn.Module):
    """Leaves weak references to what it returns, of the forward and of the recompute."""

    def __init__(self):
        super().__init__()
        self.seen = {False: [], True: []}

    def forward(self, x):
        y = x.sin()
        self.seen[is_recomputing()].append(weakref.ref(y))
        return y.exp()

    @property
    def alive(self):
        return [ref for refs in self.seen.values() for ref in refs if ref() is not None]


def network(probe):
    return nn.Sequential(nn.Linear(6, 6), probe, nn.Linear(6, 6), probe, nn.BatchNorm1d(6)).to(
        DEVICE
    )


WRAPS = {
    "ours": checkpoint,
    "debug": lambda fn, x: checkpoint(fn, x, debug=True),
    "nested": lambda fn, x: checkpoint(checkpoint, fn, x),
    "in torch's": lambda fn, x: stock(checkpoint, fn, x),
    "around torch's": lambda fn, x: checkpoint(stock, fn, x),
    "Checkpoint": lambda fn, x: Checkpoint(fn)(x),
}


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("name", WRAPS)
def test_c29_intermediates_and_output_are_freed(name):
    probe = Probe()
    y = WRAPS[name](network(probe), randn(4, 6))
    assert not probe.alive
    output = weakref.ref(y)
    y.sum().backward(retain_graph=True)
    assert not probe.alive
    assert probe.seen[True]
    y.sum().backward()
    del y
    assert output() is None
    assert not probe.alive


@pytest.mark.usefixtures("no_gc")
def test_c29_forward_without_backward():
    probe, x = Probe(), randn(4, 6) * 1
    y, argument = checkpoint(network(probe), x), weakref.ref(x)
    output = weakref.ref(y)
    del x, y
    assert output() is None
    assert argument() is None


@pytest.mark.usefixtures("no_gc")
def test_c29_after_an_exception_in_the_recompute():
    probe, x = Probe(), randn(4, 6)

    def fn(x):
        y = probe(x)
        if is_recomputing():
            raise ValueError("no")
        return y.sin()

    y = checkpoint(fn, x)
    with pytest.raises(ValueError, match="no") as info:
        y.sum().backward()
    del y
    # a traceback holds its frames
    info.value.__traceback__ = None
    del info
    assert not probe.alive


def live_tensors() -> int:
    return sum(issubclass(type(obj), torch.Tensor) for obj in gc.get_objects())


@pytest.mark.parametrize("collects", [True, False])
def test_c29_1000_steps(collects, request):
    if not collects:
        request.getfixturevalue("no_gc")
    model = nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(), fusedckpt.Linear(6, 6, activation="gelu")
    ).to(DEVICE)
    x = randn(4, 6)
    counts = []
    with forced_path("aten"):
        for step in range(1000):
            checkpoint(model, x).sum().backward()
            if step in (9, 999):
                counts.append((live_tensors(), len(gc.get_objects())))
    assert counts[0][0] == counts[1][0]
    # without gc, torch's pytree leaves its own recursive function per call
    if collects:
        assert counts[1][1] <= counts[0][1] + 500


def work(wrap, fn, *args) -> int:
    def run():
        wrap(fn, *args).sum().backward()

    # what a first call imports and caches does not count
    run()
    return calls(run)


def test_overhead_is_not_above_torchs():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    assert work(checkpoint, layer, x) <= work(stock, layer, x)


def test_large_structures_are_quick():
    x, small = randn(4), {"data": [1], "more": [None]}
    large = {"data": list(range(20_000)), "more": [None] * 10_000}

    def reached(data):
        return lambda x: x.sin() * len(data)

    # not a call for every element
    assert work(checkpoint, reached(large), x) < work(checkpoint, reached(small), x) + 1000
    given = (lambda x, data: x.sin() * len(data), x, large)
    assert work(checkpoint, *given) <= work(stock, *given)


SEGMENTS = {
    "plain": lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)),
    "fused": lambda: nn.Sequential(nn.Tanh(), fusedckpt.MLP(6, 8), nn.Tanh(), nn.Linear(6, 6)),
}


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("name", SEGMENTS)
def test_arguments_are_freed_when_their_segment_is_done(name):
    """Not only at the end of the backward, while the graph and the loss live on."""
    first, second = (SEGMENTS[name]().to(DEVICE) for _ in range(2))
    freed = []

    def between_the_two(grad):
        freed.append(storage.expired())

    hidden = checkpoint(first, randn(4, 6))
    hidden.register_hook(between_the_two)
    argument = hidden * 1
    storage = StorageWeakRef(argument.untyped_storage())
    loss = checkpoint(second, argument).sum()
    del argument, hidden
    assert not storage.expired()
    loss.backward()
    assert freed == [True]
