"""Where the peak of a step is, the bytes through it, and what counts beside saved tensors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from report_models import D, H, LinearThenCheckpoint, R, X, given, mlp
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedckpt
from fusedckpt import plan, report
from fusedckpt.allocations import Change, Profile
from fusedckpt.reporting.tables import size
from fusedckpt.reporting.timeline import read_timeline

W = 4 * D * D


class Bulge(nn.Module):
    """Needs 16 more tensors like its input for a moment of its forward."""

    def forward(self, x):
        with torch.no_grad():
            x.repeat(16, 1).sum()
        return x * 1


def test_peak_in_forward():
    model = nn.Sequential(nn.Linear(D, D), Bulge(), nn.Linear(D, D))
    found = report(model, given(64, D))
    assert (found.peak.phase, found.peak.module) == ("forward", "1")


def test_peak_in_backward():
    # the gradient of the table is as large as it; the peak comes when nothing else is left
    model = nn.Sequential(nn.Embedding(1000, D), nn.Linear(D, D), nn.GELU())
    found = report(model, torch.arange(R))
    assert (found.peak.phase, found.peak.module) == ("backward", "0")
    # a node that saves no tensors, after an op that made no node
    model = nn.Sequential(nn.Linear(D, D), Idle(), Pool(), nn.Linear(D, D))
    found = report(model, given(4 * R, 64, D))
    assert (found.peak.phase, found.peak.module) == ("backward", "2")
    # after a recompute that stopped early, by an exception out of its modules
    for run in (checkpoint, fusedckpt.checkpoint):
        model = LinearThenCheckpoint(False, run)
        model.first = nn.Embedding(1000, D)
        found = report(model, torch.arange(R))
        assert (found.peak.phase, found.peak.module) == ("backward", "first")
        assert found.timeline[-1].module == "first"


class Idle(nn.Module):
    """Passes its input on, and computes something that needs no gradient."""

    def forward(self, x):
        given(3).mul(2)
        return x


class Pool(nn.Module):
    """Its gradient is a large tensor, made by an autograd.Function that keeps nothing."""

    def forward(self, x):
        return Mean.apply(x)


class Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.mean(1)

    @staticmethod
    def backward(ctx, dy):
        return dy[:, None].repeat(1, 64, 1) / 64


class LateBulge(Bulge):
    """Bulges in a recompute only."""

    def forward(self, x):
        again = torch._C._current_graph_task_id() != -1
        return super().forward(x) if again else x * 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_peak_in_a_recompute(use_reentrant):
    model = LinearThenCheckpoint(use_reentrant)
    model.inner = nn.Sequential(mlp(), LateBulge(), nn.Tanh())
    found = report(model, given(64, D))
    assert (found.peak.phase, found.peak.module) == ("backward", "inner.1")


def test_peak_in_the_optimizer():
    model = nn.Linear(256, 256)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    found = report(model, given(1, 256), optimizer=optimizer)
    assert (found.peak.phase, found.peak.module) == ("optimizer", "(optimizer)")


def test_timeline():
    model = mlp()
    found = report(model, given(R, D), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    times = [moment.time_ns for moment in found.timeline]
    assert times[0] == 0
    assert times == sorted(times)
    assert found.timeline[0].live_bytes == found.resident_bytes
    phases = [moment.phase for moment in found.timeline]
    assert phases == sorted(phases, key=["forward", "backward", "optimizer"].index)
    assert set(phases) == {"forward", "backward", "optimizer"}
    # before the backward: three outputs, the loss's square and the loss
    before = [moment for moment in found.timeline if moment.phase == "forward"][-1]
    assert before.live_bytes == found.resident_bytes + H + H + X + 4
    # after it: the gradients, the output and the loss
    last = found.timeline[-1]
    assert last.live_bytes == found.resident_bytes + found.gradient_bytes + X + 4
    forward = [moment.module for moment in found.timeline if moment.phase == "forward"]
    assert list(dict.fromkeys(forward)) == ["(model)", "0", "1", "2", "(loss)"]
    backward = [moment.module for moment in found.timeline if moment.phase == "backward"]
    assert list(dict.fromkeys(backward)) == ["(loss)", "2", "1", "0"]


class Hoard(torch.autograd.Function):
    """Twice x, with its gradient made in forward and held in an attribute."""

    @staticmethod
    def forward(ctx, x):
        ctx.dx = torch.full_like(x, 2)
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        dx, ctx.dx = ctx.dx, None
        return dx.mul_(dy)


class Hoards(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x):
        return Hoard.apply(self.inner(x))


class ChunkedHead(nn.Module):
    """torch's own hoard: loss and gradients in chunks, in one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, D))

    def forward(self, x):
        target, options = torch.arange(len(x)) % 64, torch.nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(x, self.weight, target, options=options)


