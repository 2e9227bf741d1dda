"""A norm and an MLP that reads it, of every kind."""

from __future__ import annotations

from functools import partial

import torch
import torch._dynamo.compiled_autograd
from support import randn

import fusedckpt
from fusedckpt.autograd.recipes import View

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


def rows():
    return randn(5, D, dtype=torch.float64)


def shares(y):
    """Whether the layer that made y keeps its norm's input."""
    return isinstance(y.grad_fn._raw_saved_tensors[0].data, View)


def grads(y, *wanted):
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
    return torch.autograd.grad((y * weights).sum(), wanted, retain_graph=True)


def alone(norm, mlp, x):
    """The same without sharing: a copy was made by nobody's norm."""
    n = norm(x).clone()
    y = mlp(n)
    assert not shares(y)
    return y
