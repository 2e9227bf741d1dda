"""Derivatives of derivatives, and other transforms, through a checkpoint (C15-C17)."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cases import CASES
from checkpoints import assert_as_plain, same
from support import DEVICE, as_tuple, randn
from torch.autograd import forward_ad

import fusedckpt
from fusedckpt import checkpoint, checkpoint_sequential
from fusedckpt.autograd.dispatch import forced_path


def chain(x, w):
    return ((x @ w).sin() @ w).sin()


@pytest.mark.parametrize(
    "wrap", [checkpoint, partial(checkpoint, debug=True), partial(checkpoint, checkpoint)]
)
def test_c15_plain_layers(wrap):
    x, w = (randn(3, 3, dtype=torch.float64) for _ in range(2))
    fn = lambda x, w: F.layer_norm(chain(x, w).exp(), (3,)).tanh()  # noqa: E731
    assert torch.autograd.gradgradcheck(partial(wrap, fn), (x, w))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_c15_fused_layers(case):
    inputs = case.inputs((2,), 3, 4, dtype=torch.float64)
    wanted = [x for x in inputs if x is not None]

    def second(call):
        outputs = as_tuple(call(inputs[0] * 1, *inputs[1:]))
        grads = torch.autograd.grad(sum(y.sin().sum() for y in outputs), wanted, create_graph=True)
        return torch.autograd.grad(sum(g.sin().sum() for g in grads), wanted, allow_unused=True)

    with forced_path("aten"):
        expected = second(case.eager)
        for a, b in zip(second(partial(checkpoint, case.fused)), expected, strict=True):
            torch.testing.assert_close(
                torch.zeros(()) if a is None else a, torch.zeros(()) if b is None else b
            )


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("inside", [False, True])
def test_c15_gradients_inside_the_segment(times, inside):
    """Forces of a potential; with `inside`, of a checkpointed one."""
    w = randn(6, 6)

    def fn(x):
        for _ in range(times):
            energy = (checkpoint(chain, x, w) if inside else chain(x, w)).square().sum()
            (x,) = torch.autograd.grad(energy, x, create_graph=True)
        return x.tanh()

    assert_as_plain(lambda x: fn(x * 2), randn(4, 6), parameters=[w])
    assert_as_plain(fn, randn(4, 6), parameters=[w])


def test_c15_gradient_of_a_detached_argument_inside():
    def fn(x, w):
        z = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(chain(z, w).sum(), z, create_graph=True)
        return grad.tanh() * x

    assert_as_plain(fn, randn(4, 6), randn(6, 6))


def test_c16_forward_mode_and_vmap():
    x, w, t = (randn(6, 6, requires_grad=False) for _ in range(3))
    found = torch.func.jvp(lambda x: checkpoint(chain, x, w), (x,), (t,))
    expected = torch.func.jvp(lambda x: chain(x, w), (x,), (t,))
    assert all(map(same, found, expected))
    found, expected = (
        torch.vmap(call)(x[None], w[None]) for call in (partial(checkpoint, chain), chain)
    )
    assert same(found, expected)

    def tangent(call):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.clone().requires_grad_(), t)
            (grad,) = torch.autograd.grad(call(dual, w).sum(), dual)
            return forward_ad.unpack_dual(grad).tangent

    assert same(tangent(partial(checkpoint, chain)), tangent(chain))


def test_c16_batched_backward():
    x = randn(4, 6)
    dys = torch.randn(3, 4, 6).to(DEVICE)

    def rows(call):
        torch.manual_seed(1)
        y = call(x)
        return torch.vmap(lambda dy: torch.autograd.grad(y, x, dy, retain_graph=True)[0])(dys)

    fn = lambda x: F.dropout(x.sin()).tanh()  # noqa: E731
    assert same(rows(partial(checkpoint, fn)), rows(fn))
    (found,), (expected,) = (
        torch.autograd.grad(call(x), x, dys, is_grads_batched=True)
        for call in (partial(checkpoint, torch.sin), torch.sin)
    )
    assert same(found, expected)


FUSED = fusedckpt.MLP(6, 8, dropout=0.4, output_dropout=0.3).to(DEVICE)
RANDOM = {
    "dropout": lambda x: F.dropout(x.sin()).tanh(),
    "noise": lambda x: x.sin() * torch.rand_like(x),
    "rrelu": lambda x: F.rrelu(x.sin(), training=True).tanh(),
    "fused": FUSED,
    "before a fused layer": lambda x: FUSED(F.dropout(x)).sin(),
}
WRAPS = {
    "checkpoint": lambda fn: partial(checkpoint, fn),
    "debug": lambda fn: partial(checkpoint, fn, debug=True),
    "nested": lambda fn: partial(checkpoint, partial(checkpoint, fn)),
    "sequential": lambda fn: lambda x: checkpoint_sequential([fn, torch.sin, torch.cos], 1, x),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("fn", RANDOM)
def test_c16_random_numbers_in_a_batched_backward(fn, wrap):
    x, fn = randn(4, 6), RANDOM[fn]
    found = []
    for call in (WRAPS[wrap](fn), fn if wrap != "sequential" else lambda x: fn(x).sin().cos()):
        torch.manual_seed(1)
        y = call(x)
        dys = torch.linspace(-1, 1, 3 * y.numel(), device=DEVICE).view(3, *y.shape)
        state = torch.get_rng_state()
        found.append(torch.autograd.grad(y, x, dys, is_grads_batched=True, retain_graph=True)[0])
        # what is drawn next is what it was
        assert torch.equal(torch.get_rng_state(), state)
        rows = [torch.autograd.grad(y, x, dy, retain_graph=True)[0] for dy in dys]
        torch.testing.assert_close(found[-1], torch.stack(rows))
    torch.testing.assert_close(*found)


def test_c16_jacobian_of_dropout():
    def seeded(call, x):
        torch.manual_seed(1)
        return call(x)

    x, fn = randn(4, 6), RANDOM["dropout"]
    found = [
        torch.autograd.functional.jacobian(partial(seeded, call), x, vectorize=True)
        for call in (partial(checkpoint, fn), fn)
    ]
    assert same(*found)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian])
def test_c17_torch_func_around(transform):
    x = randn(4, 4, requires_grad=False)
    found = transform(lambda x: checkpoint(chain, x, x).sum())(x)
    expected = transform(lambda x: chain(x, x).sum())(x)
    assert same(found, expected)


def test_c17_torch_func_inside_is_refused():
    x = randn(4)
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        checkpoint(lambda x: torch.func.grad(lambda x: x.sin().sum())(x), x)
