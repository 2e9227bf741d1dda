"""Rows routed to experts: sorted, gated and summed by kernels as by ATen, one launch for each."""

import itertools

import pytest
import torch
from support import DEVICE, HALF, launches

from fusedckpt.fusing.accuracy import Errors
from fusedckpt.kernels import gating, routed
from fusedckpt.kernels.gating import ClampedSwiGLU
from fusedckpt.kernels.grouped_gemm import clear_unused, grouped_gemm, grouped_grad
from fusedckpt.kernels.routed import kernel_for
from fusedckpt.kernels.runtime import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="kernels need Triton")

T, K, E, F = 24, 3, 5, 270
GATINGS = ["silu", "gelu", ClampedSwiGLU(limit=1.0), ClampedSwiGLU(1.0, 0.5, 0.0, False)]


def drawn(tokens=T, top_k=K, num=E):
    """Draw an index in which some slots are no expert's."""
    return torch.randint(0, num + 2, (tokens, top_k), device=DEVICE)


def routes(index, num=E):
    """Return the same route by ATen and by kernels."""
    return routed.route(index, num, None), routed.route(index, num, "triton", True)


@pytest.mark.parametrize(
    ("tokens", "top_k", "num"),
    [(0, 2, 3), (1, 1, 1), (1, 2, 200), (21, 3, 5), (64, 1, 14), (65, 1, 15), (700, 6, 70)],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_sorts_as_aten(tokens, top_k, num, dtype):
    """Slots of an expert keep their order; those of none come last."""
    index = drawn(tokens, top_k, num).to(dtype)
    aten, ours = routes(index, num)
    assert torch.equal(ours.ends, aten.ends)
    assert ours.ends.dtype == torch.int32
    count = aten.ends[-1]
    assert torch.equal(ours.order[:count], aten.order[:count])
    assert torch.equal(ours.tokens, ours.order // top_k)
    numbers = torch.arange(index.numel(), device=DEVICE)
    assert torch.equal(ours.order[ours.places.flatten()], numbers)
    assert torch.equal(ours.order.sort().values, numbers)


@pytest.mark.parametrize("runs_triton", [False, True])
def test_a_negative_index_is_no_experts(runs_triton):
    """Where nothing waits for the device, expert 0 gets no row of another."""
    index = torch.tensor([[-1, 0], [1, -7], [0, 5]], device=DEVICE)
    if DEVICE.type == "cpu":
        if runs_triton:
            with pytest.raises(ValueError, match="index must be at least 0, got 2 negative"):
                routed.route(index, 2, "triton", True)
        route = routed.route(index, 2, "torch", runs_triton)
        assert route.ends.tolist() == [2, 3]
        assert route.order[:3].tolist() == [1, 4, 2]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("rule", GATINGS, ids=str)
def test_gates_as_aten(rule, is_packed, dtype):
    """One launch each way, written over the operands or not; errors beside ATen's."""
    aten, ours = routes(drawn())
    z = 2 * torch.randn(T, 2 * K * F, device=DEVICE).to(dtype)
    z, up = (z, None) if is_packed else (t.contiguous() for t in z.chunk(2, 1))
    # every second number of memory that holds more
    scores = torch.rand(T, 2 * K, device=DEVICE)[:, ::2]
    dh = torch.randn(T, K * F, device=DEVICE).to(dtype)
    for t in (z, up, dh) if up is not None else (z, dh):
        # products have zeros there
        routed.as_rows(t, aten)[aten.count :] = 0

    def computed(route, z, up, dh):
        h = gating.gated(z, up, scores, route, rule)
        return h, *gating.gated_grad(dh, z, up, scores, route, rule, (True, True))

    with launches() as counts:
        results = computed(ours, z, up, dh)
    assert counts == {"gate_kernel": 1, "gate_grad_kernel": 1}
    same = computed(aten, z, up, dh)
    truth = computed(aten, *[None if t is None else t.double() for t in (z, up, dh)])
    for a, b, t in zip(results, same, truth, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            errors = Errors(a.dtype)
            errors.add(a, b, t)
            assert errors.problem() is None
    over = [None if t is None else t.clone() for t in (dh, z, up)]
    places = dict(zip(("h", "dz", "du"), over, strict=True))
    again = gating.gated_grad(*over, scores, ours, rule, (True, True), **places)
    assert all(a is b or torch.equal(a, b) for a, b in zip(results[1:], again, strict=True))


@pytest.mark.parametrize("rule", ["silu", *GATINGS[2:]], ids=str)
@pytest.mark.parametrize("runs_triton", [False, True])
def test_special_values(rule, runs_triton):
    """NaN and inf pass, and stop, where they do in torch's ops."""
    values = [0.0, 0.5, -0.5, 3.0, -3.0, torch.inf, -torch.inf, torch.nan]
    pairs = torch.tensor(list(itertools.product(values, values, [1.0, 0.0])))
    gate, up, dh = pairs.to(DEVICE).t().contiguous()
    leaves = [t.clone().requires_grad_() for t in (gate, up)]
    if isinstance(rule, str):
        h = torch.nn.functional.silu(leaves[0]) * leaves[1]
    else:
        low, factor = leaves[0].clamp(max=rule.limit), leaves[1].clamp(-rule.limit, rule.limit)
        h = (factor + rule.offset) * (low * torch.sigmoid(low * rule.alpha))
    expected = h.detach(), *torch.autograd.grad(h, leaves, dh)
    route = routed.route(torch.zeros(1, 1, device=DEVICE).long(), 1, None, runs_triton)
    z, u, scores = gate[None], up[None], torch.ones(1, 1, device=DEVICE)
    h = gating.gated(z, u, scores, route, rule)
    _, dz, du, _ = gating.gated_grad(dh[None], z, u, scores, route, rule, (False, False))
    for a, b in zip((h, dz, du), expected, strict=True):
        torch.testing.assert_close(a[0], b, equal_nan=True)


def test_sums_read_no_row_of_no_expert():
    aten, ours = routes(drawn())
    rows = torch.randn(T, K * F, device=DEVICE)
    given = rows.clone()
    routed.as_rows(given, ours)[aten.count :] = torch.nan
    before = given.clone()
    with launches() as counts:
        y = routed.combine(given, ours)
    assert counts == {"combine_kernel": 1}
    torch.testing.assert_close(given, before, equal_nan=True)
    routed.as_rows(rows, ours)[aten.count :] = 0
    torch.testing.assert_close(y, routed.as_rows(rows, ours)[aten.places].sum(1))


def test_products_leave_zeros_where_no_expert_multiplies():
    """In memory that was NaN: rows of no expert, and gradients of experts without rows."""
    ends = torch.tensor([0, 9, 9, 40], dtype=torch.int32, device=DEVICE)
    x, dy = torch.randn(100, 24, device=DEVICE), torch.randn(100, 40, device=DEVICE)
    y, dw = torch.empty_like(dy), torch.empty(4, 24, 40, device=DEVICE)
    grouped_gemm(x, torch.randn(4, 24, 40, device=DEVICE), ends, y)
    assert not y[40:].any()
    assert y[:40].all()
    grouped_grad(x, dy, ends, dw)
    assert not dw[[0, 2]].any()
    torch.testing.assert_close(dw[3], x[9:40].t() @ dy[9:40])
    kept = torch.full((4, 70, 50), torch.nan, device=DEVICE)
    kept[[1, 3]] = 1
    clear_unused(kept, ends)
    assert not kept[[0, 2]].any()
    assert (kept[[1, 3]] == 1).all()


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
