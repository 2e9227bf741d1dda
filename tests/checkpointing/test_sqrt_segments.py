"""Segments that "sqrt" and "recursive" choose, and how they are measured."""

from __future__ import annotations

import math
import random
from functools import partial
from itertools import combinations

import numpy as np
import torch
from checkpoints import assert_as_called, assert_same, chain, conv_net, step
from support import DEVICE, randn
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fusedckpt import checkpoint_sequential
from fusedckpt.checkpointing.sequential import (
    FunctionBytes,
    function_bytes,
    least_starts,
    measured_starts,
)
from fusedckpt.memory import saved_tensors

sqrt_starts = partial(measured_starts, least_starts)


def total(sizes, starts):
    """Return the bytes of the inputs of segments, and those that the largest saves besides."""
    segments = zip(starts, [*starts[1:], len(sizes.saved_inside)], strict=True)
    saved = [sum(sizes.saved_inside[a:b]) + sum(sizes.saved_inputs[a + 1 : b]) for a, b in segments]
    return max(saved) + sum(sizes.inputs[start] for start in starts[1:])


def test_sqrt_is_the_least_of_all():
    draw = random.Random(0)
    for _ in range(100):
        count = draw.randint(1, 8)
        inputs, own, handed = ([draw.randint(0, 9) for _ in range(count)] for _ in range(3))
        sizes = FunctionBytes(inputs, own, [*(draw.choice([h, h, math.inf]) for h in handed), 1])
        starts = (c for k in range(count) for c in combinations(range(1, count), k))
        assert total(sizes, least_starts(sizes)) == min(total(sizes, [0, *c]) for c in starts)
    assert least_starts(FunctionBytes([8] * 16, [0] * 16, [8] * 17)) == [0, 4, 8, 12]


