"""Layers of transformers that fuse once neither swapped nor named, or that never ran fused."""

import copy

import pytest
import torch
from support import DEVICE, randn
from torch import nn
from transformers_cases import transformers

from fusedckpt import fuse

D, H = 32, 48


def layer(folder: str, name: str, *args, **kwargs) -> nn.Module:
    module = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    if not hasattr(module, name):
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(0)
    return getattr(module, name)(*args, **kwargs).to(DEVICE)


def mlp(config: str, folder: str, name: str, **options) -> nn.Module:
    if not hasattr(transformers, config):
        pytest.skip(f"this transformers has no {config}")
    return layer(folder, name, getattr(transformers, config)(hidden_size=D, **options))


SWAPPED = {
    "cohere": (lambda: layer("cohere", "CohereLayerNorm", D), "CohereLayerNorm -> layer_norm"),
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
    "minimax": (
        lambda: mlp(
            *("MiniMaxM3VLTextConfig", "minimax_m3_vl", "MiniMaxM3VLDenseMLP"),
            dense_intermediate_size=H,
        ),
        "MiniMaxM3VLDenseMLP -> recomputed",
    ),
    "falcon h1": (
        lambda: mlp(
            *("FalconH1Config", "falcon_h1", "FalconH1MLP"),
            intermediate_size=H,
            mlp_multipliers=[0.3, 1.7],
        ),
        "FalconH1MLP -> recomputed",
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
    torch.testing.assert_close(results(module, x), results(eager, x))
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
