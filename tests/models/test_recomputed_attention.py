"""Attention of transformers that runs again: with shared keys, and as it was in the call."""

from __future__ import annotations

import copy

import pytest
import torch
from support import DEVICE

import fusedckpt

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "use_cache": False,
    "pad_token_id": 0,
}
SHARING = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
}
GEMMA_3N = {"altup_num_inputs": 2, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 6}
MODELS = {
    "llama": {},
    "gemma3n_text": SHARING | GEMMA_3N,
    "gemma4_text": SHARING,
}
# a GPU has no fused attention in float64: what it runs there runs again in backward
AGAIN = {"again"} if DEVICE.type == "cuda" else set()


def pair(name):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SMALL | MODELS[name])
    eager = transformers.AutoModelForCausalLM.from_config(config).double().to(DEVICE).train()
    fused = copy.deepcopy(eager)
    return eager, fused, fusedckpt.fuse(fused)


def notes(report):
    """Return the keys of what is said of attention in the run."""
    swapped = [name for name, kind in report.kinds.items() if kind == "attention"]
    return {report.fallbacks[name].key for name in swapped if name in report.fallbacks}


def grads(model, between=lambda model: None):
    ids = torch.arange(2 * 12, device=DEVICE).view(2, 12) % 61 + 2
    loss = model(input_ids=ids, labels=ids).loss
    between(model)
    loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_keys_and_values_of_earlier_layers(name):
    """Attention writes them to a dict among its arguments, and reads those of other layers."""
    eager, fused, report = pair(name)
    swapped = {n for n, kind in report.kinds.items() if kind == "attention"}
    assert len(swapped) == 6
    torch.testing.assert_close(grads(fused), grads(eager))
    assert notes(report) == AGAIN


def test_another_implementation_between_forward_and_backward():
    eager, fused, report = pair("llama")
    expected = grads(eager)
    found = grads(fused, lambda model: model.set_attn_implementation("eager"))
    torch.testing.assert_close(found, expected)
    assert notes(report) == AGAIN
    assert fused.config._attn_implementation == "eager"
