"""Routed rows: which kernel multiplies them on which device."""

import pytest
import torch

from fusedckpt.kernels.routed import kernel_for


@pytest.mark.skipif(torch.version.hip is not None, reason="capabilities of NVIDIA's devices")
@pytest.mark.parametrize(
    ("capability", "kernel"),
    [
        ((8, 0), "triton"),
        ((8, 9), "triton"),
        ((9, 0), "torch"),
        ((10, 0), "torch"),
        ((10, 3), "torch"),
        # torch's grouped product is a loop there, which waits for the device
        ((12, 0), "triton"),
    ],
)
def test_grouped_products_never_wait_for_the_device(capability, kernel, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda")
    assert kernel_for("triton", device, torch.bfloat16, 64, 128) == kernel
    assert kernel_for("triton", device, torch.bfloat16, 63, 128) == "triton"
    assert kernel_for("triton", device, torch.float16, 64, 128) == "triton"
