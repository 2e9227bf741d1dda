"""Modules after a recompute, which saw their calls, are to everybody what they were."""

import copy
import pickle

import pytest
import torch
from checkpoints import same
from support import DEVICE, randn
from torch import nn

from fusedckpt import checkpoint
from fusedckpt.autograd.module_calls import observed


def model():
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).to(DEVICE)


@pytest.fixture(autouse=True)
def _recomputed():
    checkpoint(model(), randn(4, 6)).sum().backward()


def test_the_class():
    assert nn.Module._compiled_call_impl is None
    assert model()._compiled_call_impl is None


def test_hooked_modules_compile_as_one_graph():
    layers, x = model(), randn(4, 6)
    layers[0].register_forward_hook(lambda module, args, output: output * 2)
    expected = copy.deepcopy(layers)(x)
    assert same(torch.compile(layers, backend="eager", fullgraph=True)(x), expected)


def test_a_compiled_module():
    layers, x = model(), randn(4, 6)
    expected = copy.deepcopy(layers)
    layers.compile(backend="eager")
    assert layers._compiled_call_impl is not None
    assert same(checkpoint(layers, x), expected(x))
    copied = pickle.loads(pickle.dumps(layers))
    assert copied._compiled_call_impl is None
    del layers._compiled_call_impl
    assert layers._compiled_call_impl is None
    assert same(layers(x), expected(x))


def test_a_recompute_in_what_is_compiled_stays_eager():
    layers, x = model(), randn(4, 6)

    def fn(x):
        return layers(x).sin()

    def step(y):
        loss = y.square().sum()
        loss.backward()
        return loss

    step(fn(x))
    expected, x.grad = x.grad, None
    torch._dynamo.reset()
    # "eager" would leave it eager by itself
    torch.compile(step, backend=lambda graph, inputs: graph)(checkpoint(fn, x))
    assert same(x.grad, expected)


def test_scripts():
    layers, x = model().eval(), randn(4, 6)
    assert same(torch.jit.script(layers)(x), layers(x))


def test_the_buffers_of_scripts():
    layers, x = torch.jit.script(model()), randn(4, 6)
    expected = copy.deepcopy(layers)
    checkpoint(layers, x).square().sum().backward()
    expected(x)
    assert all(map(torch.equal, layers.buffers(), expected.buffers()))


class Calls:
    def __init__(self):
        self.seen = []

    def sees(self, module):
        return isinstance(module, nn.Linear)

    def enter(self, module):
        self.seen.append("enter")

    def returned(self, module, output):
        self.seen.append("returned")

    def leave(self, entered):
        self.seen.append("leave")


def test_calls_are_seen():
    calls, layers = Calls(), model()
    with observed(calls):
        layers(randn(4, 6))
        with pytest.raises(RuntimeError):
            layers(randn(4, 5))
        with observed(None):
            layers(randn(4, 6))
    layers(randn(4, 6))
    assert calls.seen == ["enter", "returned", "leave", "enter", "leave"]
