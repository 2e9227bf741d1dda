"""What `plan` found, as data: what pictures are drawn and pages written of, and JSON holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isclose
from typing import Any, TypeVar

from fusedckpt.autograd.levels import LEVELS
from fusedckpt.planning.chain import Chain, Item, Keep, Level, Segment, Unit, simulate

__all__ = ["BUT", "IN", "PLAIN", "PRODUCTS", "PlanRecord", "level_and_parts", "read"]

# the level of a module without fused layers, and that which keeps the outputs of matrix products
PLAIN, PRODUCTS = "plain", "products"
# between the name of a level and those of parts that run again, or a number of chunks
BUT, IN = " but ", " in "
FORMAT = {"format": "fusedckpt.plan", "version": 1}


@dataclass(frozen=True)
class PlanRecord:
    """The fields of a `Plan`, which says what they are."""

    model: str
    policy: str
    budget_bytes: int | None
    chain: Chain
    items: tuple[Item, ...]
    predicted_bytes: int
    extra_ms: float
    lower_bound_ms: float
    measured_bytes: int | None = None
    left_out: Mapping[str, str] = field(default_factory=dict, hash=False)
    structure: Mapping[str, str] = field(default_factory=dict, hash=False)
    gradient_bytes: int = 0
    held: Mapping[str, int] = field(default_factory=dict, hash=False)


Kind = TypeVar("Kind", bound=PlanRecord)


def level_and_parts(name: str) -> tuple[str, list[str]]:
    """Return the level at which a unit runs, and the names of parts that run again in it."""
    level, _, parts = name.partition(BUT)
    return level.partition(IN)[0], parts.split(", ") if parts else []


def read(kind: type[Kind], found: Any) -> Kind:
    """Return the plan that JSON was written of; raise where it is none."""
    if {name: found.pop(name) for name in FORMAT} != FORMAT:
        raise ValueError(f"expected {FORMAT['format']}, version {FORMAT['version']}")
    units = []
    for unit in found["chain"]["units"]:
        levels = tuple(Level(**level) for level in unit.pop("levels"))
        units.append(Unit(levels=levels, **unit))
    chain = Chain(tuple(units), found["chain"]["base"])
    items = tuple(
        Segment(item["start"], tuple(item["levels"])) if "levels" in item else Keep(**item)
        for item in found["items"]
    )
    plan = kind(**{**found, "chain": chain, "items": items})
    _check(plan)
    return plan


def _check(plan: PlanRecord) -> None:
    units = plan.chain.units
    names = [unit.name for unit in units]
    if len({*names}) < len(names) or not (units[0].fixed and units[-1].fixed and len(units) > 2):
        raise ValueError("expected units of distinct names between what is before and after them")
    texts = [plan.model, plan.policy, *names, *plan.held]
    texts += [text for told in (plan.left_out, plan.structure) for text in (*told, *told.values())]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("expected names as text")
    known = {PLAIN, PRODUCTS, *LEVELS}
    if {level_and_parts(level.name)[0] for unit in units for level in unit.levels} - known:
        raise ValueError(f"expected levels among {sorted(known)}")
    if not all(type(x) is int and x >= 0 for x in (plan.gradient_bytes, *plan.held.values())):
        raise ValueError("expected in bytes the gradients that are there, and what is held")
    peaks = (plan.budget_bytes, plan.measured_bytes)
    if not all(type(x) is int and x > 0 for x in peaks if x is not None):
        raise ValueError("expected budget and measured peak in bytes, or null")
    outcome = simulate(plan.chain, plan.items)
    if plan.predicted_bytes != outcome.peak or not isclose(plan.extra_ms, outcome.extra):
        raise ValueError(
            f"the units come to {outcome.peak} bytes and {outcome.extra} ms, the plan says "
            f"{plan.predicted_bytes} and {plan.extra_ms}"
        )
    if not 0 <= plan.lower_bound_ms <= plan.extra_ms * (1 + 1e-9):
        raise ValueError("expected a lower bound that is not above the extra time")
