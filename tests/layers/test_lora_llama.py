"""What an all-linear LoRA Llama saves beside eager, and that it trains as eager does."""

import pytest
import torch
from lora_llama import llama
from support import DEVICE, compare, randn, saved_bytes

import fusedckpt


@pytest.mark.parametrize(("save", "most"), [("inputs", 0.35), ("preact", 0.6)])
def test_saved_bytes(save, most):
    x = randn(2, 256, 256, dtype=torch.bfloat16)
    found = [saved_bytes(llama(level).to(DEVICE, torch.bfloat16), [x]) for level in (None, save)]
    assert found[1] <= most * found[0]


def test_gradients():
    ours, eager = (llama(save, d=32, f=48).to(DEVICE) for save in ("inputs", None))
    truth = llama(None, d=32, f=48).to(DEVICE).double()

    def call(model, x, *adapters):
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        return torch.func.functional_call(model, dict(zip(names, adapters, strict=True)), (x,))

    def inputs():
        trained = [p.detach().clone() for p in ours.parameters() if p.requires_grad]
        return [randn(2, 9, 32), *(p.requires_grad_() for p in trained)]

    compare(
        lambda *given: call(ours, *given),
        lambda *given: call(truth if given[0].dtype == torch.float64 else eager, *given),
        inputs,
    )


def test_checkpointed_layers_equal():
    x, model = randn(2, 9, 32), llama("inputs", d=32, f=48, dropout=0.1).to(DEVICE)
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    torch.manual_seed(3)
    wanted = torch.autograd.grad(model(x).square().mean(), leaves)
    torch.manual_seed(3)
    y = x
    for layer in model:
        y = fusedckpt.checkpoint(layer, y)
    for a, b in zip(torch.autograd.grad(y.square().mean(), leaves), wanted, strict=True):
        torch.testing.assert_close(a, b)
