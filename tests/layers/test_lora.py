"""Adapters in the place of weights: numbers, gradients of every mask, bytes, GEMMs."""

from __future__ import annotations

import random
import re
from functools import partial

import pytest
import torch
from cases import Case
from lora_cases import CASES, Eager
from lora_weights import D, F, R, T, adapted
from support import (
    DEVICE,
    as_tuple,
    compare,
    needs_inductor,
    randn,
    results,
)
from torch.utils.checkpoint import checkpoint

import fusedckpt
from fusedckpt import LoRA, functional

BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(params=BY_NAME)
def case(request) -> Case:
    return BY_NAME[request.param]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_and_gradients(case, path, dtype):
    compare(case.fused, case.eager, lambda: case.inputs((17,), 21, 33, dtype))


def numbers(case, **options):
    """Fresh inputs, the result's gradients, and what they belong to."""
    inputs = case.inputs((17,), 21, 33, **options)
    with torch.no_grad():
        douts = [torch.randn_like(y) for y in as_tuple(case.eager(*inputs))]
    return inputs, douts


def test_every_mask(case):
    draw = random.Random(case.name)
    for _ in range(12):
        mask = tuple(draw.random() < 0.4 for _ in range(case.num_inputs))
        compare(case.fused, case.eager, lambda m=mask: case.inputs((9,), 21, 33, mask=m))
    for index in range(case.num_inputs):
        mask = tuple(i == index for i in range(case.num_inputs))
        compare(case.fused, case.eager, lambda m=mask: case.inputs((9,), 21, 33, mask=m))


def test_gradients_of_some(case):
    """torch.autograd.grad of every input alone equals that of all."""
    inputs, douts = numbers(case)
    wanted = results(case.fused, inputs, douts)
    count = len(douts)
    for index, x in enumerate(inputs):
        ys = as_tuple(case.fused(*inputs))
        pairs = [(y, dy) for y, dy in zip(ys, douts, strict=True)]
        (found,) = torch.autograd.grad([y for y, _ in pairs], x, [dy for _, dy in pairs])
        torch.testing.assert_close(found, wanted[count + index])


