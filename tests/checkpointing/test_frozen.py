"""Where nothing needs a gradient a checkpoint saves nothing, and hooks see nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from checkpoints import assert_same, step, stock
from support import DEVICE, randn
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from fusedckpt import MLP, checkpoint, checkpoint_module, checkpoint_sequential, region


class AttentionThenMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.mlp = MLP(6, 8)

    def forward(self, x, scale=1.0):
        q, k, v = (linear(x)[None, None] for linear in self.linears[:3])
        x = x + self.linears[3](F.scaled_dot_product_attention(q, k, v)[0, 0]) * scale
        return x + region(self.mlp, "mlp")(x)


def block(is_frozen=True):
    torch.manual_seed(0)
    return AttentionThenMLP().to(DEVICE).requires_grad_(not is_frozen)


asking = partial(checkpoint, save_regions=["attention", "mlp"])
WAYS = {
    "module": checkpoint,
    "forward": lambda m, x: checkpoint(m.forward, x),
    "function": lambda m, x: checkpoint(lambda x: m(x), x),
    "keyword": lambda m, x: checkpoint(lambda *, x: m(x), x=x),
    "regions": asking,
    "nested": lambda m, x: checkpoint(lambda x: checkpoint(m, checkpoint(m, x)), x),
    "nested regions": lambda m, x: asking(lambda x: checkpoint(m, asking(m, x)), x),
    "inside torch's": lambda m, x: stock(lambda x: asking(m, x), x),
    "in place": lambda m, x: checkpoint_module(m)(x),
    "sequential": lambda m, x: checkpoint_sequential([m, m], 2, x),
    "debug": lambda m, x: checkpoint(m, x, debug=True),
    "samples": lambda m, x: checkpoint(m, x, debug="samples"),
    "without early stop": lambda m, x: asking(m, x, early_stop=False),
}


@pytest.mark.parametrize("way", WAYS)
def test_hooks_see_nothing(way):
    """An offloading hook would copy what it is given."""
    m, packed = block(), []
    x = randn(4, 6, requires_grad=False)
    plain = m(x)
    with saved_tensors_hooks(packed.append, lambda x: x):
        y = WAYS[way](m, x)
    # torch's checkpoint saves its arguments, and beside them a tensor of its own in torch 2.11
    saved_by_torch = []
    with saved_tensors_hooks(saved_by_torch.append, lambda x: x):
        stock(m, x)
    assert saved_by_torch
    assert len(packed) == (len(saved_by_torch) if way == "inside torch's" else 0)
    assert not y.requires_grad
    if way not in ("nested", "nested regions", "sequential"):
        assert torch.equal(y, plain)


@pytest.mark.parametrize("way", WAYS)
def test_a_trainable_module_of_an_input_without_gradient(way):
    m, plain = block(False), block(False)
    x = randn(4, 6, requires_grad=False)
    calls = {
        "nested": lambda x: plain(plain(x)),
        "nested regions": lambda x: plain(plain(x)),
        "sequential": lambda x: plain(plain(x)),
    }
    found = step(partial(WAYS[way], m), x, parameters=m.parameters())
    assert_same(found, step(calls.get(way, plain), x, parameters=plain.parameters()))


def late(x, w):
    """Needs no gradient before its end, and calls regions before."""
    y = region(torch.sin, "mlp")(x)
    z = region(torch.cos, "mlp")(y * y)
    return (z.exp() * w).sin() * y


@pytest.mark.parametrize("wrap", [checkpoint, asking], ids=["", "regions"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_regions_before_the_first_saved_tensor(wrap, is_nested):
    x, w = randn(4, 6, requires_grad=False), nn.Parameter(randn(4, 6).detach())
    run = lambda x: wrap(lambda x: late(x, w), x)  # noqa: E731
    around = (lambda x: asking(lambda x: run(x.sin()).cos(), x)) if is_nested else run
    plain = (lambda x: late(x.sin(), w).cos()) if is_nested else (lambda x: late(x, w))
    assert_same(step(around, x, parameters=[w]), step(plain, x, parameters=[w]))


@dataclass
class Holder:
    tensor: Tensor


def test_gradients_that_no_argument_shows():
    """Of tensors in objects, in closures, made inside; all is recomputed, as by torch's."""
    m, x, other = block(), randn(4, 6, requires_grad=False), randn(4, 6)
    held = lambda x, holder: m(x * holder.tensor).sin()  # noqa: E731
    closed = lambda x: m(x * other).sin()  # noqa: E731
    for fn, args in ((held, (x, Holder(other))), (closed, (x,))):
        grads = []
        for wrap in (lambda fn, *args: fn(*args), stock, checkpoint):
            grads.append(torch.autograd.grad(wrap(fn, *args).sum(), other)[0])
        assert_same(grads[1:], grads[:1] * 2)


def test_contexts_are_entered_as_by_torch():
    m, x = block(), randn(4, 6, requires_grad=False)
    counts = []
    for wrap in (stock, checkpoint):
        modes = FlopCounterMode(display=False), FlopCounterMode(display=False)
        wrap(m, x, context_fn=lambda modes=modes: modes)
        counts.append([mode.get_total_flops() for mode in modes])
    assert counts[0] == counts[1]
    assert counts[0][0] > 0


@pytest.mark.parametrize("name", ["an argument", "of a region"])
def test_written_before_the_first_saved_tensor(name):
    x, w = randn(4, 6, requires_grad=False) * 1, nn.Parameter(randn(4, 6).detach())

    def fn(x):
        y = region(torch.sin, "mlp")(x)
        (x if name == "an argument" else y).mul_(2)
        return (y.exp() * w).sin()

    y = asking(fn, x)
    with pytest.raises(RuntimeError, match=f"{name}.*has been modified by an inplace"):
        y.sum().backward()
