"""What torch takes and looks odd is taken, and means the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import DEVICE, as_tuple, randn
from torch import nn

import fusedckpt
from fusedckpt import NormSpec, functional

D, F, N = 4, 6, 3
ONE, EPS = np.float32(1.0), np.float32(1e-5)

# ours, what it stands for
CONSTRUCTED = {
    "no outputs": (lambda m: m.Linear(D, 0), (N, D)),
    "no inputs": (lambda m: m.Linear(0, D), (N, 0)),
    "numpy sizes": (lambda m: m.Linear(np.int64(D), np.int32(F)), (N, D)),
    "tensors as sizes": (lambda m: m.Linear(torch.tensor(D), torch.tensor(F)), (N, D)),
    "numpy flag": (lambda m: m.Linear(D, F, np.True_), (N, D)),
    "1 as flag": (lambda m: m.Linear(D, F, 0), (N, D)),
    "torch.device": (lambda m: m.Linear(D, F, device=torch.device("cpu")), (N, D)),
    "a size": (lambda m: m.RMSNorm(D), (N, D)),
    "numpy size": (lambda m: m.RMSNorm(np.int64(D)), (N, D)),
    "a list": (lambda m: m.LayerNorm([N, D]), (N, D)),
    "torch.Size": (lambda m: m.LayerNorm(torch.Size((D,))), (N, D)),
    "an array": (lambda m: m.LayerNorm(np.array([N, D])), (2, N, D)),
    "a range": (lambda m: m.LayerNorm(range(D, D + 1)), (N, D)),
    "zero eps": (lambda m: m.LayerNorm(D, 0), (N, D)),
    "numpy eps": (lambda m: m.RMSNorm(D, EPS), (N, D)),
    "huge eps": (lambda m: m.RMSNorm(D, 10**30), (N, D)),
    "no eps": (lambda m: m.RMSNorm(D, None, False), (N, D)),
    "no columns": (lambda m: m.RMSNorm(0), (N, 0)),
    "an empty dict": (lambda m: m.Sequential(), (N, D)),
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


def given():
    x, w, v = randn(N, D), randn(F, D), randn(D, F)
    return x, w, v, randn(D)


# each: a call with odd arguments, the plain one
CALLS = {
    "sizes": lambda x, w, v, n, odd: functional.rms_norm(x, np.int64(D) if odd else D, n),
    "list": lambda x, w, v, n, odd: functional.layer_norm(x, [D] if odd else (D,), n),
    "eps": lambda x, w, v, n, odd: functional.layer_norm(x, D, eps=EPS if odd else float(EPS)),
    "offset": lambda x, w, v, n, odd: functional.rms_norm(x, D, n, offset=ONE if odd else 1.0),
    "gemma": lambda x, w, v, n, odd: functional.mlp(
        x, w, None, v, None, norm=NormSpec("rms", n, None, EPS, ONE if odd else 1.0, "gemma")
    ),
    "residual": lambda x, w, v, n, odd: functional.mlp(
        x, w, None, v, None, residual=np.True_ if odd else True
    ),
    "residual 1": lambda x, w, v, n, odd: functional.mlp(
        x, w, None, v, None, residual=1 if odd else True
    ),
    "chunks": lambda x, w, v, n, odd: functional.mlp(
        x, w, None, v, None, chunks=np.int64(2) if odd else 2
    ),
    "many chunks": lambda x, w, v, n, odd: functional.gated_mlp(
        x, w, w, v, chunks=2**62 if odd else N
    ),
    "no activation": lambda x, w, v, n, odd: functional.mlp(
        x, w, None, v, None, None if odd else "identity"
    ),
    "tuple": lambda x, w, v, n, odd: functional.norm_linear(
        x, NormSpec("rms"), (w, w) if odd else [w, w]
    ),
    "generator": lambda x, w, v, n, odd: functional.norm_linear(
        x, NormSpec("rms"), (m for m in (w, w)) if odd else [w, w], (None, None) if odd else None
    ),
    "dim": lambda x, w, v, n, odd: fusedckpt.pack_gate_up(w, w, dim=np.int64(-1) if odd else 1),
}


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_functions_take_what_means_the_same(name, disabled, path, monkeypatch):
    monkeypatch.setattr("fusedckpt.autograd.dispatch.DISABLED", disabled)
    tensors = given()
    odd, plain = (as_tuple(CALLS[name](*tensors, odd)) for odd in (True, False))
    for mine, other in zip(odd, plain, strict=True):
        assert torch.equal(mine, other)
        grads = (
            torch.autograd.grad(y.sum(), tensors, allow_unused=True, retain_graph=True)
            for y in (mine, other)
        )
        for a, b in zip(*grads, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


def test_blocks_without_columns():
    x = randn(N, D)
    for block in (fusedckpt.MLP(D, 0, device=DEVICE), fusedckpt.GatedMLP(D, 0, device=DEVICE)):
        y = block(x)
        assert y.shape == (N, D)
        y.sum().backward()
