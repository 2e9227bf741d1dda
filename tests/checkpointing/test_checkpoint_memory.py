"""A checkpoint leaves nothing behind, and its cost beside torch's."""

import gc
import weakref

import pytest
import torch
from checkpoints import no_gc, stock
from support import DEVICE, calls, randn
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import fusedckpt
from fusedckpt import checkpoint, checkpoint_module, is_recomputing
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.checkpointing.samples import Pair


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
    parts = nn.Linear(6, 6), probe, nn.Linear(6, 6), probe, nn.BatchNorm1d(6)
    return nn.Sequential(*parts).to(DEVICE)


WRAPS = {
    "ours": checkpoint,
    "debug": lambda fn, x: checkpoint(fn, x, debug=True),
    "nested": lambda fn, x: checkpoint(checkpoint, fn, x),
    "in torch's": lambda fn, x: stock(checkpoint, fn, x),
    "around torch's": lambda fn, x: checkpoint(stock, fn, x),
    "checkpoint_module": lambda fn, x: checkpoint_module(fn)(x),
}


@pytest.mark.parametrize("name", WRAPS)
def test_intermediates_and_output_are_freed(name):
    with no_gc():
        probe, x = Probe(), randn(4, 6) * 1
        y, argument = WRAPS[name](network(probe), x), weakref.ref(x)
        assert not probe.alive
        output = weakref.ref(y)
        y.sum().backward(retain_graph=True)
        assert not probe.alive
        assert probe.seen[True]
        y.sum().backward()
        del x, y
        assert output() is None
        assert argument() is None
        assert not probe.alive


def test_all_is_freed_without_a_backward_and_after_a_failed_one():
    with no_gc():
        probe, x = Probe(), randn(4, 6) * 1

        def fn(x):
            y = probe(x)
            if is_recomputing():
                raise ValueError("no")
            return y.sin()

        for fails in (False, True):
            y = checkpoint(fn, x)
            output = weakref.ref(y)
            if fails:
                with pytest.raises(ValueError, match="no") as info:
                    y.sum().backward()
                # a traceback holds its frames
                info.value.__traceback__ = None
                del info
            del y
            assert output() is None
            assert not probe.alive


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(obj), torch.Tensor) for obj in gc.get_objects())


def test_many_steps_leave_no_tensor_or_object():
    fused = fusedckpt.Linear(6, 6, activation="gelu")
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(), fused).to(DEVICE)
    x, counts = randn(4, 6), []
    with forced_path("aten"):
        for step in range(200):
            checkpoint(model, x).sum().backward()
            if step in (9, 199):
                counts.append((live_tensors(), len(gc.get_objects())))
    assert counts[0][0] == counts[1][0]
    assert counts[1][1] <= counts[0][1] + 100


def work(wrap, fn, *args) -> int:
    def run():
        wrap(fn, *args).sum().backward()

    # what a first call imports and caches does not count
    run()
    return calls(run)


def test_overhead_is_not_above_torchs():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    assert work(checkpoint, layer, x) <= work(stock, layer, x)
    # nor that of a saved tensor and of a module
    layers = [nn.LayerNorm(4), nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4), nn.Tanh()] * 4
    assert work(checkpoint, nn.Sequential(*layers), x) <= work(stock, nn.Sequential(*layers), x)
    # not a call for every element
    data = {"data": list(range(20_000)), "more": [None] * 10_000}
    given = (lambda x, data: x.sin() * len(data), randn(4), data)
    assert work(checkpoint, *given) <= work(stock, *given)
    assert work(checkpoint, lambda x: x.sin() * len(data), x) < 1000


SEGMENTS = {
    "plain": lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)),
    "fused": lambda: nn.Sequential(nn.Tanh(), fusedckpt.MLP(6, 8), nn.Tanh(), nn.Linear(6, 6)),
}


@pytest.mark.parametrize("name", SEGMENTS)
def test_arguments_are_freed_when_their_segment_is_done(name):
    """Not only at the end of the backward, while the graph and the loss live on."""
    first, second = (SEGMENTS[name]().to(DEVICE) for _ in range(2))
    freed = []
    with no_gc():
        hidden = checkpoint(first, randn(4, 6))
        # between the two
        hidden.register_hook(lambda grad: freed.append(storage.expired()))
        argument = hidden * 1
        storage = StorageWeakRef(argument.untyped_storage())
        loss = checkpoint(second, argument).sum()
        del argument, hidden
        assert not storage.expired()
        loss.backward()
    assert freed == [True]


def test_samples_are_freed_when_they_are_compared():
    """Not only at the end of the backward, which may have its peak in layers before."""
    freed = []
    hidden = randn(4, 6) * 1
    hidden.register_hook(lambda grad: freed.append(not any(map(_is_pair, gc.get_objects()))))
    checkpoint(SEGMENTS["plain"]().to(DEVICE), hidden, debug="samples").sum().backward()
    assert freed == [True]


def _is_pair(value):
    return type(value) is Pair
