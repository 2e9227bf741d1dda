"""Adapters in the place of weights: numbers of mixed dtypes beside peft's, GEMMs, refusals."""

from __future__ import annotations

import re
from functools import partial
from itertools import product

import pytest
import torch
from adapted_cases import LORA, RANK, adapted, peft_linear
from support import DEVICE, HALF, compare, flops, in_float64, randn, results, saved_bytes
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedckpt
from fusedckpt import LoRA, functional, reference

T, D, F = 17, 24, 40
DTYPES = (torch.float32, *HALF)
# experts cast them, see test_experts.py
LINEARS = [case for case in LORA if "experts" not in case.name]
each_pair = pytest.mark.parametrize(("dtype", "adapter"), list(product(DTYPES, DTYPES)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LINEARS, ids=lambda case: case.name)
def test_adapters_of_another_dtype(case, dtype):
    adapter = DTYPES[(DTYPES.index(dtype) + LORA.index(case)) % 3]

    def inputs():
        drawn = case.inputs((T,), D, F)
        kinds = [adapter if t is not None and RANK in t.shape else dtype for t in drawn]
        return [
            None if t is None else t.detach().to(kind).requires_grad_()
            for t, kind in zip(drawn, kinds, strict=True)
        ]

    compare(case.fused, case.eager, inputs)


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
@pytest.mark.parametrize(("fn", "chunks"), [(one_linear, 1), (first_of_two, 1), (first_of_two, 2)])
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
    """The eager code of `adapted_cases` is peft's, bit for bit; ours is as near."""
    lora = pytest.importorskip("peft.tuners.lora")
    base = nn.Linear(D, F, bias=False).to(DEVICE, dtype).requires_grad_(False)
    layer = lora.Linear(base, "a", lora.LoraConfig(r=RANK, lora_alpha=7), r=RANK, lora_alpha=7)
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


def test_what_no_gradient_reads_may_be_written():
    """As in eager: the gradient of A is made of x and B."""
    w, bias, x = adapted(F, D, scale=0.5), randn(F), randn(T, D, requires_grad=False)
    w.B.requires_grad_(False)
    y = functional.linear_act(x, w, bias.detach(), activation=None)
    with torch.no_grad():
        for t in (w.weight, w.A, bias):
            t.add_(1)
    y.sum().backward()
    torch.testing.assert_close(w.A.grad, 0.5 * torch.ones(T, F, device=DEVICE).mm(w.B).t().mm(x))


GEMM, LOW = 2 * T * D * F, 2 * T * RANK * (D + F)
FORWARD = 3 * (GEMM + LOW)


def low_rank_backward(n: int, k: int) -> int:
    """Adapter backward: dy B, that times A and x, drop(x) A' again, dy' that."""
    return 2 * T * RANK * (2 * n + 3 * k)


BACKWARD = 3 * GEMM + 2 * low_rank_backward(F, D) + low_rank_backward(D, F)


@pytest.mark.parametrize(("level", "products"), [("inputs", 2), ("gate", 1), ("preact", 0)])
def test_gemms(level, products):
    """No GEMM for the gradient of a frozen weight; the last is never recomputed."""
    weights = [adapted(*s) for s in ((F, D), (F, D), (D, F))]
    x = randn(T, D)
    assert flops(lambda: functional.gated_mlp(x, *weights, save=level)) == FORWARD
    y = functional.gated_mlp(x, *weights, save=level)
    # a first linear that is recomputed has its drop(x) A' for dB, too
    recomputed = products * (GEMM + LOW - 2 * T * RANK * D)
    assert flops(lambda: y.sum().backward()) == BACKWARD + recomputed


@pytest.mark.parametrize("wrap", [fusedckpt.checkpoint, partial(checkpoint, use_reentrant=False)])
def test_gemms_under_a_checkpoint(wrap):
    """The recompute is the one that backward reads: no forward runs a third time."""
    layers = [[adapted(*s) for s in ((F, D), (F, D), (D, F))] for _ in range(2)]

    def fn(x):
        for weights in layers:
            x = functional.gated_mlp(x, *weights)
        return x

    y = wrap(fn, randn(T, D))
    # of the last layer the recompute spares the last GEMM, or all that backward does by itself
    # whose first linears have drop(x) A' for dB, too
    recomputed = FORWARD + 2 * (GEMM + LOW) - 2 * 2 * T * RANK * D
    assert flops(lambda: y.sum().backward()) == recomputed + 2 * BACKWARD


def test_adapters_after_a_norm_layer_share_its_input():
    """Linears of a norm's result keep the norm's input, as linears without adapters do."""
    norm, q, k = fusedckpt.RMSNorm(D, device=DEVICE), adapted(F, D), adapted(D, D)

    def fn(x):
        n = norm(x)
        return tuple(functional.linear_act(n, w, activation=None) for w in (q, k))

    def eager(x):
        n = torch.nn.functional.rms_norm(x, (D,), norm.weight)
        return peft_linear(n, q), peft_linear(n, k)

    assert saved_bytes(fn, [randn(T, D)]) == 4 * T * D
    x = randn(T, D)
    pair = (
        torch.autograd.grad([y.square().sum() for y in ys], [x, norm.weight, q.A, k.B])
        for ys in (fn(x), eager(x))
    )
    torch.testing.assert_close(*pair)


def bad_calls():
    w, x = adapted(F, D), randn(T, D)
    linear = functional.linear_act
    return {
        "A must be [r, 24]": lambda: linear(x, w._replace(A=randn(RANK, D + 1))),
        "weight.A must be a tensor": lambda: linear(x, w._replace(A=None)),
        "weight.scale must be a number": lambda: linear(x, w._replace(scale="2")),
        "a probability, got 2.0": lambda: linear(x, w._replace(dropout=2.0)),
        "kernel must be": lambda: linear(x, w, kernel="fused"),
        "share a dtype": lambda: linear(x, w._replace(A=w.A.double())),
        "24 input features": lambda: linear(randn(T, 5), w),
        "up_weight.B must be a tensor": lambda: functional.gated_mlp(
            x, w, w._replace(B=3), adapted(D, F)
        ),
        "save must be": lambda: linear(x, w, save="gate"),
    }


@pytest.mark.parametrize("message", bad_calls())
def test_errors_name_what_was_expected(message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        bad_calls()[message]()
