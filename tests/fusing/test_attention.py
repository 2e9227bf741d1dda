"""Fused attention modules: attention runs once, and its module saves no q, k, v."""

from __future__ import annotations

import copy
import pickle
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, flops, gemms, randn, saved_bytes
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from zoo import Attention, DecoderLayer

import fusedckpt
from fusedckpt import fuse, unfuse
from fusedckpt.memory import saved_tensors

D, H, T = 32, 4, 24
SDPA = F.scaled_dot_product_attention


class OwnAttention(Attention):
    """With more arguments, as models have them."""

    def __init__(self, **options):
        super().__init__(D, H, **options)

    def forward(self, x, scale=1.0, cache=None, output_attentions=False):
        return super().forward(x * scale)


class NormedAttention(OwnAttention):
    """With norms of queries and keys."""

    def __init__(self):
        super().__init__(qk_norm=True)


class Processor:
    def __call__(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Core(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class CallsInner(OwnAttention):
    """As diffusers does by an object, and torchtitan by a module."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def attend(self, q, k, v):
        return self.inner(q, k, v)


class OfTorch(nn.Module):
    """nn.MultiheadAttention, which returns a tuple."""

    def __init__(self):
        super().__init__()
        self.own = nn.MultiheadAttention(D, H, batch_first=True)

    def forward(self, x):
        return self.own(x, x, x, need_weights=False)[0]


class Scores(OwnAttention):
    """Multiplies queries and keys itself where asked."""

    def attend(self, q, k, v):
        if self.dropout < -1:
            return q
        if self.dropout < 0:
            return (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return super().attend(q, k, v)


class PlainAttention(NormedAttention):
    """Its attention is of plain ops, which save all probabilities on any device."""

    def attend(self, q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            return super().attend(q, k, v)


class Flash(torch.autograd.Function):
    """In the place of flash_attn's own."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return SDPA(q, k, v)

    @staticmethod
    def backward(ctx, dy):
        given = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            return torch.autograd.grad(SDPA(*given), given, dy)


flash = types.ModuleType("flash_attn.flash_attn_interface")
flash.Kernel = Flash


def flash_attn_func(q, k, v):
    """As models import it, which finds its Function in its own module."""
    return flash.Kernel.apply(q, k, v)


class Flashed(OwnAttention):
    def attend(self, q, k, v):
        return flash_attn_func(q, k, v)


def layer_of(attention, kind=DecoderLayer):
    return kind(D, attention, fusedckpt.GatedMLP(D, 2 * D), nn.RMSNorm)


def pair(kind, layer=layer_of, **options):
    torch.manual_seed(0)
    eager = nn.ModuleList([layer(kind())]).to(DEVICE)[0]
    model = copy.deepcopy(eager)
    return eager, model, fuse(model, **options)


def grads(model, x, **options):
    torch.manual_seed(1)
    y = model(x, **options)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


def assert_equal(model, eager, x, **options):
    torch.testing.assert_close(grads(model, x, **options), grads(eager, x, **options))


def count(fn):
    """Count attention's forwards, by the profiler."""
    with torch.profiler.profile() as events:
        fn()
    return sum(
        "_scaled_dot_product" in e.key and "backward" not in e.key and e.count
        for e in events.key_averages()
        if "_math" not in e.key
    )


def statistics_bytes(batch=2, dtype=torch.float32, rows=T, heads=H, width=D // H):
    """Return the bytes that attention saves beside queries, keys, values and its output.

    These are the log-sum-exp. A GPU's kernels may pad it, and save the state of a generator.
    """
    inputs = [randn(batch, rows, heads, width, dtype=dtype).transpose(1, 2) for _ in range(3)]
    nbytes = saved_bytes(SDPA, inputs) - 4 * inputs[0].nbytes
    log_sum_exp = batch * rows * 4 * heads
    assert nbytes == log_sum_exp if DEVICE.type == "cpu" else nbytes >= log_sum_exp
    return nbytes


KINDS = {
    "own": OwnAttention,
    "processor": lambda: CallsInner(Processor()),
    "core": lambda: CallsInner(Core()),
    "torch": OfTorch,
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_saves_input_output_and_log_sum_exp(kind):
    eager, model, report = pair(kind)
    assert {n: k for n, k in report.kinds.items() if k == "attention"} == {
        "attention.own" if kind is OfTorch else "attention": "attention"
    }
    x = randn(2, T, D)
    assert_equal(model, eager, x)
    assert report.fallbacks == {}
    if DEVICE.type == "cpu":
        assert count(lambda: grads(model, x)) == 1
    # x, attention's output and the second norm's input
    assert saved_bytes(model, [x]) == 2 * T * 3 * 4 * D + statistics_bytes()
    unfuse(model)
    assert_equal(model, eager, x)


@pytest.mark.parametrize("save", ["gate", "preact"])
def test_at_other_levels_attention_runs_as_ever(save):
    _, _, report = pair(NormedAttention, save=save)
    assert "attention" not in report.swapped
    eager, model, report = pair(NormedAttention)
    assert report.swapped["attention"] == "NormedAttention -> recomputed but for attention itself"
    for each in (eager, model):
        each.mlp = nn.Identity()
    x = randn(2, T, D)
    with fusedckpt.saving(save):
        assert_equal(model, eager, x)
        assert report.fallbacks == {}
        once, twice = (flops(lambda m=m: m(x).sum().backward()) for m in (eager, model))
        assert once == twice > 0


def test_under_autocast():
    """Casts of queries and keys are no part of the region."""
    eager, model, _ = pair(OwnAttention)
    for each in (eager, model):
        each.attention.attend = lambda q, k, v: F.scaled_dot_product_attention(
            q.float(), k.float(), v
        )
    x = randn(2, T, D)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert_equal(model.attention, eager.attention, x)
        found = saved_bytes(model.attention, [x])
    assert found == 2 * T * (4 * D + 2 * D) + statistics_bytes(dtype=torch.bfloat16)


def test_functions_of_flash_attn(monkeypatch):
    eager, model, _ = pair(Flashed)
    x = randn(2, T, D)
    assert not any(name.startswith("flash_attn") for name in sys.modules)
    monkeypatch.setitem(sys.modules, flash.__name__, flash)
    assert_equal(model, eager, x)
    assert saved_bytes(model, [x]) == 2 * T * 3 * 4 * D
    assert flash.Kernel is Flash


def test_a_llama_layer_saves_three_rows():
    """In bfloat16 6 D bytes a token, and 4 a head."""
    transformers = pytest.importorskip("transformers")
    # GPUs' kernels pad heads that are no multiple of 8 wide
    saved, width = [], 64
    for layers in (1, 2):
        config = transformers.LlamaConfig(
            **{"vocab_size": 16, "hidden_size": D, "intermediate_size": width, "use_cache": False},
            **{"num_attention_heads": H, "num_key_value_heads": 2, "num_hidden_layers": layers},
        )
        config._attn_implementation = "sdpa"
        model = transformers.LlamaModel(config).to(DEVICE, torch.bfloat16).train()
        fuse(model)
        with saved_tensors() as found:
            y = model(torch.arange(T, device=DEVICE)[None] % 16).last_hidden_state
        saved.append(found.nbytes)
        if DEVICE.type == "cpu":
            assert count(lambda y=y: y.sum().backward()) == 0
    assert saved[1] - saved[0] == T * 6 * D + statistics_bytes(1, torch.bfloat16)


FALLBACKS = {
    "cache": ({"cache": object()}, "cache"),
    "module": ({"cache": [nn.Identity()]}, "module"),
    "none": ({}, "unseen"),
    "scores": ({}, "again"),
    "again": ({}, "again"),
    "hook": ({}, "hooked"),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_calls_that_are_not_fused(case):
    options, key = FALLBACKS[case]
    eager, model, report = pair(PlainAttention if case == "again" else Scores)
    for each in (eager, model):
        if case == "hook":
            each.attention.qkv.register_forward_hook(lambda *_: None)
        each.attention.dropout = {"none": -2, "scores": -1, "again": 0.5}.get(case, 0.0)
    x = randn(2, 4 * T, D)
    for _ in range(2):
        assert_equal(model, eager, x, **options)
        (reason,) = report.fallbacks.values()
        assert reason.key == key
    title = "recomputed as a whole" if key == "again" else "not run fused"
    assert f"{title}: 1 of" in str(report)
    assert ("not run fused" in str(report)) == (key != "again")


@pytest.mark.parametrize("case", ["eval", "no grad", "compiled", "checkpoint", "regions"])
def test_calls_that_run_as_ever(case):
    """Attention runs again where an outer checkpoint recomputes it, else once."""
    eager, model, report = pair(OwnAttention)
    x, runs = randn(2, T, D), 1
    run = model
    if case == "eval":
        model.eval()
    elif case == "no grad":
        with torch.no_grad():
            torch.testing.assert_close(model(x), eager(x))
    elif case == "compiled":
        torch.compiler.reset()
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
    else:
        names = () if case == "checkpoint" else ("attention",)
        run = fusedckpt.checkpoint_module(model, save_regions=names)
        runs = 1 if names else 2
    assert_equal(run, eager, x)
    if DEVICE.type == "cpu":
        assert count(lambda: grads(run, x)) == runs
    if case == "checkpoint":
        other = fusedckpt.checkpoint_module(eager)
        assert len(gemms(lambda: grads(run, x))) == len(gemms(lambda: grads(other, x)))
    assert report.fallbacks == {}


def test_chosen_by_name_and_kept_in_copies():
    _, model, report = pair(OwnAttention, skip="attention")
    assert type(model.attention) is OwnAttention
    assert "attention" not in report.swapped
    assert type(pair(OwnAttention, attention=False)[1].attention) is OwnAttention
    # other levels leave q, k and v saved, and gain nothing without norms
    assert type(pair(OwnAttention, save="preact")[1].attention) is OwnAttention
    eager, model, _ = pair(OwnAttention, only="att*")
    assert fuse(model).already == {
        "attention": "OwnAttention -> recomputed but for attention itself"
    }
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(each.attention).__name__ == "FusedOwnAttention"
        assert_equal(each, eager, randn(2, T, D))


def test_a_frozen_module_and_a_replaced_forward():
    # dropout draws the same numbers
    eager, model, _ = pair(lambda: OwnAttention(dropout=0.5))
    assert_equal(model, eager, randn(2, T, D))
    eager, model, _ = pair(OwnAttention)
    for each in (eager, model):
        each.attention.requires_grad_(False)
    x = randn(2, T, D)
    found, expected = (torch.autograd.grad(each(x).square().sum(), [x]) for each in (model, eager))
    torch.testing.assert_close(found, expected)
    model = layer_of(OwnAttention())
    model.attention.forward = model.attention.forward
    assert fuse(model).left["attention"].key == "forward"
    assert F.scaled_dot_product_attention is SDPA
