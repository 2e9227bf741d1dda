"""A plan for a model: which of its units keep what, which run again as one segment."""

from __future__ import annotations

import importlib
import json
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from math import isclose
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusedckpt.autograd.levels import LEVELS, saving
from fusedckpt.planning import roles
from fusedckpt.planning.chain import Chain, Item, Keep, Level, Segment, Unit, simulate
from fusedckpt.planning.sharded import class_name
from fusedckpt.planning.unit_costs import BUT, PLAIN, PRODUCTS
from fusedckpt.planning.units import has_levels

__all__ = ["Plan"]

_FORMAT, _VERSION = "fusedckpt.plan", 1


@dataclass(frozen=True)
class Plan:
    """What `plan` found: `items` for the units of `chain`, in order.

    `predicted_bytes` and `measured_bytes` are peaks of a whole step, parameters included; the
    latter is None where no step was run under the plan. Times are in ms per step: `extra_ms` is
    what the plan adds to the fastest way, and `lower_bound_ms` what no plan within the budget is
    below. `left_out` says why modules that might have been units are none, `structure` what the
    model and its units are. `gradient_bytes` is of the gradients that are there when the planned
    step begins, `held` what of the measured step lived outside saved tensors, as in a report.
    """

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
    _applied: list[weakref.ref[nn.Module]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def apply(self, model: nn.Module) -> nn.Module:
        """Let the units of `model` run as planned, and return it.

        Parameters, hooks, names and the state_dict stay; a unit's class becomes a subclass of it.

        Raises:
            TypeError: `model` is no nn.Module.
            ValueError: it lacks a unit of the plan, has another structure, or a plan is applied
                to it. Nothing is changed.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"Plan.apply: expected an nn.Module, got {type(model).__name__}")
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        for unit in self.chain.units[1:-1]:
            if not unit.code:
                self._unit(inner, unit.name)
        self._check_structure(inner)
        given = [(self._unit(inner, name), role) for name, role in self._roles()]
        if any(roles.is_assigned(module) for module in inner.modules()):
            raise ValueError("Plan.apply: a plan is applied to this model: undo it first")
        for module, role in given:
            roles.assign(module, role)
            self._applied.append(weakref.ref(module))
        return model

    def undo(self, model: nn.Module | None = None) -> None:
        """Let units run as before: those of `model`, or all that this plan was applied to.

        A copy of a planned model, or one that was loaded, is to be given.
        """
        given = [ref() for ref in self._applied] if model is None else list(model.modules())
        for module in given:
            if module is not None and roles.is_assigned(module):
                roles.release(module)
        self._applied[:] = [ref for ref in self._applied if ref() not in (None, *given)]

    def __getstate__(self) -> dict[str, Any]:
        # what it was applied to stays here
        return {**self.__dict__, "_applied": []}

    def _unit(self, model: nn.Module, name: str) -> nn.Module:
        try:
            return model.get_submodule(name)
        except AttributeError as error:
            raise ValueError(
                f"Plan.apply: {type(model).__name__} has no unit {name!r}: call fusedckpt.plan for "
                "this model"
            ) from error

    def _check_structure(self, model: nn.Module) -> None:
        for name, expected in self.structure.items():
            found = structure_of(self._unit(model, name))
            if found != expected:
                raise ValueError(
                    f"Plan.apply: {name or 'the model'} is a {found}, the plan was made for a "
                    f"{expected}: call fusedckpt.plan for this model"
                )

    def _roles(self) -> list[tuple[str, roles.Role]]:
        found: list[tuple[str, roles.Role]] = []
        for item in self.items:
            names = [unit.name for unit in self.chain.units[item.start : item.stop]]
            if isinstance(item, Segment):
                levels = tuple(map(roles.inner_level, item.levels))
                chained = roles.Chained(levels)
                found += [(name, roles.Member(chained, i)) for i, name in enumerate(names)]
            else:
                level, parts = parts_of_level(item.level)
                if level == PRODUCTS:
                    found.append((names[0], roles.Selecting()))
                elif level in LEVELS:
                    found.append((names[0], roles.Keeping(level)))
                found += [(f"{names[0]}.{part}", roles.again()) for part in parts]
        return found

    def spans(self, count: int) -> list[tuple[int, int, AbstractContextManager[None] | None]]:
        """Return the plan of an nn.Sequential of `count` modules as (start, stop, context).

        Those modules run in the context; None stands for a segment.

        Raises:
            ValueError: the plan is not of the children of an nn.Sequential of that length.
        """
        found: list[tuple[int, int, AbstractContextManager[None] | None]] = []
        for item in self.items:
            names = [u.name for u in self.chain.units[item.start : item.stop] if not u.fixed]
            if not names:
                continue
            if not all(name.isdecimal() and int(name) < count for name in names):
                raise ValueError(
                    f"checkpoint_sequential: a plan of {count} functions was expected, got one "
                    f"with the unit {names[-1]}: give plan these functions as units="
                )
            if not isinstance(item, Segment) and BUT in item.level:
                raise ValueError(
                    f"checkpoint_sequential: a plan of whole functions was expected, got one that "
                    f"runs parts of {names[0]} again: give plan these functions as units="
                )
            context = None
            if not isinstance(item, Segment):
                context = saving(item.level) if item.level in LEVELS else nullcontext()
            found.append((int(names[0]), int(names[-1]) + 1, context))
        planned = {i for start, stop, _ in found for i in range(start, stop)}
        rest = [(i, i + 1, nullcontext()) for i in range(count) if i not in planned]
        return sorted(found + rest, key=lambda span: span[0])

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        found = {name: value for name, value in asdict(self).items() if name != "_applied"}
        found = {"format": _FORMAT, "version": _VERSION, **found}
        Path(path).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is no plan, of another version, or contradicts itself.
        """
        try:
            return read(json.loads(Path(path).read_text(encoding="utf-8")))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            why = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"Plan.load: {path} is not a plan: {why}") from error

    def __str__(self) -> str:
        return importlib.import_module("fusedckpt.planning.plan_text").text(self)

    def plot(self, path: str | Path) -> None:
        """Draw time against peak for all budgets, with this plan and those made by rule.

        Beside it, memory through a step of this plan and of one that keeps everything.

        The file's ending says which format. Needs matplotlib: `pip install fusedckpt[bench]`.
        """
        try:
            drawing = importlib.import_module("fusedckpt.planning.plan_plot")
        except ImportError as error:
            raise ImportError(
                "Plan.plot: expected matplotlib to be installed, as "
                f"pip install 'fusedckpt[bench]' does: {error}"
            ) from error
        drawing.draw(self, Path(path))


