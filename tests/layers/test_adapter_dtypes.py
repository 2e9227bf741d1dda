"""Adapters of another dtype than their weight: computed in peft's order, as exact and as finite."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from lora_cases import Eager, peft_linear
from support import DEVICE, HALF, compare, in_float64, results
from torch import Tensor, nn

from fusedckpt import LoRA, NormSpec, functional, reference

T, D, F, R = 17, 24, 40, 4
DTYPES = (torch.float32, *HALF)
each_pair = pytest.mark.parametrize(("dtype", "adapter"), list(product(DTYPES, DTYPES)))


def stacked(w: Tensor, *adapters: Tensor) -> Any:
    """Return a weight under adapters of several scales."""
    for i in range(0, len(adapters), 2):
        w = LoRA(w, *adapters[i : i + 2], (1.7, 0.3, 3.0)[i // 2 % 3])
    return w


def linear_act(module, x, *rest, **options):
    return module.linear_act(x, stacked(*rest), None, "identity", **options)


def mlp(module, x, w, a, b, v, c, d, **options):
    return module.mlp(x, stacked(w, a, b), None, stacked(v, c, d), None, **options)


def packed(module, x, w, a, b, v, **options):
    return module.gated_mlp(x, stacked(w, a, b), None, v, **options)


def norm_linear(module, x, w, a, b, v, c, d):
    weights = [stacked(w, a, b), stacked(v, c, d)]
    return module.norm_linear(x, NormSpec("rms", None, None, 1e-6), weights, [None, None])


AB, CD = [(R, D), (F, R)], [(R, F), (D, R)]
CALLS = {
    "linear_act": (linear_act, [(F, D), *AB], {}),
    "eight adapters": (linear_act, [(F, D), *AB * 8], {}),
    "mlp": (mlp, [(F, D), *AB, (D, F), *CD], {}),
    "mlp-preact": (mlp, [(F, D), *AB, (D, F), *CD], {"save": "preact"}),
    "mlp-chunks": (mlp, [(F, D), *AB, (D, F), *CD], {"chunks": 3}),
    "packed": (packed, [(2 * F, D), (R, D), (2 * F, R), (D, F)], {}),
    "norm_linear": (norm_linear, [(F, D), *AB, (F, D), *AB], {}),
}


@each_pair
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(name, dtype, adapter):
    fn, shapes, options = CALLS[name]

    def inputs():
        drawn = [torch.randn(T, D), *(torch.randn(s) / s[1] ** 0.5 for s in shapes)]
        dtypes = [dtype, *(adapter if R in shape else dtype for shape in shapes)]
        return [t.to(DEVICE, kind).requires_grad_() for t, kind in zip(drawn, dtypes, strict=True)]

    compare(partial(fn, functional, **options), partial(fn, Eager), inputs)


def one_linear(module, w, x, a, b, scale=1.0, chunks=None):
    return module.linear_act(x, LoRA(w, a, b, scale), None, "identity")


def first_of_two(module, w, x, a, b, scale=1.0, chunks=None):
    options = {"chunks": chunks} if module is functional else {}
    return module.mlp(x, LoRA(w, a, b, scale), None, w + 1, None, "identity", **options)


# x, A, B, scale, and the result's gradient: in float16 a factor is beyond its largest, 65504
FACTORS = {
    "x A s": (39936.0, 1.0, 0.0625, 4.0, 1.0),
    "x A s for B": (39936.0, 1.0, 2.0**-6, 4.0, 2.0**-8),
    "dy B": (2.0**-7, 0.5, 4096.0, 2.0**-8, 64.0),
    "x A B": (2048.0, 2.0, 64.0, 2.0**-8, 0.5),
}


@each_pair
@pytest.mark.parametrize("chunks", [None, 2])
@pytest.mark.parametrize("fn", [one_linear, first_of_two])
@pytest.mark.parametrize("factors", FACTORS)
def test_finite_where_peft_is(factors, fn, chunks, dtype, adapter):
    x, a, b, scale, dy = FACTORS[factors]
    w = torch.zeros(1, 1, dtype=dtype, device=DEVICE)
    values = ((5, 1), x, dtype), ((1, 1), a, adapter), ((1, 1), b, adapter)
    given = [torch.full(s, v, dtype=d, device=DEVICE).requires_grad_() for s, v, d in values]
    dout = [torch.full((5, 1), dy, device=DEVICE)]
    ours, theirs = (
        results(partial(fn, module, w, scale=scale, chunks=chunks), given, dout)
        for module in (functional, reference)
    )
    for mine, its in zip(ours, theirs, strict=True):
        finite = its.isfinite()
        torch.testing.assert_close(mine[finite], its[finite], rtol=0.02, atol=1e-6)
    if factors == "x A s":
        assert torch.equal(ours[0], torch.full_like(ours[0], 9984.0))


@each_pair
def test_near_peft_itself(dtype, adapter):
    """The eager code above is peft's, bit for bit, forward and backward; ours is as near."""
    lora = pytest.importorskip("peft.tuners.lora")
    base = nn.Linear(D, F, bias=False).to(DEVICE, dtype).requires_grad_(False)
    layer = lora.Linear(base, "a", lora.LoraConfig(r=R, lora_alpha=7), r=R, lora_alpha=7)
    a, b = layer.lora_A["a"].to(DEVICE, adapter), layer.lora_B["a"].to(DEVICE, adapter)
    nn.init.normal_(b.weight)
    x, dy = (torch.randn(T, n, device=DEVICE, dtype=dtype) for n in (D, F))
    given, scale = [x.requires_grad_(), a.weight, b.weight], layer.scaling["a"]

    def run(linear, x, a, b):
        return linear(x, LoRA(base.weight.to(x.dtype), a, b, scale))

    theirs = results(lambda x, *_: layer(x), given, [dy])
    eager = results(partial(run, peft_linear), given, [dy])
    ours = results(partial(run, partial(functional.linear_act, activation=None)), given, [dy])
    truth = results(partial(run, peft_linear), in_float64(given), [dy])
    for mine, same, its, true in zip(ours, eager, theirs, truth, strict=True):
        assert torch.equal(same, its)
        errors = [(t.double() - true).norm() for t in (mine, its)]
        assert errors[0] <= 2 * errors[1] + 1e-6 * true.norm()
