"""Every module that is a norm by its forward is swapped or named, weights or none."""

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, compare, randn, saved_bytes
from torch import nn

from fusedckpt import fuse, unfuse

D = 12


class L2(nn.Module):
    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


class UnreadBuffer(L2):
    """Falcon Mamba's: a weight for a kernel that is not there."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Buffer(torch.ones(D))


class ReadBuffer(UnreadBuffer):
    def forward(self, x):
        return super().forward(x) * self.weight


class NoEps(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)


class Unit(nn.Module):
    def forward(self, x):
        return F.normalize(x, dim=-1)


class Standard(nn.Module):
    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)


class KnowsWidth(L2):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / 64 + self.eps)


class OneScale(nn.Module):
    """A scale of one element: as a width it would be a norm of single numbers."""

    def __init__(self, *shape):
        super().__init__()
        self.g = nn.Parameter(torch.full(shape, 2.0))

    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True) * self.g


class Hardcoded(nn.Module):
    """OLMo's."""

    def __init__(self):
        super().__init__()
        self.normalized_shape = (D,)

    def forward(self, x):
        return F.layer_norm(x.float(), self.normalized_shape, None, None, 1e-5).to(x.dtype)


NORMS = {
    "eps a number": (L2, "L2 -> rms_norm (llama cast)"),
    "eps an integer": (lambda: L2(1), "L2 -> rms_norm (llama cast)"),
    "a buffer that it does not read": (UnreadBuffer, "UnreadBuffer -> rms_norm (llama cast)"),
    "layer_norm of a fixed eps": (Hardcoded, "Hardcoded -> layer_norm"),
}


@pytest.mark.parametrize(("make", "change"), NORMS.values(), ids=list(NORMS))
def test_norms_without_weights_are_fused(make, change):
    norm, eager = make().to(DEVICE), make().to(DEVICE)
    assert fuse(norm).swapped == {"": change}
    compare(norm, eager, lambda: [randn(40, D)])
    assert "Block" in norm(randn(3, D)).grad_fn.name()
    half = randn(5, D, dtype=torch.bfloat16)
    assert torch.equal(norm(half), eager(half))
    assert saved_bytes(norm, [randn(4, D)]) == 4 * 4 * D


NORMS_LEFT = {
    "eps in the code": (NoEps, "NoEps is not a known form of RMSNorm"),
    "of length one": (Unit, "Unit is not a known form of RMSNorm"),
    "by a deviation": (Standard, "Standard is not a known form of LayerNorm"),
    "a width in the code": (KnowsWidth, "KnowsWidth is not a known form of RMSNorm"),
    "a scale of one element": (lambda: OneScale(1), "OneScale is not a known form of RMSNorm"),
    "a scale": (OneScale, "OneScale is not a known form of RMSNorm"),
    "a buffer that it reads": (ReadBuffer, "ReadBuffer: its forward reads a tensor that is"),
}


@pytest.mark.parametrize(("make", "reason"), NORMS_LEFT.values(), ids=list(NORMS_LEFT))
def test_norms_by_their_forward_are_named(make, reason):
    report = fuse(make().to(DEVICE))
    assert not report.swapped
    assert report.left[""].startswith(reason)


class WrittenOut(nn.Module):
    """Cohere's LayerNorm: in float32, with no bias."""

    def __init__(self, bias=False):
        super().__init__()
        self.variance_epsilon = 1e-5
        # the bias first: nothing goes by order or name
        self.b = nn.Parameter(torch.randn(D)) if bias else None
        self.w = nn.Parameter(torch.randn(D))

    def forward(self, x):
        wide = x.float()
        mean = wide.mean(-1, keepdim=True)
        variance = (wide - mean).pow(2).mean(-1, keepdim=True)
        y = (wide - mean) * torch.rsqrt(variance + self.variance_epsilon) * self.w.float()
        return (y if self.b is None else y + self.b.float()).to(x.dtype)


class Variance(WrittenOut):
    def forward(self, x):
        variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - mean) / (variance + self.variance_epsilon).sqrt() * self.w


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_norm_that_is_written_out(dtype, bias, path):
    norm = WrittenOut(bias).to(DEVICE, dtype)
    assert fuse(norm).swapped == {"": "WrittenOut -> layer_norm"}
    eager = WrittenOut(bias).to(DEVICE, dtype)
    names = [name for name, _ in norm.named_parameters()]

    def at(module):
        def fn(x, *weights):
            given = dict(zip(names, weights, strict=True))
            return torch.func.functional_call(module, given, (x,))

        return fn

    def make():
        own = (p.detach().clone().requires_grad_() for p in norm.parameters())
        return [randn(40, D, dtype=dtype) + 3, *own]

    compare(at(norm), at(eager), make)
    x = randn(4, D, dtype=dtype)
    assert saved_bytes(norm, [x]) == x.nbytes
    assert "Block" in norm(x).grad_fn.name()


def test_it_keeps_dtypes_and_what_it_computes_in_another():
    norm, eager = WrittenOut().to(DEVICE), WrittenOut().to(DEVICE)
    eager.load_state_dict(norm.state_dict())
    report = fuse(norm)
    for weight in (torch.float32, torch.bfloat16, torch.float64):
        for x in (torch.float32, torch.bfloat16, torch.float64):
            given = randn(5, D, dtype=x)
            ours, theirs = norm.to(weight)(given), eager.to(weight)(given)
            assert ours.dtype == theirs.dtype
            tol = 1e-2 if x == torch.bfloat16 else 1e-5
            torch.testing.assert_close(ours, theirs, rtol=tol, atol=tol)
    # float64 in float32, bit for bit
    assert torch.equal(ours, theirs)
    assert "float64" in report.fallbacks[""]
    assert type(unfuse(norm)) is WrittenOut
    with torch.autocast(DEVICE.type, torch.bfloat16):
        norm, x = fused(WrittenOut()), randn(5, D).bfloat16()
        assert norm(x).dtype == torch.bfloat16


def fused(module):
    assert fuse(module.to(DEVICE)).swapped
    return module


def test_a_variance_of_torch():
    norm, x = fused(Variance()), randn(5, D)
    torch.testing.assert_close(norm(x), unfuse(norm)(x))
