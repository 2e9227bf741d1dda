"""A Llama in bfloat16: how little is kept, on a table that shows attention's own tensors."""

import copy

import pytest
import torch
from support import DEVICE
from transformers_cases import VOCAB, transformers

from fusedckpt import fuse
from fusedckpt.memory import saved_tensors

D, F, LAYERS, TOKENS = 64, 172, 2, 32


@pytest.fixture
def llama():
    config = transformers.LlamaConfig(
        hidden_size=D,
        intermediate_size=F,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCAB,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config).to(DEVICE, torch.bfloat16)


def kept(model):
    ids = torch.randint(VOCAB, (2, TOKENS // 2), device=DEVICE)
    with saved_tensors(exclude=[ids]) as saved:
        loss = model(input_ids=ids, labels=ids).loss
    assert loss.requires_grad
    return saved.nbytes / TOKENS


def kept_by_attention(model):
    """What the attention layers keep besides what they read."""
    x = torch.randn(2, TOKENS // 2, D, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) * 1
    positions = model.model.rotary_emb(x, torch.arange(TOKENS // 2, device=DEVICE)[None])
    attention = model.model.layers[0].self_attn
    with saved_tensors(exclude=[x, *positions]) as saved:
        y = attention(hidden_states=x, position_embeddings=positions, attention_mask=None)
    assert y[0].requires_grad
    return LAYERS * saved.nbytes / TOKENS


@pytest.mark.parametrize(
    ("save", "share", "per_layer"),
    [
        # the two norms' inputs, then what the level adds
        ("inputs", 1 / 5, 2 * 2 * D),
        ("gate", 2 / 5, 2 * 2 * D + 2 * F),
        ("preact", 1 / 2, 2 * 2 * D + 4 * F),
    ],
)
def test_a_fraction_is_kept(llama, save, share, per_layer):
    eager = copy.deepcopy(llama)
    fuse(llama, save=save, attention=False)
    attention = kept_by_attention(llama)
    assert attention == kept_by_attention(eager)
    before, after = (kept(model) - attention for model in (eager, llama))
    assert after <= share * before
    # exactly: the layers, the last norm's two tensors, and what the head keeps in any case
    heads = 1 * 2 * D + 2 * D
    rest = after - LAYERS * per_layer - heads
    llama.model.layers = llama.model.layers[:1]
    one = kept(llama) - attention / LAYERS
    assert after - one == per_layer
    assert 0 < rest < 9 * VOCAB + D
