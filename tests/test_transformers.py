"""fuse on real transformers models of tiny random configurations: the same loss and gradients."""

import copy

import pytest
import torch
from support import DEVICE

import fusedckpt
from fusedckpt.memory import saved_tensors

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def text(vocab_size=99):
    ids = torch.randint(vocab_size, (2, 12), device=DEVICE)
    return {"input_ids": ids, "labels": ids}


def gpt2():
    config = transformers.GPT2Config(vocab_size=99, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config), text(), 5


def bert():
    config = transformers.BertConfig(vocab_size=99, intermediate_size=64, **SMALL)
    return transformers.BertForMaskedLM(config), text(), 6


def vit():
    config = transformers.ViTConfig(image_size=16, patch_size=4, intermediate_size=64, **SMALL)
    inputs = {
        "pixel_values": torch.randn(2, 3, 16, 16, device=DEVICE),
        "labels": torch.tensor([0, 1], device=DEVICE),
    }
    return transformers.ViTForImageClassification(config), inputs, 5


@pytest.mark.parametrize("build", [gpt2, bert, vit])
def test_loss_gradients_and_state_are_eagers(build):
    model, inputs, num_norms = build()
    eager = model.to(DEVICE).eval()
    fused = copy.deepcopy(eager)
    report = fusedckpt.fuse(fused)
    assert list(report.swapped.values()) == ["nn.LayerNorm -> LayerNorm"] * num_norms
    kept, found = [], []
    for one in (eager, fused):
        with saved_tensors(exclude=inputs.values()) as saved:
            loss = one(**inputs).loss
        kept.append(saved.nbytes)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in one.parameters() if p.grad is not None)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    # the statistics, at least
    assert kept[1] < kept[0]
    assert fused.state_dict().keys() == eager.state_dict().keys()
    fusedckpt.unfuse(fused)
    torch.testing.assert_close(fused(**inputs).loss, eager(**inputs).loss, rtol=0, atol=0)