def hoarding(head):
    return nn.Sequential(nn.Linear(D, D), mlp(), head)


HEADS = {
    "attribute": (Hoards, X),
    "linear_cross_entropy": pytest.param(
        *(ChunkedHead, X + 4 * 64 * D),
        marks=pytest.mark.skipif(
            not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="not in this torch"
        ),
    ),
}


@pytest.mark.parametrize(("head", "nbytes"), HEADS.values(), ids=HEADS)
def test_what_is_held_outside_saved_tensors_is_named(head, nbytes):
    found = report(hoarding(head()), torch.randn(R, D))
    assert found.held == found.to_dict()["held"] == {"2": nbytes}
    assert f"outside saved tensors: {size(nbytes)} in 2" in str(found)
    assert not report(mlp(), torch.randn(R, D)).held


@pytest.mark.parametrize(("head", "nbytes"), HEADS.values(), ids=HEADS)
def test_a_plan_counts_it(head, nbytes):
    model, x = hoarding(head()), torch.randn(2048, D)
    for policy in ("none", "all", "uniform:1"):
        found = plan(model, x, policy=policy, units=["0", "1", "2"], progress=False)
        assert 0.99 <= found.predicted_bytes / found.measured_bytes <= 1.02


class RecomputeBulge(nn.Module):
    """Needs 16 tensors for a moment in code of its own, and in a recompute only."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x):
        if torch._C._current_graph_task_id() != -1:
            x.detach().repeat(16, 1).sum()
        return self.inner(x).tanh()


def test_the_peak_is_of_the_unit_that_runs_again():
    model, x = (
        nn.Sequential(nn.Linear(D, D), RecomputeBulge(), nn.Sequential(mlp(), nn.Tanh())),
        torch.randn(64, D),
    )
    found = plan(model, x, policy="uniform:1", units=["1", "2"], progress=False)
    found.apply(model)
    peak = report(model, x).peak
    assert (peak.phase, peak.module) == ("backward", "1")


def event(name, start, *children, tid=1, end=None, **fields):
    return SimpleNamespace(
        name=name,
        start_tid=tid,
        start_time_ns=start,
        end_time_ns=end or start,
        children=children,
        extra_fields=SimpleNamespace(**fields),
    )


def test_backwards_in_another_thread():
    """A GPU's: a recompute in it numbers its ops as the forward's thread did others."""
    node = "autograd::engine::evaluate_function: "
    again = event("aten::mm", 32, tid=2, sequence_number=0)
    events = [
        event("fusedckpt.report:phase:forward", 10),
        event("fusedckpt.report:enter:first", 11),
        event("aten::mm", 12, sequence_number=0),
        event("fusedckpt.report:leave:", 13),
        event("fusedckpt.report:enter:second", 14),
        event("aten::mm", 15, sequence_number=1),
        event("fusedckpt.report:leave:", 16),
        event("fusedckpt.report:phase:backward", 20),
        event(f"{node}Second", 30, again, tid=2, end=39, sequence_number=1),
        again,
        event(f"{node}First", 40, tid=2, end=49, sequence_number=0),
    ]
    found = read_timeline(Profile(events, [Change(41, 1, 64)]), 0)
    assert found.moments[-1][1:4] == (64, "backward", "first")


class InGroups(torch.optim.SGD):
    """Keeps a tensor in its groups, and one in a list of its own."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group.setdefault("average", torch.zeros(D))
        self.history = [torch.zeros(2 * D)]


