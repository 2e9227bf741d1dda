"""The override for torchtitan's experts: rows that lie in the order of their experts."""

import pytest
import torch
from little_titan import D, F, GroupedExperts, Registering, installed, routed
from support import DEVICE, compare, randn, saved_bytes
from torch.func import functional_call

# an expert without rows, and two rows of no expert
COUNTS, PADDING = [4, 0, 3], 2
ROWS = sum(COUNTS) + PADDING


@pytest.fixture
def titan():
    with installed(Registering) as titan:
        yield titan


def built(titan, **options):
    config = titan.ours.fused_experts(GroupedExperts.Config(), **options)
    return config.build().to(DEVICE)


def call(module):
    """Return the module as a function of rows and weights."""
    names = [name for name, _ in module.named_parameters()]

    def run(x, *weights):
        counts = torch.tensor(COUNTS, device=x.device)
        return functional_call(module, dict(zip(names, weights, strict=True)), (x, counts))

    return run


def inputs(dtype=torch.float32):
    return [randn(ROWS, D, dtype=dtype), randn(3, F, D), randn(3, D, F), randn(3, F, D)]


@pytest.mark.parametrize("level", ["inputs", "gate", "preact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients(titan, level, dtype):
    module = built(titan, save=level)
    compare(call(module), lambda x, *w: routed(x, COUNTS, *w), lambda: inputs(dtype))


@pytest.mark.parametrize(("level", "width"), [("inputs", 0), ("gate", F), ("preact", 2 * F)])
def test_saves_rows_routing_and_the_level(titan, level, width):
    x, *weights = inputs(torch.bfloat16)
    # parameters of bfloat16 are not cast, and so not saved
    weights = [torch.nn.Parameter(w.detach().bfloat16()) for w in weights]
    found = saved_bytes(lambda x: call(built(titan, save=level))(x, *weights), [x])
    assert found == ROWS * (2 * D + 8 + 4 + 2 * width)


def test_other_experts_are_built_as_they_are(titan):
    class Quantised(GroupedExperts):
        pass

    class Config(GroupedExperts.Config):
        _owner = Quantised

    assert type(titan.ours.fused_experts(Config()).build()) is Quantised
    with pytest.raises(ValueError, match="save"):
        titan.ours.fused_experts(GroupedExperts.Config(), save="gates")
