"""Contexts of nested checkpoints: each recompute runs in its own, whatever they are."""

import itertools
from functools import partial

import pytest
import torch
from checkpoints import assert_same, stock
from support import DEVICE, randn
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from fusedckpt import checkpoint

ADDMM = torch.ops.aten.addmm.default
WRAPS = {"ours": checkpoint, "torch": stock}


class Ops(TorchDispatchMode):
    """Lists the GEMMs that it sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is ADDMM:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def options_of(kind, wrap, seen):
    """Return options of a checkpoint; what its contexts see is added to a list."""

    def pair(mode):
        contexts = mode(), mode()
        seen.extend(contexts)
        return contexts

    return {
        "none": {},
        "selective": {"context_fn": partial(create_selective_checkpoint_contexts, [ADDMM])},
        "flops": {"context_fn": partial(pair, partial(FlopCounterMode, display=False))},
        "ops": {"context_fn": partial(pair, Ops)},
        # ours runs a recompute to its end; torch's logs ops, which pytest's handler cannot format
        "debug": {"debug": True} if wrap is checkpoint else {"early_stop": False},
    }[kind]


def step(first, last, wraps, kinds, x):
    """Return gradients of checkpoints one inside another, and what their contexts saw."""
    seen = []
    outer, inner = (partial(wraps[i], **options_of(kinds[i], wraps[i], seen)) for i in (0, 1))
    parameters = [*first.parameters(), *last.parameters()]
    torch.manual_seed(3)
    # the first tensor that backward needs is an argument of the inner one
    y = outer(lambda a: inner(last, first(a)), x * 1)
    grads = torch.autograd.grad(y.square().sum(), [x, *parameters])
    return grads, [mode.names if isinstance(mode, Ops) else mode.get_total_flops() for mode in seen]


KINDS = ["none", "selective", "flops", "ops", "debug"]


@pytest.mark.parametrize("kinds", [*itertools.product(KINDS, repeat=2)], ids="-".join)
def test_nested_contexts(kinds):
    first = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh()).to(DEVICE)
    last = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 6)).to(DEVICE)
    x = randn(4, 6)
    plain, _ = step(first, last, [lambda fn, x, **_: fn(x)] * 2, ["none"] * 2, x)
    expected = step(first, last, [stock] * 2, kinds, x)
    for wraps in itertools.product(WRAPS.values(), repeat=2):
        grads, seen = step(first, last, wraps, kinds, x)
        assert_same(grads, plain)
        # each recompute is seen by its own contexts, and no other
        assert seen == expected[1]


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_that_compute_run_outside_of_the_contexts(kind):
    block = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).to(DEVICE)
    x, scale = randn(4, 6), randn(1)

    def unpack(tensor):
        # ops that need gradients, and GEMMs: neither is of the segment
        with torch.enable_grad():
            assert (nn.functional.linear(scale, scale[None], scale) * scale).requires_grad
        return tensor.clone()

    def outside(wrap):
        seen = []
        with saved_tensors_hooks(torch.clone, unpack):
            y = wrap(block, x * 2, **options_of(kind, wrap, seen))
        return torch.autograd.grad(y.square().sum(), [x, *block.parameters()]), seen

    (found, seen), (expected, others) = outside(checkpoint), outside(stock)
    assert_same(found, expected)
    for mode, other in zip(seen, others, strict=True):
        if isinstance(mode, Ops):
            assert mode.names == other.names
        else:
            assert mode.get_total_flops() == other.get_total_flops()
