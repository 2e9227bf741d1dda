"""fuse: modules that the first training step shows to save much run again in backward."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, randn, run_ranks, saved_bytes
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from zoo import GEGLU, Attention, DecoderLayer, Heads, Scan

import fusedckpt
from fusedckpt import fuse, unfuse
from fusedckpt.layers.notes import notes_of
from fusedckpt.memory import peak_bytes, saved_tensors

D, T = 16, 12


class NotingScan(Scan):
    """Draws from all generators, and writes state of each kind."""

    def __init__(self, d, dropout=0.0):
        super().__init__(d, dropout)
        self.norm, self.calls, self.seen = nn.BatchNorm1d(D), 0, []
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 1)), 0.1)
        x = x * (np.random.rand() + random.random()) + self.mean
        return self.norm(super().forward(x).transpose(1, 2)).transpose(1, 2)


class TickingScan(Scan):
    """Gives something else each time."""

    def forward(self, x):
        return super().forward(x) * (1 + 0.1 * next(TICKS))


TICKS = itertools.count()


class LateAttention(Heads):
    """Attention in a function that its code does not name."""

    def __init__(self, d, dropout):
        super().__init__(d)

    def attend(self, q, k, v):
        return getattr(F, "scaled_dot_product" + "_attention")(q, k, v)


def block_of(kind, dropout=0.2, block=DecoderLayer):
    mlp = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))
    return block(D, kind(D, dropout=dropout), mlp)


def build(kind, count=2, dropout=0.2):
    torch.manual_seed(0)
    return nn.Sequential(*(block_of(kind, dropout) for _ in range(count))).to(DEVICE)


def seed():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def step(model, x):
    """Return what a step gives and leaves: result, gradients, buffers and next random numbers."""
    y = model(x)
    grads = torch.autograd.grad(y.sin().sum(), [x, *model.parameters()])
    drawn = [torch.rand(2), torch.tensor([random.random(), np.random.rand()])]
    return [y.detach(), *grads, *(b.clone() for b in model.buffers()), *drawn]


KINDS = Scan, NotingScan, LateAttention


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_step_is_as_ever_and_shows_what_saves_much(kind):
    eager, x = build(kind), randn(2, T, D)
    fused, by_batch = copy.deepcopy(eager), copy.deepcopy(eager)
    report = fuse(fused)
    assert [*report.undecided] == ["0.attention", "1.attention"]
    lines = str(report).splitlines()
    (line,) = (line for line in lines if f" 2 x {kind.__name__}: " in line)
    # what a matcher has left says why, and that it waits
    is_left = "0.attention" in report.left
    assert line.startswith("  left " if is_left else "  undecided ")
    assert "its first training call will show whether it saves enough to be fused" in line
    assert "run a training step, or call fuse(model, example_inputs=...)" in line
    fuse(by_batch, example_inputs=x)
    changes = {n: c for n, c in report.swapped.items() if n.endswith("attention")}
    assert changes == {}
    for _ in range(3):
        seed()
        expected = step(eager, x)
        seed()
        torch.testing.assert_close(step(fused, x), expected)
    assert report.undecided == {}
    assert [n for n in report.swapped if n.endswith("attention")] == ["0.attention", "1.attention"]
    assert "observed the first training call: 2 modules run again in backward" in str(report)
    step(by_batch, x)
    assert saved_bytes(fused, [x]) == saved_bytes(by_batch, [x]) < saved_bytes(eager, [x])
    for ours, theirs in zip(fused.modules(), eager.modules(), strict=True):
        assert getattr(ours, "calls", 0) == getattr(theirs, "calls", 0)
        assert getattr(ours, "seen", ()) == getattr(theirs, "seen", ())
    assert not nn.modules.module._has_any_global_hook()


@pytest.mark.parametrize("kind", [Scan, LateAttention])
def test_the_first_step_saves_less_already(kind):
    eager, x = build(kind, 4), randn(64, 4 * T, D)
    fused = copy.deepcopy(eager)
    fuse(fused)
    with saved_tensors() as first:
        y = fused(x * 1)
    del y
    assert first.nbytes == saved_bytes(fused, [x])
    fresh = copy.deepcopy(eager)
    fuse(fresh)
    eager_peak = peak_bytes(lambda: eager(x).sum().backward())
    assert peak_bytes(lambda: fresh(x).sum().backward()) < eager_peak


def test_attention_saves_recipes_behind_an_observed_step():
    """Hooks that observe the first call take no tensor to other memory."""
    layers = block_of(Scan, 0.0), nn.Tanh(), Attention(D, 2), block_of(Scan, 0.0)
    eager = nn.Sequential(*layers).to(DEVICE)
    fused, x = copy.deepcopy(eager), randn(2, T, D)
    report = fuse(fused)
    assert [*report.undecided] == ["0.attention", "3.attention"]
    torch.testing.assert_close(step(fused, x)[:-2], step(eager, x)[:-2])
    assert notes_of(fused[2]).follows_nodes
    torch.testing.assert_close(step(fused, x)[:-2], step(eager, x)[:-2])


def test_a_module_that_is_not_the_same_twice_stays(monkeypatch):
    eager, x = build(TickingScan, 1), randn(2, T, D)
    fused = copy.deepcopy(eager)
    report = fuse(fused)
    monkeypatch.setattr(sys.modules[__name__], "TICKS", itertools.count())
    seed()
    expected = step(eager, x)
    monkeypatch.setattr(sys.modules[__name__], "TICKS", itertools.count())
    seed()
    torch.testing.assert_close(step(fused, x), expected)
    assert next(TICKS) == 2
    assert report.left == {"0.attention": ("twice", "")}
    assert report.undecided == {}
    step(fused, x)
    assert type(fused[0].attention) is TickingScan


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyError])
def test_a_second_run_that_fails_leaves_the_step_as_it_is(error, monkeypatch):
    class Failing(Scan):
        def forward(self, x):
            if next(TICKS) == 1:
                raise error("here")
            return super().forward(x)

    eager, x = build(Scan, 1), randn(2, T, D)
    fused = build(Failing, 1)
    report = fuse(fused)
    monkeypatch.setattr(sys.modules[__name__], "TICKS", itertools.count())
    seed()
    expected = step(eager, x)
    seed()
    torch.testing.assert_close(step(fused, x), expected)
    key = "memory" if error is torch.OutOfMemoryError else "second"
    assert report.left["0.attention"].key == key


def test_an_error_of_the_model_is_its_own():
    model, x = build(Scan), randn(2, T, D)
    report = fuse(model)
    # of a hook that raises
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="normalized_shape"):
            model(randn(2, T, D + 1))
    assert not nn.modules.module._has_any_global_hook()
    assert [*report.undecided] == ["0.attention", "1.attention"]
    step(model, x)
    assert report.undecided == {}


def test_a_write_over_a_saved_tensor_is_an_error_as_ever():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(D, D)

        def forward(self, x):
            y = self.first(x).exp()
            return y.mul_(2)

    model = nn.Sequential(nn.LayerNorm(D), Wrong(), nn.Linear(D, D)).to(DEVICE)
    assert fuse(model).undecided
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(randn(2, T, D)).sum().backward()


@pytest.mark.parametrize("way", ["eval", "no_grad", "checkpoint", "hooks", "empty", "compile"])
def test_other_calls_do_not_count(way):
    model, x = build(Scan), randn(2, T, D)
    report = fuse(model)
    if way == "eval":
        model.eval()(x)
        model.train()
    elif way == "no_grad":
        with torch.no_grad():
            model(x)
    elif way == "checkpoint":
        checkpoint(model, x, use_reentrant=False).sum().backward()
        assert {reason.key for reason in report.undecided.values()} == {"unseen call"}
    elif way == "hooks":
        with torch.autograd.graph.save_on_cpu():
            model(x).sum().backward()
        assert "saved-tensor hooks of other code" in str(report)
    elif way == "empty":
        model(x[:0]).sum().backward()
    else:
        graphs = []
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=lambda graph, _: graphs.append(1) or graph)
        compiled(x).sum().backward()
        assert len(graphs) == 1
    assert [*report.undecided] == ["0.attention", "1.attention"]
    step(model, x)
    assert report.undecided == {}
    assert "0.attention" in report.swapped


def test_a_module_in_a_checkpoint_needs_no_second_run():
    class CheckpointedBlock(DecoderLayer):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    model, x = nn.Sequential(block_of(Scan, block=CheckpointedBlock)).to(DEVICE), randn(2, T, D)
    report = fuse(model)
    step(model, x)
    assert report.left == {"0.attention": ("in checkpoint", "")}
    assert type(model[0].attention) is Scan


def test_a_model_that_is_called_in_parts():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = build(Scan, 1), build(Scan, 1)

    model, x = Parts(), randn(2, T, D)
    report = fuse(model)
    step(model.encoder, x)
    assert "encoder.0.attention" in report.swapped
    assert [*report.undecided] == ["decoder.0.attention"]
    step(model.decoder, x)
    assert report.undecided == {}


def test_copies_and_files_of_a_model_that_waits():
    model, x = build(Scan), randn(2, T, D)
    by_batch = build(Scan)
    fuse(by_batch, example_inputs=x)
    taught = saved_bytes(by_batch, [x])
    names = [*model.state_dict()]
    report = fuse(model)
    assert [*model.state_dict()] == names
    assert type(model).__name__ == "Sequential"
    assert isinstance(model[0].attention, Scan)
    for other in copy.deepcopy(model), pickle.loads(pickle.dumps(model)):
        eager = build(Scan)
        seed()
        expected = step(eager, x)
        seed()
        torch.testing.assert_close(step(other, x), expected)
        assert saved_bytes(other, [x]) == taught
        unfuse(other)
        assert [type(m) for m in other.modules()] == [type(m) for m in build(Scan).modules()]
    # the first model is another one
    assert [*report.undecided] == ["0.attention", "1.attention"]
    unfuse(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in build(Scan).modules()]
    assert report.undecided == {}


def test_fuse_again_before_and_after_the_first_step():
    model, x = build(Scan), randn(2, T, D)
    fuse(model, only="0.*")
    report = fuse(model, only="1.*")
    assert [*report.undecided] == ["0.attention", "1.attention"]
    with pytest.raises(ValueError, match="matches no norm"):
        fuse(model, only="2.*")
    assert [*report.undecided] == ["0.attention", "1.attention"]
    assert fuse(model, recompute_elementwise=True).undecided
    step(model, x)
    assert "0.attention" in fuse(model).already
    unfuse(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in build(Scan).modules()]


def test_a_report_and_a_plan_teach_by_a_copy():
    model, x = build(NotingScan), randn(2, T, D)
    report = fuse(model)
    before = copy.deepcopy([vars(m) for m in model.modules() if isinstance(m, NotingScan)])
    seen = fusedckpt.report(model, x)
    assert report.undecided == {}
    assert "0.attention" in report.swapped
    assert seen.saved_bytes < fusedckpt.report(build(NotingScan), x).saved_bytes / 2
    for module, attributes in zip(
        (m for m in model.modules() if isinstance(m, NotingScan)), before, strict=True
    ):
        assert (module.calls, module.seen) == (0, [])
        assert torch.equal(module.mean, attributes["_buffers"]["mean"])


class ShortScan(Scan):
    """One token is no scan."""

    def forward(self, x):
        return self.gate(x) if x.shape[1] == 1 else super().forward(x)


def on_ranks(rank):
    model = build(ShortScan, dropout=0.0)
    report = fuse(model)
    parallel = DistributedDataParallel(model)
    torch.manual_seed(1)
    # of one token a scan saves little
    x = torch.randn(2, T, D)[:, : T if rank else 1]
    y = parallel(x)
    y.sum().backward()
    keys = {name: r.key for name, r in report.left.items() if r.key == "ranks"}
    grads = [p.grad for p in model.parameters()]
    assert {n for n in report.swapped if n.endswith("attention")} == set()
    assert report.undecided == {}
    assert set(keys) == ({"0.attention", "1.attention"} if rank else set())
    eager = DistributedDataParallel(build(ShortScan, dropout=0.0))
    eager(x).sum().backward()
    torch.testing.assert_close(grads, [p.grad for p in eager.parameters()])


def on_shards(rank):
    eager, model = build(Scan, dropout=0.0), build(Scan, dropout=0.0)
    report = fuse(model)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    torch.manual_seed(1)
    x = torch.randn(2, T, D)
    for _ in range(2):
        y = model(x)
        y.sum().backward()
    assert [n for n in report.swapped if n.endswith("attention")] == ["0.attention", "1.attention"]
    for _ in range(2):
        eager(x).sum().backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("main", [on_ranks, on_shards])
def test_on_two_ranks(main, tmp_path):
    run_ranks(main, tmp_path, 2)


def test_the_remedy_is_a_run_then_recipes_then_a_checkpoint():
    model = nn.Sequential(GEGLU(D, D))
    report = fuse(model)
    assert "left 1 x GEGLU: " in str(report)
    assert "run a training step, or call fuse(model, example_inputs=...) (0)" in str(report)
    x = randn(2, T, D).requires_grad_()
    model(x)
    # the linear's result, gelu's result; the linear itself saves x
    nbytes = 2 * T * D * 4 * (2 + 1)
    remedy = report.left["0"].remedy
    assert f"{remedy} (0): {nbytes:,} bytes saved" in str(report)
    assert remedy.index("recompute_elementwise") < remedy.index("fusedckpt.checkpoint")
    assert fuse(copy.deepcopy(model), example_inputs=x).own_bytes["0"] == nbytes
    report = fuse(model, recompute_elementwise=True)
    model(x)
    line = next(line for line in str(report).splitlines() if "left 1 x GEGLU" in line)
    assert "recompute_elementwise" not in line
    assert "fusedckpt.checkpoint" in line


def test_modules_inside_of_one_that_runs_again_are_not_left():
    scan = Scan(D)
    scan.drop = nn.InstanceNorm1d(2)
    model = nn.Sequential(scan, nn.InstanceNorm1d(T))
    report = fuse(model)
    assert {*report.left} == {"0", "0.drop", "1"}
    model(randn(2, T, D).requires_grad_())
    assert {*report.swapped} == {"0"}
    assert {*report.left} == {*report.classes} == {"1"}
