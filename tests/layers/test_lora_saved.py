"""What calls with adapters save, and how many GEMMs they take."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F_
from lora_cases import peft_linear
from lora_weights import D, F, R, T, adapted
from support import (
    DEVICE,
    flops,
    randn,
    saved_bytes,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedckpt
from fusedckpt import NormSpec, functional
from fusedckpt.blocks.passes import weight_sum

LEVELS = {"inputs": 0, "gate": 1, "preact": 2}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("level", LEVELS)
def test_gated_mlp_saves_x_and_seeds(level, dropout):
    gate, up, down = (adapted(*s, dropout=dropout) for s in ((F, D), (F, D), (D, F)))
    # two on one linear: as many seeds more, and nothing else
    up = up._replace(weight=adapted(F, D, dropout=dropout))

    def fn(x):
        return functional.gated_mlp(x, gate, up, down, save=level)

    found = saved_bytes(fn, [randn(T, D)])
    assert found == 4 * T * (D + LEVELS[level] * F) + 8 * 4 * (dropout > 0)


@pytest.mark.parametrize("save", ["inputs", "preact"])
def test_mlp_saves_what_the_formula_says(save):
    fc1, fc2 = adapted(F, D), adapted(D, F)

    def fn(x):
        return functional.mlp(x, fc1, None, fc2, None, save=save, dropout=0.2, output_dropout=0.1)

    assert saved_bytes(fn, [randn(T, D)]) == 4 * T * (D + F * (save == "preact")) + 2 * 8


def test_linears_save_x_alone():
    q, k = adapted(F, D), adapted(D, D)
    norm = NormSpec("rms", nn.Parameter(randn(D)))
    assert saved_bytes(lambda x: functional.linear_act(x, q), [randn(T, D)]) == 4 * T * D
    assert saved_bytes(lambda x: functional.norm_linear(x, norm, [q, k, q]), [randn(T, D)]) == (
        4 * T * D
    )


def test_what_no_gradient_reads_is_not_saved():
    """At preact a frozen adapter's input is read by nothing."""
    fc1, fc2 = adapted(F, D), adapted(D, F)
    for weight in (fc1, fc2):
        weight.A.requires_grad_(False)
        weight.B.requires_grad_(False)
    fn = partial(functional.mlp, save="preact")
    found = saved_bytes(lambda x: fn(x, fc1, None, fc2, None), [randn(T, D)])
    assert found == 4 * T * F
    assert saved_bytes(lambda x: fn(x.detach(), fc1, None, fc2, None), [randn(T, D)]) == 0


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


def test_backward_writes_over_what_was_kept():
    y = functional.gated_mlp(
        randn(T, D), *(adapted(*s) for s in ((F, D), (F, D), (D, F))), save="preact"
    )
    *_, z, up = y.grad_fn.saved_tensors
    before = z.clone(), up.clone()
    y.sum().backward()
    assert not torch.equal(z, before[0])
    assert not torch.equal(up, before[1])


def test_sums_over_chunks_are_not_rounded():
    total, a = None, randn(T, D, dtype=torch.bfloat16, requires_grad=False)
    for rows in a.chunk(2):
        total = weight_sum(total, rows, rows, 1.0)
    torch.testing.assert_close(total, a.float().t() @ a.float())


def gemms(n: int, k: int) -> int:
    return 2 * T * n * k


def low_rank(n: int, k: int) -> int:
    """Adapter forward: drop(x) A', then B'."""
    return 2 * T * R * (n + k)


def low_rank_backward(n: int, k: int) -> int:
    """Adapter backward: dy B, that times A and x, drop(x) A' again, dy' that."""
    return 2 * T * R * (2 * n + 3 * k)


@pytest.mark.parametrize("level", LEVELS)
def test_gemms(level):
    """No GEMM for the gradient of a frozen weight; the last is never recomputed."""
    gate, up, down = (adapted(*s) for s in ((F, D), (F, D), (D, F)))
    x = randn(T, D)
    forward = 3 * (gemms(F, D) + low_rank(F, D))
    assert flops(lambda: functional.gated_mlp(x, gate, up, down, save=level)) == forward
    y = functional.gated_mlp(x, gate, up, down, save=level)
    recomputed = (2 - LEVELS[level]) * (gemms(F, D) + low_rank(F, D))
    backward = 3 * gemms(F, D) + 2 * low_rank_backward(F, D) + low_rank_backward(D, F)
    # a first linear that is recomputed has its drop(x) A' for dB, too
    shared = (2 - LEVELS[level]) * 2 * T * R * D
    assert flops(lambda: y.sum().backward()) == backward + recomputed - shared


@pytest.mark.parametrize("wrap", [fusedckpt.checkpoint, partial(checkpoint, use_reentrant=False)])
def test_gemms_under_a_checkpoint(wrap):
    """The recompute is the one that backward reads: no forward runs a third time."""
    layers = [[adapted(*s) for s in ((F, D), (F, D), (D, F))] for _ in range(2)]

    def fn(x):
        for weights in layers:
            x = functional.gated_mlp(x, *weights)
        return x

    y = wrap(fn, randn(T, D))
    found = flops(lambda: y.sum().backward())
    one, first = 3 * (gemms(F, D) + low_rank(F, D)), 2 * (gemms(F, D) + low_rank(F, D))
    backward = 3 * gemms(F, D) + 2 * low_rank_backward(F, D) + low_rank_backward(D, F)
    # of the last layer the recompute spares the last GEMM, or all that backward does by itself
    # whose first linears have drop(x) A' for dB, too
    assert found == one + first + 2 * backward - 2 * 2 * T * R * D


def test_adapters_after_a_norm_layer_share_its_input():
    """Linears of a norm's result keep the norm's input, as linears without adapters do."""
    norm, q, k = fusedckpt.RMSNorm(D), adapted(F, D), adapted(D, D)

    def fn(x):
        n = norm(x)
        return functional.linear_act(n, q, None, None), functional.linear_act(n, k, None, None)

    assert saved_bytes(fn, [randn(T, D)]) == 4 * T * D
    x = randn(T, D)
    found = torch.autograd.grad([y.square().sum() for y in fn(x)], [x, norm.weight, q.A, k.B])

    def eager(x):
        n = F_.rms_norm(x, (D,), norm.weight)
        return peft_linear(n, q), peft_linear(n, k)

    wanted = torch.autograd.grad([y.square().sum() for y in eager(x)], [x, norm.weight, q.A, k.B])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_no_grad_keeps_nothing():
    with torch.no_grad():
        y = functional.linear_act(randn(T, D), adapted(F, D))
    assert not y.requires_grad
