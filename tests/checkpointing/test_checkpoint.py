"""checkpoint equals the plain call bit for bit: values, gradients, arguments, outputs."""

import random
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checkpoints import assert_as_plain, assert_same, counted, linears, same, step
from support import DEVICE, flops, randn
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_outputs import BaseModelOutput

from fusedckpt import checkpoint

Pair = namedtuple("Pair", "a b")


def read_several_ways(y):
    y = (y * 2).sin() * y
    return torch.view_as_real(y.resolve_conj()) if y.is_complex() else y.exp()


def written_views(x):
    y = x.sin() * 2
    y[:, :2].mul_(3)
    y.t()[1] += x[:, 0]
    return y.relu_().view(-1)


def no_grad_inside(x):
    with torch.no_grad():
        scale = x.sin().max()
    with torch.enable_grad():
        return (x * scale).sin() * scale


def attention(need_weights):
    mha = nn.MultiheadAttention(6, 2, dropout=0.3).to(DEVICE)

    def call(q, k, v):
        # attention takes another way where they are one tensor
        assert q is k is v
        return mha(q, k, v, need_weights=need_weights)[0]

    x = randn(5, 2, 6)
    return call, x, x, x


def inference():
    layer = nn.Linear(3, 3).to(DEVICE)
    with torch.inference_mode():
        index = torch.tensor([1, 0, 3], device=DEVICE)
        layer.register_buffer("of_inference", torch.ones(3))
    return lambda x: checkpoint(lambda x, i: layer(x[i * 1]).sin(), x, index), randn(4, 3)


BLOCK = linears(6, 6)


def shared(x):
    return BLOCK(checkpoint(BLOCK, BLOCK(x)))


def convolutions():
    parts = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    parts += [nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*parts).to(DEVICE)


def sparse(layout):
    a = torch.eye(4, device=DEVICE).to_sparse(layout=layout)
    return lambda a, x: torch.sparse.mm(a, x.sin()).sin(), a, randn(4, 3)


def of_complex():
    return torch.randn(4, 3, dtype=torch.complex64).requires_grad_()


class Mine(torch.Tensor):
    pass


def of_subclass(a, x):
    # in the recompute, too
    assert type(a) is Mine
    return (a * x.sin()).sin().as_subclass(torch.Tensor)


DROPOUT = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.GELU(), nn.Linear(6, 6), nn.Dropout())
INDEX, MASK = torch.tensor([0, 4, 4]).to(DEVICE), torch.tensor([True, False, True]).to(DEVICE)
NOISED = nn.Parameter(torch.linspace(-3, 3, 64).view(8, 8).to(DEVICE))


def noisy(x):
    return F.rrelu(x, 0.1, 0.9, training=True)


# a function, and its arguments
CALLS = {
    "dropout": lambda: (DROPOUT.to(DEVICE), randn(4, 6)),
    "rrelu": lambda: (lambda x: F.rrelu(x * 1, training=True), randn(8, 8)),
    "rrelu and more": lambda: (lambda x: F.rrelu(x * 1, training=True).sin(), randn(8, 8)),
    # a tensor that is kept follows the noise, which is not drawn yet
    "rrelu of an argument": lambda: (noisy, randn(8, 8)),
    "rrelu of a view": lambda: (lambda x: noisy(x.t()[1:]), randn(8, 8)),
    "rrelu of a parameter": lambda: (lambda x: noisy(NOISED) * x, randn(8, 8)),
    "rrelu twice": lambda: (lambda x: noisy(noisy(x)), randn(8, 8)),
    "rrelu in place": lambda: (lambda x: F.rrelu(x * 1, training=True, inplace=True), randn(8, 8)),
    "rrelu of all": lambda: (lambda *xs: sum(map(noisy, xs)), randn(8, 8), randn(8, 8)),
    "parameters alone": lambda: (linears(3, 3, 3), randn(4, 3, requires_grad=False)),
    "transposed": lambda: (read_several_ways, randn(4, 3).t()),
    "expanded": lambda: (read_several_ways, randn(4, 1).expand(4, 3)),
    "0-d": lambda: (read_several_ways, randn(1)[0]),
    "empty": lambda: (read_several_ways, randn(0, 3)),
    "complex": lambda: (read_several_ways, of_complex()),
    "conjugate": lambda: (read_several_ways, of_complex().conj()),
    "other dtype": lambda: (lambda z: torch.view_as_real(z).sin(), of_complex() * 1),
    "strided": lambda: (read_several_ways, randn(8, 6)[::2, 1::2]),
    "integers": lambda: (lambda t, i, m: t[i].sin()[m].sin(), randn(5, 3), INDEX, MASK),
    "coo": lambda: sparse(torch.sparse_coo),
    "csr": lambda: sparse(torch.sparse_csr),
    "attention": lambda: attention(False),
    "attention with weights": lambda: attention(True),
    "its input": lambda: (lambda x: (x, x.sin()), randn(4)),
    "views": lambda: (written_views, randn(4, 6)),
    "no_grad": lambda: (no_grad_inside, randn(4)),
    "inference": inference,
    "subclass": lambda: (of_subclass, randn(4, requires_grad=False).as_subclass(Mine), randn(4)),
    "convolutions": lambda: (convolutions(), randn(2, 2, 10, 10)),
    "shared": lambda: (shared, randn(4, 6)),
    "tuple": lambda: (lambda x: Pair(x.sin().sin(), x.cos()), randn(4, 3)),
    "output of a model": lambda: (lambda x: BaseModelOutput(x.sin().sin(), (x.cos(),)), randn(4)),
    "dict": lambda: (lambda x: {"a": x.sin().sin()}, randn(4, 3)),
}


