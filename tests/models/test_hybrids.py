"""Hybrid models of transformers: mixers save their input, and gradients are eager's."""

from __future__ import annotations

import copy

import pytest
import torch
from support import DEVICE

import fusedckpt
from fusedckpt.memory import saved_tensors

transformers = pytest.importorskip("transformers")

D = 32
SMALL = {
    "hidden_size": D,
    "intermediate_size": 3 * D,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "use_cache": False,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# with the classes of their mixers, and the percentage of saved bytes that is gone
MODELS = {
    "mamba2": (
        {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8},
        {"Mamba2Mixer"},
        90,
    ),
    "falcon_h1": (MAMBA | {"mamba_d_ssm": 64}, {"FalconH1Mixer", "FalconH1Attention"}, 85),
    "bamba": (MAMBA | {"attn_layer_indices": [1]}, {"BambaMixer", "BambaAttention"}, 85),
    "qwen3_5_text": (DELTA, {"Qwen3_5GatedDeltaNet", "Qwen3_5Attention"}, 85),
    "qwen3_next": (DELTA | EXPERTS, {"Qwen3NextGatedDeltaNet", "Qwen3NextAttention"}, 85),
    "jamba": (
        {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8, "num_experts": 2},
        {"JambaMambaMixer", "JambaAttention"},
        90,
    ),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, {"Lfm2ShortConv", "Lfm2Attention"}, 80),
}


def pair(name):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SMALL | MODELS[name][0])
    eager = transformers.AutoModelForCausalLM.from_config(config).to(DEVICE).train()
    fused = copy.deepcopy(eager)
    return eager, fused, fusedckpt.fuse(fused)


def step(model):
    ids = torch.arange(2 * 24, device=DEVICE).view(2, 24) % 61 + 2
    with saved_tensors(exclude=model.buffers()) as saved:
        y = model(input_ids=ids, use_cache=False).logits
    wanted = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(y.sin().sum(), wanted, allow_unused=True)
    return saved.nbytes, [y.detach(), *grads]


def difference(found, expected):
    """Return the L2 norm of all differences, relative to that of the values."""
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if b is not None]
    squares = [((a - b).square().sum(), b.square().sum()) for a, b in pairs]
    errors, sizes = zip(*squares, strict=True)
    return (sum(errors) / sum(sizes)).sqrt().item()


@pytest.mark.parametrize("name", MODELS)
def test_mixers_save_their_input(name):
    eager, fused, report = pair(name)
    _, kinds, gone = MODELS[name]
    swapped = {n for n, kind in report.kinds.items() if kind == "attention"}
    assert {type(eager.get_submodule(n)).__name__ for n in swapped} == kinds
    # twice, as the first call learns what it writes
    for _ in range(2):
        (was, expected), (now, found) = step(eager), step(fused)
        assert difference(found, expected) < 16 * torch.finfo(torch.float32).eps
    assert 100 * (1 - now / was) > gone
    fusedckpt.unfuse(fused)
    assert step(fused)[0] == was
