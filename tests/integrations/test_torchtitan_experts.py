"""The recipe for torchtitan's experts: rows that lie in the order of their experts."""

import pytest
import torch
from little_titan import D, F, GroupedExperts, Registering, installed, routed
from recipes import recipe
from support import DEVICE, compare, randn
from torch.func import functional_call

# an expert without rows, and two rows of no expert
COUNTS, PADDING = [4, 0, 3], 2
ROWS = sum(COUNTS) + PADDING


def run(x, *weights):
    """Run the recipe's experts on rows, with these weights."""
    with installed(Registering):
        made = {"torch": torch}
        exec(recipe("class FusedExperts"), made)
    module = made["FusedExperts"](GroupedExperts.Config()).to(DEVICE)
    names = [name for name, _ in module.named_parameters()]
    counts = torch.tensor(COUNTS, device=x.device)
    return functional_call(module, dict(zip(names, weights, strict=True)), (x, counts))


def inputs(dtype=torch.float32):
    return [randn(ROWS, D, dtype=dtype), randn(3, F, D), randn(3, D, F), randn(3, F, D)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients(dtype):
    compare(run, lambda x, *w: routed(x, COUNTS, *w), lambda: inputs(dtype))
