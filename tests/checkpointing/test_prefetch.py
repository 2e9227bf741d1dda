"""prefetch_recompute: the same backward, bit for bit, with its first recompute done before."""

from __future__ import annotations

import gc

import pytest
import torch
from checkpoints import same
from stages import ROWS, Block, D, F, assert_same, made
from support import DEVICE, flops, randn
from torch import nn

import fusedckpt
from fusedckpt import checkpoint, prefetch_recompute
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.memory import peak_bytes


def results(ahead=0, around=None, retain=False):
    """Return what a step makes, and the names of blocks in the order of their calls."""
    stage, x = made()
    torch.manual_seed(1)
    y = stage(x)
    stage.log.append("|")
    if ahead:
        with around or torch.enable_grad():
            assert prefetch_recompute({"y": [y]}, ahead) == ahead
    stage.log.append("|")
    given = [x, *stage.parameters()]
    grads = torch.autograd.grad(y.sum(), given, retain_graph=retain)
    if retain:
        stage.log.append("|")
        grads += torch.autograd.grad(y.sum(), given)
    state = [torch.get_rng_state(), *stage.buffers()]
    return [y, *grads, *state], "".join(stage.log)


@pytest.mark.parametrize(
    ("ahead", "order"), [(0, "abc||cba"), (1, "abc|c|ba"), (2, "abc|cb|a"), (3, "abc|cba|")]
)
def test_what_comes_before_does_not_come_again(ahead, order):
    found, log = results(ahead)
    assert log == order
    assert_same(found, results()[0])


@pytest.mark.parametrize(
    "around",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast(DEVICE.type, torch.bfloat16)],
    ids=["no_grad", "inference_mode", "autocast"],
)
def test_what_is_around_changes_nothing(around):
    assert_same(results(1, around())[0], results()[0])


def test_a_forward_under_autocast():
    grads = []
    for ahead in (0, 1):
        stage, x = made()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            torch.manual_seed(1)
            y = stage(x)
        assert prefetch_recompute(y, ahead) == 1 if ahead else True
        grads.append(torch.autograd.grad(y.float().sum(), list(stage.parameters())))
    assert_same(*grads)


def test_it_serves_one_backward():
    found, log = results(1, retain=True)
    assert log == "abc|c|ba|cba"
    assert_same(found, results(retain=True)[0])


def test_it_is_done_once():
    stage, x = made()
    y = stage(x)
    assert prefetch_recompute(y) == prefetch_recompute(y) == 1
    assert stage.log == [*"abcc"]
    # one more than is there
    assert prefetch_recompute(y, 2) == 2
    assert prefetch_recompute([y, y], 9) == 3
    assert stage.log == [*"abccba"]
    y.sum().backward()
    assert stage.log == [*"abccba"]
    assert prefetch_recompute(y) == 0


def test_a_part_of_the_gradients():
    stage, x = made()
    torch.manual_seed(1)
    y = stage(x)
    prefetch_recompute(y)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert stage.log == [*"abccba"]
    assert same(found, results()[0][1])


def test_a_backward_takes_it_for_good():
    stage, x = made()
    y = stage(x)
    assert prefetch_recompute(y) == 1
    y.sum().backward(retain_graph=True)
    stage.log.clear()
    assert prefetch_recompute(y) == 1
    assert stage.log == ["c"]


def test_what_is_read_outside_of_a_backward_takes_nothing():
    stage, x = made()
    y = stage(x)
    assert prefetch_recompute(y, 3) == 3
    sine = y.grad_fn.next_functions[0][0]
    assert sine._saved_self.shape == (ROWS, D)
    stage.log.clear()
    y.sum().backward()
    assert stage.log == []


def test_a_segment_of_several_outputs_counts_once():
    log, x = [], randn(ROWS, D)
    a, b = (Block(name, log).to(DEVICE) for name in "ab")
    y = checkpoint(lambda y: (b(y), y.exp()), checkpoint(a, x))
    assert prefetch_recompute(y, 2) == 2
    assert log == [*"abba"]


def test_a_recompute_starts_no_other():
    stage, x = made()
    other, found = stage(x), []

    def segment(x):
        found.append(prefetch_recompute(other))
        return x.sin().exp()

    checkpoint(segment, x).sum().backward()
    assert found == [1, 0]


@pytest.mark.parametrize("fused", [False, True], ids=["eager", "fused"])
def test_no_gemm_runs_twice(fused):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Linear(F, D)) for _ in range(3)]
    model = nn.Sequential(*layers).to(DEVICE)
    if fused:
        fusedckpt.fuse(model)
    x, counts, grads = randn(ROWS, D), [], []
    given = [x, *model.parameters()]
    with forced_path("aten"):
        for ahead in (False, True):
            y = checkpoint(model, x)
            loss = y.square().sum()
            before = flops(lambda y=y: prefetch_recompute(y)) if ahead else 0
            after = flops(loss.backward)
            counts.append([n / (2 * ROWS * D * F) for n in (before, after)])
            grads.append([t.grad for t in given])
            for t in given:
                t.grad = None
    # all but the last GEMM; a fused layer that ends a segment makes its first in its own backward
    assert counts == [[0, 17], [4, 13] if fused else [5, 12]]
    assert_same(*grads)


def test_gemm_outputs_of_a_layer_that_reads_arguments_alone():
    """Its backward starts no recompute, and takes what one left."""
    layer, x = fusedckpt.MLP(D, F).to(DEVICE), randn(ROWS, D)
    with forced_path("aten"):
        y, sine = checkpoint(lambda x: (layer(x), x.sin().sin()), x)
        counts = [flops(lambda: prefetch_recompute((y, sine))), flops(y.sum().backward)]
    assert [n / (2 * ROWS * D * F) for n in counts] == [2, 4]


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_gc")
def test_nothing_outlives_its_graph_or_its_backward():
    stage, x = made()
    y = stage(x)
    prefetch_recompute(y, 2)
    assert stage.alive == ["b", "c"]
    del y
    assert stage.alive == []
    y = stage(x)
    prefetch_recompute(y)
    y.sum().backward(retain_graph=True)
    assert stage.alive == []


@pytest.mark.skipif(DEVICE.type != "cpu", reason="counts blocks of the CPU's allocator")
def test_it_takes_what_a_recompute_takes():
    block = nn.Sequential(nn.Linear(D, F), nn.Tanh(), nn.Linear(F, D), nn.Tanh())
    x = randn(512, D)
    dy, peaks = torch.ones_like(x), []
    for ahead in (False, True):
        y = checkpoint(block, checkpoint(block, x))
        block.zero_grad()

        def step(y=y, ahead=ahead):
            if ahead:
                prefetch_recompute(y)
            y.backward(dy)

        peaks.append(peak_bytes(step))
    assert peaks[0] == peaks[1]
