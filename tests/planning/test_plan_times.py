"""The extra time that a plan claims: its measurement, and the text on it."""

from __future__ import annotations

from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plan_models import (
    Chain,
    planned,
    tokens,
    transformer,
)
from torch import nn

from fusedckpt import Plan
from fusedckpt.memory import Phase
from fusedckpt.planning import measure
from fusedckpt.planning.meter import Reading
from fusedckpt.planning.trials import Trials
from fusedckpt.planning.whole_steps import Times


def test_levels_that_keep_less_are_never_faster():
    model, x = transformer(2, fused=True), tokens()
    found = planned(model, x, policy="none")
    for unit in found.chain.units:
        by_kept = sorted(unit.levels, key=lambda level: -level.added_bytes)
        assert by_kept[0].extra_ms == 0 < by_kept[-1].extra_ms
        assert [level.extra_ms for level in by_kept] == sorted(level.extra_ms for level in by_kept)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Let no step be timed but those of pairs, of these as many as in a plan."""
    monkeypatch.setattr("fusedckpt.planning.trials._SECONDS", 0.25)
    times = measure._Costs.times
    monkeypatch.setattr(measure._Costs, "times", lambda self: (None, times(self)[1]))


def test_the_claim_is_the_difference_of_steps_in_turns(monkeypatch, tmp_path):
    steps = []

    def ms(self, plan):
        steps.append(plan.extra_ms > 0)
        return Times(30.0, 40.0 + len(steps)) if steps[-1] else Times(20.0, 30.0 + len(steps))

    monkeypatch.setattr(Trials, "_times", ms)
    found = planned(Chain([nn.Linear(17, 17) for _ in range(3)]), torch.randn(8, 17), policy="all")
    # as many as end within the time for them
    assert steps == [False, True] * 3
    assert (found.rounds, found.extra_ms, found.error_ms) == (3, pytest.approx(11), 0)
    assert found.forward_ms == pytest.approx(20)
    share = "11.00 ms, 55.0% of the forward"
    assert f"{share}, measured in 3 pairs of steps, give or take 0.00 ms" in str(found)
    found.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == found


@pytest.mark.parametrize("times", [1.4, 3.0])
def test_a_single_pair_of_steps_counts_as_much_as_the_units(monkeypatch, predicted, times):
    # pairs of steps are known by the widths
    width = 21 + 10 * (times > 2)
    model, x = Chain([nn.Linear(width, width) for _ in range(3)]), torch.randn(8, width)

    def ms(self, plan):
        return Times(100.0, 200.0 + times * plan.extra_ms)

    monkeypatch.setattr(Trials, "_times", ms)
    found = planned(model, x, policy="all")
    extra = predicted[0]
    assert found.error_ms == pytest.approx(1.5 * (times - 1) * extra / 2**0.5)
    # of the step's, and of what the units take on their own; of which it is too far off
    is_near = times < 2
    assert found.rounds == is_near
    assert found.extra_ms == pytest.approx((1 + times) / 2 * extra if is_near else extra)


@pytest.fixture
def predicted(monkeypatch):
    """The extra time of plans by their units."""
    found = []
    timed = Trials.timed
    monkeypatch.setattr(
        Trials, "timed", lambda self, *a: found.append(a[0].extra_ms) or timed(self, *a)
    )
    return found


def test_a_page_predicts_a_figure_that_steps_do_not_resolve(monkeypatch, predicted):
    model, x = Chain([nn.Linear(22, 22) for _ in range(3)]), torch.randn(8, 22)
    seconds = cycle([30.0, 34.0, 30.0, 40.0, 30.0, 25.0])
    monkeypatch.setattr(Trials, "_times", lambda self, plan: Times(20.0, next(seconds)))
    found = planned(model, x, policy="all")
    # 4, 10 and -5 ms
    assert (found.rounds, found.extra_ms) == (0, pytest.approx(predicted[0]))
    assert found.error_ms == pytest.approx(15 / 3**0.5)
    told = f"{predicted[0]:.2f} ms, {predicted[0] / 20:.1%} of the forward, predicted: steps differ"
    assert f"{told} by 8.66 ms, too much to measure it" in str(found)


def test_what_is_recomputed_is_never_claimed_to_be_free(monkeypatch, predicted):
    monkeypatch.setattr(Trials, "_times", lambda self, plan: Times(1.0, 5.0 - (plan.extra_ms > 0)))
    found = planned(Chain([nn.Linear(19, 19) for _ in range(3)]), torch.randn(8, 19), policy="all")
    assert found.rounds == 15
    assert found.extra_ms == pytest.approx(predicted[0] / 2)


def test_a_step_that_may_not_fit_is_not_run_for_the_claim(monkeypatch):
    monkeypatch.setattr("fusedckpt.planning.trials.spare_bytes", lambda device: 0)
    monkeypatch.setattr(Trials, "_times", None)
    model, x = Chain([nn.Linear(18, 18) for _ in range(3)]), torch.randn(8, 18)
    found = planned(model, x, policy="all")
    assert found.rounds == 0 < found.extra_ms
    assert "% of the forward, predicted" in str(found)
    assert "0.00 ms, 0.0% of the forward\n" in f"{planned(model, x, policy='none')}\n"


def test_a_reading_of_units_that_were_not_called():
    names = ["begin", "forward", "enter 1", "leave 1", "returned", "backward", "back 1", "end"]
    phases = [Phase(name, 10 * i, 10 * i + 5, 1.0) for i, name in enumerate(names)]
    held: Any = SimpleNamespace(
        late_bytes=lambda: [0, 0, 0],
        inputs=[],
        saved_inputs=lambda: [],
        saved_constants=[],
        constants=dict,
    )
    leftover: Any = SimpleNamespace(nbytes=lambda live: live["end"])
    reading = Reading(phases, held, leftover)
    assert reading.kept_bytes == 70
    assert [reading.live_at_begin(i) for i in range(3)] == [20, 20, 40]
    assert (reading.peak("enter", 0), reading.peak("back", 0)) == (20, 0)
    # what comes behind the last unit is one phase
    assert (reading.peak("leave", 1), reading.ms("leave", 1)) == (55, 3.0)
