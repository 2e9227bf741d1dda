"""What `plan` found, as data: what pictures are drawn and pages written of, and JSON holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isclose
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
    rounds: int = 0
    error_ms: float = 0.0


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
    plan = kind(**{**found, "chain": chain, "items": _items(found["items"])})
    _check(plan)
    return plan


def _items(found: Any) -> tuple[Item, ...]:
    return tuple(
        Segment(item["start"], tuple(item["levels"]), _items(item.get("inner", ())))
        if "levels" in item
        else Keep(**item)
        for item in found
    )


def _check(plan: PlanRecord) -> None:
    units = plan.chain.units
    names = [unit.name for unit in units]
    texts = [plan.model, plan.policy, *names, *plan.held]
    texts += [text for told in (plan.left_out, plan.structure) for text in (*told, *told.values())]
    known = {PLAIN, PRODUCTS, *LEVELS}
    levels = {level_and_parts(level.name)[0] for unit in units for level in unit.levels}
    peaks = [x for x in (plan.budget_bytes, plan.measured_bytes) if x is not None]
    sizes = [*peaks, plan.gradient_bytes, plan.rounds, *plan.held.values()]
    ends = units[0].fixed and units[-1].fixed and len(units) > 2
    outcome = simulate(plan.chain, plan.items)
    found = outcome.peak, outcome.extra
    expected = {
        "distinct names of units, between what is before and after them": ends
        and len({*names}) == len(names),
        "names as text": all(isinstance(text, str) for text in texts),
        f"levels among {sorted(known)}": levels <= known,
        "sizes in bytes, and rounds": all(type(x) is int and x >= 0 for x in sizes) and all(peaks),
        "the {} bytes and {} ms that the units come to".format(*found): (
            plan.predicted_bytes == found[0] and isclose(plan.extra_ms, found[1])
        ),
        "a lower bound, not above the extra time": (
            0 <= plan.lower_bound_ms <= plan.extra_ms * (1 + 1e-9)
        ),
        "an error in ms": 0 <= plan.error_ms < inf,
    }
    if wrong := [what for what, holds in expected.items() if not holds]:
        raise ValueError(f"expected {wrong[0]}")
