"""Regions with side effects, which debug=True finds, and names of regions that nothing has."""

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from checkpoints import assert_same, linears, step, stock
from support import DEVICE, randn
from torch import nn
from torch.utils.checkpoint import CheckpointError, create_selective_checkpoint_contexts

from fusedckpt import checkpoint, checkpoint_module, checkpoint_sequential, region

save = {"save_regions": "scores"}


class LeavesScores(nn.Module):
    """Leaves its scores in an attribute, and reads them behind the region."""

    def __init__(self, has_effects=True):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.has_effects, self.left = has_effects, []

    def attend(self, q):
        y = self.norm(q).sin()
        if self.has_effects:
            self.left.append(y.detach().exp())
        return y.cos()

    def forward(self, x):
        y = region(self.attend, "scores")(self.up(x).sin())
        return self.down(y.sin() * (self.left[-1] if self.has_effects else 1)).sin()


def attending(has_effects=True):
    torch.manual_seed(0)
    return LeavesScores(has_effects).to(DEVICE), randn(3, 6), randn(3, 6)


def gradients(module, x, other, **options):
    """Return the gradients of a call, between whose forward and backward there is another call."""
    y = checkpoint(module, x, **save, **options)
    checkpoint(module, other, **save)
    return torch.autograd.grad(y.sum(), [x, *module.parameters()])


def test_effects_of_the_last_call_are_read():
    module, x, other = attending()
    expected = torch.autograd.grad(module(x).sum(), x)[0]
    assert not torch.allclose(gradients(module, x, other)[0], expected)


@pytest.mark.parametrize("wrap", ["alone", "in ours", "in torch's"])
def test_debug_finds_effects(wrap):
    module, x, other = attending()
    run = partial(checkpoint, module, debug=True, **save)
    wraps = {
        "alone": run,
        "in ours": lambda x: checkpoint(lambda x: run(x.sin()), x),
        "in torch's": lambda x: stock(lambda x: run(x.sin()), x),
    }
    y = wraps[wrap](x)
    if wrap == "alone":
        checkpoint(module, other, **save)
    else:
        module.left.append(module.left[-1] * 2)
        # the recompute of what is around appends once more
        module.left = Last(module.left)
    with pytest.raises(CheckpointError, match="down \\(Linear\\) in the recompute differs"):
        y.sum().backward()


class Last(list):
    """Appends nothing."""

    def append(self, x):
        pass


@pytest.mark.parametrize("outer", [{}, {"debug": True}], ids=["", "debug"])
def test_debug_accepts_what_has_none(outer):
    module, x, other = attending(False)
    expected = torch.autograd.grad(module(x).sum(), [x, *module.parameters()])
    assert_same(gradients(module, x, other, debug=True), expected)
    run = partial(checkpoint, module, debug=True, **save)
    nested = lambda x: checkpoint(lambda x: run(module.up(x)).sin(), x, **outer)  # noqa: E731
    plain = lambda x: module(module.up(x)).sin()  # noqa: E731
    parameters = [*module.parameters()]
    assert_same(step(nested, x, parameters=parameters), step(plain, x, parameters=parameters))


def called(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if "no region" in str(w.message)]


LAYERS = linears(6, 6, 6)
CONTEXTS = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
MISSED = {
    "module": lambda x: checkpoint(LAYERS, x, save_regions="attention"),
    "patterns": lambda x: checkpoint(torch.sin, x, save_regions=["atention", "scan*"]),
    "other name": lambda x: checkpoint(region(torch.sin, "mine"), x, save_regions="yours"),
    "in place": lambda x: checkpoint_module(linears(6, 6), save_regions="attention")(x),
    "decorator": lambda x: checkpoint(save_regions="attention")(torch.sin)(x),
    "debug": lambda x: checkpoint(torch.sin, x, save_regions="attention", debug=True),
}
MET = {
    "region": lambda x: checkpoint(region(torch.sin, "mine"), x, save_regions=["mine", "yours"]),
    "attention": lambda x: checkpoint(
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
        x,
        save_regions="attention",
    ),
    "one of two": lambda x: checkpoint_sequential(
        [torch.sin, region(torch.sin, "mine")], 1, x, save_regions="mine"
    ),
    "inside": lambda x: checkpoint(
        lambda x: checkpoint(region(torch.sin, "mine"), x), x, save_regions="m*"
    ),
    "none asked for": lambda x: checkpoint(torch.sin, x),
    "selective": lambda x: checkpoint(torch.sin, x, save_regions="mine", context_fn=CONTEXTS),
    "no gradients": lambda x: checkpoint(LAYERS.eval().requires_grad_(True), x.detach()),
}


@pytest.mark.parametrize("name", [*MISSED, *MET])
def test_regions_that_nothing_has_are_said(name):
    x = randn(3, 6)
    said = called(lambda: (MISSED | MET)[name](x))
    assert len(said) == (name in MISSED)
    assert all("save_regions=['" in message for message in said)


def test_the_warning_is_of_the_callers_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint(torch.sin, randn(3), save_regions="attention")
    assert [w.filename for w in caught] == [__file__]
