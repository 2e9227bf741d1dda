"""Adapters in the place of weights: numbers, gradients of every mask, bytes, GEMMs."""

import random
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F_
from cases import Case
from lora_cases import CASES, Eager, peft_linear
from support import (
    DEVICE,
    as_tuple,
    compare,
    flops,
    needs_inductor,
    randn,
    results,
    saved_bytes,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedckpt
from fusedckpt import LoRA, NormSpec, functional
from fusedckpt.layers.projections import Sums

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


T, D, F, R = 16, 24, 40, 4


def adapted(n: int, k: int, dtype=torch.float32, **options) -> LoRA:
    """A frozen weight with an adapter to train."""
    w, a, b = (nn.Parameter(randn(*s, dtype=dtype) / 4) for s in ((n, k), (R, k), (n, R)))
    return LoRA(w.requires_grad_(False), a, b, **options)


LEVELS = {"inputs": 0, "gate": 1, "preact": 2}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("level", LEVELS)
def test_gated_mlp_saves_x_and_seeds(level, dropout):
    gate, up, down = (adapted(*s, dropout=dropout) for s in ((F, D), (F, D), (D, F)))
    # two on one linear: as many seeds more, and nothing else
    up = up._replace(weight=adapted(F, D, dropout=dropout))

    def fn(x):
        return functional.gated_mlp(x, gate, up, down, save=level)

    found = saved_bytes(fn, [randn(T, D)])
    assert found == 4 * T * (D + LEVELS[level] * F) + 8 * 4 * (dropout > 0)


@pytest.mark.parametrize("save", ["inputs", "preact"])
def test_mlp_saves_what_the_formula_says(save):
    fc1, fc2 = adapted(F, D), adapted(D, F)

    def fn(x):
        return functional.mlp(x, fc1, None, fc2, None, save=save, dropout=0.2, output_dropout=0.1)

    assert saved_bytes(fn, [randn(T, D)]) == 4 * T * (D + F * (save == "preact")) + 2 * 8


def test_linears_save_x_alone():
    q, k = adapted(F, D), adapted(D, D)
    norm = NormSpec("rms", nn.Parameter(randn(D)))
    assert saved_bytes(lambda x: functional.linear_act(x, q), [randn(T, D)]) == 4 * T * D
    assert saved_bytes(lambda x: functional.norm_linear(x, norm, [q, k, q]), [randn(T, D)]) == (
        4 * T * D
    )


def test_what_no_gradient_reads_is_not_saved():
    """At preact a frozen adapter's input is read by nothing."""
    fc1, fc2 = adapted(F, D), adapted(D, F)
    for weight in (fc1, fc2):
        weight.A.requires_grad_(False)
        weight.B.requires_grad_(False)
    fn = partial(functional.mlp, save="preact")
    found = saved_bytes(lambda x: fn(x, fc1, None, fc2, None), [randn(T, D)])
    assert found == 4 * T * F
    assert saved_bytes(lambda x: fn(x.detach(), fc1, None, fc2, None), [randn(T, D)]) == 0


def test_what_no_gradient_reads_may_be_written():
    """As in eager: the gradient of A is made of x and B."""
    w, bias, x = adapted(F, D, scale=0.5), randn(F), randn(T, D, requires_grad=False)
    w.B.requires_grad_(False)
    y = functional.linear_act(x, w, bias.detach(), activation=None)
    with torch.no_grad():
        for t in (w.weight, w.A, bias):
            t.add_(1)
    y.sum().backward()
    torch.testing.assert_close(w.A.grad, 0.5 * torch.ones(T, F, device=DEVICE).mm(w.B).t().mm(x))


def test_backward_writes_over_what_was_kept():
    y = functional.gated_mlp(
        randn(T, D), *(adapted(*s) for s in ((F, D), (F, D), (D, F))), save="preact"
    )
    *_, z, up = y.grad_fn.saved_tensors
    before = z.clone(), up.clone()
    y.sum().backward()
    assert not torch.equal(z, before[0])
    assert not torch.equal(up, before[1])


def test_sums_over_chunks_are_not_rounded():
    sums, a = Sums(2), randn(T, D, dtype=torch.bfloat16, requires_grad=False)
    for rows in a.chunk(2):
        sums.add_product(0, 0, rows, rows)
    torch.testing.assert_close(sums.found[0, 0], a.float().t() @ a.float())


def gemms(n: int, k: int) -> int:
    return 2 * T * n * k


def low_rank(n: int, k: int) -> int:
    """Adapter forward: drop(x) A', then B'."""
    return 2 * T * R * (n + k)


def low_rank_backward(n: int, k: int) -> int:
    """Adapter backward: dy B, that times A and x, drop(x) A' again, dy' that."""
    return 2 * T * R * (2 * n + 3 * k)


@pytest.mark.parametrize("level", LEVELS)
def test_gemms(level):
    """No GEMM for the gradient of a frozen weight; the last is never recomputed."""
    gate, up, down = (adapted(*s) for s in ((F, D), (F, D), (D, F)))
    x = randn(T, D)
    forward = 3 * (gemms(F, D) + low_rank(F, D))
    assert flops(lambda: functional.gated_mlp(x, gate, up, down, save=level)) == forward
    y = functional.gated_mlp(x, gate, up, down, save=level)
    recomputed = (2 - LEVELS[level]) * (gemms(F, D) + low_rank(F, D))
    backward = 3 * gemms(F, D) + 2 * low_rank_backward(F, D) + low_rank_backward(D, F)
    assert flops(lambda: y.sum().backward()) == backward + recomputed


@pytest.mark.parametrize("wrap", [fusedckpt.checkpoint, partial(checkpoint, use_reentrant=False)])
def test_gemms_under_a_checkpoint(wrap):
    """The recompute is the one that backward reads: no forward runs a third time."""
    layers = [[adapted(*s) for s in ((F, D), (F, D), (D, F))] for _ in range(2)]

    def fn(x):
        for weights in layers:
            x = functional.gated_mlp(x, *weights)
        return x

    y = wrap(fn, randn(T, D))
    found = flops(lambda: y.sum().backward())
    one, first = 3 * (gemms(F, D) + low_rank(F, D)), 2 * (gemms(F, D) + low_rank(F, D))
    backward = 3 * gemms(F, D) + 2 * low_rank_backward(F, D) + low_rank_backward(D, F)
    # of the last layer the recompute spares the last GEMM, or all that backward does by itself
    assert found == one + first + 2 * backward


def test_adapters_after_a_norm_layer_share_its_input():
    """Linears of a norm's result keep the norm's input, as linears without adapters do."""
    norm, q, k = fusedckpt.RMSNorm(D), adapted(F, D), adapted(D, D)

    def fn(x):
        n = norm(x)
        return functional.linear_act(n, q, None, None), functional.linear_act(n, k, None, None)

    assert saved_bytes(fn, [randn(T, D)]) == 4 * T * D
    x = randn(T, D)
    found = torch.autograd.grad([y.square().sum() for y in fn(x)], [x, norm.weight, q.A, k.B])

    def eager(x):
        n = F_.rms_norm(x, (D,), norm.weight)
        return peft_linear(n, q), peft_linear(n, k)

    wanted = torch.autograd.grad([y.square().sum() for y in eager(x)], [x, norm.weight, q.A, k.B])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


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
    assert "Adapted" not in type(y.grad_fn).__name__


def test_no_grad_keeps_nothing():
    with torch.no_grad():
        y = functional.linear_act(randn(T, D), adapted(F, D))
    assert not y.requires_grad
