"""Backward overwrites the GEMM outputs that a layer saved, if it is their last reader."""

from functools import partial

import pytest
import torch
from support import Watched, randn
from torch.utils.checkpoint import checkpoint as stock_checkpoint

import fusedckpt
from fusedckpt import LoRA
from fusedckpt.autograd import backward, private
from fusedckpt.functional import gated_mlp, linear_act, mlp
from fusedckpt.memory import saved_tensors

T, D, F = 6, 8, 12
PREACT = {"save": "preact"}


LAYERS = {
    "linear": (partial(linear_act, save="preact"), [(F, D), (F,)]),
    "mlp": (partial(mlp, save="preact"), [(F, D), (F,), (D, F), (D,)]),
    "gated": (partial(gated_mlp, save="preact", chunks=2), [(F, D), (F, D), (D, F)]),
    "gate alone": (partial(gated_mlp, save="gate", chunks=2), [(F, D), (F, D), (D, F)]),
    "packed": (lambda x, w, v, **o: gated_mlp(x, w, None, v, **PREACT | o), [(2 * F, D), (D, F)]),
    "adapted": (
        lambda x, w, a, b, v, **o: mlp(x, LoRA(w, a, b), None, v, None, **PREACT | o),
        [(F, D), (2, D), (F, 2), (D, F)],
    ),
}


def donates(run):
    with Watched() as watched:
        run()
    names = [func._schema.name for func, _ in watched.ours()]
    backward = [name for name in names if "backward" in name]
    assert backward
    kinds = {name.endswith("_donating") for name in backward}
    assert len(kinds) == 1
    return kinds.pop()


@pytest.fixture(params=LAYERS)
def layer(request):
    """A function, its inputs, the gradient of its output, and the gradients of its inputs."""
    fn, shapes = LAYERS[request.param]
    inputs = [randn(T, D), *(randn(*shape) for shape in shapes)]
    twin = fn(*inputs, save="inputs")
    dy = torch.randn_like(twin)
    return fn, inputs, dy, torch.autograd.grad(twin, inputs, dy)


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def through(wrap):
    """Run forward in a context, backward outside of it."""

    def run(fn, inputs):
        with wrap():
            return fn(*inputs)

    return run


DONATING = {
    "alone": lambda fn, inputs: fn(*inputs),
    # a last layer is not run again: what comes after it reads a tensor
    "our checkpoint": lambda fn, inputs: fusedckpt.checkpoint(
        lambda *inputs: (y := fn(*inputs)) * torch.ones_like(y), *inputs
    ),
    "reentrant": lambda fn, inputs: stock_checkpoint(fn, *inputs, use_reentrant=True),
    "counted": through(saved_tensors),
}
KEEPING = {
    "stock checkpoint": lambda fn, inputs: stock_checkpoint(fn, *inputs, use_reentrant=False),
    "on the CPU": through(torch.autograd.graph.save_on_cpu),
}


@pytest.mark.parametrize("name", DONATING | KEEPING)
def test_who_is_written_over(layer, name):
    fn, inputs, dy, expected = layer
    found = []

    def run():
        y = (DONATING | KEEPING)[name](fn, inputs)
        found[:] = torch.autograd.grad(y, inputs, dy) if name != "reentrant" else backward(y)

    def backward(y):
        # the reentrant form knows .backward() alone
        for x in inputs:
            x.grad = None
        y.backward(dy)
        return [x.grad for x in inputs]

    assert donates(run) == (name in DONATING)
    assert_equal(found, expected)


def test_a_retained_graph_is_read_again(layer):
    fn, inputs, dy, expected = layer
    y = fn(*inputs)
    for retain_graph in (True, True, False):
        assert_equal(torch.autograd.grad(y, inputs, dy, retain_graph=retain_graph), expected)
    y = fn(*inputs)
    assert not donates(lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True))
    assert donates(lambda: torch.autograd.grad(y, inputs, dy))


def failing_once(y):
    """A hook that raises in the first backward, when y's node is done."""
    failures = [RuntimeError("out of memory")]

    def hook(*_):
        if failures:
            raise failures.pop()

    y.grad_fn.register_hook(hook)


@pytest.mark.parametrize(
    ("name", "error"),
    [("alone", "modified by an inplace operation"), ("counted", "pass retain_graph=True")],
)
def test_a_failed_backward_is_not_repeated_on_what_it_left(layer, name, error):
    fn, inputs, dy, expected = layer
    y = DONATING[name](fn, inputs)
    failing_once(y)
    with pytest.raises(RuntimeError, match="out of memory"):
        torch.autograd.grad(y, inputs, dy)
    with pytest.raises(RuntimeError, match=error):
        torch.autograd.grad(y, inputs, dy)
    if name == "alone":
        y = fn(*inputs)
        failing_once(y)
        with pytest.raises(RuntimeError, match="out of memory"):
            torch.autograd.grad(y, inputs, dy, retain_graph=True)
        assert_equal(torch.autograd.grad(y, inputs, dy), expected)


def test_a_backward_inside_that_of_the_same_layer(layer):
    """It keeps the graph, but the one around it does not."""
    fn, inputs, dy, expected = layer
    y = fn(*inputs)
    # a node's hook runs before autograd lets go of what it saved
    y.grad_fn.register_hook(
        lambda *_: torch.autograd.grad(y, inputs, dy, retain_graph=True) and None
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, inputs, dy)
    assert_equal(torch.autograd.grad(fn(*inputs), inputs, dy), expected)


def test_a_backward_beside_another(layer, monkeypatch):
    """One that has read what the layer kept when another, in its own thread, writes over it."""
    fn, inputs, dy, expected = layer
    y = fn(*inputs)
    begin, inner = backward.begin, []

    def load_before_the_other(ctx, *dys):
        loaded = begin(ctx, *dys)
        if not inner:
            inner.append(None)
            inner[0] = torch.autograd.grad(y, inputs, dy, retain_graph=True)
        return loaded

    # the one in between is the first to ask
    keeps = iter((False, True))
    monkeypatch.setattr(private, "keeps_graph", lambda: next(keeps))
    monkeypatch.setattr(backward, "begin", load_before_the_other)
    with pytest.raises(RuntimeError, match="an earlier backward overwrote"):
        torch.autograd.grad(y, inputs, dy, retain_graph=True)
    assert_equal(inner[0], expected)


def test_what_hooks_hold_stays(layer):
    """A hook may hand out a tensor that is its own."""
    fn, inputs, dy, expected = layer
    held = []

    def pack(tensor):
        held.append(tensor.detach())
        return len(held) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, held.__getitem__):
        y = fn(*inputs)
    before = [t.clone() for t in held]
    assert_equal(torch.autograd.grad(y, inputs, dy), expected)
    assert_equal(held, before)


def test_a_batched_backward(layer):
    fn, inputs, dy, _ = layer
    dys = torch.stack([dy, 2 * dy, dy.neg()])
    expected = [torch.autograd.grad(fn(*inputs), inputs, one) for one in dys]
    found = torch.autograd.grad(fn(*inputs), inputs, dys, is_grads_batched=True)
    for grads, ones in zip(found, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(grads, torch.stack(ones))
