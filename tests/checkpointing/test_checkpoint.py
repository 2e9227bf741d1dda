"""checkpoint equals the plain call bit for bit: values, gradients, arguments, outputs (C1-C7)."""

import random
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checkpoints import assert_as_plain, same, step
from support import DEVICE, flops, randn
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from fusedckpt import checkpoint

Pair = namedtuple("Pair", "a b")


def test_c1_dropout_and_rng():
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.GELU(), nn.Linear(6, 6), nn.Dropout())
    assert_as_plain(model.to(DEVICE), randn(4, 6), parameters=model.parameters())


def test_c1_preserve_rng_state_off():
    x = randn(64, 6)
    y = checkpoint(F.dropout, x, preserve_rng_state=False)
    torch.manual_seed(9)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert not torch.equal(grad != 0, y != 0)


@pytest.mark.parametrize("tail", [lambda x: x, torch.sin])
def test_c1_rrelu_draws_after_it_saves(tail):
    assert_as_plain(lambda x: tail(F.rrelu(x * 1, training=True)), randn(8, 8))


def test_c2_generators():
    def run(wrap):
        generator = torch.Generator().manual_seed(3)
        return wrap(lambda x, g: (x * torch.rand(4, 6, generator=g)).sin(), x, generator)

    x = torch.randn(4, 6, requires_grad=True)
    expected = step(lambda _: run(lambda fn, *args: fn(*args)), x)
    assert all(map(same, step(lambda _: run(checkpoint), x), expected))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("where", ["args", "kwargs", "list", "parameter"])
def test_c2_rng_of_devices(where):
    x = torch.randn(64, device="cuda", requires_grad=True)
    layer = nn.Module()
    layer.register_parameter("x", nn.Parameter(x.detach().clone()))
    layer.forward = lambda: F.dropout(layer.x)
    calls = {
        "args": lambda: (checkpoint(F.dropout, x), x),
        "kwargs": lambda: (checkpoint(lambda *, x: F.dropout(x), x=x), x),
        "list": lambda: (checkpoint(lambda xs: F.dropout(xs[0]), [x]), x),
        "parameter": lambda: (checkpoint(layer), layer.x),
    }
    y, leaf = calls[where]()
    torch.cuda.manual_seed(1)
    (grad,) = torch.autograd.grad(y.sum(), leaf)
    assert torch.equal(grad != 0, y != 0)


@pytest.mark.parametrize("draw", [random.random, np.random.random])
def test_c3_python_and_numpy(draw):
    x = randn(4)
    factors = []

    def fn(x):
        factors.append(draw())
        return (x * factors[-1]).sin()

    y = checkpoint(fn, x, preserve_python_rng=True)
    after = draw()
    random_state, numpy_state = random.getstate(), np.random.get_state()
    y.sum().backward()
    assert factors[0] == factors[1] != after
    assert random.getstate() == random_state
    assert np.array_equal(np.random.get_state()[1], numpy_state[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cached", [True, False])
def test_c4_autocast(dtype, cached):
    layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)).to(DEVICE)
    kind = DEVICE.type

    def fn(x):
        x = layers[1](layers[0](x)).tanh()
        with torch.autocast(kind, enabled=False):
            x = layers[2](x.float())
        return layers[1](x)

    def run(call):
        def forward(x):
            # cached casts of an earlier use must do no harm
            with torch.autocast(kind, dtype=dtype, cache_enabled=cached):
                return call(layers[0](x))

        found = step(forward, x, parameters=layers.parameters())
        assert not torch.is_autocast_enabled(kind)
        return found

    x = randn(4, 6)
    assert all(map(same, run(partial(checkpoint, fn)), run(fn)))


def test_c4_backward_inside_another_autocast():
    layer, x = nn.Linear(6, 6).to(DEVICE), randn(4, 6)

    def run(call):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            with torch.autocast(DEVICE.type, enabled=False):
                y = call(x)
            (grad,) = torch.autograd.grad(y.square().sum(), x)
            assert torch.is_autocast_enabled(DEVICE.type)
        return grad

    fn = lambda x: layer(x.sin()).sin()  # noqa: E731
    assert torch.equal(run(partial(checkpoint, fn)), run(fn))


@dataclass
class Record:
    a: torch.Tensor
    rest: list


def test_c5_nested_arguments():
    x, y, z, w = (randn(4, 3) for _ in range(4))

    def fn(a, *, pair, table, none, text, number):
        assert none is None
        assert text == "s"
        assert type(pair) is Pair
        return (a * pair.a + pair.b[0]).sin() * table["t"]["u"] * number, text

    def call(wrap):
        table = OrderedDict(t={"u": w})
        return wrap(fn, x, pair=Pair(y, [z]), table=table, none=None, text="s", number=3)

    expected = step(lambda *_: call(lambda f, *a, **k: f(*a, **k)), x, y, z, w)
    assert all(map(same, step(lambda *_: call(checkpoint), x, y, z, w), expected))


@pytest.mark.parametrize(
    "make", [Pair, lambda a, b: BaseModelOutput(a, (b,)), lambda a, b: {"a": a}]
)
def test_c5_outputs_keep_their_type(make):
    x = randn(4, 3)
    found = checkpoint(lambda x: make(x.sin(), x.cos()), x)
    assert type(found) is type(make(x, x))
    assert_as_plain(lambda x: make(x.sin().sin(), x.cos()), x)


def test_c5_dataclass_object_and_plain_outputs():
    x = randn(4, 3)
    found = checkpoint(lambda r: Record(r.a.sin().sin(), [None, "s", 3]), Record(x, []))
    assert found.rest == [None, "s", 3]
    (grad,) = torch.autograd.grad(found.a.sum(), x)
    assert torch.equal(grad, torch.autograd.grad(x.sin().sin().sum(), x)[0])
    assert checkpoint(lambda: None) is None


def test_c6_parameters_alone_need_grad():
    layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).to(DEVICE)
    assert_as_plain(layer, randn(4, 3, requires_grad=False), parameters=layer.parameters())
    assert_as_plain(lambda: layer(torch.ones(2, 3, device=DEVICE)), parameters=layer.parameters())


def test_c7_outputs_without_grad():
    x = randn(4, 3)
    found = checkpoint(lambda x: (x.sin(), x.detach().cos(), x.argmax()), x)
    assert [y.requires_grad for y in found] == [True, False, False]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_recompute_ends_before_the_last_gemm(depth):
    """What backward reads of the last linear is its input; an enclosing recompute brings that."""
    layers, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(DEVICE), randn(5, 6)
    wrapped = layers
    for _ in range(depth):
        wrapped = partial(checkpoint, wrapped)
    # forward 2, one again, gradients 4
    assert flops(lambda: wrapped(x * 1).sum().backward()) == 7 * 2 * 5 * 6 * 6


def test_a_recompute_for_the_arguments_of_an_inner_one_ends_with_them():
    calls = []

    def inner(h, mask):
        calls.append(1)
        return (h * mask).sin()

    checkpoint(lambda x: checkpoint(inner, x.sin(), (x > 0).float()), randn(4)).sum().backward()
    # in forward and in its own recompute, not in that of the outer one
    assert len(calls) == 2
