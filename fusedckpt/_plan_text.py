"""A plan as text: what every unit keeps, and what the whole costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedckpt._text import Row, size, table
from fusedckpt.chain import Segment, Unit

if TYPE_CHECKING:
    from fusedckpt.plans import Plan

__all__ = ["text"]

_HEAD = ("unit", "runs", "keeps", "extra ms", "forward ms")


def text(plan: Plan) -> str:
    """Return a table with a row per unit between a title and what the plan costs."""
    title = f"Plan for {plan.model}, policy {plan.policy!r}"
    return "\n".join([title, table(_HEAD, rows(plan), numbers=(2, 3, 4)), *summary(plan)])


def rows(plan: Plan) -> list[Row]:
    """Return a row of `_HEAD` for every unit."""
    found: list[Row] = []
    number, parts = 0, {unit.name for unit in _between(plan)}
    for item in plan.items:
        units = plan.chain.units[item.start : item.stop]
        if units[0].name in parts:
            continue
        if isinstance(item, Segment):
            number += 1
            for unit, name in zip(units, item.levels, strict=True):
                keeps = size(unit.input) if unit is units[0] else "-"
                again = unit.forward - (unit.tail if unit is units[-1] else 0.0)
                extra = again + unit.level(name).extra
                runs = f"again, in segment {number}"
                found.append((unit.name, runs, keeps, f"{extra:.2f}", f"{unit.forward:.2f}"))
        else:
            level = units[0].level(item.level)
            unit = units[0]
            timed = not unit.fixed or unit.forward
            times = (f"{level.extra:.2f}", f"{unit.forward:.2f}") if timed else ("", "")
            runs = "as it is" if level.name == "plain" else f"keeping {level.name}"
            if unit.fixed and timed:
                runs += ", writes into its input"
            found.append((unit.name, runs, size(level.kept), *times))
    return found


def _between(plan: Plan) -> list[Unit]:
    """Return the code between units that cannot be joined."""
    return [unit for unit in plan.chain.units[1:-1] if unit.code]


def summary(plan: Plan) -> list[str]:
    """Return one line for each figure of the whole."""
    extra = f"{plan.extra_ms:.2f} ms"
    if plan.chain.forward:
        extra += f", {plan.extra_ms / plan.chain.forward:.1%} of the forward"
    begins = "without gradients; with accumulate=True it holds for steps that add to them"
    if plan.gradient_bytes:
        begins = f"with {size(plan.gradient_bytes)} of gradients"
    figures = {
        "the step begins": begins,
        "budget": None if plan.budget_bytes is None else size(plan.budget_bytes),
        "predicted peak": size(plan.predicted_bytes),
        "measured peak": None if plan.measured_bytes is None else size(plan.measured_bytes),
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
    lines = [f"  {name:16}{figure}" for name, figure in figures.items() if figure is not None]
    return lines + [f"  {'not planned':16}{name}: {why}" for name, why in plan.left_out.items()]
