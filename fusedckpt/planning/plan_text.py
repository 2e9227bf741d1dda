"""A plan as text: what every unit keeps, and what the whole costs."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from fusedckpt.planning.chain import Item, Segment, Unit, simulate
from fusedckpt.planning.policies import policy
from fusedckpt.planning.solver import least_outcome, may_go_lower
from fusedckpt.reporting.tables import Row, enough, held_by, size, table

if TYPE_CHECKING:
    from fusedckpt.planning.plans import Plan

__all__ = ["text"]

_HEAD = ("unit", "runs", "keeps", "extra ms", "forward ms")


def text(plan: Plan) -> str:
    """Return a table, units that are alike in one row, between a title and what the plan costs."""
    title = f"Plan for {plan.model}, policy {plan.policy!r}"
    return "\n".join([title, table(_HEAD, rows(plan), numbers=(2, 3, 4)), *summary(plan)])


def rows(plan: Plan) -> list[Row]:
    """Return a row of `_HEAD` for every item, or for several alike in a row."""
    found: list[Row] = []
    number, between = 0, {unit.name for unit in _between(plan)}
    shown = [item for item in plan.items if plan.chain.units[item.start].name not in between]
    for cells, group in groupby(shown, partial(_cells, plan)):
        items = list(group)
        first, last = items[0].start, items[-1].stop - 1
        names = [plan.chain.units[i].name for i in (first, last)]
        runs, *figures = cells
        if isinstance(items[0], Segment):
            runs = f"again, in segment{_numbers(number, len(items))}{runs}"
            number += len(items)
        if len(items) > 1:
            figures = [f"{len(items)} x {figure}" for figure in figures]
        name = names[0] if first == last else " to ".join(names)
        found.append((name, runs, *figures))
    return found


def _numbers(before: int, count: int) -> str:
    first, last = before + 1, before + count
    return f" {first}" if first == last else f"s {first} to {last}"


def _cells(plan: Plan, item: Item) -> Row:
    """Return what the row of an item says, but for its name and number."""
    units = plan.chain.units[item.start : item.stop]
    unit, forward = units[0], sum(unit.forward for unit in units)
    if isinstance(item, Segment):
        levels = sum(u.level(name).extra for u, name in zip(units, item.levels, strict=True))
        extra = sum(unit.again for unit in units) - units[-1].tail + levels
        of = f" of {len(units)} units" if len(units) > 1 else ""
        return of, size(unit.input), f"{extra:.2f}", f"{forward:.2f}"
    level = unit.level(item.level)
    times = ("", "") if unit.code else (f"{level.extra:.2f}", f"{forward:.2f}")
    kept, _, parts = level.name.partition(" but ")
    runs = "as it is" if kept == "plain" else f"keeping {kept}"
    runs += f", again: {parts}" if parts else ""
    if unit.fixed and not unit.code:
        holds = any(name == unit.name or name.startswith(f"{unit.name}.") for name in plan.held)
        runs += ", no checkpoint drops what it holds" if holds else ", writes into its input"
    return runs, size(level.kept), *times


def _beside_all(plan: Plan) -> str | None:
    """Return what the policy "all" does better, None where it does not."""
    found = simulate(plan.chain, policy(plan.chain, "all"))
    if found.extra > plan.extra_ms or found.peak > plan.predicted_bytes:
        return None
    return f"policy 'all' takes {found.extra:.2f} ms and peaks at {enough(found.peak)}: take that"


def _between(plan: Plan) -> list[Unit]:
    """Return the code between units that cannot be joined."""
    return [unit for unit in plan.chain.units[1:-1] if unit.code]


def _held(plan: Plan) -> str | None:
    """Say what lives outside saved tensors, in all predictions, where it matters."""
    least = (plan.measured_bytes or 0) / 100
    return held_by({name: x for name, x in plan.held.items() if x >= max(1, least)})


def summary(plan: Plan) -> list[str]:
    """Return one line for each figure of the whole."""
    extra = f"{plan.extra_ms:.2f} ms"
    if plan.chain.forward:
        extra += f", {plan.extra_ms / plan.chain.forward:.1%} of the forward"
    least = least_outcome(plan.chain)
    finer = may_go_lower(plan.chain, least)
    begins = "without gradients; with accumulate=True it holds for steps that add to them"
    if plan.gradient_bytes:
        begins = f"with {size(plan.gradient_bytes)} of gradients"
    figures = {
        "the step begins": begins,
        "budget": None if plan.budget_bytes is None else enough(plan.budget_bytes),
        "keep everything": enough(simulate(plan.chain, policy(plan.chain, "none")).peak),
        "least feasible": enough(least.peak) + (f"; {finer}" if finer else ""),
        "predicted peak": enough(plan.predicted_bytes),
        "measured peak": None if plan.measured_bytes is None else enough(plan.measured_bytes),
        "held": _held(plan),
        "extra time": extra,
        "lower bound": f"{plan.lower_bound_ms:.2f} ms" if plan.lower_bound_ms else None,
    }
    if parts := _between(plan):
        kept = size(sum(part.levels[0].kept for part in parts))
        names = ", ".join(part.name.strip("()") for part in parts[:2]) + ", ..." * (len(parts) > 2)
        figures["limited by"] = (
            f"code between units at {len(parts)} places ({names}), which keeps {kept}: "
            "what it separates cannot be one segment"
        )
    if plan.policy == "speed":
        figures["beside"] = _beside_all(plan)
    lines = [f"  {name:16}{figure}" for name, figure in figures.items() if figure is not None]
    return lines + [f"  {'not planned':16}{name}: {why}" for name, why in plan.left_out.items()]
