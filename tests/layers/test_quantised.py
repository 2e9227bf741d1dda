"""Quantised weights: dense while a GEMM reads them, in forward and backward, and never kept."""

from functools import partial

import pytest
import torch
from quantised_weight import Int8Rows, forget, quantise
from support import DEVICE, as_tuple, compare, randn, saved_bytes
from torch import nn

import fusedckpt
from fusedckpt import LoRA, NormSpec, functional, reference
from fusedckpt.blocks import quantised
from fusedckpt.memory import peak_bytes

T, D, F, R = 17, 24, 40, 4


@pytest.fixture(autouse=True)
def forgotten():
    forget()
    yield
    forget()


def weights(name):
    sizes = {"linear_act": [(F, D)], "packed": [(2 * F, D), (D, F)], "mlp": [(F, D), (D, F)]}
    return [quantise(randn(*s) / s[1] ** 0.5) for s in sizes.get(name, [(F, D), (F, D), (D, F)])]


def call(name, module, x, given, **options):
    """Run a function over weights, the first of which has an adapter."""
    torch.manual_seed(0)
    n, k = given[0].shape
    a, b = (torch.randn(s, device=DEVICE).to(x.dtype) / 4 for s in ((R, k), (n, R)))
    first, rest = LoRA(given[0], a, b), given[1:]
    if name == "linear_act":
        return module.linear_act(x, first, **options)
    if name == "norm_linear":
        return module.norm_linear(x, NormSpec("rms"), [first, rest[0]])
    if name == "mlp":
        return module.mlp(x, first, None, rest[0], None, residual=True, **options)
    up = [None] if name == "packed" else []
    return module.gated_mlp(x, first, *up, *rest, **options)


CALLS = {
    "linear_act": {},
    "norm_linear": {},
    "mlp": {"chunks": 3},
    "mlp preact": {"save": "preact"},
    "gated_mlp": {"save": "gate"},
    "packed": {},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_dense_while_it_is_read(name, dtype):
    """Values and gradients are those of a dense weight, of which one exists at a time."""
    options, name = CALLS[name], name.split()[0]
    given = [quantise(w.dequantize().to(dtype)) for w in weights(name)]
    forget()
    ys = as_tuple(call(name, functional, randn(T, D, dtype=dtype), given, **options))
    made = len(Int8Rows.made)
    # each was gone before the next was made, see `dequantize`
    assert made > 0
    assert Int8Rows.num_alive() == 0
    sum(y.sum() for y in ys).backward()
    assert len(Int8Rows.made) > made
    assert Int8Rows.num_alive() == 0
    dense = [w.int_data * w.scale[:, None] for w in given]
    compare(
        lambda x: call(name, functional, x, given, **options),
        lambda x: call(name, reference, x, [w.to(x.dtype) for w in dense]),
        lambda: [randn(T, D, dtype=dtype)],
    )


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
    if config == "nf4":
        nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
        return nf4.to_nf4(torch.randn(64, 64, dtype=torch.bfloat16), 64, 64)
    module = nn.Sequential(nn.Linear(64, 32, bias=False)).bfloat16()
    try:
        api.quantize_(module, getattr(api, config)())
    except ImportError as error:
        pytest.skip(str(error))
    return module[0].weight


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "nf4"])
def test_torchao(config, monkeypatch):
    w = torchao_weight(config)
    dense = w.get_original_weight() if config == "nf4" else w.dequantize()
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