OPTIONS = {
    "": {},
    "late": {"early_stop": False},
    "debug": {"debug": True},
    "regions": {"save_regions": "attention"},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", CALLS)
def test_as_plain(name, options):
    torch.manual_seed(0)
    fn, *args = CALLS[name]()
    parameters = fn.parameters() if isinstance(fn, nn.Module) else ()
    assert_as_plain(fn, *args, parameters=parameters, **OPTIONS[options])
    assert type(checkpoint(fn, *args, **OPTIONS[options])) is type(fn(*args))


def test_without_preserve_rng_state_a_recompute_draws_anew():
    x = randn(64, 6)
    y = checkpoint(F.dropout, x, preserve_rng_state=False)
    torch.manual_seed(9)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert not torch.equal(grad != 0, y != 0)


def test_a_generator_among_the_arguments_draws_the_same_again():
    def run(wrap):
        generator = torch.Generator().manual_seed(3)
        return wrap(lambda x, g: (x * torch.rand(4, 6, generator=g)).sin(), x, generator)

    x = torch.randn(4, 6, requires_grad=True)
    expected = step(lambda _: run(lambda fn, *args: fn(*args)), x)
    assert_same(step(lambda _: run(checkpoint), x), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("where", ["args", "kwargs", "list", "parameter"])
def test_the_generator_of_a_gpu_draws_the_same_again_wherever_its_tensor_is(where):
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
def test_random_and_numpy_draw_the_same_again_and_go_on_as_before(draw):
    factors = []

    def fn(x):
        factors.append(draw())
        return (x * factors[-1]).sin()

    y = checkpoint(fn, randn(4))
    after = draw()
    random_state, numpy_state = random.getstate(), np.random.get_state()
    y.sum().backward()
    assert factors[0] == factors[1] != after
    assert random.getstate() == random_state
    assert np.array_equal(np.random.get_state()[1], numpy_state[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cached", [True, False])
def test_a_recompute_runs_under_the_autocast_of_its_forward(dtype, cached):
    layers, kind = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)).to(DEVICE), DEVICE.type

    def fn(x):
        x = layers[1](layers[0](x)).tanh()
        with torch.autocast(kind, enabled=False):
            x = layers[2](x.float())
        return layers[1](x)

    def run(fn, x, wrap=lambda fn, x: fn(x)):
        # cached casts of an earlier use must do no harm
        with torch.autocast(kind, dtype=dtype, cache_enabled=cached):
            return wrap(fn, layers[0](x))

    assert_as_plain(partial(run, fn), randn(4, 6), parameters=layers.parameters())
    wrapped = lambda run, x: run(x, wrap=checkpoint)  # noqa: E731
    assert_as_plain(partial(run, fn), randn(4, 6), parameters=layers.parameters(), wrap=wrapped)
    assert not torch.is_autocast_enabled(kind)


def test_a_backward_under_another_autocast_changes_no_bit():
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


def test_kernels_of_attention():
    q = randn(1, 2, 8, 8)
    attend = lambda q: F.scaled_dot_product_attention(q * 1, q * 1, q * 1).sin()  # noqa: E731
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.autograd.grad(attend(q).sum(), q)
        y = checkpoint(attend, q)
    assert_same(torch.autograd.grad(y.sum(), q), expected)
    assert torch.backends.cuda.flash_sdp_enabled()


@dataclass
class Record:
    a: torch.Tensor
    rest: list


def test_tensors_in_nested_arguments_get_their_gradients():
    x, y, z, w = (randn(4, 3) for _ in range(4))
    thing, seen = object(), []

    def fn(a, *, pair, table, none, text, number, thing):
        assert none is None
        assert text == "s"
        assert type(pair) is Pair
        seen.append(thing)
        return (a * pair.a + pair.b[0]).sin() * table["t"]["u"] * number, text

    def call(wrap):
        table = OrderedDict(t={"u": w})
        options = {"pair": Pair(y, [z]), "table": table, "none": None, "text": "s"}
        return wrap(fn, x, **options, number=3, thing=thing)

    expected = step(lambda *_: call(lambda f, *a, **k: f(*a, **k)), x, y, z, w)
    assert_same(step(lambda *_: call(checkpoint), x, y, z, w), expected)
    assert seen == [thing] * 3


def test_dataclasses_may_be_arguments_and_results():
    x = randn(4, 3)
    found = checkpoint(lambda r: Record(r.a.sin().sin(), [None, "s", 3]), Record(x, []))
    assert found.rest == [None, "s", 3]
    (grad,) = torch.autograd.grad(found.a.sum(), x)
    assert torch.equal(grad, torch.autograd.grad(x.sin().sin().sum(), x)[0])
    assert checkpoint(lambda: None) is None


def test_outputs_require_grad_as_without_a_checkpoint():
    x = randn(4, 3)
    found = checkpoint(lambda x: (x.sin(), x.detach().cos(), x.argmax()), x)
    assert [y.requires_grad for y in found] == [True, False, False]
    assert checkpoint(lambda x: x, x) is x


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_recompute_ends_before_the_last_gemm(depth):
    """What backward reads of the last linear is its input; an enclosing recompute brings that."""
    wrapped, x = linears(6, 6, 6), randn(5, 6)
    for _ in range(depth):
        wrapped = partial(checkpoint, wrapped)
    # forward 2, one again, gradients 4
    assert flops(lambda: wrapped(x * 1).sum().backward()) == 7 * 2 * 5 * 6 * 6


def test_a_recompute_for_the_arguments_of_an_inner_one_ends_with_them():
    inner, calls = counted(lambda h, mask: (h * mask).sin())
    checkpoint(lambda x: checkpoint(inner, x.sin(), (x > 0).float()), randn(4)).sum().backward()
    # in forward and in its own recompute, not in that of the outer one
    assert len(calls) == 2


PACKS = {
    "dense": torch.clone,
    "transposed": lambda x: x.mT.clone().mT if x.ndim > 1 else x.clone(),
    "offset": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view_as(x),
}


@pytest.mark.parametrize("pack", PACKS.values(), ids=PACKS)
@pytest.mark.parametrize("part", [lambda x: x.t(), lambda x: x[::2, 1::2]], ids=["t", "part"])
def test_hooks_around_that_change_layouts(part, pack):
    def fn(y):
        # autograd saves the argument, a part of it, and the whole again as a view
        return y.sin().sum() + y[1:].square().sum() + y.mT.exp().sum()

    # no leaf's, which are at hand by themselves
    x = part(randn(8, 6) * 2)
    expected = torch.autograd.grad(fn(x), x, retain_graph=True)[0]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        found = torch.autograd.grad(checkpoint(fn, x), x)[0]
    torch.testing.assert_close(found, expected)


def test_an_argument_that_is_passed_twice_is_one_again():
    seen, x = [], randn(3)

    def square(a, b, rest=()):
        seen.append(a is b and all(a is c for c in rest))
        return (a * b).sin()

    with torch.autograd.graph.save_on_cpu():
        y = checkpoint(square, x.cos(), b=x.cos()), checkpoint(square, *[x.cos()] * 2)
    sum(y).sum().backward()
    # backward begins at the last
    assert seen == [False, True, True, False]
    seen.clear()
    assert_as_plain(square, x, x, [x])
    assert seen == [True, True, True]


@pytest.mark.parametrize("fn", [None, 3, "relu"])
def test_not_callable(fn):
    with pytest.raises(TypeError, match="checkpoint: function must be callable"):
        checkpoint(fn, randn(2))
    with pytest.raises(TypeError, match="checkpoint: context_fn must be callable, got"):
        checkpoint(torch.sin, randn(2), context_fn=fn)
    assert same(checkpoint(torch.sin, x := randn(2)), x.sin())
