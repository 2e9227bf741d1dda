"""An MLP after a norm keeps the norm's input; nobody else can tell."""

from functools import partial

import pytest
import torch
from support import DEVICE, compare, randn, saved_bytes
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedckpt
from fusedckpt import reference
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.layers import norm_sharing
from fusedckpt.memory import saved_tensors

D, F = 6, 10
NORMS = {
    "layer": lambda: fusedckpt.LayerNorm(D),
    "rms": lambda: fusedckpt.RMSNorm(D),
    "llama": lambda: fusedckpt.RMSNorm(D, 1e-6, cast="llama"),
    "gemma": lambda: fusedckpt.RMSNorm(D, 1e-6, offset=1.0, cast="gemma"),
}
MLPS = {
    "mlp": fusedckpt.MLP,
    "gated_mlp": fusedckpt.GatedMLP,
    "linear_act": partial(fusedckpt.Linear, activation="gelu"),
}


@pytest.fixture(params=NORMS)
def norm(request):
    made = NORMS[request.param]().to(DEVICE, torch.float64)
    with torch.no_grad():
        made.weight += torch.randn_like(made.weight)
    return made


@pytest.fixture(params=MLPS)
def mlp(request):
    return MLPS[request.param](D, F, bias=True).to(DEVICE, torch.float64)


def rows():
    return randn(5, D, dtype=torch.float64)


def joined(y):
    return y.grad_fn.name() == "_JoinedBackward"


def grads(y, *wanted):
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
    return torch.autograd.grad((y * weights).sum(), wanted, retain_graph=True)


def alone(norm, mlp, x):
    """The same without joining: a copy was made by nobody's norm."""
    n = norm(x).clone()
    y = mlp(n)
    assert not joined(y)
    return y


def test_bits_are_those_of_the_layers_alone(norm, mlp):
    x = rows()
    y = mlp(norm(x))
    assert joined(y)
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
            spec = fusedckpt.NormSpec("rms", weight, None, 1e-6, 0.0, "llama")
            rms = fusedckpt.functional.rms_norm(x, (D,), weight, 1e-6, cast="llama")
            n = norm_sharing.remember(norm, rms, spec)
            return fusedckpt.functional.gated_mlp(n, *tensors)

        def eager(x, weight, *tensors):
            spec = fusedckpt.NormSpec("rms", weight, None, 1e-6, 0.0, "llama")
            return reference.gated_mlp(reference.apply_norm(x, spec), *tensors)

        def make(dtype=dtype, weight=weight, tensors=tensors):
            leaves = [t.detach().clone().requires_grad_(True) for t in (weight, *tensors)]
            return [randn(40, D, dtype=dtype), *leaves]

        assert not joined(eager(*make()))
        assert joined(fused(*make()))
        compare(fused, eager, make)


def test_others_see_the_gradient_of_the_norms_output(norm, mlp):
    x = rows()
    seen = []
    found = {}
    for name, run in (("joined", lambda n: mlp(n)), ("alone", lambda n: mlp(n * 1))):
        n = norm(x)
        n.register_hook(seen.append)
        n.retain_grad()
        y = run(n)
        assert joined(y) == (name == "joined")
        # another reader
        total = torch.cat([y, n.sin()], -1)
        found[name] = grads(total, n, x)
        total.sum().backward()
        found[name] += (n.grad,)
    for ours, theirs in zip(*found.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert len(seen) == 4


def test_second_derivatives(norm, mlp):
    x = rows()
    wanted = [x, *norm.parameters(), *mlp.parameters()]

    def twice(y):
        first = torch.autograd.grad(y.sin().sum(), wanted, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), wanted)

    y = mlp(norm(x))
    assert joined(y)
    ours, theirs = twice(y), twice(alone(norm, mlp, x))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def watched_norm(norm, mlp, x):
    norm.register_forward_hook(lambda *_: None)
    return mlp(norm(x))


def changed_result(norm, mlp, x):
    n = norm(x)
    n.mul_(1.0)
    return mlp(n)


def changed_weight(norm, mlp, x):
    n = norm(x)
    with torch.no_grad():
        norm.weight.mul_(1.0)
    return mlp(n)


def another_tensor(norm, mlp, x):
    return mlp(norm(x).view(5, D))


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
        changed_result,
        another_tensor,
        packed_by_others,
        checkpointed,
        checkpointed_norm,
    ],
    ids=lambda run: run.__name__,
)
def test_not_joined_where_it_might_show(norm, mlp, run):
    x = rows()
    y = run(norm, mlp, x)
    assert not joined(y)
    wanted = [x, *norm.parameters(), *mlp.parameters()]
    ours, theirs = grads(y, *wanted), grads(alone(norm, mlp, x), *wanted)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_not_joined_after_a_change_of_the_weight(norm, mlp):
    assert not joined(changed_weight(norm, mlp, rows()))


def test_a_change_before_backward_raises(norm, mlp):
    x = rows() * 1
    y = mlp(norm(x))
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_autocast(norm):
    with forced_path("aten"):
        norm, mlp, x = norm.float(), fusedckpt.MLP(D, F).to(DEVICE), randn(5, D)
        wanted = [x, *norm.parameters(), *mlp.parameters()]
        with torch.autocast(DEVICE.type, torch.bfloat16), saved_tensors() as saved:
            y = mlp(norm(x))
        assert joined(y)
        # the leaf x is the caller's; no copy of n in either dtype
        assert saved.nbytes == 0
        with torch.autocast(DEVICE.type, torch.bfloat16):
            expected = alone(norm, mlp, x)
        for ours, theirs in zip(grads(y, *wanted), grads(expected, *wanted), strict=True):
            assert torch.equal(ours, theirs)


def test_nothing_is_kept_without_gradients(norm, mlp):
    before = len(norm_sharing._sources)
    with torch.no_grad():
        n = norm(rows())
        assert not norm_sharing._sources.get(n)
    n = norm(rows())
    assert len(norm_sharing._sources) == before + 1
    del n
    assert len(norm_sharing._sources) == before


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
    assert joined(y)
    assert torch.equal(*grads(y, x), *grads(alone(norm, mlp, x), x))


def test_one_norm_feeds_two_mlps(norm):
    first, second = (nn.ModuleList([fusedckpt.MLP(D, F) for _ in range(2)]).double()).to(DEVICE)

    def both(x):
        n = norm(x)
        return first(n) + second(n)

    assert saved_bytes(both, [rows()]) == 8 * 5 * D
