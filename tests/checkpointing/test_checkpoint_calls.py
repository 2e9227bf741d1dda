"""A segment of several calls that hand on their outputs, and other inner workings."""

from functools import partial

import torch
from checkpoints import assert_same
from support import DEVICE, randn

from fusedckpt.planning.roles import HandingOn


def part(of, fn, args):
    """Call `fn` as a part of a segment."""
    return of.go_on(fn, args, {})


def test_handed_on_several_and_twice():
    w = randn(6, 6)

    def split(x):
        return {"a": x @ w, "b": [(x @ w).sin(), 3]}

    def merge(a, b, again, x):
        assert a is again
        return (a * b * again * x).sin()

    def together(call, x):
        parts = call(split, (x,))
        y = call(merge, (parts["a"], parts["b"][0], parts["a"], x))
        return call(merge, (y, parts["a"], y, x))

    x, shared = randn(4, 6), HandingOn()
    plain = together(lambda fn, args: fn(*args), x)
    expected = torch.autograd.grad(plain.sum(), [x, w])
    found = together(partial(part, shared), x)
    assert_same(torch.autograd.grad(found.sum(), [x, w]), expected)


def test_address_of_a_handed_on_output_used_again():
    """An output that is gone must not be taken for what comes to lie where it lay."""
    shared, x = HandingOn(), randn(4, 6, dtype=torch.float64)
    total = 0
    for _ in range(50):
        y = part(shared, lambda x: (x.sin() * 2).exp(), (x,))
        total = total + y.sum()
        del y
        # a fresh tensor, likely at the same address
        z = torch.full((4, 6), 0.5, device=DEVICE)
        total = total + part(shared, lambda z, x: (z * x.cos()).sin(), (z, x)).sum()
        del z
    (found,) = torch.autograd.grad(total, x)
    expected = torch.autograd.grad(
        50 * ((x.sin() * 2).exp().sum() + (0.5 * x.cos()).sin().sum()), x
    )[0]
    torch.testing.assert_close(found, expected)


def test_parts_of_a_storage():
    """Views of one storage, among arguments and within, are told apart."""
    base = torch.randn(4, 6).to(DEVICE)
    x, w = base.clone().requires_grad_(), randn(6, 4)

    def fn(a, b, c, whole):
        return (
            (a * b.flip(0)).sin() @ w[:3] * (c.t() @ c.contiguous())[:2, :4] * whole[:2, :4]
        ).exp()

    def call(run):
        y = x * 1
        return torch.autograd.grad(
            run(fn, (y[:2, :3], y[:2, 3:], y.t()[:, :].t(), y)).sum(), [x, w]
        )

    expected = call(lambda fn, args: fn(*args))
    assert_same(call(lambda fn, args: part(HandingOn(), fn, args)), expected)
