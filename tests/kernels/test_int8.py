"""Values in nine bits: their error, every special value, bytes, and both paths side by side."""

import math

import pytest
import torch
from support import DEVICE, HALF, launches

from fusedckpt.kernels import int8, norm
from fusedckpt.kernels.runtime import HAS_TRITON

PATHS = ["aten", pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="Triton"))]
paths = pytest.mark.parametrize("path", PATHS)
dtypes = pytest.mark.parametrize("dtype", int8.PACKED_DTYPES, ids=str)


def both_ways(path, x):
    """Return x packed, and what becomes of it."""
    with launches() as count:
        packed = int8.pack_int8(x, path)
        y = int8.unpack_int8(packed, torch.empty(x.shape, dtype=x.dtype, device=x.device), path)
    runs = path == "triton" and x.numel() > 0
    assert count == ({"pack_int8_kernel": 1, "unpack_int8_kernel": 1} if runs else {})
    assert packed.nbytes == int8.packed_nbytes(*x.shape)
    return packed, y


def bound(x, limit=127):
    """Return how far each element may be off, but for the rounding to its dtype, in float64."""
    m, n = x.shape
    wide = torch.zeros(m, -(-n // 16) * 16, dtype=torch.float64, device=x.device)
    wide[:, :n] = x.double().abs()
    groups = wide.view(m, -1, 16)
    largest = groups.amax(-1)
    count = torch.full_like(largest, 16)
    count[:, -1] = n - 16 * (largest.shape[1] - 1)
    is_curved = groups.sum(-1) * 4 < largest * count
    # a scale is rounded up by 2**-6 at most
    step = largest * (1 + 2.0**-6) / limit
    squares = groups.mul(largest[..., None]).sqrt() * (1 + 2.0**-6) / limit
    # and half of the step between the squares of 0 and 1
    squares = squares + step[..., None] / (4 * limit)
    bounds = torch.where(is_curved[..., None], squares, step[..., None] / 2)
    return bounds.view(m, -1)[:, :n] + x.double().abs() * torch.finfo(x.dtype).eps / 2


@dtypes
@paths
@pytest.mark.parametrize("shape", [(9, 64), (3, 1), (1, 17), (5, 45), (2, 70), (1, 130), (40, 80)])
def test_half_a_step_at_most(path, dtype, shape):
    """Also of rows whose magnitudes float16's scales would lose, or not hold."""
    m, n = shape
    x = torch.randn(m, n, device=DEVICE) * 10.0 ** torch.randint(-30, 36, (m, 1), device=DEVICE)
    x = x.clamp(-1e30, 1e30) if dtype != torch.float16 else torch.randn(m, n, device=DEVICE) * 100
    x = x.to(dtype)
    _, y = both_ways(path, x)
    assert ((y.double() - x.double()).abs() <= bound(x)).all()


@dtypes
@paths
def test_values_beside_a_large_one_keep_digits(path, dtype):
    """Linear codes would lose those below 1/254 of it."""
    x = torch.randn(400, 48, device=DEVICE).to(dtype)
    x[:, ::16] = 200
    _, y = both_ways(path, x)
    small = x[:, 1::16].double()
    error = (y[:, 1::16].double() - small).norm() / small.norm()
    assert error < 0.06
    # a step of 200 / 127 would round most to 0
    assert (y[:, 1::16] != 0).double().mean() > 0.95
    assert (y[:, ::16] / 200 - 1).abs().max() <= 2.0**-7


@paths
def test_the_least_scale(path):
    x = torch.tensor([[2.0**-127, -(2.0**-127), 1.5 * 2.0**-127, 2.0**-126, 3 * 2.0**-126, -0.0]])
    want = torch.tensor([[0.0, 0.0, 2.0**-126, 2.0**-126, 3 * 2.0**-126, 0.0]])
    _, y = both_ways(path, x.to(DEVICE))
    assert torch.equal(y.cpu(), want)
    assert not y.signbit().any()


@dtypes
@paths
def test_special_values(path, dtype):
    info = torch.finfo(dtype)
    rows = [
        [math.inf, -math.inf, math.nan, -math.nan, 0.0, -0.0, 1.0, -1.0],
        [info.max, info.min, info.max / 2, 0.0, 1.0, 0.0, 0.0, 0.0],
        [info.max, math.inf, info.min, math.nan, 0.0, 0.0, 0.0, 0.0],
        [math.nan] * 8,
        [math.inf] * 8,
        [0.0, -0.0] * 4,
    ]
    x = torch.tensor(rows, dtype=dtype, device=DEVICE)
    # a group beside that of special values is as it would be without
    beside = torch.randn(6, 30, device=DEVICE).to(dtype)
    x = torch.cat([x, torch.zeros(6, 8, device=DEVICE, dtype=dtype), beside], 1)
    _, y = both_ways(path, x)
    assert torch.equal(y.isnan(), x.isnan())
    assert torch.equal(y.isposinf(), x.isposinf())
    assert torch.equal(y.isneginf(), x.isneginf())
    assert torch.equal(y[3:, :8].nan_to_num(7), x[3:, :8].nan_to_num(7))
    keeps = x.abs() < info.max
    assert torch.equal(y[x == info.max], x[x == info.max])
    assert torch.equal(y[x == info.min], x[x == info.min])
    finite = x.where(keeps, 0)
    assert ((y.where(keeps, 0) - finite).double().abs() <= bound(finite, 125)).all()
    assert torch.equal(y[:, 16:], both_ways(path, beside)[1])


@pytest.mark.skipif(not HAS_TRITON, reason="Triton")
@dtypes
@pytest.mark.parametrize("layout", ["rows", "columns apart", "expanded", "a column"])
def test_paths_agree_for_any_strides(dtype, layout):
    wide = torch.randn(6, 100, device=DEVICE).to(dtype)
    x = {
        "rows": wide[:, :45],
        "columns apart": wide[:, 1::2],
        "expanded": wide[:1].expand(6, 100),
        "a column": wide.t()[:33],
    }[layout]
    packed, y = both_ways("triton", x)
    same, z = both_ways("aten", x)
    m, n = x.shape
    for a, b in zip(
        int8.codes_and_scales(packed, m, n), int8.codes_and_scales(same, m, n), strict=True
    ):
        assert torch.equal(a, b)
    assert torch.equal(y, z)
    assert torch.equal(y, both_ways("triton", x.contiguous())[1])


@pytest.mark.skipif(not HAS_TRITON, reason="Triton")
@dtypes
@pytest.mark.parametrize("shape", [(3, 17), (5, 45), (2, 70), (9, 130), (1, 1030), (0, 32)])
def test_norms_of_rows_in_nine_bits(dtype, shape):
    """The bits are those of rows that are unpacked first, special values among them."""
    m, n = shape
    x, dy, dtotal = (torch.randn(m, n, device=DEVICE).to(dtype) for _ in range(3))
    x[:1, :3] = torch.tensor([torch.finfo(dtype).max, 1e-3, -50])
    x[1:2, :2] = torch.tensor([math.inf, math.nan])
    w = torch.randn(n, device=DEVICE)
    packed = int8.pack_int8(x, "triton")
    values = int8.unpack_int8(packed, torch.empty_like(x), "aten")
    rows = int8.PackedRows(packed, m, n, dtype)
    for rule in (
        norm.NormRule("rms", 1e-5, 1.0, "llama"),
        norm.NormRule("rms", 1e-5),
        norm.NormRule("layer", 1e-5),
    ):
        with launches() as counts:
            found = norm.norm(rows, None, w, w, rule, torch.float32)
            grads = norm.norm_grad(dy, dtotal, rows, w, rule, (True, True, True))
            part = norm.norm_grad(dy, None, rows, None, rule, (False, True, False))
        assert counts == {"norm_kernel": 1, "norm_grad_kernel": 2, "sum_partials_kernel": 2}
        expected = norm.norm(values, None, w, w, rule, torch.float32)
        of_values = norm.norm_grad(dy, dtotal, values, w, rule, (True, True, True))
        of_some = norm.norm_grad(dy, None, values, None, rule, (False, True, False))
        for pair in ((found, expected), (grads, of_values), (part, of_some)):
            torch.testing.assert_close(*pair, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 8), (4, 0)])
@paths
def test_no_elements(path, shape):
    packed, y = both_ways(path, torch.empty(shape, device=DEVICE))
    assert packed.numel() == 0
    assert y.shape == shape


def test_bytes():
    # 9/16 of half precision
    assert int8.packed_nbytes(8192, 4096) * 16 == 9 * 8192 * 4096 * HALF[0].itemsize
    # codes up to a multiple of 16, and two bytes for each group of a row
    assert int8.packed_nbytes(3, 17) == 64 + 3 * 2 * 2
    assert int8.packed_nbytes(1, 1) == 16 + 2
