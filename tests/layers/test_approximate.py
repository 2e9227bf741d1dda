"""Approximate derivatives in layers: bytes exactly, four-step gradients, refusals."""

import math

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, compare, randn, saved_bytes
from torch import nn
from torch.utils import checkpoint as stock

import fusedckpt
from fusedckpt.functional import regelu2, resilu2
from fusedckpt.kernels.codes import APPROXIMATE

EXACT = {"gelu": F.gelu, "silu": F.silu}
OURS = {"gelu": regelu2, "silu": resilu2}
each = pytest.mark.parametrize("name", EXACT)
T, D, H = 24, 16, 42
CODES = T * math.ceil(H / 4)


def four_steps(name):
    """Return the activation whose gradient is dy times the slope of x."""

    class Reference(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return EXACT[name](x)

        @staticmethod
        def backward(ctx, dy):
            boundaries, slopes = (dy.new_tensor(t, dtype=dy.dtype) for t in APPROXIMATE[name])
            return dy * slopes[(ctx.saved_tensors[0][..., None] > boundaries).sum(-1)]

    return Reference.apply


@pytest.mark.parametrize("shape", [(), (1,), (5, 7), (2, 3, 64), (4, 0), (0, 3)])
@each
def test_function_saves_two_bits_an_element(name, shape, path):
    x = randn(shape)
    rows, n = math.prod(shape[:-1]), shape[-1] if shape else 1
    assert saved_bytes(OURS[name], [x]) == rows * math.ceil(n / 4)
    compare(OURS[name], four_steps(name), lambda: [randn(shape)])
    y = OURS[name](x.detach())
    assert y.shape == x.shape
    assert not y.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_function_in_other_dtypes(dtype, path):
    z = torch.randn(9, 65, dtype=dtype, device=DEVICE).t().requires_grad_()
    # products of eager half precision are rounded as ours: from float32, once
    assert saved_bytes(regelu2, [z]) == 65 * 3
    grads = [torch.autograd.grad(fn(z).sum(), z)[0] for fn in (regelu2, four_steps("gelu"))]
    torch.testing.assert_close(*grads, rtol=torch.finfo(dtype).eps, atol=0)


def test_module_is_the_function():
    for module, exact in ((fusedckpt.ReGELU2(), F.gelu), (fusedckpt.ReSiLU2(), F.silu)):
        x = randn(T, H)
        assert saved_bytes(module, [x]) == CODES
        torch.testing.assert_close(module(x), exact(x))


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["ours", "stock", "reentrant"])
def test_inside_checkpoints(reentrant):
    mlp = fusedckpt.MLP(D, H, norm=nn.LayerNorm(D), residual=True)
    model = nn.Sequential(mlp, fusedckpt.ReGELU2()).to(DEVICE).requires_grad_(False)
    x, dy = randn(T, D), torch.randn(T, D, device=DEVICE)
    want = torch.autograd.grad(model(x), x, dy)[0]
    if reentrant is None:
        y = fusedckpt.checkpoint(model, x)
    else:
        y = stock.checkpoint(model, x, use_reentrant=reentrant)
    y.backward(dy)
    assert torch.equal(x.grad, want)


def test_other_ways_to_call():
    x = randn(T, H)
    with pytest.raises(RuntimeError, match="create_graph=True cannot differentiate"):
        torch.autograd.grad(regelu2(x).sum(), x, create_graph=True)
    y = regelu2(x)
    batch = torch.randn(2, T, H, device=DEVICE)
    found = torch.autograd.grad(y, x, batch, is_grads_batched=True, retain_graph=True)[0]
    for dy, grad in zip(batch, found, strict=True):
        assert torch.equal(torch.autograd.grad(y, x, dy, retain_graph=True)[0], grad)
    # transforms take the exact activation
    exact = torch.func.grad(lambda x: F.gelu(x).sum())(x)
    assert torch.equal(torch.func.grad(lambda x: regelu2(x).sum())(x), exact)


def test_refusals():
    with pytest.raises(TypeError, match="regelu2: x must be a tensor, got list"):
        regelu2([1.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="resilu2: x must be floating point, got"):
        resilu2(torch.ones(3, dtype=torch.int64))
