"""prefetch_recompute: the same backward, bit for bit, with its first recomputes done before."""

from __future__ import annotations

import pytest
import torch
from checkpoints import assert_same, linears, no_gc, same
from support import DEVICE, flops, randn
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import fusedckpt
from fusedckpt import checkpoint, prefetch_recompute
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.memory import peak_bytes

D, F, ROWS = 8, 16, 6


class LoggedBlock(nn.Module):
    """Draws, normalizes by statistics, and notes its calls."""

    def __init__(self, name, log):
        super().__init__()
        self.name, self.log, self.seen = name, log, []
        self.up, self.down = nn.Linear(D, F), nn.Linear(F, D)
        self.norm, self.dropout = nn.BatchNorm1d(F), nn.Dropout(0.4)
        self.to(DEVICE)

    def forward(self, x):
        self.log.append(self.name)
        h = self.dropout(self.norm(self.up(x)).relu())
        if fusedckpt.is_recomputing():
            self.seen.append(StorageWeakRef(h.untyped_storage()))
        return self.down(h).sin()


class LoggedStage(nn.Module):
    """Three checkpointed blocks, and something behind them."""

    def __init__(self):
        super().__init__()
        self.log = []
        self.blocks = nn.ModuleList(LoggedBlock(name, self.log) for name in "abc")

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x)
        return x.exp()

    @property
    def alive(self):
        return [block.name for block in self.blocks for ref in block.seen if not ref.expired()]


def made():
    torch.manual_seed(0)
    return LoggedStage(), randn(ROWS, D)


def results(ahead=0, around=torch.enable_grad, retain=False, forward=torch.enable_grad):
    """Return the results of a step, and the names of blocks in the order of their calls."""
    stage, x = made()
    torch.manual_seed(1)
    with forward():
        y = stage(x)
    stage.log.append("|")
    if ahead:
        with around():
            assert prefetch_recompute({"y": [y]}, ahead) == ahead
    stage.log.append("|")
    given = [x, *stage.parameters()]
    grads = torch.autograd.grad(y.float().sum(), given, retain_graph=retain)
    if retain:
        stage.log.append("|")
        grads += torch.autograd.grad(y.float().sum(), given)
    state = [torch.get_rng_state(), *stage.buffers()]
    return [y, *grads, *state], "".join(stage.log)


def autocast():
    return torch.autocast(DEVICE.type, torch.bfloat16)


@pytest.mark.parametrize(
    ("ahead", "order"), [(0, "abc||cba"), (1, "abc|c|ba"), (2, "abc|cb|a"), (3, "abc|cba|")]
)
@pytest.mark.parametrize("forward", [torch.enable_grad, autocast])
def test_what_comes_before_does_not_come_again(ahead, order, forward):
    found, log = results(ahead, forward=forward)
    assert log == order
    assert_same(found, results(forward=forward)[0])


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, autocast])
def test_what_is_around_changes_nothing(around):
    assert_same(results(1, around)[0], results()[0])


def test_it_serves_one_backward():
    found, log = results(1, retain=True)
    assert log == "abc|c|ba|cba"
    assert_same(found, results(retain=True)[0])


def test_it_is_done_once():
    stage, x = made()
    torch.manual_seed(1)
    y = stage(x)
    assert prefetch_recompute(y) == prefetch_recompute(y) == 1
    assert stage.log == [*"abcc"]
    # one more than is there
    assert prefetch_recompute(y, 2) == 2
    assert prefetch_recompute([y, y], 9) == 3
    assert stage.log == [*"abccba"]
    # what is read outside of a backward takes nothing
    assert y.grad_fn.next_functions[0][0]._saved_self.shape == (ROWS, D)
    stage.log.clear()
    (found,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert same(found, results()[0][1])
    assert stage.log == []
    # a backward takes it for good
    assert prefetch_recompute(y) == 1
    y.sum().backward()
    assert stage.log == [*"cba"]
    assert prefetch_recompute(y) == 0


def test_a_recompute_starts_no_other():
    stage, x = made()
    other, found = stage(x), []

    def segment(x):
        found.append(prefetch_recompute(other))
        return x.sin().exp()

    checkpoint(segment, x).sum().backward()
    assert found == [1, 0]


def counts(forward, ahead, given):
    """Return the GEMMs of a block that prefetching and the backward run, and all gradients."""
    with forced_path("aten"):
        outputs, loss = forward()
        before = flops(lambda: prefetch_recompute(outputs)) if ahead else 0
        after = flops(loss.backward)
    grads = [t.grad for t in given]
    for t in given:
        t.grad = None
    return [n / (2 * ROWS * D * F) for n in (before, after)], grads


@pytest.mark.parametrize("fused", [False, True], ids=["eager", "fused"])
def test_no_gemm_runs_twice(fused):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Linear(F, D)) for _ in range(3)]
    model, x = nn.Sequential(*layers).to(DEVICE), randn(ROWS, D)
    if fused:
        fusedckpt.fuse(model)

    def forward():
        y = checkpoint(model, x)
        return y, y.square().sum()

    given = [x, *model.parameters()]
    (plain, expected), (found, grads) = (counts(forward, ahead, given) for ahead in (False, True))
    # all but the last GEMM; a fused layer that ends a segment makes its first in its own backward
    assert [plain, found] == [[0, 17], [4, 13] if fused else [5, 12]]
    assert_same(grads, expected)


