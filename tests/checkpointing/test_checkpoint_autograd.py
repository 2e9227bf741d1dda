"""Every way to ask autograd for gradients through a checkpoint (C10-C14, C19, C33)."""

import gc
import weakref
from functools import partial

import pytest
import torch
from checkpoints import assert_as_plain, same, step, stock
from support import DEVICE, randn
from torch import nn

from fusedckpt import checkpoint, is_recomputing


def chain(x, w):
    return ((x @ w).sin() @ w).sin()


class Exp(torch.autograd.Function):
    """Reads its saved tensors twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, y := x.exp())
        return y

    @staticmethod
    def backward(ctx, dy):
        first = ctx.saved_tensors
        assert all(map(torch.equal, first, ctx.saved_tensors))
        return dy * first[1]


def test_c10_views_written_in_place():
    def fn(x):
        y = x.sin() * 2
        y[:, :2].mul_(3)
        y.t()[1] += x[:, 0]
        return y.relu_().view(-1)

    x = randn(4, 6)
    assert_as_plain(fn, x)

    def outside(call):
        y = call(lambda x: (x * 2).view(-1)[2:], x)
        y.mul_(2)
        return y.sin()

    expected = step(lambda x: outside(lambda f, x: f(x)), x)
    assert all(map(same, step(lambda x: outside(checkpoint), x), expected))


def test_c11_retain_graph():
    x, w, calls = randn(4, 6), randn(6, 6), []

    def fn(x):
        calls.append(1)
        return chain(x, w)

    loss = checkpoint(fn, x).sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone(), w.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * first[0])
    assert torch.equal(w.grad, 2 * first[1])
    assert len(calls) == 3


def test_c12_some_gradients_alone():
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).to(DEVICE)
    fn, x = lambda x: model(x).sin(), randn(4, 6)
    for leaf in (x, model[0].weight, model[2].weight, model[3].bias):
        expected, found = (
            torch.autograd.grad(call(x).sum(), leaf)[0] for call in (fn, partial(checkpoint, fn))
        )
        assert same(found, expected)
        checkpoint(fn, x).sum().backward(inputs=[leaf])
        assert same(leaf.grad, expected)
        leaf.grad = None
    assert all(p.grad is None for p in (x, *model.parameters()))


def live() -> int:
    """Count the bytes of all plain tensors there are, those of other tests too."""
    while gc.collect():
        # what is collected may let go of more
        pass
    kinds = torch.Tensor, nn.Parameter
    found = [obj for obj in gc.get_objects() if type(obj) in kinds]
    tensors = [tensor for tensor in found if tensor.layout == torch.strided]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def test_c13_partial_backward_leaves_nothing():
    kept = []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(y := x.exp())
            if is_recomputing():
                kept.append(weakref.ref(y))
            return y

        @staticmethod
        def backward(ctx, dy):
            return dy * ctx.saved_tensors[0]

    x, w = randn(64, 64), randn(64, 64)
    y = checkpoint(lambda x: Keep.apply(Keep.apply(x @ w) @ w) @ w, x)
    last = y.grad_fn
    before = live()
    (grad,) = torch.autograd.grad(y.sum(), w, retain_graph=True)
    assert len(kept) == 2
    assert [ref() for ref in kept] == [None, None]
    assert live() == before + grad.nbytes
    assert last is y.grad_fn


def test_c13_what_a_partial_backward_did_not_read_goes_too():
    x, last = randn(64, 64), randn(64, 64)
    y = checkpoint(lambda x: x.sin().exp().cos() @ last, x)
    before = live()
    (grad,) = torch.autograd.grad(y.sum(), last, retain_graph=True)
    assert live() == before + grad.nbytes


def test_c14_saved_tensors_read_twice():
    """By any number of layers, at the cost of one more recompute."""
    calls = []

    def fn(x):
        calls.append(1)
        return Exp.apply(Exp.apply(x.sin()).sin()).sin()

    assert_as_plain(fn, randn(4, 6))
    # plain, forward, and two recomputes
    assert len(calls) == 4


def test_c14_saved_attributes_outside_a_backward():
    x = randn(4, 6)
    y = checkpoint(lambda x: x.sin().exp(), x)
    assert torch.equal(y.grad_fn._saved_result, y)


def test_c19_hooks():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(DEVICE)
    calls = dict.fromkeys(["forward", "once", "backward", "tensor"], 0)

    def count(name):
        calls[name] += 1

    def forward_hook(module, args, output):
        count("forward")
        if not is_recomputing():
            count("once")
        output.register_hook(lambda grad: count("tensor"))

    model[0].register_forward_hook(forward_hook)
    model[2].register_full_backward_hook(lambda *_: count("backward"))
    assert not is_recomputing()
    checkpoint(model, randn(4, 6)).sum().backward()
    assert calls == {"forward": 2, "once": 1, "backward": 1, "tensor": 1}


@pytest.mark.parametrize("wrap", [checkpoint, stock])
def test_c19_is_recomputing_inside_torchs(wrap):
    seen = []
    wrap(lambda x: (seen.append(is_recomputing()), x.sin().sin())[1], randn(4)).sum().backward()
    assert seen == [False, True]
    assert not is_recomputing()


def test_c33_one_recompute_for_a_split_backward():
    group = getattr(torch.utils.checkpoint, "GraphExecGroup", None)
    if group is None:
        pytest.skip("torch has no GraphExecGroup")
    x, w, calls = randn(4, 6), randn(6, 6), []

    def fn(x):
        calls.append(1)
        return chain(x, w), chain(x.cos(), w)

    expected = [torch.autograd.grad(y.sum(), x)[0] for y in fn(x)]
    del calls[:]
    outputs = checkpoint(fn, x)
    with group():
        found = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in outputs]
    assert all(map(same, found, expected))
    assert len(calls) == 2
    # outside of the group each backward recomputes for itself
    found = [torch.autograd.grad(y.sum(), x)[0] for y in outputs]
    assert all(map(same, found, expected))
    assert len(calls) == 4
