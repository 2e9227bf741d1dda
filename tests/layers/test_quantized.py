"""Quantized weights: dense while a GEMM reads them, never kept, refused where they are not so.

`adapted_cases.py` has their values, gradients, masks and levels.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from quantized_weight import Int8Rows, forget, quantize
from support import DEVICE, as_tuple, compare, randn, saved_bytes
from torch import Tensor, nn

import fusedckpt
from fusedckpt import LoRA, NormSpec, QuantizedWeight, functional, reference, register_quantized
from fusedckpt.blocks import quantized
from fusedckpt.memory import peak_bytes

T, D, F, R = 17, 4, 6, 2


@pytest.fixture(autouse=True)
def forgotten():
    forget()
    yield
    forget()


def weights(name):
    sizes = {"linear_act": [(F, D)], "packed": [(2 * F, D), (D, F)], "mlp": [(F, D), (D, F)]}
    return [quantize(randn(*s) / s[1] ** 0.5) for s in sizes.get(name, [(F, D), (F, D), (D, F)])]


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


@pytest.mark.parametrize("name", CALLS)
def test_dense_while_it_is_read(name):
    """Values and gradients are those of a dense weight, of which one exists at a time."""
    dtype = torch.float32 if "save" in CALLS[name] else torch.bfloat16
    options, name = CALLS[name], name.split()[0]
    given = [quantize(w.dequantize().to(dtype)) for w in weights(name)]
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
    monkeypatch.setitem(quantized._registered, Int8Rows, (Int8Rows.dequantize, True))
    first = [(2 * n, k)] if name == "packed" else [(n, k), (n, k)]
    weights = [quantize(randn(*s) / s[1] ** 0.5) for s in (*first, (k, n))]
    dense = [w.int_data.double() * w.scale.double()[:, None] for w in weights]

    def fn(module, given, x):
        if name == "linear_act":
            return module.linear_act(x, given[0], activation="identity")
        up = [None] if name == "packed" else []
        return module.gated_mlp(x, given[0], *up, *given[1:])

    monkeypatch.setattr(quantized, "PIECE_BYTES", n * k)
    compare(
        partial(fn, functional, weights),
        lambda x: fn(reference, [w.to(x.dtype) for w in dense], x),
        lambda: [randn(T, k)],
    )
    assert {rows for rows, _ in Int8Rows.sizes} <= {n // 4, k // 4}
    assert max(nbytes for _, nbytes in Int8Rows.sizes) == n * k
    # no more pieces than roundings are worth
    forget()
    monkeypatch.setattr(quantized, "PIECE_BYTES", 1)
    fn(functional, weights, randn(T, k))
    assert {rows for rows, _ in Int8Rows.sizes} <= {n // 4, k // 4}


def test_no_pieces_of_a_class_without_slices(monkeypatch):
    monkeypatch.setattr(quantized, "PIECE_BYTES", 1)
    functional.linear_act(randn(T, D), quantize(randn(F, D)))
    assert {rows for rows, _ in Int8Rows.sizes} == {F}


def test_peak_of_a_step():
    """Above the start: a dense weight at a time, beside what a dense block's step needs."""
    d, f, t = 64, 512, 16
    weights = [quantize(randn(*s)) for s in ((f, d), (f, d), (d, f))]
    x = randn(t, d)

    def step():
        functional.gated_mlp(x, *weights).sum().backward()

    step()
    x.grad = None
    dense, rows = 4 * d * f, 4 * t * f
    # two make one: the integers as floats, and these times the scale
    assert peak_bytes(step, DEVICE) <= 2 * dense + 4 * rows + 8 * 4 * t * d


