"""Quantized weights of other libraries, where they are installed: torchao, bitsandbytes."""

import pytest
import torch
from support import compare, randn
from torch import nn

from fusedckpt import functional
from fusedckpt.blocks import quantized

T = 17


def torchao_weight(config):
    api = pytest.importorskip("torchao.quantization")
    if config == "nf4":
        nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
        return nf4.to_nf4(torch.randn(64, 64, dtype=torch.bfloat16), 64, 64)
    module = nn.Sequential(nn.Linear(64, 32, bias=False)).bfloat16()
    try:
        api.quantize_(module, getattr(api, config)())
    except ImportError as error:
        pytest.skip(str(error))
    return module[0].weight


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "nf4"])
def test_torchao(config, monkeypatch):
    w = torchao_weight(config)
    dense = w.get_original_weight() if config == "nf4" else w.dequantize()
    x = torch.randn(T, 64, dtype=torch.bfloat16, requires_grad=True)
    y = functional.linear_act(x, w, activation="identity")
    assert "LayerFunction" in type(y.grad_fn).__name__
    assert torch.equal(y, nn.functional.linear(x, dense))
    monkeypatch.setattr(quantized, "PIECE_BYTES", 1)
    compare(
        lambda x: functional.linear_act(x, w, activation="identity"),
        lambda x: nn.functional.linear(x, dense.to(x.dtype)),
        lambda: [randn(T, 64, dtype=torch.bfloat16)],
    )
    w = torchao_weight("Int8DynamicActivationInt8WeightConfig")
    assert quantized.quantized(w) is None
    y = functional.linear_act(x, w, activation="identity")
    assert torch.equal(y, nn.functional.linear(x, w))


@pytest.mark.parametrize("kind", ["Linear4bit", "Linear8bitLt"])
def test_bitsandbytes(kind):
    nn_ = pytest.importorskip("bitsandbytes.nn")
    options = {"compute_dtype": torch.bfloat16} if kind == "Linear4bit" else {}
    if kind == "Linear8bitLt":
        options["has_fp16_weights"] = False
    linear = getattr(nn_, kind)(64, 32, bias=False, **options)
    dense = linear.weight.detach().clone()
    linear = linear.to("cpu")
    x = torch.randn(T, 64, dtype=torch.bfloat16, requires_grad=True)
    y = functional.linear_act(x, linear.weight, activation="identity")
    assert "LayerFunction" in type(y.grad_fn).__name__
    # as near to what was quantized as so few bits are
    wanted = x.float() @ dense.float().T
    relative = (y.float() - wanted).norm() / wanted.norm()
    assert relative < {"Linear4bit": 0.15, "Linear8bitLt": 0.02}[kind]
    if kind == "Linear4bit":
        torch.testing.assert_close(y, linear(x), rtol=0.02, atol=0.02)
    (dx,) = torch.autograd.grad(y.sum(), x)
    (theirs,) = torch.autograd.grad(linear(x).sum(), x)
    torch.testing.assert_close(dx, theirs, rtol=0.05, atol=0.05)
    if kind == "Linear4bit":
        # a layout of its own, for inference
        linear.weight.quant_state.packing_format_for_cpu = True
        assert quantized.quantized(linear.weight) is None
    else:
        # the 8-bit module has taken the scale from its weight
        assert quantized.quantized(linear.weight) is None
        record = quantized.int8(linear.weight.data, linear.state.SCB)
        assert torch.equal(functional.linear_act(x, record, activation="identity"), y)
