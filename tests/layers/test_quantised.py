"""Quantised weights: dense while a GEMM reads them, in forward and backward, and never kept."""

from functools import partial

import pytest
import torch
from quantised_weight import Int8Rows, forget, quantise
from support import DEVICE, as_tuple, compare, flops, randn, saved_bytes
from torch import nn

import fusedckpt
from fusedckpt import LoRA, NormSpec, QuantisedWeight, functional, reference, register_quantised
from fusedckpt.blocks import quantised
from fusedckpt.memory import peak_bytes

T, D, F, R = 17, 24, 40, 4


@pytest.fixture(autouse=True)
def forgotten():
    forget()
    yield
    forget()


def linear_act(module, x, w, a, b, **options):
    return module.linear_act(x, LoRA(w(F, D), a, b), **options)


def norm_linear(module, x, n, a, b, make=None, w=None):
    return module.norm_linear(x, NormSpec("rms", n), [LoRA(w(F, D), a, b), w(D, D)])


def mlp(module, x, a, b, w=None, **options):
    return module.mlp(x, LoRA(w(F, D), a, b), None, w(D, F), None, residual=True, **options)


def gated_mlp(module, x, a, b, w=None, **options):
    return module.gated_mlp(x, w(F, D), LoRA(w(F, D), a, b, 2.0), w(D, F), **options)


def packed(module, x, a, b, w=None, **options):
    return module.gated_mlp(x, LoRA(w(2 * F, D), a, b), None, w(D, F), **options)


AB, AB2 = [(R, D), (F, R)], [(R, D), (2 * F, R)]
CALLS = {
    "linear_act": (lambda m, x, a, b, w, **o: linear_act(m, x, w, a, b, **o), AB, {}),
    "norm_linear": (norm_linear, [(D,), *AB], {}),
    "mlp": (mlp, AB, {}),
    "mlp-chunks": (mlp, AB, {"chunks": 3}),
    "mlp-preact": (mlp, AB, {"save": "preact"}),
    "gated_mlp": (gated_mlp, AB, {}),
    "gated_mlp-gate": (gated_mlp, AB, {"save": "gate"}),
    "packed": (packed, AB2, {}),
}


@pytest.fixture(params=CALLS)
def call(request):
    """The function over quantised weights, torch over dense ones that equal them, and inputs."""
    fn, shapes, options = CALLS[request.param]
    weights = {}

    def weight(n, k, dense=False, dtype=torch.float32):
        if (n, k, dtype) not in weights:
            generator = torch.Generator().manual_seed(n * k)
            w = torch.randn(n, k, generator=generator).to(DEVICE) / k**0.5
            weights[n, k, dtype] = quantise(w.to(dtype))
        w = weights[n, k, dtype]
        return (w.int_data * w.scale[:, None]) if dense else w

    def fused(*inputs):
        given = {} if fn is norm_linear else options
        return fn(functional, *inputs, w=partial(weight, dtype=inputs[0].dtype), **given)

    def eager(*inputs):
        # float64 starts from the weights of the dtype that is tested
        dtype = inputs[0].dtype
        source = eager.dtype if dtype == torch.float64 else dtype

        def dense(n, k):
            return weight(n, k, dense=True, dtype=source).to(dtype)

        return fn(reference, *inputs, w=dense)

    def inputs(dtype=torch.float32):
        eager.dtype = dtype
        drawn = [randn(T, D, requires_grad=False)]
        drawn += [randn(*s, requires_grad=False) / s[-1] ** 0.5 for s in shapes]
        return [x.to(dtype).requires_grad_() for x in drawn]

    return fused, eager, inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients(call, path, dtype):
    fused, eager, inputs = call
    compare(fused, eager, partial(inputs, dtype))


def test_no_dense_weight_is_kept(call):
    fused, _, inputs = call
    ys = as_tuple(fused(*inputs()))
    made = len(Int8Rows.made)
    # each was gone before the next was made, see `dequantize`
    assert made > 0
    assert Int8Rows.num_alive() == 0
    sum(y.sum() for y in ys).backward()
    assert len(Int8Rows.made) > made
    assert Int8Rows.num_alive() == 0


@pytest.mark.parametrize("save", ["inputs", "preact"])
def test_saved_bytes(save):
    weights = [quantise(randn(*s)) for s in ((F, D), (F, D), (D, F))]

    def fn(x):
        return functional.gated_mlp(x, *weights, save=save)

    # at preact nothing reads x: no weight has a gradient
    kept = D if save == "inputs" else 2 * F
    assert saved_bytes(fn, [randn(T, D)]) == 4 * T * kept


