"""Every way to ask autograd for gradients through a checkpoint."""

import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cases import CASES
from checkpoints import assert_as_plain, assert_same, counted, linears, same, step, stock
from support import DEVICE, as_tuple, randn
from torch.autograd import forward_ad

import fusedckpt
from fusedckpt import checkpoint, checkpoint_sequential, is_recomputing
from fusedckpt.autograd.dispatch import forced_path


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


def test_an_output_may_be_written_in_place():
    def outside(x, call=lambda f, x: f(x)):
        y = call(lambda x: (x * 2).view(-1)[2:], x)
        y.mul_(2)
        return y.sin()

    x = randn(4, 6)
    assert_same(step(partial(outside, call=checkpoint), x), step(outside, x))


def test_a_retained_graph_recomputes_for_each_backward():
    x, w = randn(4, 6), randn(6, 6)
    fn, calls = counted(lambda x: chain(x, w))
    loss = checkpoint(fn, x).sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone(), w.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * first[0])
    assert torch.equal(w.grad, 2 * first[1])
    assert len(calls) == 3


def test_some_gradients_alone_are_the_same_and_leave_the_others_none():
    model = linears(6, 6, 6, 6)
    fn, x = lambda x: model(x).sin(), randn(4, 6)
    for leaf in (x, model[0].weight, model[2].weight, model[4].bias):
        expected, found = (
            torch.autograd.grad(call(x).sum(), leaf)[0] for call in (fn, partial(checkpoint, fn))
        )
        assert same(found, expected)
        checkpoint(fn, x).sum().backward(inputs=[leaf])
        assert same(leaf.grad, expected)
        leaf.grad = None
    assert all(p.grad is None for p in (x, *model.parameters()))


def test_a_partial_backward_leaves_no_recomputed_tensor():
    made = []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(y := x.exp())
            if is_recomputing():
                made.append(weakref.ref(y))
            return y

        @staticmethod
        def backward(ctx, dy):
            return dy * ctx.saved_tensors[0]

    x, w, last = randn(64, 64), randn(64, 64), randn(64, 64)
    y = checkpoint(lambda x: Keep.apply(Keep.apply(x @ w) @ w) @ last, x)
    # of what is recomputed, the backward of `last` reads the last alone
    for wanted in (w, last):
        torch.autograd.grad(y.sum(), wanted, retain_graph=True)
        assert len(made) == 2
        assert [ref() for ref in made] == [None, None]
        made.clear()


def test_saved_tensors_may_be_read_twice():
    """By any number of layers, at the cost of one more recompute."""
    fn, calls = counted(lambda x: Exp.apply(Exp.apply(x.sin()).sin()).sin())
    assert_as_plain(fn, randn(4, 6))
    # plain, forward, and two recomputes
    assert len(calls) == 4
    # and outside of a backward
    y = checkpoint(lambda x: x.sin().exp(), randn(4, 6))
    assert torch.equal(y.grad_fn._saved_result, y)


def test_hooks_of_modules_run_again_but_those_of_tensors_once():
    model = linears(6, 6, 6)
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
    checkpoint(model, randn(4, 6)).sum().backward()
    assert calls == {"forward": 2, "once": 1, "backward": 1, "tensor": 1}


@pytest.mark.parametrize("wrap", [checkpoint, stock])
def test_is_recomputing_tells_a_recompute_from_its_forward(wrap):
    seen = []
    wrap(lambda x: (seen.append(is_recomputing()), x.sin().sin())[1], randn(4)).sum().backward()
    assert seen == [False, True]
    assert not is_recomputing()


def test_a_backward_that_is_split_recomputes_once():
    group = getattr(torch.utils.checkpoint, "GraphExecGroup", None)
    if group is None:
        pytest.skip("torch has no GraphExecGroup")
    x, w = randn(4, 6), randn(6, 6)
    fn, calls = counted(lambda x: (chain(x, w), chain(x.cos(), w)))
    expected = [torch.autograd.grad(y.sum(), x)[0] for y in fn(x)]
    outputs = checkpoint(fn, x)
    calls.clear()
    with group():
        found = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in outputs]
    assert_same(found, expected)
    assert len(calls) == 1
    # outside of the group each backward recomputes for itself
    assert_same([torch.autograd.grad(y.sum(), x)[0] for y in outputs], expected)
    assert len(calls) == 3