class Rounded(Int8Rows):
    """Dequantizes, but rounds what it multiplies."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            return func(args[0].round(), args[1].int_data * args[1].scale[:, None], *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_an_unknown_class_runs_its_own_linear():
    given = quantize(randn(F, D))
    x, w = randn(T, D), Rounded(given.int_data, given.scale)
    y = functional.linear_act(x, w, activation="identity")
    assert torch.equal(y, nn.functional.linear(x, w))


@pytest.mark.parametrize("save", ["inputs", "preact"])
def test_a_weight_that_was_written_raises(save):
    w, x = quantize(randn(F, D)), randn(T, D)
    y = functional.linear_act(x, w, save=save)
    w.scale.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_modules_take_quantized_children():
    module = fusedckpt.GatedMLP(D, F, norm=fusedckpt.RMSNorm(D), residual=True).to(DEVICE)
    dense = fusedckpt.GatedMLP(D, F, norm=fusedckpt.RMSNorm(D), residual=True).to(DEVICE)
    for name, linear in module.named_children():
        if isinstance(linear, nn.Linear):
            linear.weight = quantize(linear.weight)
            getattr(dense, name).weight = nn.Parameter(linear.weight.dequantize())
    x = randn(T, D)
    forget()
    y = module(x)
    assert "LayerFunction" in type(y.grad_fn).__name__
    torch.testing.assert_close(y, dense(x))
    assert saved_bytes(module, [x]) == 4 * T * D


@pytest.mark.parametrize("key", ["act_quant_kwargs", "act_quant_scale", "act_pre_scale"])
def test_changed_activations_are_left(key):
    # what has a gradient of its own is for its class to compute
    assert quantized.quantized(nn.Parameter(quantize(randn(F, D)).data)) is None
    w = quantize(randn(F, D))
    setattr(w, key, object())
    assert quantized.quantized(w) is None
    assert "activations" in str(quantized.why_left(w))


def zeros(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape, **{"device": DEVICE} | options)


def record(n: int, k: int, dense: Any = None, **fields: Any) -> QuantizedWeight:
    w = randn(n, k, requires_grad=False)
    dense = dense or (lambda rows: w if rows is None else w[rows])
    given = {"shape": (n, k), "dtype": w.dtype, "device": w.device, "dense": dense}
    return QuantizedWeight(**given | fields)


# what a message calls a weight [F, D], and a call of it
NAMED = {
    "linear_act: weight": functional.linear_act,
    "mlp: fc2_weight": lambda x, w: functional.mlp(x, zeros(D, D), None, w, None),
    "norm_linear: weights[1]": lambda x, w: functional.norm_linear(
        x, NormSpec("rms"), [zeros(D, D), w]
    ),
    "gated_mlp: gate_weight": lambda x, w: functional.gated_mlp(x, w, None, zeros(D, F // 2)),
    "linear_act: weight ": lambda x, w: functional.linear_act(x, LoRA(w, zeros(R, D), zeros(F, R))),
}
# what `dense` returns in place of [F, D]
RETURNED = {
    "fewer rows": lambda: zeros(F - 1, D),
    "one row": lambda: zeros(1, D),
    "more rows": lambda: zeros(F + 1, D),
    "fewer columns": lambda: zeros(F, D - 1),
    "one column": lambda: zeros(F, 1),
    "transposed": lambda: zeros(D, F),
    "flat": lambda: zeros(F * D),
    "a batch": lambda: zeros(1, F, D),
    "integers": lambda: zeros(F, D, dtype=torch.int8),
    "complex": lambda: zeros(F, D, dtype=torch.complex64),
    "sparse": lambda: zeros(F, D).to_sparse(),
    "another device": lambda: zeros(F, D, device="meta"),
    "nothing": lambda: None,
    "a list": lambda: zeros(F, D).tolist(),
}


@pytest.mark.parametrize("returned", RETURNED)
def test_dense_returns_another_tensor(returned):
    w = record(F, D, lambda rows: RETURNED[returned]())
    for name, call in NAMED.items():
        source = re.escape(f"{name.strip()}.dense must return a dense floating-point tensor [6, 4]")
        with pytest.raises((TypeError, ValueError), match=f"^{source} on .*, got "):
            call(randn(T, D), w)


@pytest.mark.parametrize("save", ["inputs", "preact"])
def test_dense_returns_another_tensor_in_backward(save):
    returned = [zeros(F, D)]
    w = record(F, D, lambda rows: returned[0])
    y = functional.linear_act(randn(T, D), w, save=save)
    returned[0] = zeros(F - 1, D)
    with pytest.raises(ValueError, match=r"^linear_act: weight.dense must return .*\[6, 4\]"):
        y.sum().backward()


def test_dense_that_ignores_its_slice(monkeypatch):
    monkeypatch.setattr(quantized, "PIECE_BYTES", 1)
    w = zeros(8, D)
    with pytest.raises(ValueError, match=r"must return .*\[2, 4\] on .*, got .*\[8, 4\]"):
        functional.linear_act(randn(T, D), record(8, D, lambda rows: w, is_sliceable=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dense_of_any_floating_dtype(dtype):
    w = torch.randn(F, D, device=DEVICE).to(dtype)
    given = record(F, D, lambda rows: w, shape=[F, D], device=str(DEVICE))
    compare(
        partial(functional.linear_act, weight=given),
        lambda x: reference.linear_act(x, w.to(x.dtype)),
        lambda: [randn(T, D)],
    )


ODD = {
    "record": lambda: record(7, D),
    "class": lambda: quantize(randn(7, D)),
    "under an adapter": lambda: LoRA(record(7, D), zeros(R, D), zeros(7, R)),
    "dense": lambda: zeros(7, D),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_rows_of_a_packed_weight(name):
    message = r"^gated_mlp: a packed gate_weight must have an even number of rows, 2 F, got 7$"
    with pytest.raises(ValueError, match=message):
        functional.gated_mlp(randn(T, D), ODD[name](), None, zeros(D, 3))


def test_fields_are_checked_before_any_weight_is_dense():
    made = []
    first, last = record(F, D, made.append), record(D, F + 1, made.append)
    with pytest.raises(ValueError, match="fc2_weight expects 7 input features, h has 6"):
        functional.mlp(randn(T, D), first, None, last, None)
    last = record(D, F, made.append, device="meta")
    with pytest.raises(ValueError, match="fc2_weight must be on the device of x"):
        functional.mlp(randn(T, D), first, None, last, None)
    assert made == []


class Narrow(torch.Tensor):
    """A class whose tensors look as their dense forms do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(quantized, "_registered", {})
    return lambda dense: register_quantized(Narrow, lambda weight: dense())