def test_gemm_outputs_of_a_layer_that_reads_arguments_alone():
    """Its backward starts no recompute, and takes what one left."""
    layer, x = fusedckpt.MLP(D, F).to(DEVICE), randn(ROWS, D)

    def forward():
        outputs = checkpoint(lambda x: (layer(x), x.sin().sin()), x)
        return outputs, outputs[0].sum()

    assert counts(forward, True, [x])[0] == [2, 4]


def test_nothing_outlives_its_graph_or_its_backward():
    with no_gc():
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


@pytest.mark.parametrize("kind", ["parameter", "argument", "in a list"])
def test_what_is_written_in_place_raises_as_in_any_backward(kind):
    (stage, x), middle = made(), randn(ROWS, D) * 1
    written = {"parameter": stage.blocks[2].up.weight}.get(kind, middle)
    y = {
        "parameter": lambda: stage(x),
        "argument": lambda: checkpoint(lambda x: x.sin().exp(), middle),
        "in a list": lambda: checkpoint(lambda xs: xs[0].sin().exp(), [middle]),
    }[kind]()
    prefetch_recompute(y)
    with torch.no_grad():
        written.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_first_that_is_needed_is_found():
    """Not what a residual leads to beside it; of two branches the one made last."""
    log, x = [], randn(ROWS, D)
    a, b, c = (LoggedBlock(name, log) for name in "abc")
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


@pytest.mark.parametrize("last", [lambda y: y, torch.exp], ids=["its argument", "two outputs"])
def test_a_segment_of_several_outputs_counts_once(last):
    log, x = [], randn(ROWS, D)
    a, b = (LoggedBlock(name, log) for name in "ab")
    y = checkpoint(lambda y: (b(y), last(y)), checkpoint(a, x))
    assert prefetch_recompute(y, 2) == 2
    assert log == [*"abba"]


def test_where_there_is_nothing_to_do():
    stage, x = made()
    with torch.no_grad():
        assert prefetch_recompute(stage(x)) == 0
    assert prefetch_recompute([x, 3, None]) == 0
    # what a segment of one fused layer needs is its argument
    layer = fusedckpt.MLP(D, F).to(DEVICE)
    assert prefetch_recompute(checkpoint(layer, x)) == 0
    for wrong in (0, "1", True, 2.0):
        with pytest.raises((TypeError, ValueError), match=r"^prefetch_recompute: segments must be"):
            prefetch_recompute(x, wrong)


def test_a_checkpoint_within_is_part_of_its_own():
    found = []
    for ahead in (9, 0):
        stage, x = made()
        torch.manual_seed(1)
        y = checkpoint(stage, x)
        assert not ahead or prefetch_recompute(y, ahead) == 1
        found.append((torch.autograd.grad(y.sum(), list(stage.parameters())), stage.log))
    assert_same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_compiled_code_is_left_alone():
    block, x = linears(D, F, D), randn(ROWS, D)

    def step(x):
        y = checkpoint(block, x)
        prefetch_recompute(y)
        return y

    y = torch.compile(step, backend="aot_eager", fullgraph=True)(x)
    assert prefetch_recompute(y) == 0
    assert_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(block(x).sum(), x))
