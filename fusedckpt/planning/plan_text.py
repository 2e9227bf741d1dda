"""A plan as text: the bytes that every unit saves, and the costs of the whole."""

from __future__ import annotations

from functools import partial
from itertools import groupby, pairwise
from typing import Any, TypeAlias

from fusedckpt.planning.chain import Item
from fusedckpt.planning.changed_arguments import ADVICE, CHANGES
from fusedckpt.planning.products import WRITES_PRODUCT
from fusedckpt.planning.rewritten import REWRITTEN
from fusedckpt.planning.roles import UNCHANGED
from fusedckpt.planning.rules import by_rule
from fusedckpt.planning.solver import least_peak
from fusedckpt.reporting.tables import Row, enough, size, table

# the class of `plans.py`, which imports this module
Plan: TypeAlias = Any

_HEAD = ("unit", "plan", "saved", "extra ms", "forward ms")


def text_of_plan(plan: Plan) -> str:
    """Return a table, units that are alike in one row, between a title and the plan's figures."""
    mode = "" if plan.is_training else ", in eval mode"
    title = f"Plan for {plan.model}{mode}, policy {plan.policy!r}"
    return "\n".join([title, table(_HEAD, _rows(plan), numbers=(2, 3, 4)), *_figures(plan)])


def _rows(plan: Plan) -> list[Row]:
    """Return a row of `_HEAD` for every item, or for several alike in a row."""
    units = plan.chain.units
    num_segments = 0
    first = units[0]
    saved_before = max(0, first.live_at_begin - plan.chain.resident_bytes - first.input_bytes)
    rows: list[Row] = [("(before)", "unchanged", size(saved_before), "", "")]
    for cells, group in groupby(plan.items, partial(_cells, plan)):
        items = list(group)
        count = len(items)
        names = [units[i].name for i in (items[0].start, items[-1].stop - 1)]
        planned, *figures = cells
        if items[0].level is None:
            number = num_segments + 1
            numbers = f" {number}" if count == 1 else f"s {number} to {num_segments + count}"
            planned = f"checkpointed (segment{numbers}{planned})"
            num_segments += count
        if count > 1:
            figures = [f"{count} x {figure}" for figure in figures]
        rows.append((" to ".join(dict.fromkeys(names)), planned, *figures))
    return [*rows, ("(after)", "unchanged", size(plan.chain.saved_behind), "", "")]


def _cells(plan: Plan, item: Item) -> Row:
    """Return the cells of an item's row, but for its name and number."""
    chain = plan.chain
    units = chain.units[item.start : item.stop]
    if item.level is None:
        planned = f" of {len(units)} units" if len(units) > 1 else ""
        if item.offloads:
            planned += ", offloaded"
    else:
        planned = "unchanged" if item.level == UNCHANGED else f"saves {item.level}"
        # a unit with a forward that is not the same twice is named below
        if units[0].fixed and units[0].name not in plan.left_out:
            planned += f", {units[0].fixed}"
    extra = chain.extra_ms_of(item)
    forward = sum(unit.forward_ms for unit in units)
    return planned, size(chain.saved_by(item)), f"{extra:.2f}", f"{forward:.2f}"


def _figures(plan: Plan) -> list[str]:
    """Return one line for each figure of the whole."""
    chain = plan.chain
    measured = plan.measured_bytes
    least = least_peak(chain)
    begins = "without gradients; with accumulate=True it holds for steps that add to them"
    if plan.gradient_bytes:
        begins = f"with {size(plan.gradient_bytes)} of gradients"
    figures = {
        "the step begins": begins,
        "budget": None if plan.budget_bytes is None else enough(plan.budget_bytes),
        "save everything": enough(by_rule(chain, "none").peak_bytes),
        "least feasible": f"{enough(least.peak_bytes)}: {least.where}",
        "predicted peak": enough(plan.predicted_bytes),
        "measured peak": None if measured is None else enough(measured),
        "extra time": _extra(plan),
        "lower bound": f"{plan.lower_bound_ms:.2f} ms" if plan.lower_bound_ms else None,
        "offload": _offload(plan),
        "limited by": _limited_by(plan),
    }
    lines = [f"  {name:16}{figure}" for name, figure in figures.items() if figure is not None]
    for name, why in plan.left_out.items():
        label = {REWRITTEN: "not joined", WRITES_PRODUCT: "unchanged"}.get(why, "not planned")
        lines.append(f"  {label:16}{name}: {why}")
    if any(why.startswith(CHANGES) for why in plan.left_out.values()):
        lines.append(f"  {'advice':16}{ADVICE}")
    return lines


def _limited_by(plan: Plan) -> str | None:
    """Say which units cannot be in one segment, because of code between them."""
    units = plan.chain.units
    pairs = [(a, b) for a, b in pairwise(units) if not (b.joined or a.fixed or b.fixed)]
    if not pairs:
        return None
    names = ", ".join(f"{a.name} and {b.name}" for a, b in pairs[:2])
    names += f", and {len(pairs) - 2} more" if pairs[2:] else ""
    states = plan.chain.random_state_bytes
    saved = sum(
        max(0, b.live_at_begin - a.live_at_begin - b.input_bytes - states) for a, b in pairs
    )
    text = f"code between these modules prevents one segment across them: {names}"
    return f"{text}; it saves {size(saved)}" if saved else text


def _offload(plan: Plan) -> str | None:
    """Say how many bytes segments offload, or why none does; None where this was not asked for."""
    if plan.offload:
        return f"declined: {plan.offload}"
    items = [item for item in plan.items if item.offloads]
    if not items:
        return None
    chain = plan.chain
    nbytes = sum(map(chain.offloaded_by, items))
    rates = " and ".join(f"{rate / 1e6:.1f}" for rate in (chain.to_host, chain.to_device))
    return (
        f"{size(nbytes)}, the inputs of {len(items)} segments; copies at {rates} GB/s to the host "
        "and back; their ms are arithmetic"
    )


def _extra(plan: Plan) -> str:
    """Return the plan's extra time, and whether it was measured or predicted."""
    ms = plan.extra_ms
    text = f"{ms:.2f} ms"
    if plan.forward_ms:
        text += f", {ms / plan.forward_ms:.1%} of the forward"
    error = f"{plan.error_ms:.2f} ms"
    if plan.rounds:
        pairs = f"{plan.rounds} pair{'s' * (plan.rounds > 1)} of steps"
        return f"{text}, measured in {pairs}, give or take {error}"
    why = f": steps differ by {error}, too much to measure it" if plan.error_ms else ""
    return text + (f", predicted{why}" if ms else "")