def test_no_gemm_for_a_weights_gradient():
    up, down, x = quantise(randn(F, D)), quantise(randn(D, F)), randn(T, D)
    y = functional.mlp(x, up, None, down, None)
    assert flops(lambda: y.sum().backward()) == 3 * 2 * T * D * F


@pytest.mark.parametrize("name", ["linear_act", "gated_mlp", "packed"])
def test_pieces(monkeypatch, name):
    """Where the class has slices, at most a piece is dense at a time."""
    n, k = 64, 48
    monkeypatch.setitem(quantised._registered, Int8Rows, (Int8Rows.dequantize, True))
    first = [(2 * n, k)] if name == "packed" else [(n, k), (n, k)]
    weights = [quantise(randn(*s) / s[1] ** 0.5) for s in (*first, (k, n))]
    dense = [w.int_data.double() * w.scale.double()[:, None] for w in weights]

    def fn(module, given, x):
        if name == "linear_act":
            return module.linear_act(x, given[0], activation="identity")
        up = [None] if name == "packed" else []
        return module.gated_mlp(x, given[0], *up, *given[1:])

    monkeypatch.setattr(quantised, "PIECE_BYTES", n * k)
    compare(
        partial(fn, functional, weights),
        lambda x: fn(reference, [w.to(x.dtype) for w in dense], x),
        lambda: [randn(T, k)],
    )
    assert {rows for rows, _ in Int8Rows.sizes} <= {n // 4, k // 4}
    assert max(nbytes for _, nbytes in Int8Rows.sizes) == n * k
    # no more pieces than roundings are worth
    forget()
    monkeypatch.setattr(quantised, "PIECE_BYTES", 1)
    fn(functional, weights, randn(T, k))
    assert {rows for rows, _ in Int8Rows.sizes} <= {n // 4, k // 4}


def test_no_pieces_of_a_class_without_slices(monkeypatch):
    monkeypatch.setattr(quantised, "PIECE_BYTES", 1)
    functional.linear_act(randn(T, D), quantise(randn(F, D)))
    assert {rows for rows, _ in Int8Rows.sizes} == {F}


def test_peak_of_a_step():
    """Above the start: a dense weight at a time, beside what a dense block's step needs."""
    d, f, t = 64, 512, 16
    weights = [quantise(randn(*s)) for s in ((f, d), (f, d), (d, f))]
    x = randn(t, d)

    def step():
        functional.gated_mlp(x, *weights).sum().backward()

    step()
    x.grad = None
    dense, rows = 4 * d * f, 4 * t * f
    # two make one: the integers as floats, and these times the scale
    assert peak_bytes(step, DEVICE) <= 2 * dense + 4 * rows + 8 * 4 * t * d


class Halved(torch.Tensor):
    """Another class, which only a registration tells of."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs)


def test_a_registered_class(monkeypatch):
    monkeypatch.setattr(quantised, "_registered", {})
    w = randn(F, D, requires_grad=False)
    x, given = randn(T, D), (w * 2).as_subclass(Halved)
    register_quantised(Halved, lambda weight: weight.as_subclass(torch.Tensor) / 2)
    y = functional.linear_act(x, given)
    assert "Block" in type(y.grad_fn).__name__
    torch.testing.assert_close(y, reference.linear_act(x, w))


class Rounded(Int8Rows):
    """Dequantises, but rounds what it multiplies."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            return func(args[0].round(), args[1].int_data * args[1].scale[:, None], *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_an_unknown_class_runs_its_own_linear():
    given = quantise(randn(F, D))
    x, w = randn(T, D), Rounded(given.int_data, given.scale)
    y = functional.linear_act(x, w, activation="identity")
    assert torch.equal(y, nn.functional.linear(x, w))


@pytest.mark.parametrize("save", ["inputs", "preact"])
def test_a_weight_that_was_written_raises(save):
    w, x = quantise(randn(F, D)), randn(T, D)
    y = functional.linear_act(x, w, save=save)
    w.scale.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_record():
    w = randn(F, D, requires_grad=False)
    record = QuantisedWeight(w.shape, w.dtype, w.device, lambda rows: w)
    x = randn(T, D)
    y, wanted = functional.linear_act(x, record), reference.linear_act(x, w)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(t.sum(), x)[0] for t in (y, wanted)))


@pytest.mark.parametrize(
    ("kind", "fn", "message"), [(int, len, "subclass of Tensor"), (Halved, 3, "a function")]
)
def test_registering_nonsense(kind, fn, message):
    with pytest.raises(TypeError, match=message):
        register_quantised(kind, fn)


