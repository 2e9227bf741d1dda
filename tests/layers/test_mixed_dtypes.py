"""Dtypes that do not go together: taken where torch's own ops take them, refused where they do."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from support import DEVICE, as_tuple
from torch import Tensor

from fusedckpt import NormSpec, functional, reference
from fusedckpt.autograd import dispatch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
D, F, N = 4, 6, 3


def norms(kind: str) -> Callable[..., Any]:
    """A norm of a residual sum and its weights, as a block's norm has them."""
    bias = (torch.zeros(D),) if kind == "layer" else ()

    def call(module: Any, x: Tensor, w: Tensor, fc: Tensor) -> Any:
        spec = NormSpec(kind, w, *(b.to(w) for b in bias))
        return module.mlp(x, fc, None, fc.mT, None, norm=spec, residual=True)

    return call


# function of a module of functions and of tensors, whose shapes follow
CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "linear_act": (lambda m, *a: m.linear_act(*a), ((N, D), (F, D), (F,))),
    "no rows": (lambda m, *a: m.linear_act(*a), ((0, D), (F, D), (F,))),
    "rms_norm": (lambda m, x, w: m.rms_norm(x, (D,), w), ((N, D), (D,))),
    "llama": (lambda m, x, w: m.rms_norm(x, (D,), w, cast="llama"), ((N, D), (D,))),
    "layer_norm": (lambda m, x, w, b: m.layer_norm(x, (D,), w, b), ((N, D), (D,), (D,))),
    "layer_norm bias": (lambda m, x, b: m.layer_norm(x, (D,), None, b), ((N, D), (D,))),
    "layer_norm weight": (lambda m, x, w: m.layer_norm(x, (D,), w), ((N, D), (D,))),
    "add_rms_norm": (lambda m, x, r, w: m.add_rms_norm(x, r, (D,), w), ((N, D), (N, D), (D,))),
    "add_layer_norm": (lambda m, x, r, w: m.add_layer_norm(x, r, (D,), w), ((N, D), (N, D), (D,))),
    "norm_linear": (
        lambda m, x, nw, w, b: m.norm_linear(x, NormSpec("rms", nw), [w], [b]),
        ((N, D), (D,), (F, D), (F,)),
    ),
    "norm_linear llama": (
        lambda m, x, nw, w: m.norm_linear(x, NormSpec("rms", nw, cast="llama"), [w]),
        ((N, D), (D,), (F, D)),
    ),
    "two linears": (
        lambda m, x, w, v: m.norm_linear(x, NormSpec("layer"), [w, v]),
        ((N, D), (F, D), (F, D)),
    ),
    "mlp": (lambda m, x, a, b: m.mlp(x, a, None, b, None), ((N, D), (F, D), (D, F))),
    "mlp biases": (
        lambda m, x, b, c: m.mlp(x, x.new_zeros(F, D), b, x.new_zeros(D, F), c),
        ((N, D), (F,), (D,)),
    ),
    "mlp rms": (norms("rms"), ((N, D), (D,), (F, D))),
    "mlp layer": (norms("layer"), ((N, D), (D,), (F, D))),
    "gated_mlp": (
        lambda m, x, g, u, d: m.gated_mlp(x, g, u, d),
        ((N, D), (F, D), (F, D), (D, F)),
    ),
    "packed": (lambda m, x, g, d: m.gated_mlp(x, g, None, d), ((N, D), (2 * F, D), (D, F))),
}


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_as_torch(name, autocast, disabled, monkeypatch):
    monkeypatch.setattr(dispatch, "DISABLED", disabled)
    call, shapes = CASES[name]
    refused, taken = [], []
    for dtypes in product(DTYPES, repeat=len(shapes)):
        given = [torch.ones(s, dtype=d, device=DEVICE) for s, d in zip(shapes, dtypes, strict=True)]
        with dispatch.forced_path("aten"), torch.autocast(DEVICE.type, enabled=autocast):
            try:
                expected = [y.dtype for y in as_tuple(call(reference, *given))]
            except RuntimeError:
                refused.append(dtypes)
                with pytest.raises(TypeError, match="must share a dtype, got"):
                    call(functional, *given)
            else:
                taken.append(dtypes)
                assert [y.dtype for y in as_tuple(call(functional, *given))] == expected, dtypes
    assert {(d,) * len(shapes) for d in DTYPES} <= set(taken)
    always = ("rms_norm", "add_rms_norm", "llama")
    assert bool(refused) == (name not in always)
