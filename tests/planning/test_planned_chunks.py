"""Chunks as a choice of the planner: a smaller working set, in more time."""

import copy
import pickle

import pytest
import torch
from plan_models import assert_as_near, assert_equal, planned, step, tokens, transformer
from torch import nn

import fusedckpt
from fusedckpt import Plan, checkpoint_sequential, report
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.memory import nbytes_of, peak_bytes
from fusedckpt.planning import planner

T, D, F = 512, 16, 512


def mlps(count=3, gated=True):
    """Return MLPs whose transients, 3 F-wide tensors, are far above what is kept between them."""
    torch.manual_seed(0)
    kind = fusedckpt.GatedMLP if gated else fusedckpt.MLP
    return nn.Sequential(
        *(kind(D, F, norm=fusedckpt.RMSNorm(D), residual=True) for _ in range(count))
    )


def wide():
    """Return blocks of attention and an MLP, which peaks."""
    torch.manual_seed(0)
    model = transformer(2)
    for block in model.blocks:
        block.mlp = fusedckpt.MLP(64, 1024, norm=nn.LayerNorm(64))
    fusedckpt.fuse(model)
    # or the peak would be the last of backward's, where all of them are there
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def peak(model, x):
    """Return the peak of a step that finds its gradients there, and what the last one returned."""
    last = model(x).detach()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    start = nbytes_of([*model.parameters(), *(p.grad for p in model.parameters()), x, last])
    return start + peak_bytes(lambda: model(x).square().mean().backward(), x.device)


def assert_right(model, plain, x):
    """Compare a planned step with the plain one by the error rule, and with itself by bits."""
    ours, exact = step(model, x), x.double() if x.is_floating_point() else x
    assert_as_near(ours, step(plain, x), step(copy.deepcopy(plain).double(), exact))
    assert_equal(ours, step(model, x))


@pytest.fixture
def uncut(monkeypatch):
    """Plan as if there were no chunks."""

    def plan_uncut(model, *args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(planner, "has_levels", lambda module: False)
            return planned(model, *args, **options)

    return plan_uncut


@pytest.mark.parametrize("gated", [False, True], ids=["mlp", "gated_mlp"])
def test_a_budget_that_only_chunks_keep(gated, uncut):
    model, x = mlps(gated=gated), torch.randn(T, D)
    budget = uncut(model, x, policy="memory").measured_bytes * 2 // 3
    with pytest.raises(ValueError, match="the least feasible budget is"):
        uncut(model, x, budget=budget)
    found = planned(model, x, budget=budget)
    assert found.chunks > 1
    assert found.measured_bytes <= budget
    assert found.measured_bytes <= found.predicted_bytes <= 1.02 * found.measured_bytes
    plain = copy.deepcopy(model)
    found.apply(model)
    assert report(model, x).peak_bytes == found.measured_bytes
    assert_right(model, plain, x)
    found.undo()
    assert report(model, x).peak_bytes == report(plain, x).peak_bytes > budget


@pytest.fixture(scope="module")
def least():
    """The least peak of a model of blocks: segments in chunks."""
    with forced_path("aten"):
        return planned(wide(), tokens(), policy="memory")


def test_segments_in_chunks(least, uncut):
    model, x = wide(), tokens()
    plain = copy.deepcopy(model)
    assert any(item.level is None for item in least.items)
    assert least.chunks > 1
    assert least.measured_bytes <= least.predicted_bytes <= 1.02 * least.measured_bytes
    assert least.measured_bytes < uncut(model, x, policy="memory").measured_bytes
    least.apply(model)
    assert peak(model, x) == least.measured_bytes
    assert_right(model, plain, x)


def test_a_plan_in_chunks_is_told_saved_and_taken_elsewhere(least, tmp_path):
    assert "chunks" in str(least)
    least.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == least
    assert str(loaded) == str(least)
    # as ranks get it, and as a planned model is copied
    for found in (loaded, pickle.loads(pickle.dumps(least))):
        model = wide()
        found.apply(model)
        assert peak(model, tokens()) == least.measured_bytes
        twin = pickle.loads(pickle.dumps(model))
        assert peak(twin, tokens()) == least.measured_bytes
        found.undo(twin)
        assert peak(twin, tokens()) == peak(wide(), tokens())


def test_rules_room_and_units_without_mlps_cut_nothing():
    model, x = mlps(), torch.randn(T, D)
    linears = nn.Sequential(*(fusedckpt.Linear(D, D, activation="gelu") for _ in range(3)))
    plans = [planned(model, x, policy=policy) for policy in ("none", "all", "sqrt")]
    plans += [planned(linears, x, policy="memory")]
    plans += [planned(model, x, budget=report(model, x).peak_bytes * 2)]
    assert [found.chunks for found in plans] == [1] * 5
    assert plans[-1].extra_ms == 0


def test_checkpoint_sequential_takes_a_plan_in_chunks(uncut):
    model, x = mlps(), torch.randn(T, D)
    budget = uncut(model, x, policy="memory").measured_bytes * 2 // 3
    found = planned(model, x, budget=budget)

    class Through(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return checkpoint_sequential(self.inner, found, x)

    # the plan may have a segment where the chain's last one saves no random states
    spare = found.measured_bytes - report(Through(), x).peak_bytes
    assert spare in (0, found.chain.states)


def test_a_plan_in_chunks_is_compiled_in_one_graph(least):
    model, x = wide(), tokens()
    plain = copy.deepcopy(model)
    least.apply(model)
    assert_right(torch.compile(model, backend="aot_eager", fullgraph=True), plain, x)
