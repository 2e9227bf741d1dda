"""A layer after a norm keeps the norm's input; nobody else can tell."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.compiled_autograd
from norm_pairs import NORMS, D, F, alone, grads, rows, shares
from support import DEVICE, compare, randn, saved_bytes, splits_backward
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.multiprocessing.reductions import StorageWeakRef

import fusedckpt
from fusedckpt import reference
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.blocks import norm_sharing
from fusedckpt.memory import saved_tensors


def test_bits_are_those_of_the_layers_alone(norm, mlp):
    x = rows()
    y = mlp(norm(x))
    assert shares(y)
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


def test_frozen_weights_keep_what_they_need(norm):
    mlp = fusedckpt.MLP(D, F, save="preact").to(DEVICE, torch.float64).requires_grad_(False)
    # z alone, and what the norm keeps
    assert saved_bytes(lambda x: mlp(norm(x)), [rows()]) == 8 * 5 * (D + F)
    norm.requires_grad_(False)
    x = rows()
    y = mlp(norm(x))
    torch.testing.assert_close(grads(y, x), grads(alone(norm, mlp, x), x), rtol=0, atol=0)


def test_every_dtype_on_every_path(path):
    norm, mlp = fusedckpt.RMSNorm(D, 1e-6, cast="llama"), fusedckpt.GatedMLP(D, F)
    for dtype in (torch.float32, torch.bfloat16):
        weight = norm.to(DEVICE, dtype).weight
        tensors = [p.detach() for p in mlp.to(DEVICE, dtype).parameters()]

        def fused(x, weight, *tensors):
            rms = fusedckpt.functional.rms_norm(x, (D,), weight, 1e-6, cast="llama")
            n = norm_sharing.remember(norm, rms, weight, None)
            return fusedckpt.functional.gated_mlp(n, *tensors)

        def eager(x, weight, *tensors):
            n = reference.rms_norm(x, (D,), weight, 1e-6, cast="llama")
            return reference.gated_mlp(n, *tensors)

        def make(dtype=dtype, weight=weight, tensors=tensors):
            leaves = [t.detach().clone().requires_grad_(True) for t in (weight, *tensors)]
            return [randn(40, D, dtype=dtype), *leaves]

        assert shares(fused(*make()))
        compare(fused, eager, make)


def remembered(norm, mlp, x):
    """Run a layer on n, which its caller still holds."""
    n = norm(x)
    y = mlp(n)
    assert shares(y)
    return n, y


def twice(y, first, second):
    """Return gradients of `first`, and of their squares' sum with respect to `second`."""
    found = torch.autograd.grad(y.sin().sum(), first, create_graph=True)
    total = sum(g.square().sum() for g in found)
    return *found, *torch.autograd.grad(total, second, retain_graph=True)


def assert_near(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("of", ["n", "x", "weights", "all"])
def test_second_derivatives(norm, mlp, of):
    x = rows()
    n, y = remembered(norm, mlp, x)
    copied = norm(x)
    pairs = []
    for middle, result in ((n, y), (copied, mlp(copied * 1))):
        weights = [*norm.parameters(), *mlp.parameters()]
        wanted = {"n": [middle], "x": [x], "weights": [*mlp.parameters()]}
        wanted["all"] = [x, middle, *weights]
        pairs.append(twice(result, wanted[of], wanted["all"]))
    assert_near(*pairs)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_second_derivatives_pass_where_n_was(norm, mlp, scale):
    """Nobody holds n: its place in the graph is known by an edge, and has a hook."""
    x = rows()
    found = []
    for run in (mlp, lambda n: mlp(n * 1)):
        n = norm(x)
        edge = torch.autograd.graph.get_gradient_edge(n)
        y = run(n)
        n.register_hook(lambda grad: scale * grad)
        del n
        found.append(twice(y, [*mlp.parameters()], [edge, x]))
    assert_near(*found)


def test_nobody_holds_the_result(norm, mlp):
    n = norm(rows())
    storage = StorageWeakRef(n.untyped_storage())
    y = mlp(n)
    del n
    assert shares(y)
    assert storage.expired()


def test_a_graph_that_is_not_retained_is_gone(norm, mlp):
    y = mlp(norm(rows()))
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_partial_gradients(norm, mlp):
    x = rows()
    n, y = remembered(norm, mlp, x)
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


def test_compiled_autograd(mlp):
    torch._dynamo.reset()
    norm = NORMS["layer"]().to(DEVICE, torch.float64)
    x = rows()
    wanted = [x, *norm.parameters(), *mlp.parameters()]
    expected = torch.autograd.grad(alone(norm, mlp, x).sum(), wanted)
    y = mlp(norm(x))
    assert shares(y)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        y.sum().backward()
    assert_near([tensor.grad for tensor in wanted], list(expected))


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


def test_a_result_is_saved_to_files_as_ever(norm, tmp_path):
    n = norm(rows())
    torch.save(n, tmp_path / "n.pt")
    assert torch.equal(torch.load(tmp_path / "n.pt"), n)


def test_compiles_to_one_graph():
    def run(x):
        return mlp(norm(x))

    torch._dynamo.reset()
    norm, mlp, x = NORMS["llama"]().double().to(DEVICE), fusedckpt.MLP(D, F).double(), rows()
    mlp = mlp.to(DEVICE)
    y = torch.compile(run, backend="aot_eager", fullgraph=True)(x)
    wanted = [x, *norm.parameters(), *mlp.parameters()]
    ours, theirs = grads(y, *wanted), grads(alone(norm, mlp, x), *wanted)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_an_input_that_only_the_norm_keeps(norm, mlp):
    x = rows()
    y = mlp(norm(x * 1))
    assert shares(y)
    assert torch.equal(*grads(y, x), *grads(alone(norm, mlp, x), x))


def test_one_norm_feeds_two_mlps(norm):
    first, second = (nn.ModuleList([fusedckpt.MLP(D, F) for _ in range(2)]).double()).to(DEVICE)

    def both(x):
        n = norm(x)
        return first(n) + second(n)

    assert saved_bytes(both, [rows()]) == 8 * 5 * D
