"""Memory-sharing norms: bytes exactly, gradients from the result, and merging of weights."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, compare, randn, saved_bytes
from torch import nn
from torch.utils import checkpoint as stock

import fusedckpt
from fusedckpt import MSLayerNorm, MSRMSNorm, merge_affine, unmerge_affine

T, D, H = 24, 16, 40
KINDS = {"layer": (MSLayerNorm, F.layer_norm), "rms": (MSRMSNorm, F.rms_norm)}
each = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("shape", [(D,), (7, 1), (2, 5, 70), (4, 0), (0, D), (3, 1000)])
@each
def test_saves_its_result_and_rstd(kind, shape):
    make, theirs = KINDS[kind]
    ours, n = make(shape[-1], eps=1e-3), shape[-1:]
    compare(ours, lambda x: theirs(x, n, eps=1e-3), lambda: [randn(*shape)])
    rows = torch.empty(shape[:-1]).numel()
    assert saved_bytes(ours, [randn(*shape)]) == 4 * rows * (shape[-1] + 1)


@each
def test_other_dtypes(kind):
    make, theirs = KINDS[kind]
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        compare(make(300), lambda x: theirs(x, (300,)), lambda d=dtype: [randn(T, 300, dtype=d)])
        x = torch.randn(300, T, dtype=dtype, device=DEVICE).t().requires_grad_()
        assert saved_bytes(make(300), [x]) == T * (300 * dtype.itemsize + max(4, dtype.itemsize))


@each
def test_the_linear_shares_the_result(kind):
    norm, linear = KINDS[kind][0](D), nn.Linear(D, H).to(DEVICE)
    x = randn(2, T, D)
    assert saved_bytes(lambda x: linear(norm(x)), [x]) == 2 * T * (4 * D + 4)
    # rows of equal numbers
    same = torch.ones(T, D, device=DEVICE).requires_grad_()
    norm(same).sum().backward()
    assert same.grad.isfinite().all()


def test_other_ways_to_call():
    norm, x, dy = MSLayerNorm(D).to(DEVICE), randn(T, D), torch.randn(T, D, device=DEVICE)
    want = torch.autograd.grad(norm(x), x, dy)[0]
    for run in (fusedckpt.checkpoint, lambda *a: stock.checkpoint(*a, use_reentrant=False)):
        assert torch.equal(torch.autograd.grad(run(norm, x), x, dy)[0], want)
    y = norm(x)
    batch = torch.stack([dy, 2 * dy])
    found = torch.autograd.grad(y, x, batch, is_grads_batched=True, retain_graph=True)[0]
    assert torch.equal(found[0], want)
    assert torch.autograd.gradgradcheck(MSLayerNorm(5), randn(3, 5, dtype=torch.float64))
    assert torch.autograd.gradgradcheck(MSRMSNorm(5), randn(3, 5, dtype=torch.float64))
    exact = torch.func.grad(lambda x: (F.layer_norm(x, (D,)) * dy).sum())(x)
    torch.testing.assert_close(torch.func.grad(lambda x: (norm(x) * dy).sum())(x), exact)
    y = norm(x)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class QueriesAndKeys(nn.Module):
    """A norm, and the linears that read it."""

    def __init__(self, norm, bias=True):
        super().__init__()
        self.norm = norm
        self.q, self.k = nn.Linear(D, H, bias), nn.Linear(D, H)

    def forward(self, x):
        n = self.norm(x)
        return self.q(n.reshape(-1, D)) * self.k(n).reshape(-1, H)

    @property
    def linears(self):
        return self.q, self.k


def drawn(norm, *args, **options):
    torch.manual_seed(0)
    norm = norm(D)
    for p in norm.parameters():
        nn.init.normal_(p, 1)
    return QueriesAndKeys(norm, *args, **options).to(DEVICE)


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm, nn.RMSNorm, lambda d: fusedckpt.RMSNorm(d, offset=1.0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merged_and_back(norm, dtype):
    model, x = drawn(norm, bias=False).to(dtype), torch.randn(2, T, D, device=DEVICE, dtype=dtype)
    weights, want = copy.deepcopy(model.state_dict()), model.double()(x.double())
    model.to(dtype).load_state_dict(weights)
    old, plain = model.norm, model(x)
    model.norm = merge_affine(old, *model.linears)
    assert type(model.norm) is (MSLayerNorm if norm is nn.LayerNorm else MSRMSNorm)
    assert (model.q.bias is None) == (norm is not nn.LayerNorm)
    error, eagers = (abs(y.double() - want).square().mean().sqrt() for y in (model(x), plain))
    assert error <= 2 * eagers + 8 * torch.finfo(torch.float32).eps * want.square().mean().sqrt()
    unmerge_affine(old, *model.linears)
    model.norm = old
    for name, t in weights.items():
        tolerance = torch.finfo(dtype).eps
        torch.testing.assert_close(
            model.state_dict()[name], t, rtol=tolerance, atol=8 * tolerance * t.abs().max().item()
        )


def test_refusals():
    model = drawn(nn.LayerNorm)
    with pytest.raises(ValueError, match=r"linears\[0\] must have 16 in_features"):
        merge_affine(model.norm, nn.Linear(3, 3))
    with pytest.raises(TypeError, match=r"linears\[0\] must be an nn.Linear"):
        merge_affine(model.norm, nn.Bilinear(D, D, 1))
    with pytest.raises(TypeError, match=r"norm must be an nn\.LayerNorm or nn.RMSNorm"):
        merge_affine(nn.BatchNorm1d(D), model.q)
    with pytest.raises(ValueError, match="norm must have a weight"):
        merge_affine(nn.LayerNorm(D, elementwise_affine=False), model.q)
    nn.init.zeros_(model.norm.weight)
    with pytest.raises(ValueError, match="must not have zeros"):
        unmerge_affine(model.norm, model.q)
    with pytest.raises(ValueError, match="MSLayerNorm: normalized_shape must be one size"):
        MSLayerNorm((2, 3))
    with pytest.raises(TypeError, match=r"MSRMSNorm: x must be floating point, got torch\.int"):
        MSRMSNorm(3)(torch.ones(3, dtype=torch.int64))
