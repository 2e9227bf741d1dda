"""checkpoint on arguments of every kind, and on modules as they come."""

import pytest
import torch
from checkpoints import assert_as_plain, same
from support import DEVICE, randn
from torch import nn

import fusedckpt
from fusedckpt import checkpoint

LAYOUTS = {
    "transposed": lambda: randn(4, 3).t(),
    "expanded": lambda: randn(4, 1).expand(4, 3),
    "0-d": lambda: randn(1)[0],
    "empty": lambda: randn(0, 3),
    "complex": lambda: torch.randn(4, 3, dtype=torch.complex64).requires_grad_(),
    "conjugate": lambda: torch.randn(4, 3, dtype=torch.complex64).requires_grad_().conj(),
    "strided": lambda: randn(8, 6)[::2, 1::2],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name):
    x = LAYOUTS[name]()

    def fn(y):
        y = (y * 2).sin() * y
        return torch.view_as_real(y.resolve_conj()) if y.is_complex() else y.exp()

    expected = torch.autograd.grad(fn(x).square().sum(), x, retain_graph=True)[0]
    found = torch.autograd.grad(checkpoint(fn, x).square().sum(), x)[0]
    assert same(found, expected)


def test_an_argument_read_as_another_dtype():
    def fn(z):
        return torch.view_as_real(z).sin().sum()

    z = torch.randn(4, 3, dtype=torch.complex64).requires_grad_() * 1
    expected = torch.autograd.grad(fn(z), z, retain_graph=True)[0]
    assert same(torch.autograd.grad(checkpoint(fn, z), z)[0], expected)


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


def test_integer_and_bool_arguments():
    table, index, mask = randn(5, 3), torch.tensor([0, 4, 4]), torch.tensor([True, False, True])
    index, mask = index.to(DEVICE), mask.to(DEVICE)
    assert_as_plain(lambda t, i, m: t[i].sin()[m].sin(), table, index, mask)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["coo", "csr"])
def test_sparse_argument(layout):
    a = torch.eye(4, device=DEVICE).to_sparse(layout=layout)
    assert_as_plain(lambda a, x: torch.sparse.mm(a, x.sin()).sin(), a, randn(4, 3))


def test_an_argument_that_is_passed_twice_is_one_again():
    seen, x = [], randn(3).requires_grad_()

    def square(a, b):
        # attention takes another way where key and value are one tensor
        seen.append(a is b)
        return (a * b).sin()

    with torch.autograd.graph.save_on_cpu():
        y = checkpoint(square, x.cos(), b=x.cos()), checkpoint(square, *[x.cos()] * 2)
    sum(y).sum().backward()
    # backward begins at the last
    assert seen == [False, True, True, False]


def test_subclass_argument():
    class Mine(torch.Tensor):
        pass

    kinds = []

    def fn(a, x):
        kinds.append(type(a))
        return (a * x.sin()).sin().as_subclass(torch.Tensor)

    a, x = randn(4, requires_grad=False).as_subclass(Mine), randn(4)
    checkpoint(fn, a, x).sum().backward()
    assert kinds == [Mine, Mine]


def test_argument_given_twice_is_one_tensor():
    seen = []

    def fn(a, b, rest):
        seen.append(a is b is rest[0])
        return (a * b).sin() * rest[0]

    x = randn(4)
    assert_as_plain(fn, x, x, [x])
    # plain, then forward and recompute
    assert seen == [True, True, True]


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_of_one_tensor(need_weights):
    mha = nn.MultiheadAttention(6, 2, dropout=0.3).to(DEVICE)
    x = randn(5, 2, 6)

    def call(q, k, v):
        assert q is k is v
        return mha(q, k, v, need_weights=need_weights)[0]

    assert_as_plain(call, x, x, x, parameters=mha.parameters())


def test_output_is_the_input():
    x = randn(4)
    assert checkpoint(lambda x: x, x) is x
    assert_as_plain(lambda x: (x, x.sin()), x)


def test_inference_tensors():
    layer, x = nn.Linear(3, 3).to(DEVICE), randn(4, 3)
    with torch.inference_mode():
        index = torch.tensor([1, 0, 3], device=DEVICE)
        layer.register_buffer("of_inference", torch.ones(3))
    assert_as_plain(lambda x: checkpoint(lambda x, i: layer(x[i * 1]).sin(), x, index), x)


def test_objects_pass_through():
    x, thing = randn(4), object()
    seen = []
    y = checkpoint(
        lambda x, it, o: (seen.append(o), (x * next(it)).sin())[1], x, iter([2, 2]), thing
    )
    y.sum().backward()
    assert seen == [thing, thing]


def test_a_module_list_of_a_script():
    """Convolutions, pools and ReLU in place, as older networks are written."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ).to(DEVICE)
    assert_as_plain(model, randn(2, 2, 10, 10), parameters=model.parameters())
    assert_as_plain(
        nn.Sequential(model[0], model[2], model[0].__class__(4, 2, 3)), randn(2, 2, 9, 9)
    )


def test_shared_modules():
    block = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to(DEVICE)
    assert_as_plain(
        lambda x: block(checkpoint(block, block(x))), randn(4, 3), parameters=block.parameters()
    )


@pytest.mark.parametrize("fn", [None, 3, "relu"])
def test_not_callable(fn):
    with pytest.raises(TypeError, match="checkpoint: expected something to call"):
        fusedckpt.checkpoint(fn, randn(2))
