"""Unusual input that torch takes is taken, and means the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import DEVICE, randn
from torch import nn

import fusedckpt
from fusedckpt import NormSpec, functional

D, F, N = 4, 6, 3
ONE, EPS = np.float32(1.0), np.float32(1e-5)

# ours, what it stands for
CONSTRUCTED = {
    "no inputs": (lambda m: m.Linear(0, D), (N, 0)),
    "numpy sizes": (lambda m: m.Linear(np.int64(D), np.int32(F)), (N, D)),
    "tensors as sizes": (lambda m: m.Linear(torch.tensor(D), torch.tensor(F)), (N, D)),
    "1 as flag": (lambda m: m.Linear(D, F, 0), (N, D)),
    "torch.device": (lambda m: m.Linear(D, F, device=torch.device("cpu")), (N, D)),
    "an array": (lambda m: m.LayerNorm(np.array([N, D])), (2, N, D)),
    "a range": (lambda m: m.LayerNorm(range(D, D + 1)), (N, D)),
    "numpy eps": (lambda m: m.RMSNorm(D, EPS), (N, D)),
    "huge eps": (lambda m: m.RMSNorm(D, 10**30), (N, D)),
    "no columns": (lambda m: m.RMSNorm(0), (N, 0)),
    "one None": (lambda m: m.Sequential(nn.Linear(D, F), None)[:1], (N, D)),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", CONSTRUCTED)
def test_modules_take_what_torchs_take(name, path):
    build, shape = CONSTRUCTED[name]
    ours, eager = build(fusedckpt).to(DEVICE), build(nn).to(DEVICE)
    ours.load_state_dict(eager.state_dict())
    x = randn(*shape)
    torch.testing.assert_close(ours(x), eager(x))


def an_mlp(x, w, v, n, **options):
    return functional.mlp(x, w, None, v, None, **options)


def gemma(n, eps, offset):
    return {"norm": NormSpec("rms", n, None, eps, offset, "gemma")}


# two calls that mean the same
CALLS = {
    "list": lambda x, w, v, n: [functional.layer_norm(x, size, n) for size in ([D], (D,))],
    "eps": lambda x, w, v, n: [functional.layer_norm(x, D, eps=e) for e in (EPS, float(EPS))],
    "gemma": lambda *a: [an_mlp(*a, **gemma(a[3], EPS, offset)) for offset in (ONE, 1.0)],
    "residual": lambda *a: [an_mlp(*a, residual=flag) for flag in (1, np.True_, True)],
    "chunks": lambda *a: [an_mlp(*a, chunks=number) for number in (np.int64(2), 2)],
    "no activation": lambda *a: [an_mlp(*a, activation=name) for name in (None, "identity")],
    "generator": lambda x, w, v, n: [
        torch.cat(functional.norm_linear(x, NormSpec("rms"), linears))
        for linears in ((m for m in (w, w)), [w, w])
    ],
}


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_functions_take_what_means_the_same(name, disabled, path, monkeypatch):
    monkeypatch.setattr("fusedckpt.autograd.dispatch.DISABLED", disabled)
    tensors = randn(N, D), randn(F, D), randn(D, F), randn(D)
    *odd, plain = CALLS[name](*tensors)
    options = {"allow_unused": True, "retain_graph": True}
    for y in odd:
        assert torch.equal(y, plain)
        pair = (torch.autograd.grad(t.sum(), tensors, **options) for t in (y, plain))
        torch.testing.assert_close(*pair, rtol=0, atol=0)


def test_blocks_without_columns():
    x = randn(N, D)
    for block in (fusedckpt.MLP(D, 0, device=DEVICE), fusedckpt.GatedMLP(D, 0, device=DEVICE)):
        y = block(x)
        assert y.shape == (N, D)
        y.sum().backward()
