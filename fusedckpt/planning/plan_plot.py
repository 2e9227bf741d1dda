"""A plan as a figure: extra time against peak for every budget, and memory through a step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeAlias

from fusedckpt.planning.chain import Chain, Outcome, moments, simulate
from fusedckpt.planning.rules import by_rule
from fusedckpt.planning.solver import least_peak, solve
from fusedckpt.reporting.figure import BLUE, FAINT, GREY, INK, MIB, RED, panels
from fusedckpt.reporting.tables import enough

# the class of `plans.py`, which imports this module
Plan: TypeAlias = Any

_POINTS = 24
# a budget is drawn up to so much of an axis beyond its end
_FAR = 0.25
_RULES_DRAWN = {
    "none": "save everything",
    "sqrt": "sqrt(n) segments",
    "all": "checkpoint every unit",
}


def draw(plan: Plan, path: str | Path) -> None:
    """Write the figure in the format that the path's ending names."""
    with panels(path, "Plan.plot") as (_, (trade, step)):
        draw_trade(trade, plan)
        draw_step(step, plan)


def draw_trade(axes: Any, plan: Plan) -> None:
    """Draw the time of plans against their peak."""
    chain = plan.chain
    forward = plan.forward_ms or chain.forward_ms or 1.0
    points = _frontier(chain, plan.predicted_bytes)
    axes.step(
        [point.peak_bytes / MIB for point in points],
        [100 * point.extra_ms / forward for point in points],
        where="post",
        color=BLUE,
        label="best plan for each budget",
    )
    for marker, (rule, label) in zip("s^D", _RULES_DRAWN.items(), strict=True):
        outcome = by_rule(chain, rule)
        spot = outcome.peak_bytes / MIB, 100 * outcome.extra_ms / forward
        axes.plot(*spot, marker, color=GREY, markersize=8, label=label)
    spot = plan.predicted_bytes / MIB, 100 * plan.extra_ms / forward
    axes.plot(*spot, "o", color=RED, markersize=10, label=f"this plan ({plan.policy})")
    if plan.budget_bytes is not None:
        _draw_budget(axes, plan.budget_bytes)
    axes.set_title(f"{plan.model}: time against memory", color=INK)
    axes.set_xlabel("peak of a training step, MiB")
    axes.set_ylabel("extra time, % of the forward")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.legend(frameon=False)


def _draw_budget(axes: Any, budget: int) -> None:
    """Draw a line at the budget; where that is far above all points, an arrow towards it."""
    start, end = axes.get_xlim()
    where: Any = {"xycoords": ("data", "axes fraction"), "va": "top"}
    if budget / MIB <= end + _FAR * (end - start):
        axes.axvline(budget / MIB, color=FAINT, linewidth=1, linestyle=":")
        axes.annotate(" budget", (budget / MIB, 1), **where)
    else:
        label = f"budget {enough(budget)} \N{RIGHTWARDS ARROW}"
        axes.annotate(label, (end, 1), **where, ha="right")


def draw_step(axes: Any, plan: Plan) -> None:
    """Draw live bytes through a step as predicted, under this plan and where all is saved."""
    ways = {
        "save everything": (by_rule(plan.chain, "none").items, GREY),
        f"this plan ({plan.policy})": (plan.items, RED),
    }
    for label, (items, color) in ways.items():
        live = [nbytes / MIB for nbytes, _ in moments(plan.chain, items)]
        peak = enough(simulate(plan.chain, items).peak_bytes)
        axes.plot(range(1, len(live) + 1), live, color=color, label=f"{label}: {peak}")
    # a forward has two moments for each unit, and one before them
    end = 2 * len(plan.chain.units) + 1.5
    axes.axvline(end, color=FAINT, linewidth=1, linestyle=":")
    # phases have no common measure of time
    axes.set_xticks([0.5, end], ["forward", "backward"], ha="left")
    budget = math.inf if plan.budget_bytes is None else plan.budget_bytes / MIB
    # one far above would flatten the curves
    if budget <= (1 + _FAR) * axes.get_ylim()[1]:
        axes.axhline(budget, color=FAINT, linewidth=1, linestyle=":")
    axes.set_title("One step, as predicted: live MiB and their peak")
    axes.set_xlabel("unit by unit, backward with recomputation")
    axes.set_ylim(bottom=0)
    axes.legend(facecolor="white", edgecolor="none", framealpha=1.0, loc="lower center")


def _frontier(chain: Chain, planned: int) -> list[Outcome]:
    """Return the best plans from the least feasible peak to that of saving everything.

    planned: the predicted peak of the plan, for which there is a point, too.
    """
    least = least_peak(chain)
    low = least.peak_bytes
    high = by_rule(chain, "none").peak_bytes
    step = max(1, (high - low) // (_POINTS - 1))
    budgets = {*range(low, high, step), min(planned, high), high} - {low}
    return [least, *(solve(chain, budget) for budget in sorted(budgets))]
