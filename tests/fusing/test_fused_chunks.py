"""fuse(chunks=): swapped MLPs cut their tokens as the functions do, the report says so."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from zoo import MLP, SwiGLU

import fusedckpt
from fusedckpt import fuse, unfuse
from fusedckpt.functional import gated_mlp, mlp
from fusedckpt.memory import peak_bytes

# F so wide that a chunk more or less is seen
T, D, F = 256, 8, 128
CPU = torch.device("cpu")


def sequential():
    return nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Linear(F, D))


def gated(x, module, chunks):
    return gated_mlp(x, *(linear.weight for linear in module.children()), chunks=chunks)


def plain(x, module, chunks):
    one, two = (m for m in module.modules() if isinstance(m, nn.Linear))
    return mlp(x, one.weight, one.bias, two.weight, two.bias, chunks=chunks)


MLPS = {
    "gated": (partial(SwiGLU, D, F), gated, "SwiGLU -> gated_mlp (silu, 4 chunks)"),
    "plain": (partial(MLP, D, F), plain, "MLP -> mlp (gelu, 4 chunks)"),
    "sequential": (
        sequential,
        plain,
        "nn.Linear + gelu + nn.Linear -> mlp (4 chunks)",
    ),
}


def peaks(module, function=None, chunks=None):
    """Return the peaks of forward and backward of a copy, called itself or by a function."""
    twin, x, found = copy.deepcopy(module), torch.randn(T, D).requires_grad_(), []
    call = twin if function is None else partial(function, module=twin, chunks=chunks)
    up = peak_bytes(lambda: found.append(call(x)), CPU)
    (y,) = found
    return up, peak_bytes(lambda: y.backward(torch.ones_like(y)), CPU)


@pytest.mark.parametrize("name", MLPS)
def test_chunks_are_those_of_the_functions(name):
    make, function, change = MLPS[name]
    module = make()
    expected = {chunks: peaks(module, function, chunks) for chunks in (1, 2, 4)}
    assert expected[4] < expected[2] < expected[1]
    report = fuse(module, chunks=4)
    assert [*report.swapped.values()] == [change]
    assert change in str(report)
    assert "chunks=4" in repr(module)
    assert peaks(module) == peaks(pickle.loads(pickle.dumps(module))) == expected[4]
    assert [*fuse(module).already.values()] == [change]
    unfuse(module)
    assert not hasattr(module, "chunks")
    assert peaks(module) > expected[1]
    (change,) = fuse(module).swapped.values()
    assert "chunks" not in change + repr(module)
    assert peaks(module) == expected[1]


@pytest.mark.parametrize("chunks", [0, -1, True, 2.0, "4"])
def test_wrong_chunks_change_nothing(chunks):
    model = sequential()
    with pytest.raises((TypeError, ValueError), match=r"^fuse: chunks"):
        fuse(model, chunks=chunks)
    assert type(model) is nn.Sequential
    with pytest.raises((TypeError, ValueError), match=r"^Sequential: chunks"):
        fusedckpt.Sequential(chunks=chunks)


def test_a_linear_with_its_activation_has_none():
    model = nn.Sequential(nn.Linear(D, F), nn.GELU())
    assert [*fuse(model, chunks=4).swapped.values()] == ["nn.Linear + gelu -> linear_act"]
