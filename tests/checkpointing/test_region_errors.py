"""Errors in and of regions: exceptions, recomputes that do something else, bad input."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from checkpoints import assert_as_plain, linears
from support import DEVICE, randn
from torch import nn
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as stock

import fusedckpt
from fusedckpt import is_recomputing, region

SDPA = F.scaled_dot_product_attention
checkpoint = partial(fusedckpt.checkpoint, save_regions=("attention",))


class AroundAttention(nn.Module):
    """Attention between linears; `before` and `behind` come into its path."""

    def __init__(self, before=nn.Identity(), behind=nn.Identity(), width=8):  # noqa: B008
        super().__init__()
        self.up, self.down = linears(width, width), linears(width, width, width)
        self.before, self.behind = before, behind

    def forward(self, x):
        h = self.before(self.up(x).sin())[None, None]
        return self.down(self.behind(F.scaled_dot_product_attention(h, h, h)[0, 0]).sin())


def made(*parts):
    torch.manual_seed(0)
    return AroundAttention(*parts).to(DEVICE), randn(6, 8)


@pytest.mark.parametrize("place", [0, 1], ids=["before", "behind"])
@pytest.mark.parametrize("when", [False, True], ids=["forward", "recompute"])
def test_exceptions(place, when):
    failing = [True]

    def fail(x):
        if failing and is_recomputing() == when:
            raise ValueError("no")
        return x

    m, x = made(*[nn.Identity()] * place, fail)
    y = checkpoint(m, x) if when else None
    before = torch.get_rng_state(), F.scaled_dot_product_attention
    with pytest.raises(ValueError, match="no"):
        y.sum().backward() if when else checkpoint(m, x)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert F.scaled_dot_product_attention is before[1] is SDPA
    failing.clear()
    assert_as_plain(m, x, parameters=m.parameters(), wrap=checkpoint)


@pytest.mark.parametrize("place", [0, 1], ids=["before", "behind"])
@pytest.mark.parametrize("change", [lambda x: x[:3], torch.Tensor.double, lambda x: x.exp().sin()])
def test_another_recompute_raises(place, change):
    """Another shape, another dtype, more tensors than the forward saved."""
    m, x = made(*[nn.Identity()] * place, lambda x: change(x) if is_recomputing() else x)
    y = checkpoint(m, x)
    with pytest.raises(RuntimeError):
        y.sum().backward()


def test_a_region_that_raises_raises_again():
    runs = []

    def fails(x):
        runs.append(0)
        x.sin()
        raise ValueError("no")

    def fn(x):
        y = x * 2
        try:
            y = region(fails, "r")(y.exp())
        except ValueError:
            y = y.cos()
        return region(torch.sin, "r")(y)

    assert_as_plain(fn, randn(4), save_regions="r")
    assert len(runs) == 3
    with pytest.raises(ValueError, match="no"):
        checkpoint(region(fails, "attention"), randn(4), save_regions="attention")
    assert F.scaled_dot_product_attention is SDPA


def test_a_tensor_written_after_it_was_saved():
    """The region runs again, up to the last tensor that backward reads; eager raises."""

    def spoilt(x):
        saved = x.exp()
        y = saved * 2
        saved.add_(1)
        return y

    x = randn(4)
    y = checkpoint(region(spoilt, "r"), x, save_regions="r")
    (dx,) = torch.autograd.grad(y.sum(), [x])
    assert torch.equal(dx, 2 * x.detach().exp())


def _grad_inside(x):
    y = x * 2
    (g,) = torch.autograd.grad(region(torch.exp, "r")(y).sum(), [y], create_graph=True)
    return g.sin()


def _other(state, x):
    state.append(0)
    first, second = ("r1", "r2") if len(state) == 1 else ("r2", "r1")
    return (region(torch.exp, second)(region(torch.exp, first)(x.sin())) * 2).sin()


@pytest.mark.parametrize(
    ("fn", "error", "words"),
    [
        (_grad_inside, RuntimeError, "through 'r', which its recompute"),
        (partial(_other, []), CheckpointError, "calls a region 'r2', where the forward called 'r1"),
        (lambda x: region(torch.exp, "r")(x.sin()).mul_(2), RuntimeError, "inplace"),
    ],
    ids=["gradient", "other", "in place"],
)
def test_clear_errors(fn, error, words):
    x = randn(4)
    with pytest.raises(error, match=words):
        checkpoint(fn, x, save_regions="r*").sum().backward()


def test_bad_input():
    with pytest.raises(TypeError, match="region: fn must be callable, got int"):
        region(3, "r")
    with pytest.raises(TypeError, match="region: name must be a string, got int"):
        region(torch.sin, 3)
    with pytest.raises(TypeError, match="save_regions must be strings, got int"):
        checkpoint(torch.sin, randn(2), save_regions=[3])
    with pytest.raises(TypeError, match="save_regions must be strings, got int"):
        checkpoint(torch.sin, randn(2), save_regions=3)
    with pytest.raises(TypeError, match="region: recompute must be True or False, got str"):
        region(torch.sin, "r", recompute="no")
    with pytest.warns(UserWarning, match="torch's checkpoint recomputes regions"):
        stock(region(torch.sin, "r"), randn(2), use_reentrant=False)
