"""Modules after a recompute, which saw their calls, are to everybody what they were."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from checkpoints import assert_same, same
from support import DEVICE, randn
from torch import nn

from fusedckpt import checkpoint


def model():
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).to(DEVICE)


@pytest.fixture(autouse=True)
def _recomputed():
    checkpoint(model(), randn(4, 6)).sum().backward()


def test_the_class():
    assert nn.Module._compiled_call_impl is None
    assert model()._compiled_call_impl is None
    assert not torch.nn.modules.module._has_any_global_hook()


COMPILED = """
import copy, torch, fusedckpt
from torch import nn
layers, x = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), torch.randn(4, 6)
expected = copy.deepcopy(layers)
expected(x)
compiled = torch.compile(layers, backend="eager")
fusedckpt.checkpoint(compiled, x).square().sum().backward()
assert all(map(torch.equal, layers.buffers(), expected.buffers()))
"""


def test_a_compiled_module_warns_of_no_hooks():
    """In a process of its own, as pytest has its own filters."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "global hooks" not in done.stderr


def test_hooked_modules_compile_as_one_graph():
    layers, x = model(), randn(4, 6)
    layers[0].register_forward_hook(lambda module, args, output: output * 2)
    expected = copy.deepcopy(layers)(x)
    assert same(torch.compile(layers, backend="eager", fullgraph=True)(x), expected)


def test_a_compiled_module():
    layers, x = model(), randn(4, 6)
    expected = copy.deepcopy(layers)
    layers.compile(backend="eager")
    assert same(checkpoint(layers, x), expected(x))
    assert pickle.loads(pickle.dumps(layers))._compiled_call_impl is None
    del layers._compiled_call_impl
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
    layers, x = model(), randn(4, 6)
    assert same(torch.jit.script(copy.deepcopy(layers).eval())(x), copy.deepcopy(layers).eval()(x))
    assert_updated_once(torch.jit.script(layers), x)


def assert_updated_once(layers, x):
    expected = copy.deepcopy(layers)
    checkpoint(layers, x).square().sum().backward()
    expected(x)
    assert_same(layers.buffers(), expected.buffers())


class Retries(nn.Module):
    """Its BatchNorm is written, then raises; the module catches that, and goes on."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = Fails(6), nn.BatchNorm1d(6)

    def forward(self, x):
        try:
            x = self.norm(x)
        except ValueError:
            x = x * 2
        return self.last(x).sin()


class Fails(nn.BatchNorm1d):
    def forward(self, x):
        super().forward(x)
        raise ValueError


def test_buffers_of_a_call_that_raised():
    assert_updated_once(Retries().to(DEVICE), randn(4, 6))
