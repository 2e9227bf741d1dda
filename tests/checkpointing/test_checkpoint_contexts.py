"""Checkpoints among other checkpoints, hooks, threads, modes and compilers."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from checkpoints import assert_same, counted, linears, same, step, stock
from support import DEVICE, randn
from torch import nn
from torch._dynamo import compiled_autograd
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from torch.utils.checkpoint import checkpoint as any_stock

from fusedckpt import checkpoint
from fusedckpt.memory import saved_tensors

reentrant = partial(any_stock, use_reentrant=True)
WRAPS = {"ours": checkpoint, "torch": stock, "reentrant": reentrant}
ORDERS = [order for order in itertools.product(WRAPS, repeat=3) if "ours" in order]


def block(width: int = 6) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, width), nn.Dropout(0.2), nn.Tanh(), nn.BatchNorm1d(width)
    ).to(DEVICE)


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_three_nested_checkpoints_change_no_bit(order):
    a, b, c = (WRAPS[name] for name in order)
    blocks = [block() for _ in range(4)]
    parameters = [p for m in blocks for p in m.parameters()]

    def inner(x):
        return blocks[2](c(blocks[1], x)).sin()

    def nested(x):
        x = b(inner, blocks[0](x))
        return c(blocks[3], b(blocks[2], x)).sin()

    def plain(x):
        x = blocks[2](blocks[1](blocks[0](x))).sin()
        return blocks[3](blocks[2](x)).sin()

    def run(call):
        # no reentrant checkpoint under autograd.grad
        x.grad = None
        for p in parameters:
            p.grad = None
        torch.manual_seed(1)
        call(x * 1).square().sum().backward()
        return [x.grad, *(p.grad for p in parameters)]

    x = randn(4, 6)
    assert_same(run(partial(a, nested)), run(plain))


def test_save_on_cpu_outside_or_inside_changes_no_bit():
    layer, x = block(), randn(4, 6)
    fn, calls = counted(layer)

    def outside(x):
        with save_on_cpu():
            return checkpoint(fn, x).sin()

    def inside(x):
        def offloaded(x):
            with save_on_cpu():
                return fn(x)

        return checkpoint(offloaded, x.sin()).sin()

    assert_same(step(outside, x), step(lambda x: layer(x).sin(), x))
    # what the inner hooks keep is not recomputed
    calls.clear()
    assert_same(step(inside, x), step(lambda x: layer(x.sin()).sin(), x))
    assert len(calls) == 1


def test_hooks_that_are_disabled_raise_the_error_of_who_disabled_them():
    with disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"):
        checkpoint(torch.sin, randn(4))


def test_four_threads_at_once_change_no_bit():
    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(8, 6, generator=generator).to(DEVICE).requires_grad_()
        with lock:
            torch.manual_seed(seed)
            layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)).to(DEVICE)
        run, wanted = lambda x: layers(x.sin()), [x, *layers.parameters()]
        for _ in range(20):
            found, expected = (
                torch.autograd.grad(call(x).sin().sum(), wanted)
                for call in (partial(checkpoint, run), run)
            )
            assert_same(found, expected)

    lock = threading.Lock()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_backward_may_run_in_another_thread():
    layers, x = block(), randn(4, 6)
    y = checkpoint(layers, x)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(y.sum().backward).result()
    assert all(leaf.grad is not None for leaf in (x, *layers.parameters()))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_saved_where_no_gradients_are_wanted(mode):
    layers, x = block(), randn(4, 6)
    fn, calls = counted(layers)
    with mode(), saved_tensors() as saved:
        y = checkpoint(fn, x)
    assert saved.nbytes == 0
    assert not y.requires_grad
    assert len(calls) == 1


# "inductor" compiles the graphs that "aot_eager" runs
@pytest.mark.parametrize(
    ("backend", "inside"), [("eager", False), ("aot_eager", False), ("aot_eager", True)]
)
def test_compiled_code_around_or_inside_has_the_same_gradients(backend, inside):
    layers, x = linears(6, 6, 6), randn(4, 6)
    expected = step(lambda x: layers(x).sin(), x, parameters=layers.parameters())
    if inside:
        compiled = torch.compile(layers, backend=backend)
        run = lambda x: checkpoint(compiled, x).sin()  # noqa: E731
    else:
        plain = lambda x: checkpoint(layers, x).sin()  # noqa: E731
        run = torch.compile(plain, backend=backend, fullgraph=True)
    found = step(run, x, parameters=layers.parameters())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_recompute_in_a_compiled_backward_stays_eager():
    layers, x = block(), randn(4, 6)
    fn = lambda x: layers(x).sin()  # noqa: E731
    expected = step(fn, x)[1]
    torch.manual_seed(3)

    def backward(y):
        y.square().sum().backward()

    # "eager" would leave it eager by itself
    torch.compile(backward, backend=lambda graph, inputs: graph)(checkpoint(fn, x))
    assert same(x.grad, expected)
    assert not torch.nn.modules.module._has_any_global_hook()


def test_compiled_autograd_changes_no_bit():
    layers, x = linears(6, 6, 6), randn(4, 6)
    expected = step(lambda x: layers(x).sin(), x)[1]
    loss = checkpoint(lambda x: layers(x).sin(), x).square().sum()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    assert same(x.grad, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_checkpoint_replays_and_refuses_random_states():
    layers = linears(6, 6, 6)
    x = randn(4, 6)

    def work(preserve):
        y = checkpoint(layers, x, preserve_rng_state=preserve)
        return torch.autograd.grad(y.sum(), x)[0]

    expected = work(True)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work(False)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        grad = work(False)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(grad, expected)
    with (
        pytest.raises(RuntimeError, match="pass preserve_rng_state=False"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
    ):
        work(True)


def test_selective_checkpointing_inside():
    def policy(ctx, op, *args, **kwargs):
        saves = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    context_fn = partial(create_selective_checkpoint_contexts, policy)
    x, w = randn(6, 6), randn(6, 6)

    def fn(x):
        y = any_stock(
            lambda x: (x @ w).sin() @ w, x.sin(), use_reentrant=False, context_fn=context_fn
        )
        return y.sin()

    expected = step(lambda x: ((x.sin() @ w).sin() @ w).sin(), x, parameters=[w])
    assert_same(step(partial(checkpoint, fn), x, parameters=[w]), expected)


class Tagged(torch.Tensor):
    """A class without anything of its own."""


@pytest.mark.parametrize("is_seen", [True, False], ids=["seen", "unseen"])
def test_recompute_lets_classes_of_tensors_see_what_the_forward_let_them(is_seen):
    kinds = []

    def fn(x):
        y = x * 2
        kinds.append(type(y))
        return y.sin()

    x = randn(3, 4).detach().requires_grad_()
    given = x.as_subclass(Tagged)
    with nullcontext() if is_seen else torch._C.DisableTorchFunctionSubclass():
        y = checkpoint(fn, given)
    # the backward of a loss of that class runs unseen, that of another not
    y.as_subclass(Tagged if is_seen else torch.Tensor).sum().backward()
    assert kinds == [Tagged if is_seen else torch.Tensor] * 2
    assert torch.equal(x.grad, 2 * (x.detach() * 2).cos())
