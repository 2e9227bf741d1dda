"""Records and classes of quantised weights whose fields, or dense forms, are not what they say."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from quantised_weight import quantise
from support import DEVICE, compare, randn
from torch import Tensor

from fusedckpt import (
    Linear,
    LoRA,
    NormSpec,
    QuantisedWeight,
    functional,
    reference,
    register_quantised,
)
from fusedckpt.blocks import quantised

T, D, F, R = 5, 4, 6, 2


def zeros(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape, **{"device": DEVICE} | options)


def record(n: int, k: int, dense: Any = None, **fields: Any) -> QuantisedWeight:
    w = randn(n, k, requires_grad=False)
    dense = dense or (lambda rows: w if rows is None else w[rows])
    given = {"shape": (n, k), "dtype": w.dtype, "device": w.device, "dense": dense}
    return QuantisedWeight(**given | fields)


def linear_act(x, w, **options):
    return functional.linear_act(x, w, **options)


def last_of_mlp(x, w, **options):
    return functional.mlp(x, zeros(D, D), None, w, None, **options)


def norm_linear(x, w):
    return functional.norm_linear(x, NormSpec("rms"), [zeros(D, D), w])[1]


def packed(x, w, **options):
    return functional.gated_mlp(x, w, None, zeros(D, F // 2), **options)


def adapted(x, w, **options):
    return functional.linear_act(x, LoRA(w, zeros(R, D), zeros(F, R)), **options)


CALLS = {
    "linear_act: weight": linear_act,
    "mlp: fc2_weight": last_of_mlp,
    "norm_linear: weights[1]": norm_linear,
    "gated_mlp: gate_weight": packed,
    "linear_act: weight ": adapted,
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
@pytest.mark.parametrize("name", CALLS)
def test_dense_returns_another_tensor(name, returned):
    source = re.escape(f"{name.strip()}.dense must return a dense floating-point tensor [6, 4] on ")
    w = record(F, D, lambda rows: RETURNED[returned]())
    with pytest.raises((TypeError, ValueError), match=f"^{source}.*, got "):
        CALLS[name](randn(T, D), w)


@pytest.mark.parametrize("save", ["inputs", "preact"])
def test_dense_returns_another_tensor_in_backward(save):
    returned = [zeros(F, D)]
    y = linear_act(randn(T, D), record(F, D, lambda rows: returned[0]), save=save)
    returned[0] = zeros(F - 1, D)
    with pytest.raises(ValueError, match=r"^linear_act: weight.dense must return .*\[6, 4\]"):
        y.sum().backward()


def test_dense_that_ignores_its_slice(monkeypatch):
    monkeypatch.setattr(quantised, "PIECE_BYTES", 1)
    w = zeros(8, D)
    with pytest.raises(ValueError, match=r"must return .*\[2, 4\] on .*, got .*\[8, 4\]"):
        linear_act(randn(T, D), record(8, D, lambda rows: w, is_sliceable=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("fields", [{}, {"shape": [F, D]}, {"device": str(DEVICE)}])
def test_dense_of_any_floating_dtype(dtype, fields):
    w = torch.randn(F, D, device=DEVICE).to(dtype)
    given = record(F, D, lambda rows: w, **fields)
    compare(
        partial(functional.linear_act, weight=given),
        lambda x: reference.linear_act(x, w.to(x.dtype)),
        lambda: [randn(T, D)],
    )


ODD = {
    "record": lambda: record(7, D),
    "sliceable": lambda: record(7, D, is_sliceable=True),
    "class": lambda: quantise(randn(7, D)),
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
    monkeypatch.setattr(quantised, "_registered", {})
    return lambda dense: register_quantised(Narrow, lambda weight: dense())


@pytest.mark.parametrize("returned", RETURNED)
def test_a_class_that_dequantises_to_another_tensor(registered, returned):
    registered(RETURNED[returned])
    w, x = zeros(F, D).as_subclass(Narrow), randn(T, D)
    module = Linear(D, F, bias=False, activation="gelu").to(DEVICE)
    module.weight = torch.nn.Parameter(w, requires_grad=False)
    message = r"^\w+: dequantise\(\w*weight\) must return a dense floating-point tensor \[6, 4\]"
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
        (lambda: zeros(F, D, 1), r"mlp: fc1_weight.shape must be two sizes, \[N, K\]"),
        (lambda: zeros(F, D, device="meta"), "mlp: fc1_weight must be on the device of x"),
        (lambda: zeros(F, D + 1), "mlp: fc1_weight expects 5 input features, x has 4"),
    ],
)
def test_a_class_whose_tensors_are_not_like_their_dense_form(registered, weight, message):
    registered(lambda: zeros(F, D))
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        functional.mlp(randn(T, D), weight().as_subclass(Narrow), None, zeros(D, F), None)


@pytest.mark.parametrize("given", ["record", "adapter"])
@pytest.mark.parametrize("key", ["x", "fc1_bias", "fc2_bias", "norm.weight", "fc1_weight.A"])
def test_records_where_tensors_belong(given, key):
    w = record(F, D) if given == "record" else LoRA(zeros(F, D), zeros(R, D), zeros(F, R))
    call = {"x": randn(T, D), "fc1_weight": zeros(F, D), "fc1_bias": None}
    call |= {"fc2_weight": zeros(D, F), "fc2_bias": None}
    if key == "norm.weight":
        call["norm"] = NormSpec("rms", w)
    elif key == "fc1_weight.A":
        call["fc1_weight"] = LoRA(zeros(F, D), w, zeros(F, R))
    else:
        call[key] = w
    with pytest.raises(TypeError, match=f"^mlp: {key} must be a tensor, got {type(w).__name__}"):
        functional.mlp(**call)