def test_reruns_are_bit_equal(case):
    inputs, douts = numbers(case)
    first, second = (results(case.fused, inputs, douts) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_retained_graph(case):
    inputs, douts = numbers(case)
    ys = as_tuple(case.fused(*inputs))
    first, second = (torch.autograd.grad(ys, inputs, douts, retain_graph=k) for k in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError):
        torch.autograd.grad(ys, inputs, douts)


def test_double_backward(case):
    def gradients(fn):
        @torch.enable_grad()
        def of(*inputs):
            y = sum(y.tanh().sum() for y in as_tuple(fn(*inputs)))
            grads = torch.autograd.grad(y, inputs, create_graph=True)
            return tuple(grad.sin() for grad in grads)

        return of

    compare(gradients(case.fused), gradients(case.eager), lambda: case.inputs((5,), 7, 9))


@pytest.mark.parametrize("name", ["fusedckpt", "torch", "reentrant"])
def test_under_a_checkpoint(case, name):
    inputs, douts = numbers(case)
    wrap = {
        "fusedckpt": fusedckpt.checkpoint,
        "torch": partial(checkpoint, use_reentrant=False),
        "reentrant": partial(checkpoint, use_reentrant=True),
    }[name]
    # not the last: its backward counts on nothing that a recompute cuts short
    wanted = results(lambda *i: tuple(y * 2 for y in as_tuple(case.fused(*i))), inputs, douts)
    inner = partial(wrap, lambda *i: tuple(y * 2 for y in as_tuple(case.fused(*i))))
    ys = as_tuple(inner(*inputs))
    torch.autograd.backward(ys, douts)
    for a, b in zip((*ys, *(x.grad for x in inputs)), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_transforms(case):
    inputs = [x.detach() for x in case.inputs((5,), 7, 9)]
    index = tuple(range(len(inputs)))

    def total(fn, *args):
        return sum(y.square().sum() for y in as_tuple(fn(*args)))

    pair = (torch.func.grad(partial(total, fn), index)(*inputs) for fn in (case.fused, case.eager))
    for a, b in zip(*pair, strict=True):
        torch.testing.assert_close(a, b)
    (x, *rest), tangent = inputs, torch.randn_like(inputs[0])
    pair = (
        torch.func.jvp(lambda x, fn=fn: fn(x, *rest), (x,), (tangent,))
        for fn in (case.fused, case.eager)
    )
    (_, ours), (_, theirs) = pair
    torch.testing.assert_close(ours, theirs)


@needs_inductor
@pytest.mark.parametrize("name", ["linear_act-gelu", "norm_linear", "gated_mlp-gate"])
def test_compiled(name):
    case = BY_NAME[name]
    inputs, douts = numbers(case)
    compiled = torch.compile(case.fused, fullgraph=True, backend="aot_eager")
    pairs = zip(results(compiled, inputs, douts), results(case.eager, inputs, douts), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b)


def test_batched_gradients(case):
    inputs, douts = numbers(case)
    ys = as_tuple(case.fused(*inputs))
    batched = [torch.stack([dy, 2 * dy]) for dy in douts]
    found = torch.autograd.grad(ys, inputs, batched, is_grads_batched=True)
    wanted = torch.autograd.grad(as_tuple(case.eager(*inputs)), inputs, douts)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, torch.stack([b, 2 * b]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("save", ["inputs", "preact"])
def test_float32_adapters_of_half_precision_weights(path, save):
    """peft keeps adapters in float32; x is cast to it, and the sum back."""

    def call(module, x, w1, a1, b1, w2, a2, b2, **options):
        # in float64 all are
        half = torch.bfloat16 if x.dtype != torch.float64 else x.dtype
        x, w1, w2 = (t.to(half) for t in (x, w1, w2))
        fc1, fc2 = LoRA(w1, a1, b1, 1.5), LoRA(w2, a2, b2, 0.5)
        return module.mlp(x, fc1, None, fc2, None, **options)

    def inputs():
        shapes = (17, D), (F, D), (R, D), (F, R), (D, F), (R, F), (D, R)
        x, *rest = (torch.randn(s, device=DEVICE) for s in shapes)
        found = [x, *(t / t.shape[1] ** 0.5 for t in rest)]
        # exact in half precision, so that all start from the same numbers
        for i in (0, 1, 4):
            found[i] = found[i].bfloat16().float()
        return [t.requires_grad_() for t in found]

    fused, eager = partial(call, functional, save=save), partial(call, Eager)
    compare(fused, eager, inputs)


def test_autocast(path):
    """All GEMMs in the dtype of autocast, adapters' too."""
    case = BY_NAME["gated_mlp-rms-chunks"]

    def under_autocast(fn):
        def call(*inputs):
            with torch.autocast(DEVICE.type, torch.bfloat16):
                return fn(*inputs)

        return call

    fused, eager = (under_autocast(fn) for fn in (case.fused, case.eager))
    assert fused(*case.inputs((3,), D, F)).dtype == torch.float32
    compare(fused, eager, lambda: case.inputs((17,), D, F))


@pytest.mark.parametrize("shape", [(0, D), (3, 2, D), (D,)])
def test_shapes(shape, path):
    w = adapted(F, D)
    x = randn(*shape)
    y = functional.linear_act(x, w)
    assert y.shape == (*shape[:-1], F)
    y.sum().backward()
    assert x.grad.shape == shape
    assert w.A.grad.shape == w.A.shape


def bad_calls():
    w, x = adapted(F, D), randn(T, D)
    other = torch.zeros(R, D + 1)
    return {
        "A must be [r, 24]": lambda: functional.linear_act(x, w._replace(A=other)),
        "weight.A must be a tensor": lambda: functional.linear_act(x, w._replace(A=None)),
        "weight must be a tensor": lambda: functional.linear_act(x, w._replace(weight=None)),
        "weight.scale must be a number": lambda: functional.linear_act(x, w._replace(scale="2")),
        "a probability, got 2.0": lambda: functional.linear_act(x, w._replace(dropout=2.0)),
        "dropout must be a number": lambda: functional.mlp(x, w, None, w, None, dropout="a"),
        "kernel must be": lambda: functional.linear_act(x, w, kernel="fused"),
        "share a dtype": lambda: functional.linear_act(x, w._replace(A=w.A.double())),
        "24 input features": lambda: functional.linear_act(randn(T, 5), w),
        "up_weight.B must be a tensor": lambda: functional.gated_mlp(
            x, w, w._replace(B=3), adapted(D, F)
        ),
        "save must be": lambda: functional.linear_act(x, w, save="gate"),
    }


@pytest.mark.parametrize("message", bad_calls())
def test_errors_name_what_was_expected(message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        bad_calls()[message]()


def test_disabled(monkeypatch):
    monkeypatch.setattr("fusedckpt.autograd.dispatch.DISABLED", True)
    y = functional.linear_act(randn(T, D), adapted(F, D))
    assert "Block" not in type(y.grad_fn).__name__
