"""The norms: saved bytes, long rows, mixed dtypes, casts, the add forms, refusals."""

import inspect
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, HALF, compare, launches, randn
from torch import nn
from torch._subclasses import FakeTensorMode

import fusedckpt
from fusedckpt import functional, reference
from fusedckpt.functional import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from fusedckpt.kernels import norm_aten
from fusedckpt.kernels.norm import MAX_BLOCK, MAX_GRAD_BLOCK, WARP_COLUMNS, NormRule
from fusedckpt.kernels.runtime import HAS_TRITON

M, N = 12, 20
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


def weight(n=N, dtype=torch.float32, requires_grad=True):
    return nn.Parameter(randn(n, dtype=dtype).detach(), requires_grad=requires_grad)


WIDE = [(3, MAX_GRAD_BLOCK), (3, MAX_GRAD_BLOCK + 1), (2, 12345), (3, MAX_BLOCK + 1), (1, 32769)]


@needs_triton
@pytest.mark.parametrize(
    ("function", "shape"),
    [
        *(("layer_norm", shape) for shape in WIDE),
        *(("llama", shape) for shape in WIDE),
        # rows of whole vectors
        ("llama", (3, 12288)),
        ("rms_norm", (3, MAX_BLOCK // 2 + 16)),
        ("half layer_norm", (3, MAX_BLOCK // 2 + 16)),
        ("rms_norm", WIDE[2]),
        ("add_rms_norm", WIDE[3]),
    ],
    ids=str,
)
def test_long_rows(function, shape):
    m, n = shape
    options = {"cast": "llama", "eps": 1e-5} if function == "llama" else {}
    is_half = function.startswith(("llama", "half"))
    function = function.replace("llama", "rms_norm").removeprefix("half ")
    names = {"layer_norm": "wb", "add_rms_norm": "rw"}.get(function, "w")

    def call(module, x, *rest):
        args = (x, rest[0], (n,), rest[1]) if "r" in names else (x, (n,), *rest)
        return getattr(module, function)(*args, **options)

    def inputs():
        shapes = [(m, n), *((m, n) if key == "r" else (n,) for key in names)]
        return [randn(*s, dtype=torch.bfloat16 if is_half else torch.float32) for s in shapes]

    with launches() as count:
        compare(lambda *a: call(functional, *a), lambda *a: call(reference, *a), inputs)
    assert ("wide_norm_kernel" in count) == (n > MAX_BLOCK)
    # float32 takes twice the registers
    fits = MAX_GRAD_BLOCK if is_half else MAX_GRAD_BLOCK // 2
    splits = (is_half or function != "layer_norm") and n % 16 == 0 and fits < n <= MAX_BLOCK
    assert ("split_norm_grad_kernel" in count) == splits
    assert ("wide_grad_kernel" in count) == (n > fits and not splits)


@needs_triton
@pytest.mark.parametrize("function", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize(
    ("dtype", "columns", "takes_warps"),
    [
        (torch.bfloat16, WARP_COLUMNS, True),
        (torch.float16, WARP_COLUMNS + 16, True),
        # rows begin within a vector, or are of other widths
        (torch.bfloat16, WARP_COLUMNS + 2, False),
        (torch.float32, WARP_COLUMNS, False),
    ],
    ids=str,
)
def test_rows_that_a_warp_has_each(function, dtype, columns, takes_warps):
    n = WARP_COLUMNS

    def inputs():
        wide = randn(19, columns, dtype=dtype).detach()
        # of equal numbers LayerNorm divides by the root of eps
        wide[3] = 3.140625
        vectors = [randn(n, dtype=dtype) for _ in range(1 + (function == "layer_norm"))]
        return [wide[:, :n].requires_grad_(), *vectors]

    with launches() as count:
        compare(
            lambda x, *vectors: getattr(functional, function)(x, n, *vectors, eps=1e-5),
            lambda x, *vectors: getattr(F, function)(x, (n,), *vectors, eps=1e-5),
            inputs,
        )
    assert ("warp_norm_grad_kernel" in count) == takes_warps
    assert ("norm_grad_kernel" in count) != takes_warps


@needs_triton
def test_long_rows_of_every_mask():
    n = MAX_GRAD_BLOCK + 100
    for mask in list(product((False, True), repeat=3))[1:]:
        compare(
            lambda x, w, b: layer_norm(x, n, w, b),
            lambda x, w, b: F.layer_norm(x, (n,), w, b),
            lambda mask=mask: [
                randn(2, n, requires_grad=mask[0]),
                randn(n, requires_grad=mask[1]),
                randn(n, requires_grad=mask[2]),
            ],
        )


@pytest.mark.parametrize(
    ("x_dtype", "w_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("cast", ["torch", "llama", "gemma", "layer"])
def test_mixed_dtypes(cast, x_dtype, w_dtype, path):
    if cast == "layer":
        if x_dtype not in HALF or DEVICE.type != "cpu":
            pytest.skip("torch mixes LayerNorm's dtypes so alone, and on a CPU")
        compare(
            lambda x, w, b: layer_norm(x, N, w, b),
            lambda x, w, b: F.layer_norm(x, (N,), w, b),
            lambda: [randn(M, N, dtype=x_dtype), randn(N), randn(N)],
        )
        return
    compare(
        lambda x, w: rms_norm(x, N, w, 1e-6, cast=cast),
        lambda x, w: reference.rms_norm(x, (N,), w, 1e-6, cast=cast),
        lambda: [randn(M, N, dtype=x_dtype), randn(N, dtype=w_dtype)],
    )


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)]
)
def test_mixed_residual(dtypes, path):
    for order in (dtypes, dtypes[::-1]):
        compare(
            lambda x, r, w: add_rms_norm(x, r, N, w),
            lambda x, r, w: reference.add_rms_norm(x, r, (N,), w),
            lambda order=order: [*(randn(M, N, dtype=d) for d in order), randn(N)],
        )


@pytest.mark.parametrize("dtype", [torch.float32, *HALF, torch.float64], ids=str)
def test_default_eps_is_torchs(dtype, path):
    x = randn(M, N, dtype=dtype).detach() * 1e-4
    torch.testing.assert_close(rms_norm(x, N), F.rms_norm(x, (N,)))


@pytest.mark.parametrize("shape", [(5, 7), (3, 2, 4)], ids=str)
@pytest.mark.parametrize("rows", [(), (6,), (2, 3)], ids=str)
def test_several_normalized_dimensions(shape, rows):
    compare(
        lambda x, w, b: layer_norm(x, shape, w, b),
        lambda x, w, b: F.layer_norm(x, shape, w, b),
        lambda: [randn(*rows, *shape), randn(*shape), randn(*shape)],
    )
    compare(
        lambda x, w: rms_norm(x, shape, w),
        lambda x, w: F.rms_norm(x, shape, w),
        lambda: [randn(*rows, *shape), randn(*shape)],
    )


@pytest.mark.parametrize("n", [N, MAX_GRAD_BLOCK + 50])
def test_a_far_mean_does_not_cancel(n):
    compare(
        lambda x: layer_norm(x, n),
        lambda x: F.layer_norm(x, (n,)),
        lambda: [(randn(4, n) + 1000).detach().requires_grad_()],
    )


def test_rows_do_not_leak_into_each_other(path):
    """One NaN row, one constant row and eps = 0: every other row is as it would be alone."""
    x = randn(5, N).detach()
    x[1], x[3] = float("nan"), 0.0
    x.requires_grad_()
    for ours, theirs in (
        (rms_norm(x, N, None, 0.0), F.rms_norm(x, (N,), None, 0.0)),
        (layer_norm(x, N, eps=0.0), F.layer_norm(x, (N,), eps=0.0)),
    ):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
        dy = torch.randn_like(ours)
        found, expected = (torch.autograd.grad(y, x, dy)[0] for y in (ours, theirs))
        keep = [0, 2, 4]
        torch.testing.assert_close(found[keep], expected[keep])


def test_padding_rows_leave_the_weight_gradient_alone():
    """Rows past the last of a tile are zeros; eps = 0 must not make NaN of them."""
    x, w = randn(3, N), weight()
    (dw,) = torch.autograd.grad(rms_norm(x, N, w, 0.0).sum(), w)
    (expected,) = torch.autograd.grad(F.rms_norm(x, (N,), w, 0.0).sum(), w)
    torch.testing.assert_close(dw, expected)


@pytest.mark.parametrize("used", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm"])
def test_outputs_of_an_add_form(name, used):
    """Leaves get gradients of their own: a second backward adds to each in place."""
    fused, eager = ([randn(M, N), randn(M, N), randn(N)] for _ in "fe")
    for mine, its in zip(fused, eager, strict=True):
        its.data.copy_(mine.data)
    for scale in (1.0, 3.0):
        for leaves, module in ((fused, functional), (eager, reference)):
            x, r, w = leaves
            ys = getattr(module, name)(x, r, (N,), w)
            total = sum(y.square().sum() for y, use in zip(ys, used, strict=True) if use)
            (scale * total).backward()
    torch.testing.assert_close([t.grad for t in fused], [t.grad for t in eager])
    assert fused[0].grad.data_ptr() != fused[1].grad.data_ptr()
    # the gradient of x and of the residual, where the norm's result is not used
    x, r = randn(M, N), randn(M, N)
    added, incoming = functional.add_rms_norm(x, r, N)[1], torch.ones(M, N, device=DEVICE)
    for times in (1, 2):
        added.backward(incoming, retain_graph=True)
        assert incoming.eq(1).all()
        assert x.grad.eq(times).all()
        assert r.grad.eq(times).all()


def test_the_sum_is_the_residual_stream():
    x, r = randn(M, N, dtype=torch.bfloat16), randn(M, N, dtype=torch.bfloat16)
    assert torch.equal(add_rms_norm(x, r, N)[1], x + r)
    assert torch.equal(add_layer_norm(x, r, N)[1], x + r)


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_gpu_autocast_dtype_is_torchs(norm):
    """The rule that _dispatch.autocasts_norm states, read off torch without a GPU."""
    was = torch.is_autocast_enabled("cuda")
    # torch.autocast would turn itself off where there is no GPU
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode():
            x = torch.empty(4, 8, device="cuda", dtype=torch.bfloat16)
            theirs = getattr(F, norm)(x, (8,)).dtype
            assert getattr(functional, norm)(x, 8).dtype == theirs
        autocasts = norm == "layer_norm" or torch.__version__ >= "2.12"
        assert theirs == (torch.float32 if autocasts else torch.bfloat16)
    finally:
        torch.set_autocast_enabled("cuda", was)


@pytest.mark.parametrize("name", ["Linear", "RMSNorm", "LayerNorm"])
def test_modules_are_drop_ins(name):
    """Their constructors take torch's arguments in its order, and ours by name."""
    ours, theirs = getattr(fusedckpt, name), getattr(nn, name)
    mine, twins = (inspect.signature(m.__init__).parameters for m in (ours, theirs))
    assert list(mine)[: len(twins)] == list(twins)
    assert all(p.kind is p.KEYWORD_ONLY for p in list(mine.values())[len(twins) :])
    if name != "Linear":
        module, twin = ours((3, 5), 1e-3, device=DEVICE), theirs((3, 5), 1e-3, device=DEVICE)
        assert isinstance(module, theirs)
        assert module.state_dict().keys() == twin.state_dict().keys()
        x = randn(4, 3, 5)
        torch.testing.assert_close(module(x), twin(x))
        assert not list(ours(N, elementwise_affine=False).parameters())


def test_an_offset_starts_at_scale_one():
    module = fusedckpt.RMSNorm(N, device=DEVICE, offset=1.0, cast="gemma")
    assert torch.equal(module.weight, torch.zeros_like(module.weight))
    x = randn(M, N)
    torch.testing.assert_close(module(x), F.rms_norm(x, (N,)))
    assert repr(module).endswith("offset=1.0, cast=gemma)")


@pytest.mark.parametrize("n", [7, 33, 1000, MAX_BLOCK + 5])
def test_rows_of_equal_numbers_become_the_bias(n):
    """Nothing is left to divide by next to nothing."""
    x = torch.tensor([0.1, -1.7, 300.3]).to(DEVICE)[:, None].expand(3, n).detach().requires_grad_()
    w, bias = randn(n), randn(n, requires_grad=False)
    y = layer_norm(x, (n,), w, bias)
    assert torch.equal(y, bias.expand(3, n))
    (dw,) = torch.autograd.grad(y, w, torch.randn_like(y))
    assert not dw.any()
    # where torch has no kernel: float32 in, bfloat16 out
    y, _ = norm_aten.norm(x.detach(), None, None, None, NormRule("layer", 1e-5), torch.bfloat16)
    assert n > MAX_BLOCK or not y.any()


@pytest.mark.xdist_group("large")
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_offsets_beyond_two_to_the_31(norm):
    """Rows 2^30 elements apart: the third starts past what 32 bits hold."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    storage = torch.empty(2**31 + 512, dtype=torch.float16, device=DEVICE)
    x = storage.as_strided((3, 64), (2**30, 1))
    x.copy_(randn(3, 64, dtype=torch.float16).detach())
    dense = x.clone().requires_grad_()
    w = randn(64, dtype=torch.float16)
    call = getattr(functional, norm)
    y, expected = call(x.requires_grad_(), 64, w), call(dense, 64, w)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(expected)
    for at in ((x, dense), (w, w)):
        grads = [
            torch.autograd.grad(out, t, dy, retain_graph=True)[0]
            for out, t in zip((y, expected), at, strict=True)
        ]
        torch.testing.assert_close(*grads)
