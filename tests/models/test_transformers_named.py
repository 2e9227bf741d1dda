"""Layers of transformers that fuse once neither swapped nor named, or that never ran fused."""

import copy
import importlib

import pytest
import torch
import transformers_cases  # skips where transformers is missing
from support import DEVICE, randn
from torch import nn
from transformers import ApertusConfig, BitNetConfig, FalconH1Config, LlamaConfig, SeedOssConfig

from fusedckpt import fuse

D, H = 32, 48


def layer(folder: str, name: str, *args, **kwargs) -> nn.Module:
    module = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    if not hasattr(module, name):
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(0)
    return getattr(module, name)(*args, **kwargs).to(DEVICE)


def sized(kind, **options):
    return kind(hidden_size=D, intermediate_size=H, **options)


def minimax() -> nn.Module:
    module = importlib.import_module("transformers")
    if not hasattr(module, "MiniMaxM3VLTextConfig"):
        pytest.skip("this transformers has no MiniMax M3")
    config = module.MiniMaxM3VLTextConfig(hidden_size=D, dense_intermediate_size=H)
    return layer("minimax_m3_vl", "MiniMaxM3VLDenseMLP", config)


SWAPPED = {
    "cohere": (lambda: layer("cohere", "CohereLayerNorm", D), "CohereLayerNorm -> layer_norm"),
    "cohere2": (lambda: layer("cohere2", "Cohere2LayerNorm", D), "Cohere2LayerNorm -> layer_norm"),
    "deberta": (lambda: layer("deberta", "DebertaLayerNorm", D), "DebertaLayerNorm -> layer_norm"),
    "llama4": (
        lambda: layer("llama4", "Llama4TextL2Norm", 1),
        "Llama4TextL2Norm -> rms_norm (llama cast)",
    ),
    "olmo": (lambda: layer("olmo", "OlmoLayerNorm", D), "OlmoLayerNorm -> layer_norm"),
    "falcon mamba": (
        lambda: layer("falcon_mamba", "FalconMambaWeightlessRMSNorm", D),
        "FalconMambaWeightlessRMSNorm -> rms_norm (llama cast)",
    ),
    "apertus": (
        lambda: layer("apertus", "ApertusMLP", sized(ApertusConfig)),
        "ApertusMLP -> recomputed",
    ),
    "minimax": (minimax, "MiniMaxM3VLDenseMLP -> recomputed"),
    "nemotron": (
        lambda: layer("nemotron", "NemotronLayerNorm1P", D),
        "NemotronLayerNorm1P -> layer_norm (offset 1)",
    ),
    "bitnet": (
        lambda: layer("bitnet", "BitNetMLP", sized(BitNetConfig)),
        "BitNetMLP -> recomputed",
    ),
    "falcon h1": (
        lambda: layer(
            "falcon_h1", "FalconH1MLP", sized(FalconH1Config, mlp_multipliers=[0.3, 1.7])
        ),
        "FalconH1MLP -> recomputed",
    ),
    "seed oss": (
        lambda: layer("seed_oss", "SeedOssMLP", sized(SeedOssConfig)),
        "SeedOssMLP -> gated_mlp (silu)",
    ),
}


def results(module, x):
    torch.manual_seed(1)
    y = module(x)
    return [y, *torch.autograd.grad(y.cos().sum(), [x, *module.parameters()])]


@pytest.mark.parametrize(("make", "change"), SWAPPED.values(), ids=list(SWAPPED))
def test_swapped_and_trained_as_before(make, change):
    module = make().train()
    eager, x = copy.deepcopy(module), randn(2, 5, D)
    report = fuse(module)
    assert report.swapped == {"": change}
    for ours, theirs in zip(results(module, x), results(eager, x), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert report.fallbacks == {}
    assert "not run fused" not in str(report)


LEFT = {
    "mobilebert": lambda: layer("mobilebert", "NoNorm", D),
    "detr": lambda: layer("detr", "DetrFrozenBatchNorm2d", D),
    "cohere, weights of heads": lambda: layer("cohere", "CohereLayerNorm", (4, 8)),
    "vitdet": lambda: layer("vitdet", "VitDetLayerNorm", D),
}


@pytest.mark.parametrize("make", LEFT.values(), ids=list(LEFT))
def test_left_and_named(make):
    report = fuse(make())
    assert report.swapped == {}
    assert list(report.left) == [""]


def test_llama_has_nothing_to_name():
    config = sized(LlamaConfig, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    model = transformers_cases.transformers.LlamaForCausalLM(config)
    assert fuse(model, verify=False).left == {}
