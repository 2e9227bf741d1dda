"""Peaks of reports: those of the same step, wherever they are."""

from __future__ import annotations

import pytest
import torch
from report_models import (
    CASES,
    Checkpointed,
    D,
    H,
    R,
    X,
    call,
    case,
    given,
    mlp,
    squares,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedckpt
from fusedckpt.memory import peak_bytes
from fusedckpt.reporting.memory_report import report


@pytest.mark.parametrize("name", CASES)
def test_peak_is_that_of_the_same_step(name):
    model, args, kwargs, loss = case(name)
    found = report(model, *args, **kwargs)
    model.zero_grad()

    def step():
        # as in a training loop, these live on
        output = call(model, args, kwargs)
        value = loss(output)
        value.backward()

    # what was there before is all that the report adds
    there = found.parameter_bytes + found.buffer_bytes + found.input_bytes
    assert found.resident_bytes == there
    assert found.peak_bytes - there == peak_bytes(step)


@pytest.mark.parametrize("name", ["containers", "gpt2", "fused"])
def test_peak_with_an_optimizer_is_that_of_a_later_step(name):
    model, args, kwargs, loss = case(name)
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        output = call(model, args, kwargs)
        value = loss(output)
        value.backward()
        optimizer.step()

    found = report(model, *args, optimizer=optimizer, **kwargs)
    assert not optimizer.state
    step()
    optimizer.zero_grad()
    assert found.peak_bytes - found.resident_bytes == peak_bytes(step)
    optimizer.zero_grad()
    again = report(model, *args, optimizer=optimizer, **kwargs)
    assert again.peak_bytes == found.peak_bytes
    assert again.resident_bytes == found.resident_bytes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_peak_on_a_gpu_is_the_allocators():
    model, x = mlp().cuda(), given(R, D).cuda()

    def step():
        output = model(x)
        value = squares(output)
        value.backward()

    # the first step sets up libraries
    step()
    model.zero_grad()
    found = report(model, x)
    assert found.device == "cuda:0"
    assert found.peak_bytes - found.resident_bytes == peak_bytes(step, "cuda")


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
