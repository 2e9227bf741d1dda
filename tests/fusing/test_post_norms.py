"""A norm of what a fused attention module returns saves nothing."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
from support import DEVICE, gemms, randn, saved_bytes
from test_attention import (
    D,
    NormedAttention,
    OfTorch,
    OwnAttention,
    T,
    assert_equal,
    count,
    grads,
    layer_of,
    pair,
    statistics_bytes,
)
from torch import nn
from zoo import DecoderLayer


class PostNormed(DecoderLayer):
    """With norms of results, as OLMo 2 has; `between` gets attention's result."""

    between = staticmethod(lambda y: y)

    def forward(self, x, **options):
        x = x + self.norm1(self.between(self.attention(x, **options)))
        return x + self.mlp(self.norm2(x))


post_normed = partial(layer_of, kind=PostNormed)


@pytest.mark.parametrize("kind", [OwnAttention, OfTorch])
def test_a_norm_of_the_result_saves_nothing(kind):
    """The recompute runs to its end, one GEMM more, also for second derivatives."""
    eager, model, report = pair(kind, post_normed)
    x = randn(2, T, D, dtype=torch.float64)
    assert_equal(model.double(), eager.double(), x)
    # x, attention's output and the second norm's input; a GPU's attention in float64 saves others
    assert (
        saved_bytes(model.float(), [x.float().requires_grad_()])
        == 2 * T * 3 * 4 * D + statistics_bytes()
    )
    model.double()
    for each in (eager, model):
        each.mlp = nn.Identity()
        # the first call with a leaf as its input compares all values
        grads(each, x)
    counts = [len(gemms(lambda m=m: grads(m, x))) for m in (eager, model)]
    if kind is OwnAttention:
        # qkv and out; a GPU has no fused attention in float64, but a product of q and k
        assert counts[1] == counts[0] + 2 + (DEVICE.type == "cuda")
    if DEVICE.type == "cpu":
        assert count(lambda: grads(model, x)) == 1
    found = []
    for each in (eager, model):
        # attention itself has no second derivatives
        y, weight = each(x.detach()), each.norm1.weight
        args = y.square().sum(), weight
        (first,) = torch.autograd.grad(*args, create_graph=True)
        (again,) = torch.autograd.grad(*args, retain_graph=True)
        found.append([first, again, *torch.autograd.grad(first.square().sum(), weight)])
    torch.testing.assert_close(*found)
    # a GPU's attention in float64 runs again
    notes = {"again"} if DEVICE.type == "cuda" else set()
    assert {reason.key for reason in report.fallbacks.values()} == notes
    # the graph that is left holds nothing
    loss = model(made := x * 1).sum()
    loss.backward()
    left = weakref.ref(made.untyped_storage())
    del made
    assert left() is None


class PostNormByHand(OwnAttention):
    """Computes attention in products of its own, and saves all probabilities."""

    def attend(self, q, k, v):
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def test_a_norm_of_the_result_of_attention_that_runs_again():
    """All of attention runs again, and its result with it: only x and the sum are saved."""
    eager, model, report = pair(PostNormByHand, post_normed)
    x = randn(2, 8 * T, D, dtype=torch.float64)
    assert_equal(model.double(), eager.double(), x)
    assert {reason.key for reason in report.fallbacks.values()} == {"again"}
    assert saved_bytes(model.float(), [x.float()]) == 2 * 8 * T * 2 * 4 * D


def test_a_norm_of_the_result_of_other_weights():
    _, model, _ = pair(OwnAttention, post_normed)
    y = model.attention(randn(2, T, D))
    n, weight = model.norm1(y), model.norm1.weight
    expected = torch.autograd.grad(model.norm1(y.detach()).sum(), weight)
    # after that nothing of attention is left but what the norm saved
    y.sum().backward()
    found = torch.autograd.grad(n.sum(), weight, retain_graph=True)
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        model.attention.out.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(n.sum(), weight)


class NoView(OwnAttention):
    """Returns no view, whose node would not outlive a write."""

    def forward(self, x, **options):
        return 2 * super().forward(x, **options)


def write(y):
    with torch.no_grad():
        return y.mul_(2)


def watch(y):
    y.register_hook(lambda dy: dy * 2)
    return y


@pytest.mark.parametrize("case", ["written", "watched", "hooked", "preact"])
def test_a_norm_of_a_result_that_may_not_be_made_again(case):
    kind, save = (NormedAttention, "preact") if case == "preact" else (NoView, "inputs")
    eager, model, _ = pair(kind, post_normed, save=save)
    for each in (eager, model):
        each.between = {"written": write, "watched": watch}.get(case, each.between)
        if case == "hooked":
            each.attention.register_forward_hook(lambda *_: None)
    x = randn(2, T, D, dtype=torch.float64)
    assert_equal(model.double(), eager.double(), x)
    # x, attention's output, the norms' inputs; at preact attention runs as ever: also q, k and v, q
    # and k normalized, and the output as the last linear reads it, which a GPU need not copy
    rows = (9 if DEVICE.type == "cuda" else 10) if case == "preact" else 4
    x = x.float().requires_grad_()
    assert saved_bytes(model.float(), [x]) == 2 * T * rows * 4 * D + statistics_bytes()