@pytest.mark.parametrize("returned", RETURNED)
def test_a_class_that_dequantizes_to_another_tensor(registered, returned):
    registered(RETURNED[returned])
    w, x = zeros(F, D).as_subclass(Narrow), randn(T, D)
    module = fusedckpt.Linear(D, F, bias=False, activation="gelu").to(DEVICE)
    module.weight = nn.Parameter(w, requires_grad=False)
    message = r"^\w+: dequantize\(\w*weight\) must return a dense floating-point tensor \[6, 4\]"
    for call in (
        lambda: functional.mlp(x, w, None, zeros(D, F), None),
        lambda: functional.gated_mlp(x, w, None, zeros(D, F // 2)),
        lambda: module(x),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (lambda: zeros(F, D, dtype=torch.int8), "mlp: fc1_weight.dtype must be one of"),
        (lambda: zeros(F), r"mlp: fc1_weight.shape must be two sizes, \[N, K\]"),
        (lambda: zeros(F, D, 1), "mlp: x must have at least one dimension and fc1_weight two"),
        (lambda: zeros(F, D, device="meta"), "mlp: fc1_weight must be on the device of x"),
        (lambda: zeros(F, D + 1), "mlp: fc1_weight expects 5 input features, x has 4"),
    ],
)
def test_a_class_whose_tensors_are_not_like_their_dense_form(registered, weight, message):
    registered(lambda: zeros(F, D))
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        functional.mlp(randn(T, D), weight().as_subclass(Narrow), None, zeros(D, F), None)
