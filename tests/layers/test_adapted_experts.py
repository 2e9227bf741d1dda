"""Experts with adapters or quantized weights, beside a loop over sums of weights."""

from itertools import product

import pytest
import torch
from expert_calls import HIDDEN, LEVELS, RANK, D, E, K, T, adapters, both, leaves, loop, routing
from quantized_weight import Int8Rows, forget, quantize
from support import DEVICE, compare, flops, gemm_flops, saved_bytes

from fusedckpt import ClampedSwiGLU, LoRA
from fusedckpt.blocks import quantized
from fusedckpt.functional import experts


@pytest.mark.parametrize("save", LEVELS)
def test_bytes_and_flops_of_adapters(save, path):
    """They save nothing, and frozen weights take no GEMM for a gradient."""
    index, dtype = torch.rand(T, E, device=DEVICE).topk(K).indices, torch.bfloat16
    (x, scores, *_), weights = leaves(dtype=dtype), adapters(dtype)

    def call(x, scores, index):
        return experts(x, index, scores, *weights, save=save)

    products = {"inputs": 0, "gate": 1, "preact": 2}[save]
    expected = T * (2 * D + 12 * K + products * 2 * HIDDEN * K)
    assert saved_bytes(call, [x, scores, index]) == expected
    unit, low = T * D * HIDDEN * K, 2 * T * K * RANK
    # at "gate" gate and up have an adapter each
    sizes = [(HIDDEN, D)] * 2 if save == "gate" else [(2 * HIDDEN, D)]
    sizes.append((D, HIDDEN))
    assert flops(lambda: call(x, scores, index)) == 6 * unit + low * sum(n + k for n, k in sizes)
    y = call(x, scores, index)
    wanted = [x, scores, *(t for w in weights for t in (w.A, w.B))]

    def backward():
        torch.autograd.grad(y, wanted, torch.ones_like(y), retain_graph=True)

    # dy B, that times A and x, x A' again, dy' that
    expected = 6 * unit + low * sum(2 * n + 3 * k for n, k in sizes)
    expected += (2 - products) * (2 * unit + low * HIDDEN)
    assert flops(backward) == expected
    if path == "aten" and DEVICE.type == "cpu":
        assert gemm_flops(backward) == expected


@pytest.mark.parametrize("kind", ["gate", "GptOss", "mixed"])
def test_adapters_equal_sums_of_weights(kind, path):
    """Adapters of another dtype are cast to that of the weight."""
    options, turns = {"save": "gate"}, kind == "GptOss"
    if turns:
        options |= {"activation": ClampedSwiGLU(limit=1.0), "is_transposed": True, "chunks": 2}
    ours, eager = both(routing(T, foreign=2), **options)

    def inputs():
        found = leaves(rank=RANK, bias=turns, turns=turns)
        if kind == "mixed":
            found = [t.bfloat16() if i in (0, 2, 5) else t for i, t in enumerate(found)]
        return [t.detach().requires_grad_() for t in found]

    compare(ours, eager, inputs)


def test_every_mask_of_adapters():
    """With weights frozen or not, at each level in turns; second derivatives, too."""
    shape = {"d": 3, "f": 2, "num": 3, "top_k": 2, "rank": 1}
    given = [t.detach().double().requires_grad_() for t in leaves((5,), **shape)]
    index = routing(5, num=3, top_k=2, foreign=1)
    expected = torch.autograd.grad(both(index)[1](*given).sin().sum(), given)
    for i, mask in enumerate(product((False, True), repeat=len(given) - 1)):
        # both weights have one flag
        wants = [*mask[:5], mask[2], *mask[5:]]
        inputs = [t.detach().requires_grad_(want) for t, want in zip(given, wants, strict=True)]
        y = both(index, save=LEVELS[i % 3])[0](*inputs)
        assert y.requires_grad == any(wants)
        if any(wants):
            found = torch.autograd.grad(y.sin().sum(), [t for t in inputs if t.requires_grad])
            known = [grad for grad, want in zip(expected, wants, strict=True) if want]
            torch.testing.assert_close(list(found), known)
    assert torch.autograd.gradgradcheck(both(index)[0], given)


@pytest.mark.parametrize("is_sliceable", [True, False])
@pytest.mark.parametrize("save", LEVELS)
def test_quantized_weights(save, is_sliceable, monkeypatch):
    """Dense while a GEMM reads them; of a class with slices one expert's at a time."""
    monkeypatch.setitem(quantized._registered, Int8Rows, (Int8Rows.dequantize, is_sliceable))
    index, (x, scores, *weights) = routing(T), leaves(dtype=torch.bfloat16)
    given = [quantize(w) for w in weights]
    dense = [(w.int_data.double() * w.scale.double()[..., None]) for w in given]
    lora = adapters(torch.bfloat16)[0]

    def call(fn, first, last, **options):
        def run(x, scores, index):
            a, b = lora.A.to(x.dtype), lora.B.to(x.dtype)
            weight = LoRA(first, a, b) if fn is experts else first.to(x.dtype) + b @ a
            return fn(
                x, index, scores, weight, last if fn is experts else last.to(x.dtype), **options
            )

        return run

    ours, eager = call(experts, *given, save=save), call(loop, *dense)
    compare(*(lambda *t, fn=fn: fn(*t, index) for fn in (ours, eager)), lambda: [x, scores])
    products = {"inputs": 0, "gate": 1, "preact": 2}[save]
    expected = T * (2 * D + 12 * K + products * 2 * HIDDEN * K)
    assert saved_bytes(ours, [x, scores, index]) == expected
    forget()
    y = ours(x, scores, index)
    y.sum().backward()
    # each was gone before the next was made, see `dequantize`
    assert Int8Rows.num_alive() == 0
    assert {rows for rows, _ in Int8Rows.sizes} == {1 if is_sliceable else E}
    forget()