class Wraps(torch.optim.Optimizer):
    """Steps another optimizer."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        self.inner.step(closure)


OPTIMIZERS = {
    "fused Adam": (lambda p: torch.optim.Adam(p, fused=True), 2 * W + 4),
    "foreach Adam": (lambda p: torch.optim.Adam(p, foreach=True), 2 * W + 4),
    "capturable": (lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3), foreach=False), 2 * W + 8),
    "momentum": (lambda p: torch.optim.SGD(p, momentum=0.9), W),
    "SGD": (lambda p: torch.optim.SGD(p), 0),
    "in groups": (lambda p: InGroups(p, momentum=0.9), W + 4 * D + 8 * D),
    "wrapped": (lambda p: Wraps(torch.optim.SGD(p, momentum=0.9)), W),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_state_is_the_optimizers(name):
    make, nbytes = OPTIMIZERS[name]
    model, x = nn.Linear(D, D, bias=False), torch.randn(R, D)
    optimizer = make(model.parameters())
    for _ in range(2):
        found = report(model, x, optimizer=optimizer)
        assert found.optimizer_bytes == nbytes
        # made in the first step, there in the one reported
        assert found.resident_bytes == W + X + nbytes
        model(x).sum().backward()
        optimizer.step()


def test_live_bytes_by_kind():
    model, x = nn.Sequential(mlp(), nn.Linear(D, D)), torch.randn(R, D)
    found = report(model, x, optimizer=torch.optim.Adam(model.parameters(), foreach=True))
    *_, last = found.timeline
    assert last.gradient_bytes == found.gradient_bytes == found.parameter_bytes
    gradients = [moment.gradient_bytes for moment in found.timeline]
    assert gradients == sorted(gradients)
    assert {m.gradient_bytes for m in found.timeline if m.phase == "forward"} == {0}
    # what it takes for a moment
    assert max(m.optimizer_bytes for m in found.timeline) > 0 == last.optimizer_bytes
    assert {m.optimizer_bytes for m in found.timeline if m.phase != "optimizer"} == {0}


@pytest.mark.parametrize("adam", [False, True])
def test_the_figures_kinds_add_up(adam):
    drawing = pytest.importorskip("fusedckpt.reporting.memory_plot", exc_type=ImportError)
    model, x = nn.Sequential(mlp(), nn.Sequential(mlp(), nn.Tanh())), torch.randn(R, D)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True) if adam else None
    found = report(model, x, optimizer=optimizer)
    kinds = found.live_by_kind
    expected = ["parameters", *["optimizer"] * adam, "gradients", "activations"]
    assert [*kinds] == expected
    lives = [moment.live_bytes for moment in found.timeline]
    assert [sum(column) for column in zip(*kinds.values(), strict=True)] == lives
    assert kinds["activations"][0] == 0 < max(kinds["activations"])
    layers = drawing.by_layer(found.saved_by_module)
    assert set(layers) == {"0", "1"}
    assert sum(layers.values()) == found.saved_bytes


class Tied(nn.Module):
    """Gradients of one weight come from several nodes, and wait for the others."""

    def __init__(self, head, uses):
        super().__init__()
        self.embedding, self.inner = nn.Embedding(256, D), nn.Linear(D, D)
        self.head, self.uses = head, uses

    def forward(self, ids):
        x = sum(self.embedding(ids[:, i]) for i in range(self.uses))
        x = self.inner(x) * x
        return F.linear(x, self.embedding.weight).logsumexp(-1) if self.head else x


@pytest.mark.parametrize(("head", "uses"), [(True, 1), (True, 2), (False, 2), (False, 3)])
def test_gradients_that_are_added_up(head, uses):
    """Those of a weight are gradients while they wait, those of an activation are activations."""
    model = Tied(head, uses)
    found = report(model, torch.randint(256, (2, 3)))
    weight = model.embedding.weight.nbytes
    assert max(found.live_by_kind["activations"]) < weight
    gradients = [moment.gradient_bytes for moment in found.timeline]
    # one that waits, and the next
    assert max(gradients) >= 2 * weight
    assert gradients[-1] == found.gradient_bytes == found.parameter_bytes
    assert {m.gradient_bytes for m in found.timeline if m.phase == "forward"} == {0}
