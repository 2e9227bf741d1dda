"""What the report of `fuse` says to a reader who knows nothing: names, one clause, one remedy."""

from __future__ import annotations

import re
import string
from functools import partial

import pytest
import torch
from torch import nn
from zoo import Attention

from fusedckpt import fuse
from fusedckpt.layers.fallbacks import WORDS, NotFused

D, H = 12, 20


class GatedAttention(Attention):
    """timm's way: a gate beside attention, which makes it look like an MLP."""

    def __init__(self):
        super().__init__(D, 2)
        self.gate = nn.GELU()

    def forward(self, x):
        return self.gate(super().forward(x))


class ModulatedNorm(nn.Module):
    """The norm of diffusers' AdaLayerNormZero, whose second argument has a default."""

    def __init__(self):
        super().__init__()
        self.linear, self.act, self.norm = nn.Linear(D, 2 * D), nn.SiLU(), nn.LayerNorm(D)

    def forward(self, x, timestep=None, emb=None):
        scale, shift = self.linear(self.act(emb)).chunk(2, -1)
        return self.norm(x) * (1 + scale) + shift


@pytest.mark.parametrize("key", WORDS)
def test_each_reason_is_one_clause_and_one_thing_to_do(key):
    clause, remedy = WORDS[key]
    count = sum(field is not None for _, field, *_ in string.Formatter().parse(clause))
    text = str(NotFused(key, ("a",) * count if count > 1 else "a"))
    assert "{" not in text
    for words in (clause, remedy):
        assert not re.search(r"[.;\n]$|\. [A-Z]", words)
    assert remedy
    assert NotFused(key).remedy == remedy


@pytest.mark.parametrize("make", [partial(Attention, D, 2), GatedAttention])
def test_an_attention_module_itself_is_fused(make):
    model = make()
    report = fuse(model)
    assert list(report.swapped) == [""]
    assert report.left == {}
    x = torch.randn(2, 5, D, requires_grad=True)
    model(x).sum().backward()
    assert report.fallbacks == {}


def test_nothing_is_both_swapped_and_left():
    report = fuse(nn.Sequential(nn.LayerNorm(D), GatedAttention()))
    assert set(report.swapped) == {"0", "1"}
    assert report.swapped.keys().isdisjoint(report.left)
    assert "left 0" in str(report)


def test_a_second_argument_is_named():
    report = fuse(nn.Sequential(ModulatedNorm()))
    assert report.left["0"] == ("inputs", "timestep and emb")
    assert (
        "left 1 x ModulatedNorm: its forward takes timestep and emb in addition to one tensor; "
        "fuse(model, recompute_elementwise=True) recomputes its cheap functions, "
        "fusedckpt.checkpoint all of it (0)"
    ) in str(report)


def test_where_nothing_was_found_the_classes_are_named():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Flatten())
    assert str(fuse(model)) == (
        "fused 0 modules, left 0\n"
        "found no norm, MLP, attention, experts, or linear with an activation\n"
        "looked at 2 x Conv2d, 1 x Sequential, 1 x ReLU, 1 x Flatten\n"
        "recompute_elementwise=True also recomputes activations, sums, other norms\n"
        "print(fusedckpt.report(model, **batch)) measures what a step saves, and where, "
        "also with recompute_elementwise=True"
    )
