"""linear_act and Linear: saved bytes, recomputation, the kernel that runs, refusals."""

import pytest
import torch
import torch.nn.functional as F
from cases import LINEARS
from support import DEVICE, compare, launches, randn, saved_bytes
from torch import nn

import fusedckpt
from fusedckpt.autograd import dispatch
from fusedckpt.functional import linear_act
from fusedckpt.kernels import gemm
from fusedckpt.kernels.runtime import HAS_TRITON

T, D, N = 24, 16, 40
GEMM = 2 * T * D * N
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


def parameters(mask=(True, True, True), dtype=torch.float32):
    x = randn(T, D, dtype=dtype, requires_grad=mask[0])
    w = nn.Parameter(randn(N, D, dtype=dtype).detach() / 4, requires_grad=mask[1])
    b = nn.Parameter(randn(N, dtype=dtype).detach(), requires_grad=mask[2])
    return x, w, b


def test_a_view_is_kept_as_given():
    x = randn(T, 2 * D)
    weights = parameters()[1:]
    assert (
        saved_bytes(lambda x, *rest: linear_act(x[:, ::2], *rest), (x, *weights)) == 4 * T * 2 * D
    )


@needs_triton
@pytest.mark.parametrize("kernel", ["fused", "split"])
@pytest.mark.parametrize("save", ["inputs", "preact"])
def test_launches(kernel, save):
    inputs = parameters()
    with launches() as forward:
        y = linear_act(*inputs, save=save, kernel=kernel)
    with launches() as backward:
        y.sum().backward()
    recomputes_fused = kernel == "fused" and save == "inputs"
    assert forward == {"gemm_kernel" if kernel == "fused" else "act_kernel": 1}
    # the second stage of the bias's gradient
    second = {"sum_partials_kernel": 1}
    assert backward == {"gemm_kernel" if recomputes_fused else "act_grad_kernel": 1} | second


@needs_triton
def test_no_triton_no_fused_kernel():
    x, w, b = parameters(dtype=torch.float64)
    with pytest.raises(ValueError, match="kernel='fused' needs Triton"):
        linear_act(x, w, b, kernel="fused")
    with dispatch.forced_path("aten"), pytest.raises(ValueError, match="needs Triton"):
        linear_act(*parameters(), kernel="fused")
    linear_act(x, w, b, kernel="split")


def test_levels_take_precedence():
    x, w, b = parameters()
    layer = fusedckpt.Linear(D, N, activation="gelu", device=DEVICE)
    keen = fusedckpt.Linear(D, N, activation="gelu", save="preact", device=DEVICE)
    inputs, preact = 4 * T * D, 4 * T * (D + N)
    assert saved_bytes(linear_act, (x, w, b)) == inputs
    assert [saved_bytes(m, (x,)) for m in (layer, keen)] == [inputs, preact]
    with fusedckpt.saving("preact"):
        assert [saved_bytes(m, (x,)) for m in (layer, keen)] == [preact, preact]
        assert saved_bytes(lambda *a: linear_act(*a, save="inputs"), (x, w, b)) == inputs
        with fusedckpt.saving("gate"):
            # a linear has no gate
            assert saved_bytes(keen, (x,)) == inputs
        assert saved_bytes(layer, (x,)) == preact
    with pytest.raises(RuntimeError, match="inside"), fusedckpt.saving("preact"):
        raise RuntimeError("inside")
    assert saved_bytes(layer, (x,)) == inputs


def test_module_is_a_drop_in():
    layer = fusedckpt.Linear(D, N, True, DEVICE, activation="swish")
    twin = nn.Linear(D, N, True, DEVICE)
    assert isinstance(layer, nn.Linear)
    assert "activation=silu, save=inputs" in repr(layer)
    layer.load_state_dict(twin.state_dict(), strict=True)
    x = randn(T, D)
    torch.testing.assert_close(layer(x), F.silu(twin(x)))
    plain = fusedckpt.Linear(D, N, bias=False, device=DEVICE)
    torch.testing.assert_close(plain(x), F.linear(x, plain.weight))


@needs_triton
def test_one_column_of_a_transposed_matrix():
    """No tensor descriptor reaches rows that are 2 bytes apart."""

    def inputs():
        x, w = randn(8, T, dtype=torch.bfloat16).t(), randn(N, 8, dtype=torch.bfloat16)
        columns = [t[:, :1].detach().requires_grad_() for t in (x, w)]
        assert [t.stride() for t in columns] == [(1, T), (8, 1)]
        assert not gemm.fits_descriptors(*columns)
        return columns

    compare(
        lambda x, w: linear_act(x, w, None, "silu", kernel="fused"),
        lambda x, w: F.silu(F.linear(x, w)),
        inputs,
    )


@pytest.mark.xdist_group("large")
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "misaligned"])
def test_offsets_beyond_two_to_the_31(offset):
    """Rows 2^30 elements apart: the third starts past what 32 bits hold."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    storage = torch.empty(2**31 + 512, dtype=torch.float16, device=DEVICE)
    x = storage.as_strided((3, 64), (2**30, 1), offset)
    x.copy_(randn(3, 64, dtype=torch.float16).detach())
    w = randn(40, 64, dtype=torch.float16).detach() / 8
    dense = x.clone().requires_grad_()
    y, expected = linear_act(x.requires_grad_(), w), linear_act(dense, w)
    torch.testing.assert_close(y, expected)
    dy = randn(3, 40, dtype=torch.float16, requires_grad=False)
    grads = [torch.autograd.grad(out, at, dy)[0] for out, at in ((y, x), (expected, dense))]
    torch.testing.assert_close(*grads)


@pytest.mark.xdist_group("large")
@pytest.mark.skipif(DEVICE.type != "cuda", reason="takes 20 GB and a GPU")
@pytest.mark.parametrize("kernel", ["fused", "split"])
def test_outputs_beyond_two_to_the_31_elements(kernel):
    x, w = randn(70000, 16, dtype=torch.bfloat16), randn(32768, 16, dtype=torch.bfloat16)
    y = linear_act(x, w, None, "relu", kernel=kernel)
    torch.testing.assert_close(y[-64:], F.relu(F.linear(x[-64:], w)))
    (dx,) = torch.autograd.grad(y, x, y.detach())
    tail = x[-64:].detach().requires_grad_()
    expected = F.relu(F.linear(tail, w))
    (grad,) = torch.autograd.grad(expected, tail, y[-64:].detach())
    torch.testing.assert_close(dx[-64:], grad, rtol=2e-2, atol=1.0)


@pytest.mark.parametrize("rows", [0, 3])
def test_empty_sides(rows, path):
    for d, n in ((0, 5), (5, 0), (0, 0)):
        x, w, b = randn(rows, d), randn(n, d), randn(n)
        y, expected = linear_act(x, w, b), F.gelu(F.linear(x, w, b))
        assert torch.equal(y, expected)
        for ours, theirs in zip(
            torch.autograd.grad(y.sum(), (x, w, b)),
            torch.autograd.grad(expected.sum(), (x, w, b)),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("case", LINEARS, ids=lambda case: case.name)
def test_many_rows_on_aten(case):
    """Bias and weight gradients over many rows stay as accurate as eager's."""
    with dispatch.forced_path("aten"):
        compare(case.fused, case.eager, lambda: case.inputs((20000,), 8, 9, torch.bfloat16))
