"""Backward for some inputs computes their gradients, all of them, and no others."""

from __future__ import annotations

import pytest
import torch
from cases import CASES, loss_of
from support import DEVICE, as_tuple, randn
from torch.utils._python_dispatch import TorchDispatchMode

from fusedckpt import functional
from fusedckpt.autograd import private

D, F, ROWS, LAYERS = 12, 20, 6, 3


EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@EACH
def test_gradients_of_some_inputs(case, path):
    inputs = case.inputs((5,), 6, 10)
    leaves = [x for x in inputs if x is not None]
    loss = loss_of(case, inputs)
    expected = torch.autograd.grad(loss, leaves, retain_graph=True)
    # each alone, and each left out
    halves = [[i] for i in range(len(leaves))]
    halves += [[j for j in range(len(leaves)) if j != i] for i in range(len(leaves))]
    for wanted in filter(None, halves):
        found = torch.autograd.grad(loss, [leaves[i] for i in wanted], retain_graph=True)
        for i, grad in zip(wanted, found, strict=True):
            torch.testing.assert_close(grad, expected[i])


@EACH
def test_gradients_of_gradients_of_some_inputs(case):
    inputs = case.inputs((3,), 4, 5, torch.float64)
    leaves = [x for x in inputs if x is not None]
    eager = sum(y.sin().sum() for y in as_tuple(case.eager(*inputs)))
    for i in range(len(leaves)):
        found = [
            torch.autograd.grad(loss, leaves[i], create_graph=True)[0]
            for loss in (loss_of(case, inputs), eager)
        ]
        torch.testing.assert_close(*found)
        second = [
            torch.autograd.grad(grad.sin().sum(), leaves, retain_graph=True, materialize_grads=True)
            if grad.requires_grad
            else None
            for grad in found
        ]
        torch.testing.assert_close(*second)


def weights():
    return randn(F, D), randn(F), randn(D, F), randn(D)


def mlp_grad_calls(monkeypatch):
    """Collect which gradients the MLP's backward computes."""
    from fusedckpt.blocks import run

    seen, computed = [], run.backward

    def spy(call, wanted, *args):
        seen.append(wanted)
        return computed(call, wanted, *args)

    monkeypatch.setattr(run, "backward", spy)
    return seen


@pytest.fixture
def seen(monkeypatch, on_aten):
    return mlp_grad_calls(monkeypatch)


def test_nothing_is_wanted(seen):
    """`backward` may be asked for a tensor that is no leaf: the node that made it then runs."""
    y = functional.mlp(randn(ROWS, D), *weights())
    y.sum().backward(inputs=[y])
    assert y.grad is not None
    assert not seen


def test_layer_at_the_root(seen):
    """The engine does not count the root among the nodes of its graph."""
    x, given = randn(ROWS, D), weights()
    y = functional.mlp(x, *given)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    assert sum(seen[0]) == 1
    torch.testing.assert_close(dx, torch.autograd.grad(y.sum(), [x, *given])[0])


def test_called_by_hand_inside_another_backward(seen):
    """What is called by hand gets all gradients, whatever the backward around it wants."""
    x, given = randn(ROWS, D), weights()
    y = functional.mlp(x, *given)
    expected = torch.autograd.grad(y.sum(), [x, *given], retain_graph=True)
    found = []
    z = y * 2
    z.register_hook(lambda _: found.extend(y.grad_fn.apply(torch.ones_like(y))))
    torch.autograd.grad(z.sum(), x)
    grads = [grad for grad in found if grad is not None]
    assert len(grads) == len(expected)
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_hooks_see_what_is_wanted(seen):
    x, given = randn(ROWS, D), weights()
    inner = x * 1
    y = functional.mlp(inner, *given)
    got = {}
    inner.register_hook(lambda grad: got.setdefault("inner", grad))
    given[0].register_hook(lambda grad: got.setdefault("fc1", grad) * 2)
    handle = y.grad_fn.register_hook(lambda grads, _: got.setdefault("node", grads) and None)
    (dw,) = torch.autograd.grad(y.sum(), given[0], retain_graph=True)
    assert "inner" not in got
    torch.testing.assert_close(dw, got["fc1"] * 2)
    assert [grad is not None for grad in got["node"] if grad is not None] == [True]
    assert sum(seen[-1]) == 1
    handle.remove()
    inner.retain_grad()
    torch.autograd.grad(y.sum(), x)
    assert got["inner"] is not None
    torch.testing.assert_close(inner.grad, got["inner"])


