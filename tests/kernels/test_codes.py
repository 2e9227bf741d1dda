"""Codes of four-step derivatives: bits against a float32 reference, and every special value."""

import math

import pytest
import torch
from support import DEVICE, HALF, launches

from fusedckpt.kernels import codes
from fusedckpt.kernels.activations import ACTIVATIONS
from fusedckpt.kernels.codes import APPROXIMATE, coded_act, coded_grad, width_of
from fusedckpt.kernels.runtime import HAS_TRITON, IS_INTERPRETED

PATHS = ["aten", pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="Triton"))]
paths = pytest.mark.parametrize("path", PATHS)
each = pytest.mark.parametrize("name", APPROXIMATE)


def reference(name, z, dh):
    """Return dh times the slope of z, in float32, and rounded once."""
    steps, wide = APPROXIMATE[name], torch.promote_types(z.dtype, torch.float32)
    boundaries, slopes = (torch.tensor(t, dtype=wide, device=z.device) for t in steps)
    places = (z.to(wide)[..., None] > boundaries).sum(-1)
    return (dh.to(wide) * slopes[places]).to(dh.dtype)


def evaluate(path, name, z, dh):
    """Return act(z) and its gradient, each written over its own operand."""
    h, dz = z.clone(), dh.clone()
    with launches() as count:
        found, packed = coded_act(h, name, path, out=h)
        coded_grad(dz, packed, name, path, out=dz)
    assert found is h
    assert packed.shape == (z.shape[0], width_of(z.shape[1]))
    assert count == ({} if path == "aten" else {"coded_act_kernel": 1, "coded_grad_kernel": 1})
    return h, dz


def special(name, dtype):
    """Return every special value, each boundary, and its neighbors."""
    tiny, info = torch.tensor(0.0, dtype=dtype), torch.finfo(dtype)
    up, down = torch.tensor(math.inf, dtype=dtype), torch.tensor(-math.inf, dtype=dtype)
    numbers = [0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, info.max, info.min]
    numbers += [torch.nextafter(tiny, up).item(), torch.nextafter(tiny, down).item(), info.tiny]
    for boundary in APPROXIMATE[name].boundaries:
        at = torch.tensor(boundary, dtype=dtype)
        numbers += [at.item(), torch.nextafter(at, up).item(), torch.nextafter(at, down).item()]
    return torch.tensor(numbers, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF, torch.float64], ids=str)
@paths
@each
def test_a_million_values_to_the_bit(name, path, dtype, monkeypatch):
    # the interpreter takes 10 ms for each program
    monkeypatch.setattr(codes, "MAX_COLUMNS", 1 << 16 if IS_INTERPRETED else codes.MAX_COLUMNS)
    if path == "triton" and dtype == torch.float64:
        pytest.skip("float64 runs on ATen alone")
    z = (torch.randn(4, 250_001) * 4).to(DEVICE, dtype)
    dh = torch.randn_like(z)
    h, dz = evaluate(path, name, z, dh)
    assert torch.equal(dz, reference(name, z, dh))
    # the kernels' last digits are test_activations'
    exact = ACTIVATIONS[name].eager(z.double())
    assert (h.double() - exact).abs().max() <= 8 * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@paths
@each
def test_special_values_to_the_bit(name, path, dtype):
    z = special(name, dtype).to(DEVICE)
    for factor in (1.0, -0.0, math.inf, math.nan):
        dh = torch.full_like(z, factor)
        _, dz = evaluate(path, name, z[None], dh[None])
        want = reference(name, z, dh)
        assert torch.equal(dz[0].isnan(), want.isnan())
        bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        keeps = ~want.isnan()
        assert torch.equal(dz[0][keeps].view(bits), want[keeps].view(bits))


@pytest.mark.parametrize("shape", [(3, 1), (1, 17), (5, 45), (2, 70), (1, 130), (0, 8), (4, 0)])
@paths
def test_widths_that_four_does_not_divide(path, shape):
    z = torch.randn(shape, device=DEVICE)
    dh = torch.randn(*shape[:-1], shape[1] + 3, device=DEVICE)[:, : shape[1]]
    path = "aten" if 0 in shape else path
    _, packed = coded_act(z, "silu", path)
    assert packed.numel() == shape[0] * math.ceil(shape[1] / 4)
    assert torch.equal(coded_grad(dh, packed, "silu", path), reference("silu", z, dh))