def test_modules_take_quantised_children():
    module = fusedckpt.GatedMLP(D, F, norm=fusedckpt.RMSNorm(D), residual=True).to(DEVICE)
    dense = fusedckpt.GatedMLP(D, F, norm=fusedckpt.RMSNorm(D), residual=True).to(DEVICE)
    for name, linear in module.named_children():
        if isinstance(linear, nn.Linear):
            linear.weight = quantise(linear.weight)
            getattr(dense, name).weight = nn.Parameter(linear.weight.dequantize())
    x = randn(T, D)
    forget()
    y = module(x)
    assert "Block" in type(y.grad_fn).__name__
    torch.testing.assert_close(y, dense(x))
    assert saved_bytes(module, [x]) == 4 * T * D


def test_a_weight_that_trains_is_left():
    """What has a gradient of its own is for its class to compute."""
    w = nn.Parameter(quantise(randn(F, D)).data, requires_grad=True)
    assert quantised.quantised(w) is None


@pytest.mark.parametrize("key", ["act_quant_kwargs", "act_quant_scale", "act_pre_scale"])
def test_changed_activations_are_left(key):
    w = quantise(randn(F, D))
    setattr(w, key, object())
    assert quantised.quantised(w) is None
    assert "activations" in str(quantised.why_left(w))


def torchao_weight(config):
    api = pytest.importorskip("torchao.quantization")
    module = nn.Sequential(nn.Linear(64, 32, bias=False)).bfloat16()
    try:
        api.quantize_(module, getattr(api, config)())
    except ImportError as error:
        pytest.skip(str(error))
    return module[0].weight


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_torchao(config, monkeypatch):
    w = torchao_weight(config)
    dense = w.dequantize()
    x = torch.randn(T, 64, dtype=torch.bfloat16, requires_grad=True)
    y = functional.linear_act(x, w, activation="identity")
    assert "Block" in type(y.grad_fn).__name__
    assert torch.equal(y, nn.functional.linear(x, dense))
    monkeypatch.setattr(quantised, "PIECE_BYTES", 1)
    compare(
        lambda x: functional.linear_act(x, w, activation="identity"),
        lambda x: nn.functional.linear(x, dense.to(x.dtype)),
        lambda: [randn(T, 64, dtype=torch.bfloat16)],
    )


def test_torchao_dynamic_is_left():
    w = torchao_weight("Int8DynamicActivationInt8WeightConfig")
    assert quantised.quantised(w) is None
    x = torch.randn(T, 64, dtype=torch.bfloat16)
    y = functional.linear_act(x, w, activation="identity")
    assert torch.equal(y, nn.functional.linear(x, w))


def test_nf4():
    pytest.importorskip("torchao")
    module = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"
    nf4 = pytest.importorskip(module)
    w = nf4.to_nf4(torch.randn(128, 128, dtype=torch.bfloat16), 64, 256)
    x = torch.randn(T, 128, dtype=torch.bfloat16, requires_grad=True)
    y = functional.linear_act(x, w, activation="identity")
    assert "Block" in type(y.grad_fn).__name__
    assert torch.equal(y, nn.functional.linear(x, w.get_original_weight()))
    y.sum().backward()


@pytest.mark.parametrize("kind", ["Linear4bit", "Linear8bitLt"])
def test_bitsandbytes(kind):
    nn_ = pytest.importorskip("bitsandbytes.nn")
    options = {"compute_dtype": torch.bfloat16} if kind == "Linear4bit" else {}
    if kind == "Linear8bitLt":
        options["has_fp16_weights"] = False
    linear = getattr(nn_, kind)(64, 32, bias=False, **options)
    dense = linear.weight.detach().clone()
    linear = linear.to("cpu")
    x = torch.randn(T, 64, dtype=torch.bfloat16, requires_grad=True)
    y = functional.linear_act(x, linear.weight, activation="identity")
    assert "Block" in type(y.grad_fn).__name__
    # as near to what was quantised as so few bits are
    wanted = x.float() @ dense.float().T
    relative = (y.float() - wanted).norm() / wanted.norm()
    assert relative < {"Linear4bit": 0.15, "Linear8bitLt": 0.02}[kind]
    if kind == "Linear4bit":
        torch.testing.assert_close(y, linear(x), rtol=0.02, atol=0.02)
    (dx,) = torch.autograd.grad(y.sum(), x)
    (theirs,) = torch.autograd.grad(linear(x).sum(), x)
    torch.testing.assert_close(dx, theirs, rtol=0.05, atol=0.05)
    if kind == "Linear4bit":
        # a layout of its own, for inference
        linear.weight.quant_state.packing_format_for_cpu = True
        assert quantised.quantised(linear.weight) is None
    # the 8-bit module has taken the scale from its weight
    if kind == "Linear8bitLt":
        assert quantised.quantised(linear.weight) is None
        record = quantised.int8(linear.weight.data, linear.state.SCB)
        assert torch.equal(functional.linear_act(x, record, activation="identity"), y)
