"""Fused transformers models under checkpoints: equal gradients, and no GEMM run for nothing."""

from functools import partial

import pytest
import torch
from support import flops
from torch import nn
from transformers_cases import MODELS

import fusedckpt

# test_transformers.py compares what is swapped of these models
pytestmark = pytest.mark.usefixtures("unverified")

# each with its blocks, and the weight of the last GEMM where that ends a block's fused MLP
BLOCKS = {
    "llama": ("model.layers", "mlp.down_proj.weight"),
    "gemma2": ("model.layers", None),
    "gpt2": ("transformer.h", "mlp.c_proj.weight"),
    "bert": ("bert.encoder.layer", None),
}


@pytest.fixture(params=BLOCKS)
def fused(request):
    """A fused model in training mode, its inputs, its blocks, and the FLOPs of their last GEMMs."""
    case = MODELS[request.param]
    model = case.build().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    model.config.attention_probs_dropout_prob = 0.0
    # a block that writes into a cache does not do the same twice
    model.config.use_cache = False
    assert fusedckpt.fuse(model).swapped
    layers, weight = BLOCKS[request.param]
    inputs, last = case.inputs(), 0
    if weight is not None:
        shape = model.get_parameter(f"{layers}.0.{weight}").shape
        last = 2 * inputs["input_ids"].numel() * shape.numel()
    return model, inputs, [f"{layers}.{i}" for i in range(2)], 2 * last


def step(model, inputs) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def counted(model, inputs) -> tuple[int, list[torch.Tensor]]:
    found = []
    return flops(lambda: found.extend(step(model, inputs))), found


def forward_of_blocks(model, inputs, blocks) -> int:
    """Return the FLOPs of the blocks' forwards."""
    counts = []

    def counting(forward, *args, **kwargs):
        outputs = []
        counts.append(flops(lambda: outputs.append(forward(*args, **kwargs))))
        return outputs[0]

    for name in blocks:
        block = model.get_submodule(name)
        block.forward = partial(counting, block.forward)
    with torch.no_grad():
        model(**inputs)
    for name in blocks:
        del model.get_submodule(name).forward
    return sum(counts)


@pytest.mark.parametrize("way", ["reentrant", "non-reentrant", "ours"])
def test_every_blocks_forward_runs_once_more(fused, way):
    """And no GEMM of a fused layer a third time.

    But for a reentrant recompute, not even the last GEMM of a block that ends in one runs again.
    """
    model, inputs, blocks, last = fused
    with fusedckpt.saving("preact"):
        least, expected = counted(model, inputs)
    again = forward_of_blocks(model, inputs, blocks)
    if way == "ours":
        for name in blocks:
            model.set_submodule(name, fusedckpt.checkpoint_module(model.get_submodule(name)))
    else:
        enable = getattr(model, "activation_checkpointing_enable", None)
        enable = enable or model.gradient_checkpointing_enable
        enable({"use_reentrant": way == "reentrant"})
    total, found = counted(model, inputs)
    assert total == least + again - (0 if way == "reentrant" else last)
    torch.testing.assert_close(found, expected)
