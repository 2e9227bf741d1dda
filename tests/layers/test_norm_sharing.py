"""A layer after a norm saves the norm's input in place of its own, where nothing can tell."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch._dynamo.compiled_autograd
from norm_pairs import NORMS, D, F, alone, grads, rows, shares
from support import DEVICE, randn, saved_bytes, splits_backward
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import fusedckpt
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.memory import saved_tensors


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_bits_are_those_of_the_layers_alone(norm, mlp, dtype):
    """And the norm's result is gone when nobody holds it."""
    norm, mlp, x = norm.to(dtype), mlp.to(dtype), rows().detach().to(dtype).requires_grad_()
    n = norm(x)
    storage, y = StorageWeakRef(n.untyped_storage()), mlp(n)
    del n
    assert shares(y)
    assert storage.expired()
    expected = alone(norm, mlp, x)
    wanted = [x, *norm.parameters(), *mlp.parameters()]
    assert torch.equal(y, expected)
    for _ in range(2):
        for ours, theirs in zip(grads(y, *wanted), grads(expected, *wanted), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("save", "kept"), [("inputs", D), ("gate", D + F), ("preact", D + 2 * F)])
def test_the_norm_adds_nothing(norm, save, kept):
    mlp = fusedckpt.GatedMLP(D, F, save=save).to(DEVICE, torch.float64)
    assert saved_bytes(lambda x: mlp(norm(x)), [rows()]) == 8 * 5 * kept
    first, second = (fusedckpt.MLP(D, F).to(DEVICE, torch.float64) for _ in range(2))

    def both(x):
        n = norm(x)
        return first(n) + second(n)

    assert saved_bytes(both, [rows()]) == 8 * 5 * D


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("save", ["inputs", "preact"])
def test_layers_with_several_inputs(norm, save, frozen):
    """Experts save a routing, too, and a head its targets, in any order, or these alone."""
    index = torch.arange(10, device=DEVICE).view(5, 2) % 4
    experts = fusedckpt.Experts(4, D, F, save=save).to(DEVICE, torch.float64)
    head = fusedckpt.LinearCrossEntropy(D, 7, save=save).to(DEVICE, torch.float64)
    scores, target = randn(5, 2, dtype=torch.float64), torch.arange(5, device=DEVICE)
    for layer, given in ((experts, (index, scores)), (head, (target,))):
        layer.requires_grad_(not frozen)
        x = rows()
        wanted = [x, *norm.parameters(), *(p for p in layer.parameters() if p.requires_grad)]
        expected = grads(layer(norm(x) * 1, *given), *wanted)
        for ours, theirs in zip(grads(layer(norm(x), *given), *wanted), expected, strict=True):
            assert torch.equal(ours, theirs)
        own = saved_bytes(lambda x: layer(x, *given), [rows()])  # noqa: B023
        own += (save == "preact" and frozen) * 8 * 5 * D
        assert saved_bytes(lambda x: layer(norm(x), *given), [x]) == own  # noqa: B023


