"""Which segments prefetch_recompute finds, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from plan_models import tokens, transformer
from stages import ROWS, Block, D, F, assert_same, made
from support import DEVICE, flops, randn
from torch import nn

import fusedckpt
from fusedckpt import checkpoint, prefetch_recompute
from fusedckpt.autograd.dispatch import forced_path


def test_what_is_written_in_place_raises_as_in_any_backward():
    stage, x = made()
    y = stage(x)
    prefetch_recompute(y)
    with torch.no_grad():
        stage.blocks[2].up.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    middle = x * 1
    y = checkpoint(lambda x: x.sin().exp(), middle)
    prefetch_recompute(y)
    with torch.no_grad():
        middle.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    held = [x * 1]
    y = checkpoint(lambda xs: xs[0].sin().exp(), held)
    prefetch_recompute(y)
    with torch.no_grad():
        held[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_first_that_is_needed_is_found():
    """Not what a residual leads to beside it; of two branches the one made last."""
    log, x = [], randn(ROWS, D)
    a, b, c = (Block(name, log).to(DEVICE) for name in "abc")
    y = x + checkpoint(a, x)
    y = y + checkpoint(b, y)
    assert prefetch_recompute(y) == 1
    assert log == [*"abb"]
    one, two = checkpoint(a, y), checkpoint(c, y)
    log.clear()
    prefetch_recompute({"two": two, "one": one, "none": None, "x": x.detach()})
    assert log == ["c"]
    (one + two).sum().backward()
    assert log == [*"caa"]


def test_a_segment_that_hands_on_its_argument():
    log, x = [], randn(ROWS, D)
    a, b = (Block(name, log).to(DEVICE) for name in "ab")
    y = checkpoint(a, x)
    z, y = checkpoint(lambda y: (b(y), y), y)
    log.clear()
    assert prefetch_recompute((z, y), 2) == 2
    assert log == [*"ba"]


def test_where_there_is_nothing_to_do():
    stage, x = made()
    with torch.no_grad():
        assert prefetch_recompute(stage(x)) == 0
    assert prefetch_recompute([x, 3, None]) == 0
    # what a segment of one fused layer needs is its argument
    layer = fusedckpt.MLP(D, F).to(DEVICE)
    assert prefetch_recompute(checkpoint(layer, x)) == 0
    for wrong in (0, -1, "1", True, 2.0):
        with pytest.raises((TypeError, ValueError), match=r"^prefetch_recompute: segments must be"):
            prefetch_recompute(x, wrong)


def test_a_checkpoint_within_is_part_of_its_own():
    stage, x = made()
    y = checkpoint(stage, x)
    assert prefetch_recompute(y, 9) == 1
    grads = torch.autograd.grad(y.sum(), list(stage.parameters()))
    log = "".join(stage.log)
    stage, x = made()
    expected = torch.autograd.grad(checkpoint(stage, x).sum(), list(stage.parameters()))
    assert log == "".join(stage.log)
    assert all(map(torch.allclose, grads, expected))


def test_compiled_code_is_left_alone():
    x = randn(ROWS, D)
    block = nn.Sequential(nn.Linear(D, F), nn.Tanh(), nn.Linear(F, D)).to(DEVICE)

    def step(x):
        y = checkpoint(block, x)
        prefetch_recompute(y)
        return y

    y = torch.compile(step, backend="aot_eager", fullgraph=True)(x)
    assert prefetch_recompute(y) == 0
    assert_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(block(x).sum(), x))


def test_segments_of_a_plan():
    torch.manual_seed(0)
    grads, counts = [], []
    with forced_path("aten"):
        model, ids = transformer(4), tokens()
        fusedckpt.plan(model, ids, policy="uniform:2", progress=False).apply(model)
        for ahead in (False, True):
            loss = model(ids)
            before = flops(lambda y=loss: prefetch_recompute(y)) if ahead else 0
            counts.append((before, flops(loss.backward)))
            grads.append([p.grad for p in model.parameters()])
            model.zero_grad()
    assert counts[1][0] > 0
    assert sum(counts[1]) == counts[0][1]
    assert_same(*grads)
