"""Variables beside a model: runs on trial leave them as they were, a recompute finds them so."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE
from torch import nn

import fusedckpt
from fusedckpt import fuse
from fusedckpt.state.variables import (
    NO_VARIABLES,
    noted_variables,
    variables_of,
    variables_of_functions,
)

D = 16
NUM_CALLS = 0
SEEN: list[int] = []
TOTAL = torch.zeros((), dtype=torch.float64, device=DEVICE)
LOSSES: list[int] = []
HOOKED: list[int] = []
PARTS: list[int] = []


def counting_attention():
    """Return a class with variables of every kind, and a function that reads them all."""
    assigned, cells, default = 0, [0], []
    generator = torch.Generator()

    class CountingAttention(nn.Module):
        """Scales its input by the number of calls, and counts these in variables of all kinds."""

        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
            self.counts = SimpleNamespace(calls=0)
            # a function in an attribute
            self.part = lambda: PARTS.append(1)

        def forward(self, x, calls=default):
            global NUM_CALLS
            nonlocal assigned
            assigned += 1
            cells[0] += 1
            NUM_CALLS += 1
            SEEN.append(1)
            TOTAL.add_(1)
            calls.append(1)
            self.counts.calls += 1
            self.part()
            x = x * (1 + 0.1 * assigned + float(torch.rand((), generator=generator, device="cpu")))
            return self.out(F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1)))

    def read(model):
        calls = sum(part.counts.calls for part in model)
        lists = SEEN, default, LOSSES, HOOKED
        state = generator.get_state().numpy().tobytes()
        return state, assigned, calls, *cells, NUM_CALLS, float(TOTAL), *map(len, lists)

    return CountingAttention, read


def counting_loss(y):
    LOSSES.append(1)
    return y.square().mean()


TRIALS = pytest.mark.parametrize(
    "run",
    [
        lambda model, x: fuse(model, example_inputs=x),
        lambda model, x: fusedckpt.report(model, x, loss=counting_loss),
        lambda model, x: fusedckpt.estimate(model, x, loss=counting_loss),
        lambda model, x: fusedckpt.plan(model, x, loss=counting_loss, activation_budget=0.5),
    ],
    ids=["fuse", "report", "estimate", "plan"],
)


@pytest.fixture
def model_and_reader():
    kind, read = counting_attention()
    model = nn.Sequential(kind(), kind()).to(DEVICE)
    model[0].register_forward_hook(lambda *_: HOOKED.append(1))
    return model, partial(read, model)


@TRIALS
def test_runs_on_trial_leave_variables_as_they_were(model_and_reader, run):
    model, read = model_and_reader
    x = torch.randn(2, 6, D, device=DEVICE)
    model(x)
    counting_loss(x)
    before = *read(), len(PARTS)
    assert all(before)
    run(model, x)
    assert (*read(), len(PARTS)) == before


def test_a_recompute_finds_variables_as_its_forward_did(model_and_reader):
    model, read = model_and_reader
    fuse(model)
    x = torch.randn(2, 6, D, device=DEVICE)
    y = model(x)
    expected = torch.autograd.grad(y.sum(), model[0].qkv.weight, retain_graph=True)
    before = read()
    grads = torch.autograd.grad(y.sum(), model[0].qkv.weight)
    assert read() == before
    torch.testing.assert_close(grads, expected)


def test_a_variable_that_is_not_assigned_is_so_again():
    def made():
        class Late(nn.Linear):
            """Assigns a variable that has no value before."""

            def forward(self, x):
                nonlocal late
                late = 1
                return super().forward(x)

        if not made:
            late = 0
        return Late, lambda: late

    kind, read = made()
    model = nn.Sequential(kind(D, D)).to(DEVICE)
    fusedckpt.report(model, torch.randn(2, D, device=DEVICE))
    with pytest.raises(NameError):
        read()
    assert len(variables_of(kind).assigned) == 1


def test_fuse_leaves_its_example_inputs_as_they_were():
    class Taking(nn.Module):
        """Writes its input, and takes an entry out of it."""

        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(D, 2)

        def forward(self, batch):
            x = batch["x"].mul_(2)
            batch["calls"].append(batch.pop("mask"))
            return self.attention(x, x, x)[0]

    x = torch.ones(2, 3, D, device=DEVICE)
    batch = {"x": x, "calls": [], "mask": 1}
    report = fuse(nn.Sequential(Taking()).to(DEVICE), example_inputs={"input": batch})
    assert batch == {"x": x, "calls": [], "mask": 1}
    assert x.unique() == 1
    assert report.swapped


class MomentumEncoder(nn.Module):
    """Moves the parameters of one encoder to those of another in its forward."""

    def __init__(self, way):
        super().__init__()
        self.online, self.target = (
            nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D)) for _ in range(2)
        )
        self.target.requires_grad_(False)
        self.way = way

    @torch.no_grad()
    def update(self):
        for mine, theirs in zip(self.target.parameters(), self.online.parameters(), strict=True):
            if self.way == "in place":
                mine.mul_(0.5).add_(theirs, alpha=0.5)
            elif self.way == "data":
                mine.data.copy_(theirs)
            else:
                mine.data = (mine.data + theirs.data) / 2

    def forward(self, x):
        if self.way == "function":
            move(self.target, self.online)
        else:
            self.update()
        return F.mse_loss(self.online(x), self.target(x))


@torch.no_grad()
def move(mine, theirs):
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        a.lerp_(b, 0.5)


@TRIALS
@pytest.mark.parametrize("way", ["in place", "data", "another tensor", "function"])
def test_runs_on_trial_leave_the_parameters_that_a_forward_writes(run, way):
    model = nn.Sequential(MomentumEncoder(way)).to(DEVICE)
    before = copy.deepcopy(model.state_dict())
    run(model, torch.randn(2, 6, D, device=DEVICE))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


class Clamped(nn.Module):
    """Keeps its own weight, which is trained, within bounds."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, D * D).view(D, D))

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.5, 0.5)
        return F.linear(x, self.weight)


@TRIALS
def test_runs_on_trial_leave_trained_parameters_that_a_forward_writes(run):
    model = nn.Sequential(Clamped(), Clamped()).to(DEVICE)
    before = copy.deepcopy(model.state_dict())
    run(model, torch.randn(2, 6, D, device=DEVICE))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_data_in_variables_is_not_copied(monkeypatch):
    monkeypatch.setattr("fusedckpt.state.variables._MOST_BYTES", 64)
    small, large = torch.zeros(8), torch.zeros(1024)

    def loss(y):
        return (y * small.sum() * large.sum()).sum()

    tensors = noted_variables(nn.Sequential(), loss).tensors
    assert [tensor is small for tensor in tensors] == [True]


def test_functions_of_ours_keep_what_they_note():
    """A trial's own observers may be on the model."""
    noted = []

    def note():
        noted.append(1)

    assert variables_of_functions([note]).objects() == [noted]
    note.__module__ = "fusedckpt.planning.roles"
    assert variables_of_functions([note]) is NO_VARIABLES