def assert_near(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("holds", [False, True])
def test_second_derivatives(norm, mlp, holds):
    """Also where nobody holds n: its place in the graph is known by an edge, and has a hook."""
    x = rows()
    found = []
    for run in (mlp, lambda n: mlp(n * 1)):
        n = norm(x)
        middle = n if holds else torch.autograd.graph.get_gradient_edge(n)
        y = run(n)
        assert shares(y) == (run is mlp)
        n.register_hook(lambda grad: 3 * grad)
        del n
        weights = [*norm.parameters(), *mlp.parameters()]
        for first in ([middle], [x], [*mlp.parameters()], [x, middle, *weights]):
            grads = torch.autograd.grad(y.sin().sum(), first, create_graph=True)
            total, by = sum(g.square().sum() for g in grads), [x, middle, *weights]
            found += [*grads, *torch.autograd.grad(total, by, retain_graph=True)]
    assert_near(found[: len(found) // 2], found[len(found) // 2 :])


def test_partial_gradients(norm, mlp):
    x = rows()
    n = norm(x)
    y = mlp(n)
    expected = alone(norm, mlp, x)
    weights = [*mlp.parameters()]
    for wanted in (weights, [*norm.parameters()], [x]):
        for ours, theirs in zip(grads(y, *wanted), grads(expected, *wanted), strict=True):
            assert torch.equal(ours, theirs)
    # the norm's node lets go of what it kept before the layer's does
    dn = torch.autograd.grad(y.sum(), n, retain_graph=True)
    torch.autograd.grad(n, x, dn)
    torch.autograd.grad(y.sum(), weights)


@splits_backward
@pytest.mark.parametrize("last", ["norm", "mlp"])
def test_backward_of_inputs_and_of_weights_apart(norm, mlp, last):
    """As pipelines without bubbles run it, whatever module's turn comes first."""
    parts = {"norm": norm, "mlp": mlp}
    weights = [*parts.pop(last).parameters()]
    weights = [*parts.popitem()[1].parameters(), *weights]
    found = []
    for run in (lambda x: mlp(norm(x)), lambda x: alone(norm, mlp, x)):
        x = rows()
        torch.manual_seed(0)
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        loss = run(x * 1).square().sum()
        (dx,), groups = stage_backward_input([loss], None, [x], iter(weights))
        stage_backward_weight(iter(weights), groups)
        found.append([dx, *(weight.grad for weight in weights)])
        for weight in weights:
            weight.grad = None
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_a_parametrized_weight_is_computed_once(mlp):
    """Noise is drawn at each look at the weight."""
    calls = []

    class Noise(nn.Module):
        def forward(self, weight):
            calls.append(1)
            return weight + torch.randn_like(weight)

    for made in (NORMS["layer"](), NORMS["rms"]()):
        norm = nn.utils.parametrize.register_parametrization(made.double(), "weight", Noise())
        norm = norm.to(DEVICE)
        x = rows()
        calls.clear()
        torch.manual_seed(0)
        y = mlp(norm(x))
        assert len(calls) == 1
        torch.manual_seed(0)
        wanted = [x, *norm.parameters(), *mlp.parameters()]
        ours, theirs = grads(y, *wanted), grads(mlp(norm(x).clone()), *wanted)
        for mine, its in zip(ours, theirs, strict=True):
            assert torch.equal(mine, its)


def test_a_result_without_a_node(norm, mlp):
    x = rows()
    detached = mlp(norm(x).detach_())
    assert not shares(detached)
    with forward_ad.dual_level():
        n = norm(x)
    y = mlp(n)
    assert not shares(y)
    assert_near(grads(y, x), grads(alone(norm, mlp, x), x))


def test_autocast(norm):
    with forced_path("aten"):
        norm, mlp, x = norm.float(), fusedckpt.MLP(D, F).to(DEVICE), randn(5, D)
        wanted = [x, *norm.parameters(), *mlp.parameters()]
        with torch.autocast(DEVICE.type, torch.bfloat16), saved_tensors() as saved:
            y = mlp(norm(x))
        assert shares(y)
        # the leaf x is the caller's; no copy of n in either dtype
        assert saved.nbytes == 0
        with torch.autocast(DEVICE.type, torch.bfloat16):
            expected = alone(norm, mlp, x)
        for ours, theirs in zip(grads(y, *wanted), grads(expected, *wanted), strict=True):
            assert torch.equal(ours, theirs)


def test_nothing_is_noted_without_gradients(norm, mlp):
    x = rows()
    with torch.no_grad():
        assert mlp(norm(x)).grad_fn is None
    n = norm(x)
    with torch.no_grad():
        assert mlp(n).grad_fn is None
    with torch.inference_mode():
        assert mlp(n).is_inference()


def test_others_see_the_gradient_of_the_norms_output(norm, mlp):
    x = rows()
    seen = []
    found = {}
    for name, run in (("shared", mlp), ("alone", lambda n: mlp(n * 1))):
        n = norm(x)
        n.retain_grad()
        y = run(n)
        assert shares(y) == (name == "shared")
        # after it was read: hooks on what is to be read are another case
        n.register_hook(seen.append)
        # another reader
        total = torch.cat([y, n.sin()], -1)
        found[name] = grads(total, n, x)
        total.sum().backward()
        found[name] += (n.grad,)
    for ours, theirs in zip(*found.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert len(seen) == 4


def test_where_hooks_are_forbidden(norm, mlp):
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        assert shares(mlp(norm(rows())))


def watched_norm(norm, mlp, x):
    norm.register_forward_hook(lambda *_: None)
    return mlp(norm(x))


def changed_unseen(norm, mlp, x):
    n = norm(x)
    with torch.no_grad():
        n.mul_(1.0)
    return mlp(n)


def hooked_result(norm, mlp, x):
    # as FSDP has them, which gathers the norm's weight when the gradient of n has come
    n = norm(x)
    n.register_hook(lambda grad: 1 * grad)
    return mlp(n)


def counted_inside_of_others(norm, mlp, x):
    with torch.autograd.graph.save_on_cpu(), saved_tensors():
        return mlp(norm(x))


def another_tensor(norm, mlp, x):
    return mlp(norm(x).clone())


def packed_by_others(norm, mlp, x):
    with torch.autograd.graph.save_on_cpu():
        return mlp(norm(x))


def checkpointed(norm, mlp, x):
    y = checkpoint(lambda x: mlp(norm(x)), x, use_reentrant=False)
    assert isinstance(y, torch.Tensor)
    return y


def checkpointed_norm(norm, mlp, x):
    calls = []

    def counted(x):
        calls.append(1)
        return norm(x)

    y = mlp(checkpoint(counted, x, use_reentrant=False))
    # looking for the norm's input would run it again
    assert len(calls) == 1
    return y


@pytest.mark.parametrize(
    "run",
    [
        watched_norm,
        changed_unseen,
        hooked_result,
        counted_inside_of_others,
        another_tensor,
        packed_by_others,
        checkpointed,
        checkpointed_norm,
    ],
    ids=lambda run: run.__name__,
)
def test_not_shared_where_it_might_show(norm, mlp, run):
    x = rows()
    y = run(norm, mlp, x)
    assert not shares(y)
    wanted = [x, *norm.parameters(), *mlp.parameters()]
    ours, theirs = grads(y, *wanted), grads(alone(norm, mlp, x), *wanted)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_change_before_the_layer_runs(norm, mlp):
    x = rows() * 1
    n = norm(x)
    with torch.no_grad():
        norm.weight.mul_(1.0)
    assert not shares(mlp(n))
    n = norm(x)
    x.add_(1.0)
    y = mlp(n)
    assert not shares(y)
    # eager: n is what it was
    torch.autograd.grad(y.sum(), [*mlp.parameters()], retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("changed", [0, 1, -1], ids=["x", "weight", "bias or weight"])
def test_a_change_before_backward_raises(norm, mlp, changed):
    x = rows() * 1
    tensors = [x, *norm.parameters()]
    y = mlp(norm(x))
    with torch.no_grad():
        tensors[changed].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), [*mlp.parameters()])


def calls_of_ours(run):
    """Return how many Python functions of the library run() calls."""
    root, count = os.path.dirname(fusedckpt.__file__), [0]

    def noted(frame, event, _):
        count[0] += event == "call" and frame.f_code.co_filename.startswith(root)

    sys.setprofile(noted)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count[0]


def test_python_work_of_a_shared_norm():
    """A warm norm, and an MLP that saves its recipe: a small model waits for these calls."""
    norm, mlp = (layer.to(DEVICE) for layer in (fusedckpt.RMSNorm(D), fusedckpt.MLP(D, F)))
    x = randn(4, D)
    with forced_path("aten"):
        loss = []

        def forward():
            loss.append(mlp(norm(x)).sum())

        forward()
        loss.pop().backward()
        assert calls_of_ours(forward) <= 59
        assert calls_of_ours(loss[0].backward) <= 63
