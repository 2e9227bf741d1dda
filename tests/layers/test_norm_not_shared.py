"""Norms whose input layers do not take: hooks, changes, and checkpoints around them."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.compiled_autograd
from norm_pairs import D, alone, grads, rows, shares
from torch.utils.checkpoint import checkpoint

from fusedckpt.memory import saved_tensors


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


def test_hooks_on_what_is_to_be_read_keep_it(norm, mlp):
    # as FSDP has them, which gathers the norm's weight when the gradient of n has come
    x = rows()
    n = norm(x)
    n.register_hook(lambda grad: 2 * grad)
    y = mlp(n)
    assert not shares(y)
    torch.testing.assert_close(grads(y, x)[0], 2 * grads(alone(norm, mlp, x), x)[0])


def test_counted_by_two_at_once(norm, mlp):
    x = rows() * 1
    with saved_tensors() as around, saved_tensors() as within:
        y = mlp(norm(x))
    assert shares(y)
    # hooks of saved tensors do not add up: the innermost sees them
    assert (within.nbytes, around.nbytes) == (8 * 5 * D, 0)


def test_counted_inside_of_others_hooks(norm, mlp):
    with torch.autograd.graph.save_on_cpu(), saved_tensors():
        n = norm(rows())
        y = mlp(n)
        assert not shares(y)


def test_hooks_of_others_get_what_the_layer_reads(norm, mlp):
    """And so count n beside x, which README says."""
    x = rows() * 1
    sizes = {}

    def pack(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = mlp(norm(x))
    assert not shares(y)
    assert sum(sizes.values()) == 2 * 8 * 5 * D
    torch.testing.assert_close(grads(y, x), grads(alone(norm, mlp, x), x))


def test_where_hooks_are_forbidden(norm, mlp):
    x = rows()
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        y = mlp(norm(x))
    assert shares(y)
    assert torch.equal(*grads(y, x), *grads(alone(norm, mlp, x), x))


def watched_norm(norm, mlp, x):
    norm.register_forward_hook(lambda *_: None)
    return mlp(norm(x))


def changed_result(norm, mlp, x):
    n = norm(x)
    n.mul_(1.0)
    return mlp(n)


def changed_unseen(norm, mlp, x):
    n = norm(x)
    with torch.no_grad():
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
        changed_unseen,
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


def test_not_shared_after_a_change_of_the_weight(norm, mlp):
    assert not shares(changed_weight(norm, mlp, rows()))


def test_a_change_before_the_layer_runs(norm, mlp):
    x = rows() * 1
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
