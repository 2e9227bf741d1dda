"""Fused transformers models under autocast, and compiled."""

import copy

import pytest
import torch
from support import DEVICE
from transformers_cases import MODELS, tokens

from fusedckpt import fuse


def pair(name="llama", **options):
    torch.manual_seed(0)
    eager = MODELS[name].build(**options)
    fused = copy.deepcopy(eager)
    assert fuse(fused).swapped
    return eager, fused


def grads(model, inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_close(ours, theirs, tol):
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@pytest.mark.parametrize("name", ["gemma", "gpt2", "t5"])
def test_autocast(name):
    eager, fused = (model.eval() for model in pair(name))
    inputs = tokens()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        ours, theirs = grads(fused, inputs), grads(eager, inputs)
    truth = grads(eager, inputs)
    for a, b, t in zip(ours, theirs, truth, strict=True):
        assert a.dtype == b.dtype
        mine, eagers = ((x - t).double().square().mean().sqrt().item() for x in (a, b))
        # of few numbers: the contract's factor of two holds over many
        assert mine <= 3 * eagers + 1e-6


def test_a_layer_compiles_to_one_graph():
    eager, fused = (model.eval() for model in pair())
    torch._dynamo.reset()
    x = torch.randn(2, 6, 32, device=DEVICE)
    positions = torch.arange(6, device=DEVICE)[None]
    options = {"position_embeddings": eager.model.rotary_emb(x, positions)}
    found = []
    for model in (eager, fused):
        layer = model.model.layers[0]
        if model is fused:
            layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
        leaf = x.clone().requires_grad_(True)
        y = layer(leaf, **options)
        y = y if torch.is_tensor(y) else y[0]
        found.append([y, *torch.autograd.grad(y.sin().sum(), [leaf, *layer.parameters()])])
    assert_close(*reversed(found), 1e-4)
