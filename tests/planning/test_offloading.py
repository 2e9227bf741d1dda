"""Plans whose segments offload their inputs, on a CPU whose memory counts as a device's."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from fake_streams import fake_device
from random_chains import llama_like, random_chain
from test_solver import every_plan
from torch import nn
from zoo import MLP, Residual

import fusedckpt
from fusedckpt.checkpointing.offload import KEPT
from fusedckpt.planning import offloading, planner
from fusedckpt.planning.chain import simulate
from fusedckpt.planning.offloading import CopyRates, choose, copy_rates
from fusedckpt.planning.solver import least_peak, solve

T, D, N = 1024, 16, 10
X = T * D * 4


def make(count=N):
    return nn.Sequential(*[Residual(MLP(D, 2 * D)) for _ in range(count)])


@pytest.fixture
def x():
    return torch.randn(T, D, requires_grad=True)


@pytest.fixture
def device(monkeypatch):
    """A device whose copies take no time, as far as a plan knows."""
    monkeypatch.setattr(planner, "copy_rates", lambda at: CopyRates(1e9, 1e9))
    with fake_device(monkeypatch) as device:
        yield device


def grads(model, x):
    return torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])


def num_offloaded(plan):
    return sum(item.offloads for item in plan.items)


def test_a_budget_below_every_checkpoint(device, x, tmp_path):
    model = make()
    expected = grads(model, x)
    every = fusedckpt.plan(model, x, policy="memory")
    least = fusedckpt.plan(model, x, policy="memory", offload=True)
    assert least.measured_bytes < 0.8 * every.measured_bytes
    with pytest.raises(ValueError, match="least feasible budget"):
        fusedckpt.plan(model, x, budget=int(0.9 * every.measured_bytes))
    plan = fusedckpt.plan(model, x, budget=int(0.9 * every.measured_bytes), offload=True)
    assert num_offloaded(plan) >= KEPT + 3
    for chosen in (plan, least):
        ratio = chosen.predicted_bytes / chosen.measured_bytes
        assert 0.99 < ratio < 1.03
    assert "offloaded" in str(plan)
    assert f"the inputs of {num_offloaded(plan)} segments; copies at 1000.0 and" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert fusedckpt.Plan.load(tmp_path / "plan.json") == plan
    device.to_host = 0
    plan.apply(model)
    for a, b in zip(grads(model, x), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert device.to_host == (num_offloaded(plan) - KEPT) * X
    plan.undo()
    device.to_host = 0
    y = fusedckpt.checkpoint_sequential(model, plan, x)
    torch.autograd.grad(y.square().sum(), x)
    assert device.to_host == (num_offloaded(plan) - KEPT) * X


def test_it_declines_and_says_why(device, monkeypatch, x):
    model = make()
    free = fusedckpt.plan(model, x, policy="none").measured_bytes
    plan = fusedckpt.plan(model, x, budget=2 * free, offload=True)
    assert "offload         declined: the budget fits without it" in str(plan)
    # copies that take hours
    monkeypatch.setattr(planner, "copy_rates", lambda at: CopyRates(1e-3, 1e-3))
    plan = fusedckpt.plan(model, x, budget=int(0.7 * free), offload=True)
    assert not num_offloaded(plan)
    assert "offload         declined: another plan costs" in str(plan)
    assert "offload" not in str(fusedckpt.plan(model, x, budget=int(0.7 * free)))


def test_few_segments_decline(monkeypatch):
    chain = llama_like(24)
    units = [
        replace(unit, movable_bytes=unit.input_bytes, backward_ms=2 * unit.forward_ms)
        for unit in chain.units
    ]
    chain = replace(chain, units=tuple(units), to_host=1e12, to_device=1e12)
    limit = 1.05 * least_peak(replace(chain, to_host=0.0)).peak_bytes
    choice = choose(chain, limit)
    count = sum(item.offloads for item in choice.outcome.items)
    assert count >= KEPT + 3
    assert not choice.declined
    assert choice.outcome.extra_ms < 0.98 * solve(replace(chain, to_host=0.0), limit).extra_ms
    monkeypatch.setattr(offloading, "LEAST_SEGMENTS", count + 1)
    choice = choose(chain, limit)
    assert not any(item.offloads for item in choice.outcome.items)
    told = f"it pays with {count + 1} segments or more, and this plan has {count}"
    assert choice.declined == told


def test_a_cpu_offloads_nothing_and_says_so(x):
    plan = fusedckpt.plan(make(3), x, policy="memory", offload=True)
    assert not num_offloaded(plan)
    assert "offload         declined: tensors of a CPU are in host memory already" in str(plan)


def test_the_rates_of_copies(monkeypatch):
    with fake_device(monkeypatch):
        rates = copy_rates(torch.device("cpu"))
    assert rates.to_host > 0
    assert rates.to_device > 0
    assert copy_rates(torch.device("cpu")).obstacle


def with_movable(chain, draw):
    units = (
        replace(
            unit,
            movable_bytes=draw.randrange(unit.input_bytes + 1),
            backward_ms=draw.randrange(30),
        )
        for unit in chain.units
    )
    return replace(chain, units=tuple(units))


def offloaded_plans(chain):
    """Yield all plans, each segment with its input on the device and offloaded."""
    for items in every_plan(chain):
        choices = [
            [item, replace(item, offloads=True)]
            if item.level is None and chain.units[item.start].movable_bytes
            else [item]
            for item in items
        ]
        yield from itertools.product(*choices)


def test_the_solver_against_every_plan():
    """Within the limit, no slower than any plan that needs the inputs under way less."""
    draw, num_offloading = random.Random(3), 0
    for number in range(30):
        chain = with_movable(random_chain(draw, 2 + number % 3), draw)
        chain = replace(chain, to_host=draw.choice((2.0, 1e9)), to_device=draw.choice((2.0, 1e9)))
        outcomes = [simulate(chain, items) for items in offloaded_plans(chain)]
        least = min(outcome.peak_bytes for outcome in outcomes)
        assert least <= least_peak(chain).peak_bytes
        slack = (KEPT + 1) * max(unit.movable_bytes for unit in chain.units)
        for limit in (least_peak(chain).peak_bytes, least + slack, least + 2 * slack + 20):
            solution = solve(chain, limit)
            assert solution.peak_bytes <= limit
            assert solution == replace(
                simulate(chain, solution.items), lower_bound_ms=solution.lower_bound_ms
            )
            best = min(outcome.extra_ms for outcome in outcomes if outcome.peak_bytes <= limit)
            assert solution.lower_bound_ms <= best + 1e-9
            sure = [outcome.extra_ms for outcome in outcomes if outcome.peak_bytes <= limit - slack]
            assert solution.extra_ms <= min(sure, default=float("inf")) + 1e-9
            num_offloading += any(item.offloads for item in solution.items)
    assert num_offloading > 10
