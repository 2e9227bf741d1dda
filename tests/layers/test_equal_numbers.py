"""LayerNorm of a row of equal numbers is its bias: nothing is left to divide by next to nothing."""

import pytest
import torch
from support import DEVICE

from fusedckpt import functional
from fusedckpt.kernels import aten
from fusedckpt.kernels.norm import MAX_BLOCK, NormRule


def equal_rows(n: int) -> torch.Tensor:
    return torch.tensor([0.1, -1.7, 300.3]).to(DEVICE)[:, None].expand(3, n)


@pytest.mark.parametrize("n", [7, 33, 1000, MAX_BLOCK + 5])
def test_kernels_return_the_bias(n):
    x = equal_rows(n).detach().requires_grad_()
    weight = torch.randn(n, device=DEVICE, requires_grad=True)
    bias = torch.randn(n, device=DEVICE)
    y = functional.layer_norm(x, (n,), weight, bias)
    assert torch.equal(y, bias.expand(3, n))
    (dw,) = torch.autograd.grad(y, weight, torch.randn_like(y))
    assert not dw.any()


@pytest.mark.parametrize("n", [7, 33, 1000])
def test_aten_returns_zeros(n):
    """Where torch has no kernel: float32 in, bfloat16 out."""
    y, _ = aten.norm(equal_rows(n), None, None, None, NormRule("layer", 1e-5), torch.bfloat16)
    assert not y.any()