def parts_of_level(name: str) -> tuple[str, list[str]]:
    """Return the level at which a unit runs, and the names of parts that run again in it."""
    level, _, parts = name.partition(BUT)
    return level, parts.split(", ") if parts else []


def structure_of(module: nn.Module) -> str:
    """Return a module's class, size, and whether a level tells layers in it what to keep."""
    fused = " with fused layers" if has_levels(module) else ""
    count = sum(parameter.numel() for parameter in module.parameters())
    return f"{class_name(module)} of {count:,} parameters{fused}"


def read(found: Any) -> Plan:
    """Return the plan that `save` wrote as these values; raise where they are none."""
    if (found.pop("format"), found.pop("version")) != (_FORMAT, _VERSION):
        raise ValueError(f"expected {_FORMAT}, version {_VERSION}")
    units = []
    for unit in found["chain"]["units"]:
        levels = tuple(Level(**level) for level in unit.pop("levels"))
        units.append(Unit(levels=levels, **unit))
    chain = Chain(tuple(units), found["chain"]["base"])
    items = tuple(
        Segment(item["start"], tuple(item["levels"])) if "levels" in item else Keep(**item)
        for item in found["items"]
    )
    plan = Plan(**{**found, "chain": chain, "items": items})
    _check_plan(plan)
    return plan


def _check_plan(plan: Plan) -> None:
    units, measured = plan.chain.units, plan.measured_bytes
    names = [unit.name for unit in units]
    if len({*names}) < len(names) or not (units[0].fixed and units[-1].fixed and len(units) > 2):
        raise ValueError("expected units of distinct names between what is before and after them")
    known = {PLAIN, PRODUCTS, *LEVELS}
    kept = {parts_of_level(level.name)[0] for unit in units for level in unit.levels}
    texts = [plan.model, plan.policy, *names, *plan.left_out, *plan.left_out.values()]
    texts += [*plan.structure, *plan.structure.values(), *plan.held]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("expected names as text")
    if kept - known:
        raise ValueError(f"expected levels among {sorted(known)}")
    if not all(type(x) is int and x >= 0 for x in (plan.gradient_bytes, *plan.held.values())):
        raise ValueError("expected in bytes the gradients that are there, and what is held")
    if not all(type(x) is int and x > 0 for x in (plan.budget_bytes, measured) if x is not None):
        raise ValueError("expected budget and measured peak in bytes, or null")
    outcome = simulate(plan.chain, plan.items)
    if plan.predicted_bytes != outcome.peak or not isclose(plan.extra_ms, outcome.extra):
        raise ValueError(
            f"the units come to {outcome.peak} bytes and {outcome.extra} ms, the plan says "
            f"{plan.predicted_bytes} and {plan.extra_ms}"
        )
    if not 0 <= plan.lower_bound_ms <= plan.extra_ms * (1 + 1e-9):
        raise ValueError("expected a lower bound that is not above the extra time")
