"""The result of planning, as data: pages and pictures show it, JSON holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isclose
from typing import Any, TypeVar

from fusedckpt.autograd.levels import LEVELS
from fusedckpt.planning.chain import Chain, Item, Keep, Level, Segment, Unit, simulate
from fusedckpt.planning.roles import PLAIN, PRODUCTS

__all__ = ["FORMAT", "PlanRecord", "read"]

FORMAT = {"format": "fusedckpt.plan", "version": 3}


@dataclass(frozen=True)
class PlanRecord:
    """The fields of a `Plan`; its docstring describes them."""

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
    rounds: int = 0
    error_ms: float = 0.0
    forward_ms: float = 0.0
    chunks: int = 1


Kind = TypeVar("Kind", bound=PlanRecord)


def read(kind: type[Kind], found: Any) -> Kind:
    """Return the plan that JSON was written of; raise where it is none."""
    if {name: found.pop(name) for name in FORMAT} != FORMAT:
        raise ValueError(f"expected {FORMAT['format']}, version {FORMAT['version']}")
    chain, units = found["chain"], []
    for unit in chain["units"]:
        levels, again = [Level(**x) for x in unit.pop("levels")], unit.pop("again")
        inside = Level(**unit.pop("inside"))
        again = None if again is None else Level(**again)
        units.append(Unit(levels=tuple(levels), again=again, inside=inside, **unit))
    chain = Chain(**{**chain, "units": tuple(units)})
    items = tuple(Keep(**x) if "level" in x else Segment(**x) for x in found["items"])
    plan = kind(**{**found, "chain": chain, "items": items})
    _check(plan)
    return plan


def _check(plan: PlanRecord) -> None:
    names = [unit.name for unit in plan.chain.units]
    texts = [plan.model, plan.policy, *names]
    texts += [text for told in (plan.left_out, plan.structure) for text in (*told, *told.values())]
    known = {PLAIN, PRODUCTS, *LEVELS}
    levels = {level.name for unit in plan.chain.units for level in unit.levels}
    peaks = [x for x in (plan.budget_bytes, plan.measured_bytes) if x is not None]
    sizes = [*peaks, plan.gradient_bytes, plan.rounds, plan.chunks]
    outcome = simulate(plan.chain, plan.items)
    expected = {
        "distinct names of units": len({*names}) == len(names),
        "names as text": all(isinstance(text, str) for text in texts),
        f"levels among {sorted(known)}": levels <= known,
        "sizes in bytes, and rounds": all(type(x) is int and x >= 0 for x in sizes) and all(peaks),
        f"the {outcome.peak} bytes and {outcome.extra} ms that the units come to": (
            plan.predicted_bytes == outcome.peak and isclose(plan.extra_ms, outcome.extra)
        ),
        "a lower bound, not above the extra time": (
            0 <= plan.lower_bound_ms <= plan.extra_ms * (1 + 1e-9)
        ),
        "an error in ms": 0 <= plan.error_ms < inf and 0 <= plan.forward_ms < inf,
    }
    if wrong := [what for what, holds in expected.items() if not holds]:
        raise ValueError(f"expected {wrong[0]}")
