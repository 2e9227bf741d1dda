"""Half precision is rounded where eager rounds it, and nowhere else on the way to a result."""

from functools import partial
from itertools import product

import pytest
import torch
from support import DEVICE, HALF, Watched, compare, randn

from fusedckpt import NormSpec, functional, reference
from fusedckpt.autograd import dispatch
from fusedckpt.functional import add_rms_norm, gated_mlp, layer_norm, mlp, norm_linear
from fusedckpt.kernels import products
from fusedckpt.kernels.norm import MAX_BLOCK
from fusedckpt.layers.norm import sums_dtype

half = pytest.mark.parametrize("dtype", HALF, ids=str)


@pytest.mark.parametrize(("rows", "n"), [(6, 45), (2, MAX_BLOCK + 7)])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_llamas_cast_is_to_the_dtype_of_the_sum(dtypes, rows, n, path):
    def make():
        shapes = (rows, n), (rows, n), (n,)
        return [randn(*shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def call(function, x, residual, weight):
        return function(x, residual, (n,), weight, 1e-5, cast="llama")

    compare(partial(call, add_rms_norm), partial(call, reference.add_rms_norm), make)

    inputs = make()
    dy = torch.randn(rows, n, device=DEVICE)
    y, _ = call(add_rms_norm, *inputs)
    once = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    twice = torch.autograd.grad(y, inputs, dy, create_graph=True)
    for ours, twin in zip(once, twice, strict=True):
        torch.testing.assert_close(ours, twin)


def opposites(rows, features, dtype):
    """Rows whose second half takes back the first but for a little, and all of one sign before."""
    first = randn(rows // 2, features, dtype=dtype, requires_grad=False).abs() + 1
    return torch.cat([first, 0.125 * torch.randn_like(first).to(dtype) - first])


@half
@pytest.mark.parametrize("gated", [False, True], ids=["mlp", "gated_mlp"])
def test_chunks_add_up_in_float32(gated, dtype, path):
    """In float16 a chunk's product is past the largest number, in bfloat16 it has few digits."""
    rows, d, f = 64, 20, 40
    scale = 64.0 if dtype == torch.float16 else 1.0

    def make():
        x = randn(rows // 2, d, dtype=dtype, requires_grad=False)
        weights = [randn(f, d, dtype=dtype) for _ in range(2 if gated else 1)]
        # hidden values of one sign and some size
        biases = [torch.full((f,), scale, dtype=dtype, device=DEVICE) for _ in weights]
        down = (torch.randn(d, f) / (8 * scale)).to(DEVICE, dtype).requires_grad_()
        return [torch.cat([x, x]), *biases, *weights, down]

    def call(function, x, *rest):
        if gated:
            gate_bias, up_bias, *weights = rest
            biases = {"gate_bias": gate_bias, "up_bias": up_bias}
            return function(x, *weights, "identity", **biases)
        bias, weight, down = rest
        return function(x, weight, bias, down, None, "identity")

    fused = partial(mlp if not gated else gated_mlp, chunks=2)
    eager = reference.gated_mlp if gated else reference.mlp
    compare(
        partial(call, fused),
        partial(call, eager),
        make,
        lambda y: (opposites(*y.shape, dtype).double() * scale).to(dtype),
    )


@half
@pytest.mark.parametrize(("norm", "residual"), [(False, False), (True, True)])
def test_the_gradient_of_a_packed_weights_input_is_one_product(residual, norm, dtype, path):
    """Gate's half and up's cancel, and in float16 each is past the largest number."""
    rows, d, f = 40, 20, 256

    def make():
        gate = torch.rand(f, d) + 1
        packed = torch.cat([gate, 0.0625 * torch.rand(f, d) - gate]).to(DEVICE, dtype)
        bias = torch.full((2 * f,), 64.0, dtype=dtype, device=DEVICE)
        down = (torch.rand(d, f) + 1).to(DEVICE, dtype)
        x = randn(rows, d, dtype=dtype) / 16
        return [x.detach().requires_grad_(), packed, bias, down]

    def call(function, x, packed, bias, down):
        spec = NormSpec("rms", None, None, 1.0) if norm else None
        return function(
            x, packed, None, down, "identity", gate_bias=bias, norm=spec, residual=residual
        )

    compare(
        partial(call, gated_mlp),
        partial(call, reference.gated_mlp),
        make,
        lambda y: torch.rand_like(y) + 0.25,
    )


@pytest.fixture
def asked(monkeypatch):
    """The dtypes that products are asked for, on a device whose GEMMs can write float32.

    Here, ops in their place.
    """
    found, mm = [], torch.mm

    def wide_mm(a, b, out_dtype=None, **options):
        if out_dtype is None:
            return mm(a, b, **options)
        found.append(out_dtype)
        return mm(a.to(out_dtype), b.to(out_dtype))

    def wide_addmm(total, a, b, out_dtype, out):
        found.append("sum")
        out.addmm_(a.to(out_dtype), b.to(out_dtype))

    monkeypatch.setattr(products, "writes_wider", lambda _, dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(torch, "mm", wide_mm)
    monkeypatch.setattr(products.torch, "addmm", wide_addmm)
    # what multiplies is remembered
    dispatch._remembered.cache_clear()
    yield found
    dispatch._remembered.cache_clear()


def summed(first, *others):
    """Return a sum of products, unrounded."""
    total = products.wide_product(*first)
    for pair in others:
        products.add_product(total, *pair)
    return total


def test_a_sum_begins_with_its_first_product(asked):
    """Not with zeros, which would be written and read for nothing."""
    a, b = randn(4, 5, dtype=torch.bfloat16), randn(5, 3, dtype=torch.bfloat16)
    found = summed((a, b), (a, b), (a, b))
    assert asked == [torch.float32, "sum", "sum"]
    torch.testing.assert_close(found, 3 * (a.float() @ b.float()))


@pytest.mark.parametrize("name", ["linear_act", "norm_linear", "gated_mlp"])
def test_gradients_of_float32_weights_come_unrounded_under_autocast(asked, name):
    """No pass casts them."""
    x = randn(9, 17)
    gate, up = (randn(23, 17).detach().requires_grad_() for _ in range(2))
    down = randn(17, 23).detach().requires_grad_()
    weights = {"linear_act": [gate], "norm_linear": [gate, up], "gated_mlp": [gate, up, down]}[name]
    x = x.detach()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16), dispatch.forced_path("aten"):
        if name == "norm_linear":
            found = norm_linear(x, NormSpec("rms"), weights)
        else:
            found = [getattr(functional, name)(x, *weights)]
        grads = torch.autograd.grad([y.float().square().sum() for y in found], weights)
    assert asked == [torch.float32] * len(weights)
    for grad in grads:
        assert grad.dtype == torch.float32
        assert not torch.equal(grad, grad.bfloat16().float())


@pytest.mark.parametrize(
    "shape", [(5, 7, 300), (0, 4, 3), (4, 0, 3), (4, 3, 0), (1, 1, 1)], ids=str
)
@half
def test_products_add_up_unrounded(dtype, shape):
    m, n, k = shape
    a, b = (randn(*s, dtype=dtype, requires_grad=False) for s in ((m, k), (k, n)))
    found = summed((a, b), (a, -b), (a, b))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


def test_autocast_adds_gradients_of_n_as_wide_as_n(path):
    """The first weight's part is the same in every column: LayerNorm leaves its rounding alone."""

    def make():
        equal = 64 * randn(40, 1, requires_grad=False).expand(40, 24)
        weights = equal.clone().requires_grad_(), randn(40, 24)
        return randn(30, 24), *weights

    def call(module, x, *weights):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return module.norm_linear(x, NormSpec("layer", eps=1.0), weights)

    compare(partial(call, functional), partial(call, reference), make)


@half
def test_sums_are_written_in_the_dtype_of_the_weight(dtype, path):
    for mask in list(product((False, True), repeat=3))[1:]:
        shapes = zip(((6, 20), (20,), (20,)), mask, strict=True)
        x, w, b = (randn(*s, dtype=dtype, requires_grad=need) for s, need in shapes)
        for y in (layer_norm(x, 20, w, b), norm_linear(x, NormSpec("layer", w, b), [w[None]])[0]):
            with Watched() as watched:
                y.backward(torch.ones_like(y))
            # no casts around the op
            ops = [func for func, _ in watched.seen]
            assert ops.count(torch.ops.fusedckpt.block_backward.default) == 1
            assert torch.ops.aten._to_copy.default not in ops


@pytest.mark.parametrize(
    ("weight", "bias", "sums"),
    [
        (torch.float16, torch.float16, torch.float16),
        (None, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (None, None, torch.float32),
    ],
    ids=str,
)
def test_sums_for_two_dtypes_stay_wide(weight, bias, sums):
    """As autocast on a GPU allows."""
    dtypes = sums, weight, bias
    given = [None if dtype is None else torch.empty(20, dtype=dtype) for dtype in dtypes]
    assert sums_dtype(*given) == sums
    assert sums_dtype(given[0].double(), None, None) == torch.float64