@pytest.mark.parametrize(
    "wrap", [checkpoint, partial(checkpoint, debug=True), partial(checkpoint, checkpoint)]
)
def test_second_derivatives_of_plain_layers(wrap):
    x, w = (randn(3, 3, dtype=torch.float64) for _ in range(2))
    fn = lambda x, w: F.layer_norm(chain(x, w).exp(), (3,)).tanh()  # noqa: E731
    assert torch.autograd.gradgradcheck(partial(wrap, fn), (x, w))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_second_derivatives_of_fused_layers(case):
    inputs = case.inputs((2,), 3, 4, dtype=torch.float64)
    wanted = [x for x in inputs if x is not None]

    def second(call):
        outputs = as_tuple(call(inputs[0] * 1, *inputs[1:]))
        grads = torch.autograd.grad(sum(y.sin().sum() for y in outputs), wanted, create_graph=True)
        return torch.autograd.grad(
            sum(g.sin().sum() for g in grads), wanted, allow_unused=True, materialize_grads=True
        )

    with forced_path("aten"):
        found = second(partial(checkpoint, case.fused))
    torch.testing.assert_close(found, second(case.eager))


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("inside", [False, True])
def test_gradients_inside_the_segment_change_no_bit(times, inside):
    """Forces of a potential; with `inside`, of a checkpointed one."""
    w = randn(6, 6)

    def fn(x):
        for _ in range(times):
            energy = (checkpoint(chain, x, w) if inside else chain(x, w)).square().sum()
            (x,) = torch.autograd.grad(energy, x, create_graph=True)
        return x.tanh()

    assert_as_plain(lambda x: fn(x * 2), randn(4, 6), parameters=[w])
    assert_as_plain(fn, randn(4, 6), parameters=[w])
    assert_as_plain(lambda x: fn(x.detach().requires_grad_()) * x, randn(4, 6), parameters=[w])


def test_forward_mode_and_vmap_change_no_bit():
    x, w, t = (randn(6, 6, requires_grad=False) for _ in range(3))

    def tangent(call):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.clone().requires_grad_(), t)
            (grad,) = torch.autograd.grad(call(dual, w).sum(), dual)
            return forward_ad.unpack_dual(grad).tangent

    found, expected = (
        [
            *torch.func.jvp(call, (x, w), (t, t)),
            torch.vmap(call)(x[None], w[None]),
            tangent(call),
        ]
        for call in (partial(checkpoint, chain), chain)
    )
    assert_same(found, expected)


def test_a_backward_under_vmap_changes_no_bit():
    x, dys = randn(4, 6), torch.randn(3, 4, 6).to(DEVICE)

    def rows(call):
        torch.manual_seed(1)
        y = call(x)
        return torch.vmap(lambda dy: torch.autograd.grad(y, x, dy, retain_graph=True)[0])(dys)

    fn = lambda x: F.dropout(x.sin()).tanh()  # noqa: E731
    assert same(rows(partial(checkpoint, fn)), rows(fn))


FUSED = fusedckpt.MLP(6, 8, dropout=0.4, output_dropout=0.3).to(DEVICE)
RANDOM = {
    "dropout": lambda x: F.dropout(x.sin()).tanh(),
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
def test_a_batched_backward_draws_the_random_numbers_of_the_forward(fn, wrap):
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


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian])
def test_torch_func_around_changes_no_bit(transform):
    x = randn(4, 4, requires_grad=False)
    found = transform(lambda x: checkpoint(chain, x, x).sum())(x)
    assert same(found, transform(lambda x: chain(x, x).sum())(x))


def test_torch_func_inside_is_refused():
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        checkpoint(lambda x: torch.func.grad(lambda x: x.sin().sum())(x), randn(4))
