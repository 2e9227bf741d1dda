"""The pair of ops that watchers of ops see in place of a block, for every function."""

import pytest
import torch
from cases import CASES
from support import Watched, as_tuple, copied, leaves_of, randn
from torch._subclasses.fake_tensor import FakeTensorMode

each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
OPS = torch.ops.fusedckpt


def calls_of(case, dtype=torch.float32, retain=True):
    inputs = case.inputs((6,), 5, 7, dtype)
    # before a donating one writes
    with Watched(copies=True) as watched:
        outputs = as_tuple(case.fused(*inputs))
        douts = [torch.ones_like(y) for y in outputs]
        torch.autograd.grad(outputs, leaves_of(inputs), douts, retain_graph=retain)
    return watched.ours()


@pytest.mark.parametrize("case", CASES[::2], ids=lambda case: case.name)
def test_opcheck(case):
    """One op each way, whose fakes have the shapes, dtypes and strides of its results."""
    seen = calls_of(case)
    assert [func for func, _ in seen] == [OPS.block.default, OPS.block_backward.default]
    for func, args in seen:
        torch.library.opcheck(func, args)


@each
def test_fakes_are_laid_out_as_results(case, path):
    for func, args in calls_of(case, torch.bfloat16):
        found = func(*args)
        with FakeTensorMode(allow_non_fake_inputs=True):
            fakes = func(*args)
        for real, fake in zip(found, fakes, strict=True):
            assert (real.shape, real.dtype, real.stride()) == (
                fake.shape,
                fake.dtype,
                fake.stride(),
            )


@each
def test_donating_gives_the_same(case, path):
    if not case.name.endswith(("preact", "chunks")) or "rms" in case.name:
        pytest.skip("saves no product")
    (_, _), (func, args) = calls_of(case, retain=False)
    assert func is OPS.block_backward_donating.default
    torch.library.opcheck(func, args, test_utils=("test_schema", "test_faketensor"))
    plain = OPS.block_backward(*map(copied_all, args))
    for ours, theirs in zip(func(*map(copied_all, args)), plain, strict=True):
        assert torch.equal(ours, theirs)


def copied_all(given):
    return torch.utils._pytree.tree_map(copied, given)


def test_ops_refuse_to_be_differentiated():
    (func, (tensors, *rest)), _ = calls_of(CASES[0])
    with torch.no_grad():
        func(tensors, *rest)
    tensors = [None if t is None else t.requires_grad_() for t in tensors]
    with pytest.raises(RuntimeError, match="no autograd formula"):
        func(tensors, *rest)


def test_a_block_is_traced_as_torchs_ops():
    """What records a program finds no op of ours in it."""
    x, w = randn(3, 4), randn(5, 4)
    from torch.fx.experimental.proxy_tensor import make_fx

    from fusedckpt import functional

    graph = make_fx(lambda x, w: functional.linear_act(x, w))(x, w)
    assert not any("fusedckpt" in str(node.target) for node in graph.graph.nodes)
