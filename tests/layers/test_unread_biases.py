"""A bias that no gradient reads is not saved by autograd: code may write it before backward."""

from functools import partial

import pytest
import torch
from cases import CASES
from linear_calls import PRIMES, Dtypes, Operands, function_of
from support import as_tuple
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fusedckpt

T, D, F, *_ = PRIMES
WIDE = Dtypes(*[torch.float64] * 4)
# block, norm, level: which of all biases may be written before backward, the norm's first, and
# which before one that is differentiated again
FREE = {
    ("linear_act", None, "inputs"): ([], []),
    ("linear_act", None, "preact"): ([0], []),
    ("linear", None, "inputs"): ([0], [0]),
    ("mlp", "layer", "inputs"): ([2], [2]),
    ("mlp", "layer", "preact"): ([1, 2], [2]),
    ("gated_mlp", None, "inputs"): ([2], [2]),
    ("gated_mlp", None, "gate"): ([0, 2], [2]),
    ("gated_mlp", None, "preact"): ([0, 1, 2], [2]),
    ("norm_linear", "layer", "inputs"): ([1, 2, 3], [1, 2, 3]),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(("block", "norm", "level"), FREE)
def test_written_before_backward(block, norm, level, create_graph):
    operands = Operands(PRIMES, WIDE)
    x, spec = operands.x().requires_grad_(), operands.norm(norm)
    call = partial(function_of(block, spec, operands.linears(block)), save=level)
    wanted = operands.leaves
    biases = [t for t, r in zip(wanted, operands.roles, strict=True) if r.endswith("bias")]

    def total():
        return sum(y.sum() for y in as_tuple(call(x)))

    expected = torch.autograd.grad(total(), wanted)
    for index, bias in enumerate(biases):
        loss = total()
        with torch.no_grad():
            bias.add_(0.0)
        if index in FREE[block, norm, level][create_graph]:
            found = torch.autograd.grad(loss, wanted, create_graph=create_graph)
            torch.testing.assert_close(found, expected)
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(loss, wanted, create_graph=create_graph)


BIASED = [
    case
    for case in CASES
    if "preact" not in case.name and len(case.shapes((T,), D, F)[-1] or ()) == 1
]


@pytest.mark.parametrize("checkpoint", [torch_checkpoint, fusedckpt.checkpoint])
@pytest.mark.parametrize("case", BIASED, ids=lambda case: case.name)
def test_the_last_vector_alone_is_trained_inside_a_checkpoint(case, checkpoint):
    """Nothing may be left to keep."""
    mask = [False] * (len(case.shapes((T,), D, F)) - 1) + [True]
    inputs = case.inputs((T,), D, F, torch.float64, tuple(mask))
    found = []
    for fn in (partial(checkpoint, case.fused, use_reentrant=False), case.eager):
        total = sum(y.sin().sum() for y in as_tuple(fn(*inputs)) if y.requires_grad)
        found.append(torch.autograd.grad(total, inputs[-1]))
    torch.testing.assert_close(*found)