def test_sqrt_of_what_keeps_much_and_hands_on_little():
    """A pyramid: cuts where tensors are small, short segments where they are large."""
    model = [nn.Conv2d(4, 4, 3, 2 if i % 6 == 5 else 1, 1) for i in range(24)]
    x = randn(1, 4, 64, 64).cpu()
    sizes = function_bytes(model, x)
    assert sizes.inputs[:7] == [x.nbytes] * 6 + [x.nbytes // 4]
    starts = sqrt_starts(model, x)
    even = min(total(sizes, [24 * i // k for i in range(k)]) for k in range(1, 25))
    assert total(sizes, starts) < even
    with saved_tensors() as saved:
        checkpoint_sequential(model, "sqrt", x * 1)
    assert saved.nbytes == sum(sizes.inputs[start] for start in starts)


def test_what_each_function_saves():
    """Each tensor counts once, whether its writer or its reader saves it."""
    x = randn(2, 6)
    model = [torch.sin, torch.tanh, torch.sin, lambda x: x.sin().cos(), torch.neg, torch.tanh]
    b = x.nbytes
    # the last one's output counts as its own
    assert function_bytes(model, x) == FunctionBytes(
        [b, 0, b, b, 0, 0], [0, 0, 0, b, 0, b], [b] * 7
    )


class FillsTable(nn.Module):
    """It counts calls, and fills a buffer at the first, which a flag remembers."""

    def __init__(self):
        super().__init__()
        self.calls, self.cached = 0, False
        self.register_buffer("table", torch.zeros(6))

    def forward(self, x):
        self.calls += 1
        if not self.cached:
            self.table, self.cached = torch.rand(6, device=x.device), True
        return (x * self.table).sin()


def test_sqrt_measures_once():
    calls = []
    model, x = chain(9), randn(4, 6)
    model[0].register_forward_pre_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        checkpoint_sequential(model, "sqrt", x)
    assert len(calls) == 1
    for expected in (4, 6):
        y = checkpoint_sequential(model, "sqrt", x[: expected // 2])
        assert len(calls) == expected - 1
        y.sum().backward()
        assert len(calls) == expected


def test_sqrt_measures_anew_in_another_mode():
    """In training the dropout writes its input in place, in evaluation it does nothing."""
    pairs = ((nn.Linear(6, 6), nn.Dropout(0.5, inplace=True)) for _ in range(9))
    model, x = nn.Sequential(*(m for pair in pairs for m in pair)).to(DEVICE), randn(4, 6)
    assert_as_called(model.eval(), "sqrt", x)
    assert_as_called(model.train(), "sqrt", x)


def test_sqrt_leaves_no_trace_of_measuring():
    module, norm = FillsTable().to(DEVICE), nn.BatchNorm1d(6).to(DEVICE)
    functions = [module, nn.Dropout(), lambda x: norm(x), torch.tanh, nn.Dropout()]
    x = randn(4, 6)
    states = random.getstate(), np.random.get_state()[1].tolist()
    torch.manual_seed(1)
    y = checkpoint_sequential(functions, "sqrt", x)
    assert module.calls == 1
    assert module.cached
    assert norm.num_batches_tracked == 1
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states
    plain, other = FillsTable().to(DEVICE), nn.BatchNorm1d(6).to(DEVICE)
    torch.manual_seed(1)
    expected = nn.Sequential(plain, nn.Dropout(), other, nn.Tanh(), nn.Dropout())(x)
    assert_same([y, module.table, *norm.buffers()], [expected, plain.table, *other.buffers()])


def test_sqrt_leaves_the_input_as_it_was():
    x = randn(4, 6).detach()
    before = x.clone()
    function_bytes([lambda x: x.mul_(2), torch.sin], x)
    assert torch.equal(x, before)


def test_sqrt_of_lazy_modules():
    model = nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.Tanh())
    sqrt_starts(list(model), torch.ones(4, 5))
    assert model[0].weight.shape == (6, 5)
    assert model[1].num_batches_tracked == 0
    assert torch.equal(model[1].running_mean, torch.zeros(6))


def test_sqrt_of_bound_methods_and_others():
    block = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).to(DEVICE)
    calls = []
    block.register_forward_pre_hook(lambda *_: calls.append(1))

    class Unknowable:
        __slots__ = ()
        __hash__ = None

        def __call__(self, x):
            return block(x)

    x = randn(4, 6)
    for functions, count in (([block.__call__] * 4, 12), ([Unknowable()] * 4, 16)):
        calls.clear()
        for _ in range(2):
            checkpoint_sequential(functions, "sqrt", x)
        assert len(calls) == count


def test_sqrt_starts_before_nothing_that_writes_its_input():
    model = conv_net()
    starts = sqrt_starts(list(model), randn(2, 3, 32, 32).cpu())
    assert len(starts) > 2
    assert not any(isinstance(model[start], nn.ReLU) for start in starts)
    # the ReLUs write what BatchNorm saves
    for rule in ("sqrt", "recursive"):
        assert_as_called(model, rule, randn(2, 3, 32, 32).cpu())


def test_sqrt_starts_before_no_view_that_is_written():
    """A cut before flatten would keep the tensor that ReLU writes through its view."""
    blocks = [[nn.Conv1d(6, 6, 1), nn.Unflatten(1, (2, 3)), nn.Flatten(1, 2)] for _ in range(6)]
    model = nn.Sequential(*(m for block in blocks for m in (*block, nn.ReLU(inplace=True))))
    starts = sqrt_starts(list(model), randn(4, 6, 8).cpu())
    assert len(starts) > 1
    assert all(isinstance(model[start], nn.Conv1d) for start in starts)
    assert_as_called(model, "sqrt", randn(4, 6, 8).cpu())


def test_sqrt_inside_selective_checkpointing():
    """What is measured, in the forward alone, does not go into the count of ops."""

    def run(x):
        return checkpoint_sequential([torch.sin, torch.exp, torch.sin, torch.exp], "sqrt", x)

    contexts = partial(
        create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE
    )
    x = randn(4)
    call = partial(torch.utils.checkpoint.checkpoint, run, use_reentrant=False, context_fn=contexts)
    assert_same(step(call, x), step(lambda x: x.sin().exp().sin().exp(), x))
