"""Every activation on every path: value, derivative, extremes, and the names people use."""

import pytest
import torch
from support import DEVICE, HALF, launches, squared
from torch import nn

from fusedckpt.kernels.activations import ACTIVATIONS, CANONICAL, name_of
from fusedckpt.kernels.hidden import hidden, hidden_grad
from fusedckpt.kernels.runtime import HAS_TRITON

each = pytest.mark.parametrize("name", ACTIVATIONS)
PATHS = ["aten", pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="Triton"))]


def evaluate(path, name, z, dh):
    """Return act(z) and dh * act'(z), each written over its own operand."""
    h, dz = z.clone(), z.clone()
    with launches() as count:
        hidden(h, None, h, name, path)
        hidden_grad(dh, dz, None, None, dz, None, name, (False, False), path)
    assert count == ({} if path == "aten" else {"act_kernel": 1, "act_grad_kernel": 1})
    return h, dz


def eager(name, z, dh):
    z = z.detach().clone().requires_grad_()
    h = ACTIVATIONS[name].eager(z)
    return h.detach(), torch.autograd.grad(h, z, dh)[0]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("path", PATHS)
@each
def test_value_and_derivative(name, path, dtype):
    z = torch.cat([torch.linspace(-12, 12, 961), torch.randn(1087)]).to(DEVICE, dtype).view(8, 256)
    dh = torch.randn_like(z)
    ours, theirs = evaluate(path, name, z, dh), eager(name, z, dh)
    truth = eager(name, z.double(), dh.double())
    for mine, other, exact in zip(ours, theirs, truth, strict=True):
        mine, other = (squared(found - exact) ** 0.5 for found in (mine, other))
        assert mine <= 2 * other + 8 * torch.finfo(torch.float32).eps * squared(exact) ** 0.5


@pytest.mark.parametrize("path", PATHS)
@each
def test_extremes_go_where_torch_sends_them(name, path):
    values = [0.0, -0.0, 1e-30, 20.0, 21.0, 90.0, 1e4, 1e30, float("inf")]
    z = torch.tensor([*values, *(-v for v in values), float("nan")], device=DEVICE)
    # where the derivative is zero by definition, not by underflow, an infinite dh stops
    stops = [float("inf")] if name in ("relu", "relu2", "leaky_relu", "identity") else []
    dh = torch.tensor([1.0, 0.0, float("nan"), *stops], device=DEVICE)
    z, dh = (t.contiguous() for t in torch.broadcast_tensors(z[:, None], dh[None, :]))
    spoiled = z.isnan(), z.isnan() | dh.isnan()
    found = zip(evaluate(path, name, z, dh), eager(name, z, dh), spoiled, strict=True)
    for ours, theirs, nan in found:
        assert ours[nan & theirs.isnan()].isnan().all()
        # torch's vectorised erf-GELU, for one, makes NaN of inf: the limit is as good
        ours = torch.where(theirs.isnan(), theirs, ours)
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@each
def test_float64_takes_the_aten_path(name):
    z, dh = torch.randn(2, 64, dtype=torch.float64, device=DEVICE).unbind()
    z, dh = z.view(8, 8), dh.view(8, 8)
    for ours, theirs in zip(evaluate("aten", name, z, dh), eager(name, z, dh), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_names_of_transformers():
    activations = pytest.importorskip("transformers.activations")
    z = torch.randn(64, dtype=torch.float64)
    known = set(CANONICAL) & set(activations.ACT2FN)
    assert {"gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "silu"} <= known
    for name in known:
        torch.testing.assert_close(
            ACTIVATIONS[CANONICAL[name]].eager(z), activations.ACT2FN[name](z), rtol=1e-6, atol=1e-6
        )


def test_modules_of_torch():
    named = {name: act.module for name, act in ACTIVATIONS.items() if act.module}
    for name, module in named.items():
        assert name_of(module(**ACTIVATIONS[name].module_state)) == name
    assert name_of(nn.ReLU(inplace=True)) == "relu"
    for module in (nn.LeakyReLU(0.2), nn.Softplus(2.0), nn.ELU(), nn.Identity(), nn.Linear(1, 1)):
        assert name_of(module) is None


def test_names_are_unique():
    names = [name for row, act in ACTIVATIONS.items() for name in (row, *act.aliases)]
    assert len(names) == len(set(names)) == len(CANONICAL)
