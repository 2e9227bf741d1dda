"""Backward through the functions under compiled autograd, at every level."""

import pytest
import torch
import torch._dynamo.compiled_autograd
from cases import CASES
from support import as_tuple

NAMES = [
    "linear_act-gelu",
    "linear_act-gelu-preact",
    "rms_norm-torch",
    "add_layer_norm-affine",
    "norm_linear-layer-bias",
    "mlp-layer",
    "gated_mlp-gate-rms",
    "gated_mlp-preact-layer-chunks",
]


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in NAMES], ids=lambda case: case.name
)
def test_gradients_are_those_of_the_engine(case):
    torch._dynamo.reset()
    inputs = case.inputs((3,), 4, 5, torch.float64)
    leaves = [x for x in inputs if x is not None]

    def total():
        return sum(y.sin().sum() for y in as_tuple(case.fused(*inputs)))

    expected = torch.autograd.grad(total(), leaves)
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        total().backward()
    torch.testing.assert_close([leaf.grad for leaf in leaves], list(expected))
