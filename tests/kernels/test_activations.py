"""Every activation on every path: value, derivative, extremes, and the names people use."""

import math

import pytest
import torch
from support import DEVICE, HALF, launches
from torch import nn

from fusedckpt.kernels.activations import ACTIVATIONS, CANONICAL, activation_name_of
from fusedckpt.kernels.linear import HiddenGrad, hidden, hidden_grad
from fusedckpt.kernels.runtime import HAS_TRITON

each = pytest.mark.parametrize("name", ACTIVATIONS)
PATHS = ["aten", pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="Triton"))]


def evaluate(path, name, z, dh):
    """Return act(z) and dh * act'(z), each written over its own operand."""
    h, dz = z.clone(), z.clone()
    with launches() as count:
        hidden(h, None, name, path, h)
        hidden_grad(dh, HiddenGrad(dz, None, None, dz, None), name, (False, False), path)
    assert count == ({} if path == "aten" else {"act_kernel": 1, "act_grad_kernel": 1})
    return h, dz


def eager(name, z, dh):
    z = z.detach().clone().requires_grad_()
    h = ACTIVATIONS[name].eager(z)
    return h.detach(), torch.autograd.grad(h, z, dh)[0]


# worst errors of value and derivative over `dense_grid`, in eps of the dtype times the larger of
# |truth| and a floor: float32, bfloat16, float16. Half of one is the rounding of the result. The
# kernels' bounds are at most twice what was measured, in the interpreter. Where they are large,
# digits cancel: in erf's tail, and where a derivative passes through zero
FLOORS = 2.0**-14, 2.0**-10
BOUNDS = {
    "identity": ((0, 0), (0, 0), (0, 0)),
    "relu": ((0, 0), (0, 0), (0, 0)),
    "relu2": ((0.5, 0), (0.5, 0), (0.5, 0)),
    "leaky_relu": ((1, 0.28), (0.5, 0.19), (0.5, 0.33)),
    "gelu": ((17000, 190), (0.5, 0.5), (0.5, 1.3)),
    "gelu_tanh": ((14, 87), (0.5, 0.5), (0.51, 0.5)),
    "quick_gelu": ((8.7, 35), (0.5, 0.5), (0.51, 0.5)),
    "silu": ((2.2, 71), (0.5, 0.5), (0.51, 0.5)),
    "sigmoid": ((2.1, 3.2), (0.5, 0.5), (0.5, 0.5)),
    "tanh": ((2.2, 3.5), (0.5, 0.5), (0.5, 0.5)),
    "softplus": ((2.9, 2.1), (0.5, 0.5), (0.5, 0.5)),
    "mish": ((3.3, 430), (0.5, 0.5), (0.5, 0.5)),
}


def dense_grid(dtype):
    """Return z [32, 256]: dense around zero, then to the ends of what the dtype holds."""
    top = math.log10(min(torch.finfo(dtype).max, 1e18))
    ends = torch.logspace(-8, top, 512, dtype=torch.float64)
    dense = torch.linspace(-30, 30, 7168, dtype=torch.float64)
    return torch.cat([dense, ends, -ends]).to(DEVICE, dtype).view(32, 256)


def worst_errors(found, truth):
    """Return the largest error of value and derivative in the units of BOUNDS."""
    worst = []
    for mine, exact, floor in zip(found, truth, FLOORS, strict=True):
        inside = exact.to(mine.dtype).isfinite()
        assert torch.equal(mine.isfinite(), inside)
        unit = torch.finfo(mine.dtype).eps * exact.abs().clamp_min(floor)
        worst.append(((mine.double() - exact).abs() / unit)[inside].max().item())
    return worst


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("path", PATHS)
@each
def test_error_table(name, path, dtype):
    """No worse than the table on the kernels, nor than a few of torch's own errors anywhere."""
    z = dense_grid(dtype)
    dh = torch.ones_like(z)
    truth = eager(name, z.double(), dh.double())
    ours = worst_errors(evaluate(path, name, z, dh), truth)
    theirs = worst_errors(eager(name, z, dh), truth)
    bounds = BOUNDS[name][[torch.float32, *HALF].index(dtype)]
    is_near = all(mine <= 3 * other + 1 for mine, other in zip(ours, theirs, strict=True))
    assert is_near, f"measured {ours}, torch itself {theirs}: use a formula that loses fewer digits"
    if path == "triton" and DEVICE.type == "cpu":
        # a GPU's exp is another one
        within = [bound / 2 <= mine <= bound for mine, bound in zip(ours, bounds, strict=True)]
        assert all(within), f"measured {ours}, BOUNDS have {bounds}"


@pytest.mark.skipif(not HAS_TRITON, reason="Triton")
def test_erf_gelu_keeps_its_tail_in_bfloat16():
    """Value and derivative to half a unit in the last place where torch's erf has no digit left."""
    z = torch.linspace(-12.5, -1, 4096).to(DEVICE, torch.bfloat16).view(32, 128)
    # normal down to -12.5; the float64 of torch loses that tail too
    x = z.double()
    cdf = torch.special.erfcx(-x / 2**0.5) / 2 * torch.exp(-x * x / 2)
    density = torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5
    for found, exact in zip(
        evaluate("triton", "gelu", z, torch.ones_like(z)), (x * cdf, cdf + x * density), strict=True
    ):
        assert ((found.double() / exact - 1).abs() <= 0.51 * torch.finfo(z.dtype).eps).all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("path", PATHS)
@each
def test_extremes_go_where_torch_sends_them(name, path, dtype):
    values = [0.0, -0.0, 1e-30, 20.0, 21.0, 90.0, 1e4, 1e30, float("inf")]
    z = torch.tensor([*values, *(-v for v in values), float("nan")]).to(DEVICE, dtype)
    # where the derivative is zero by definition, not by underflow, an infinite dh stops
    stops = [float("inf")] if name in ("relu", "relu2", "leaky_relu", "identity") else []
    dh = torch.tensor([1.0, 0.0, float("nan"), *stops]).to(DEVICE, dtype)
    z, dh = (t.contiguous() for t in torch.broadcast_tensors(z[:, None], dh[None, :]))
    spoiled = z.isnan(), z.isnan() | dh.isnan()
    columns = zip(evaluate(path, name, z, dh), eager(name, z, dh), spoiled, strict=True)
    for ours, theirs, nan in columns:
        assert ours[nan & theirs.isnan()].isnan().all()
        # torch's vectorized erf-GELU, for one, makes NaN of inf: the limit is as good
        ours = torch.where(theirs.isnan(), theirs, ours)
        torch.testing.assert_close(ours, theirs, equal_nan=True)


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
        assert activation_name_of(module(**ACTIVATIONS[name].module_state)) == name
    assert activation_name_of(nn.ReLU(inplace=True)) == "relu"
    for module in (nn.LeakyReLU(0.2), nn.Softplus(2.0), nn.ELU(), nn.Identity(), nn.Linear(1, 1)):
        assert activation_name_of(module) is None
