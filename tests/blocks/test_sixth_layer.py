"""A layer that fusedckpt does not have, as a program of the steps that it has.

y = fc2(rms_norm(relu(fc1(x)) ** 2))
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import compare, randn, saved_bytes
from torch import Tensor, nn

from fusedckpt.autograd.dispatch import Context, Meta
from fusedckpt.blocks import layer_function
from fusedckpt.blocks.builder import Builder
from fusedckpt.blocks.call import LayerCall
from fusedckpt.blocks.operands import LinearNames, LinearParts
from fusedckpt.layers.linear import Hidden
from fusedckpt.layers.norm import Norm, NormSpec, norm_rule_of

# so wide that four draws are enough numbers of a vector
T, D, FF, OUT = 37, 65, 67, 71
INPUTS = "x", "fc1", "fc1_bias", "norm", "fc2", "fc2_bias"
# the gradients of which any one makes a level save x, or z
SAVED = {
    "inputs": {D: "x fc1 fc1_bias norm fc2"},
    "preact": {D: "fc1", FF: "x fc1 fc1_bias norm fc2"},
}


def call_of(metas: tuple[Meta, ...], level: str, chunks: int) -> LayerCall:
    """Return the layer as a program."""
    x, w1, b1, weight, w2, b2 = metas
    dtype = x.dtype
    context = Context(
        grad=True, autocast=None, level=None, reference_only=False, is_unwatched=True, forced=()
    )
    b = Builder(context, dtype)
    fc1 = b.linear(LinearNames("fc1_weight", "fc1_bias"), LinearParts(w1, b1))
    z = b.apply(fc1, None, "x", "z")
    h = b.add(Hidden("relu2", "aten"), "h", (z,))
    n = b.norm(Norm(norm_rule_of(NormSpec("rms"), dtype), dtype), weight, None, reads=h)
    fc2 = b.linear(LinearNames("fc2_weight", "fc2_bias"), LinearParts(w2, b2))
    y = b.apply(fc2, None, n, "y")
    given = {"gemm_outputs": (z,), "dtype": dtype}
    return b.build("relu2_mlp", {"x": x}, [y], given, level=level, chunks=chunks)


def relu2_mlp(
    x: Tensor, w1: Any, b1: Any, weight: Any, w2: Any, b2: Any, level="inputs", chunks=1
) -> Tensor:
    tensors = x, w1, b1, weight, w2, b2
    metas = tuple([Meta(t.shape, t.dtype, t.device) for t in tensors])
    call = call_of(metas, level, chunks)
    return layer_function.apply(call, None, x, w1, b1, weight, None, w2, b2)


def eager(x: Tensor, w1: Any, b1: Any, weight: Any, w2: Any, b2: Any) -> Tensor:
    h = F.relu(F.linear(x, w1, b1)).square()
    return F.linear(F.rms_norm(h, h.shape[-1:], weight), w2, b2)


def inputs(mask=(True,) * 6, dtype=torch.float32, rows=(T,), features=(D, FF, OUT)) -> list[Tensor]:
    before, hidden, after = features
    shapes = (*rows, before), (hidden, before), (hidden,), (hidden,), (after, hidden), (after,)
    pairs = zip(shapes, mask, strict=True)
    return [randn(*shape, dtype=dtype, requires_grad=wanted) for shape, wanted in pairs]


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("level", ["inputs", "preact"])
def test_every_mask(level, chunks):
    fused = partial(relu2_mlp, level=level, chunks=chunks)
    for mask in product((False, True), repeat=6):
        if chunks > 1 and sum(mask) not in (1, 5, 6):
            continue
        compare(fused, eager, lambda mask=mask: inputs(mask))
        wanted = {name for name, flag in zip(INPUTS, mask, strict=True) if flag}
        features = sum(n for n, by in SAVED[level].items() if wanted & set(by.split()))
        x, *weights = inputs(mask)
        nbytes = saved_bytes(fused, [x, *(nn.Parameter(w, w.requires_grad) for w in weights)])
        assert nbytes == 4 * T * features, (mask, nbytes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("level", ["inputs", "preact"])
def test_dtypes_and_leading_dimensions(level, dtype):
    make = partial(inputs, dtype=dtype, rows=(2, 3, 5))
    compare(partial(relu2_mlp, level=level), eager, make)


@pytest.mark.parametrize("chunks", [1, 2])
def test_second_derivatives(chunks):
    fused = partial(relu2_mlp, chunks=chunks)
    leaves = inputs(dtype=torch.float64, rows=(4,), features=(5, 7, 11))
    assert torch.autograd.gradcheck(fused, leaves)
    assert torch.autograd.gradgradcheck(fused, leaves)


def test_schedule():
    """Backward recomputes one GEMM, and writes over what nothing reads later."""
    y = relu2_mlp(*inputs())
    call, needs = y.grad_fn.call, y.grad_fn.needs_input_grad[2:]
    lines = str(call.backward(needs, (False,), (True,), False)).splitlines()
    assert sum("linear(" in line for line in lines) == 1
    assert sum("h=z, dz=d_h" in line for line in lines) == 1
    assert sum(" = norm(" in line for line in lines) == 1
