"""Where the peak of a step is, and the bytes through it."""

from __future__ import annotations

import pytest
import torch
from report_models import Checkpointed, D, H, R, X, given, mlp
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedckpt
from fusedckpt.reporting.memory_report import report


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
        model = Checkpointed(False, run)
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
    model = Checkpointed(use_reentrant)
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
