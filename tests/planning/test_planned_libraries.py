"""Plans of transformers' models, and under autocast."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import pytest
import torch
from plan_models import (
    assert_as_near,
    assert_equal,
    assert_predicted,
    planned,
    step,
    tokens,
    transformer,
    units_of,
)
from torch import nn

import fusedckpt
from fusedckpt.memory import nbytes_of, peak_bytes
from fusedckpt.planning.chain import Item, simulate

HF = {
    "llama": {"intermediate_size": 64, "num_attention_heads": 2, "hidden_size": 32},
    "qwen3": {"intermediate_size": 64, "num_attention_heads": 2, "hidden_size": 32, "head_dim": 16}
    | {"num_key_value_heads": 1},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64},
    "bert": {"intermediate_size": 64, "num_attention_heads": 2, "hidden_size": 32},
    "t5": {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "decoder_start_token_id": 0},
}


HEADS = {"bert": "MaskedLM", "t5": "Seq2SeqLM"}


def hugging_face(kind):
    transformers = pytest.importorskip("transformers")
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    layers = {"t5": "num_layers", "gpt2": "n_layer"}.get(kind, "num_hidden_layers")
    options = {"vocab_size": 128, **special, **HF[kind], layers: 3}
    config = transformers.AutoConfig.for_model(kind, **options)
    auto = getattr(transformers, f"AutoModelFor{HEADS.get(kind, 'CausalLM')}")
    return auto.from_config(config).train()


@pytest.mark.parametrize("kind", [kind for kind in HF if kind != "qwen3"])
def test_hugging_face_models(kind):
    model, x = hugging_face(kind), tokens()
    inputs = {"input_ids": x, "labels": x}
    plain = copy.deepcopy(model)
    if kind == "t5":
        # the encoder's layers get no cache
        found = planned(model, policy="all", **inputs)
        assert sorted(found.left_out) == [f"decoder.block.{i}" for i in range(3)]
        assert all(re.fullmatch(r"changes .*Cache", why) for why in found.left_out.values())
        # its decoder has a configuration of its own, beside `model.config`
        inputs["use_cache"] = False
    elif kind != "bert":
        with pytest.raises(ValueError, match=r"^plan: .*Cache: .*use_cache=False to plan"):
            planned(model, policy="all", **inputs)
        inputs["use_cache"] = False
    for policy in ("memory", "uniform:2"):
        found = planned(model, policy=policy, **inputs)
        assert len(units_of(found)) == (6 if kind == "t5" else 3)
        # of what is as small as this
        most = 1.06 if kind == "t5" else 1.03
        assert_predicted(found, most)
        found.apply(model)
        assert_equal(step(model, **inputs), step(plain, **inputs))
        found.undo()
    if kind == "llama":
        found.apply(model)
        ours, theirs = (m.generate(x[:1, :4], max_new_tokens=4) for m in (model, plain))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_fused_attention_at_its_levels(kind):
    """Attention saves its input, or q, k and v."""
    model, x = hugging_face(kind), torch.randint(128, (2, 128))
    inputs = {"input_ids": x, "labels": x, "use_cache": False}
    plain = copy.deepcopy(model)
    fusedckpt.fuse(model)
    unplanned = step(model, **inputs)
    exact = step(plain.double(), **inputs)
    most, least = (planned(model, policy=p, **inputs).measured_bytes for p in ("none", "all"))
    for share in (0.25, 0.75):
        found = planned(model, budget=int(least + share * (most - least)), **inputs)
        assert_predicted(found)
        assert found.measured_bytes <= found.budget_bytes
        found.apply(model)
        assert_as_near(step(model, **inputs), unplanned, exact)
        found.undo()
    first, *others = found.chain.units[0].levels
    assert first.name == "preact"
    assert others
    assert all(level.added_bytes < first.added_bytes for level in others)


@pytest.mark.parametrize("kind", ["llama", "own"])
def test_a_head_at_its_levels(kind):
    """Where all fits it saves the logits, and runs no GEMM again; else only its input."""
    x = tokens()
    if kind == "own":
        model, inputs = Headed(), {"tokens": x}
    else:
        model, inputs = hugging_face(kind), {"input_ids": x, "labels": x, "use_cache": False}
    plain = copy.deepcopy(model)
    fusedckpt.fuse(model, head=kind == "llama")
    exact, unplanned = step(copy.deepcopy(plain).double(), **inputs), step(plain, **inputs)
    found = planned(model, policy="none", **inputs)
    # not with the logits counted twice, where the loss computes the head
    assert found.predicted_bytes == found.measured_bytes
    name, head = "lm_head" if kind == "llama" else "head", found.chain.units[-1]
    assert head.name == name
    first, last = head.level("preact"), head.level("inputs")
    assert first.added_bytes - last.added_bytes == 4 * 128 * x.numel()
    assert (found.items[-1].level, found.items[-1].stop) == ("preact", 4)
    for budget in (found.measured_bytes, found.measured_bytes - 1):
        found = planned(model, budget=budget, **inputs)
        assert_predicted(found)
        assert found.measured_bytes <= budget
        found.apply(model)
        assert_as_near(step(model, **inputs), unplanned, exact)
        found.undo()
        model.zero_grad()
    least = [unit.levels[-1].name for unit in found.chain.units]
    items = tuple(Item(i, i + 1, name) for i, name in enumerate(least))
    found = replace(found, items=items)
    found.apply(model)
    peak = fusedckpt.report(model, **inputs).peak_bytes
    assert 0.99 <= simulate(found.chain, items).peak_bytes / peak <= 1.03


class Headed(nn.Module):
    """A language model that computes its loss without logits."""

    def __init__(self):
        super().__init__()
        self.inner = transformer(3)
        self.head = fusedckpt.LinearCrossEntropy(64, 128)

    def forward(self, tokens):
        x = self.inner.embedding(tokens)
        for block in self.inner.blocks:
            x = block(x)
        return self.head(self.inner.norm(x), tokens)


@pytest.mark.parametrize("fused", [False, True])
def test_units_that_do_not_run_attention_again(fused):
    model, x = transformer(3, fused=fused), tokens()
    unplanned = step(copy.deepcopy(model), x)
    found = planned(model, x, policy="none")
    for unit in found.chain.units:
        level, least = unit.level("attention"), unit.level(unit.fastest.name)
        assert 0 < level.added_bytes < least.added_bytes
        assert 0 < level.extra_ms <= unit.recomputed.extra_ms
    items = tuple(Item(i, i + 1, "attention") for i in range(3))
    found = replace(found, items=items)
    found.apply(model)
    assert_equal(step(model, x), unplanned)
    assert forwards_of_attention(lambda: step(model, x)) == 3
    predicted = simulate(found.chain, items).peak_bytes
    assert 0.99 <= predicted / fusedckpt.report(model, x).peak_bytes <= 1.03


def forwards_of_attention(fn):
    with torch.profiler.profile() as profiler:
        fn()
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    return sum(event.name == name for event in profiler.events())


def test_beside_hugging_faces_own_checkpoints():
    model, x = hugging_face("llama"), tokens()
    plain = copy.deepcopy(model)
    model.gradient_checkpointing_enable()
    inputs = {"input_ids": x, "labels": x, "use_cache": False}
    with pytest.raises(ValueError, match=r"^plan: unit model.layers.0 .*_checkpointing_disable"):
        planned(model, policy="uniform:1", **inputs)
    model.gradient_checkpointing_disable()
    planned(model, policy="uniform:1", **inputs).apply(model)
    model.gradient_checkpointing_enable()
    assert_equal(step(model, **inputs), step(plain, **inputs))


def test_weights_that_autocast_has_cast_are_counted():
    model, x = transformer(3), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        # the casts live until it ends
        model(x)
        found = planned(model, x, policy="all")
    # what a segment casts in backward goes with its recompute
    assert_predicted(found)
    found.apply(model)

    def loop():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x)
        loss.backward()

    held = nbytes_of([*model.parameters(), *model.buffers(), x])
    assert held + peak_bytes(loop) <= found.measured_bytes


def test_bfloat16_parameters_and_a_single_block():
    model, x = transformer(1, fused=True).bfloat16(), tokens()
    plain = copy.deepcopy(model)
    found = planned(model, x, policy="all")
    assert found.measured_bytes <= found.predicted_bytes
    found.apply(model)
    assert_equal(step(model, x), step(plain, x))