def test_batched_gradients_of_some_inputs():
    x, given = randn(ROWS, D), weights()
    y = functional.mlp(x, *given)
    basis = torch.randn(3, *y.shape, device=DEVICE)
    (found,) = torch.autograd.grad(y, given[2], basis, is_grads_batched=True, retain_graph=True)
    for dy, grad in zip(basis, found, strict=True):
        expected = torch.autograd.grad(y, given[2], dy, retain_graph=True)
        torch.testing.assert_close(grad, expected[0])


def test_in_the_backward_of_another(seen):
    """The innermost backward says what is wanted, and the one around it afterwards."""
    x, given = randn(ROWS, D), weights()
    y, inner = (functional.mlp(x, *given) for _ in range(2))
    loss = inner.sum()
    got = []
    y.register_hook(lambda _: got.extend(torch.autograd.grad(loss, given[2], retain_graph=True)))
    (dx,) = torch.autograd.grad(y.sum(), x)
    expected = torch.autograd.grad(loss, [given[2], x])
    for ours, theirs in zip([*got, dx], expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert [sum(needs) for needs in seen] == [1, 1, 2]


def test_compiled_autograd_of_some_inputs():
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    torch._dynamo.reset()
    x, given = randn(ROWS, D), weights()
    expected = torch.autograd.grad(functional.mlp(x, *given).sum(), [x, *given])
    loss = functional.mlp(x, *given).sum()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        found = torch.autograd.grad(loss, [x, *given[:2]])
    for ours, theirs in zip(found, expected[:3], strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "engine",
    [
        {"will_execute": lambda node: False},
        {"will_execute": lambda node: True},
        {"current_node": lambda: None},
    ],
    ids=["no to all", "yes to all", "no node"],
)
def test_an_engine_that_does_not_tell(engine, monkeypatch, seen):
    """All gradients are computed, as by torch.distributed.autograd, whose engine says no to all."""
    for name, function in engine.items():
        monkeypatch.setattr(private, name, function)
    x, given = randn(ROWS, D), weights()
    expected = torch.autograd.grad(functional.mlp(x, *given).sum(), x)
    assert sum(seen[0]) == 5
    monkeypatch.undo()
    torch.testing.assert_close(
        expected, torch.autograd.grad(functional.mlp(x, *given).sum(), [x, *given])[:1]
    )


def test_distributed_autograd(tmp_path):
    """Its engine says of every node that it will not run it."""
    rpc = pytest.importorskip("torch.distributed.rpc")
    if not rpc.is_available() or DEVICE.type != "cpu":
        pytest.skip("needs torch.distributed.rpc on a CPU")
    from torch.distributed import autograd as distributed_autograd

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store")
    rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=options)
    try:
        leaves = [randn(ROWS, D), *weights()]
        with distributed_autograd.context() as context:
            distributed_autograd.backward(context, [functional.mlp(*leaves).sum()])
            found = distributed_autograd.get_gradients(context)
    finally:
        rpc.shutdown()
    expected = torch.autograd.grad(functional.mlp(*leaves).sum(), leaves)
    for leaf, theirs in zip(leaves, expected, strict=True):
        torch.testing.assert_close(found[leaf], theirs)


class NormGradients(TorchDispatchMode):
    """Notes which gradients the backward of a norm is asked for."""

    def __init__(self):
        super().__init__()
        self.wanted = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.fusedckpt.block_backward.default:
            self.wanted.append(list(args[-1]))
        return func(*args, **(kwargs or {}))


def test_a_norm_computes_what_it_is_asked_for():
    """No GEMM tells: it is asked with the arguments of the op."""
    x, w, b = randn(ROWS, D), randn(D), randn(D)
    y = functional.layer_norm(x, D, w, b).sum()
    with NormGradients() as seen:
        for tensor in (x, w, b):
            torch.autograd.grad(y, tensor, retain_graph=True)
    assert seen.wanted == [[i == j for i in range(3)] for j in range(3)]
