"""Adapters in the place of weights: numbers, gradients of every mask, bytes, GEMMs."""

import random
from functools import partial

import pytest
import torch
from cases import Case
from lora_cases import CASES
from support import as_tuple, compare, needs_inductor, results
from torch.utils.checkpoint import checkpoint

import fusedckpt

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
