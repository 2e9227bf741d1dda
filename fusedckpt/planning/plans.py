"""A plan for a model: the level that each unit saves, or the segment in which it runs again."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from math import isclose
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusedckpt.autograd import arguments
from fusedckpt.autograd.levels import LEVELS
from fusedckpt.checkpointing.sequential import OFFLOADED, Span
from fusedckpt.planning import roles
from fusedckpt.planning.chain import Chain, Item, Level, SharedConstant, Unit, simulate
from fusedckpt.planning.plan_plot import draw
from fusedckpt.planning.plan_text import text_of_plan
from fusedckpt.planning.units import has_levels

_FORMAT = {"format": "fusedckpt.plan", "version": 8}


@dataclass(frozen=True)
class Plan:
    """The result of `plan`. Peaks are those of a whole step, parameters included, in bytes."""

    # the class of the model
    model: str
    # the policy, or the modules that it lists
    policy: str
    # None for a policy without a budget
    budget_bytes: int | None
    # the units in the order of their forward
    chain: Chain
    # a level or a segment for each unit, in order
    items: tuple[Item, ...]
    # the peak of the model of costs
    predicted_bytes: int
    # ms per step over one that saves everything: the median difference of `rounds` pairs of steps;
    # with one pair the mean of that and of the prediction from units, with none the prediction, as
    # a step that saves everything may not fit, or steps differ by more
    extra_ms: float
    # ms that every plan within the budget takes at least
    lower_bound_ms: float
    # the peak of a step under the plan, None if none was run
    measured_bytes: int | None = None
    # by name of a module, why it is no unit, or is never recomputed
    left_out: Mapping[str, str] = field(default_factory=dict, hash=False)
    # by name, the class and size of the model ("") and of each module of a unit
    structure: Mapping[str, str] = field(default_factory=dict, hash=False)
    # bytes of the gradients that exist when the planned step begins
    gradient_bytes: int = 0
    # pairs of steps that `extra_ms` was measured with
    rounds: int = 0
    # the standard error of that measurement, in ms
    error_ms: float = 0.0
    # ms of the model's forward
    forward_ms: float = 0.0
    # why no segment offloads its input, "" where a segment does; None without offload=True
    offload: str | None = None
    # whether the model was in training mode
    is_training: bool = True
    # the modules that `apply` gave roles
    _applied: list[weakref.ref[nn.Module]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def apply(self, model: nn.Module) -> nn.Module:
        """Apply the plan to the units of `model`, and return the model.

        Parameters, hooks, names and the state_dict are unchanged; a unit's class becomes a subclass
        of its class.

        Raises:
            TypeError: `model` is not an nn.Module.
            ValueError: it lacks a unit of the plan, has another structure, or has a plan applied
                already. The model is unchanged.
        """
        if not isinstance(model, nn.Module):
            arguments.wrong_type("Plan.apply", "model", "an nn.Module", model)
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        if any(roles.is_assigned(module) for module in inner.modules()):
            raise ValueError(
                "Plan.apply: another plan is applied to this model: call its undo() first"
            )
        for unit in self.chain.units:
            for name in unit.modules:
                _unit(inner, name)
        for name, expected in self.structure.items():
            if (structure := structure_of(_unit(inner, name))) != expected:
                raise ValueError(
                    f"Plan.apply: {name or 'the model'} is a {structure}, the plan was made for a "
                    f"{expected}: call fusedckpt.plan for this model"
                )
        for name, role in self._roles():
            module = _unit(inner, name)
            roles.assign(module, role)
            self._applied.append(weakref.ref(module))
        return model

    def undo(self, model: nn.Module | None = None) -> None:
        """Undo `apply` for the units of `model`, or of all models that this plan was applied to.

        Pass `model` for a copy of a planned model, or a loaded one.

        Raises:
            TypeError: `model` is not an nn.Module.
        """
        if model is not None and not isinstance(model, nn.Module):
            arguments.wrong_type("Plan.undo", "model", "an nn.Module or None", model)
        modules = [ref() for ref in self._applied] if model is None else list(model.modules())
        for module in modules:
            if module is not None and roles.is_assigned(module):
                roles.release(module)
        # by identity, whatever `==` of their classes does
        released = {id(None), *map(id, modules)}
        self._applied[:] = [ref for ref in self._applied if id(ref()) not in released]

    def __getstate__(self) -> dict[str, Any]:
        # the models that it was applied to stay here
        return {**self.__dict__, "_applied": []}

    def _roles(self) -> Iterator[tuple[str, roles.Role]]:
        for item in self.items:
            names = self._names(item)
            if item.level is None:
                yield from zip(names, roles.segmented(len(names), item.offloads), strict=True)
            elif item.level != roles.UNCHANGED:
                for name in names:
                    yield name, roles.run_at(item.level)

    def _names(self, item: Item) -> list[str]:
        units = self.chain.units[item.start : item.stop]
        return [name for unit in units for name in unit.modules]

    def spans(self, count: int) -> list[Span]:
        """Return the plan of an nn.Sequential of `count` modules, as `checkpoint_sequential` does.

        Raises:
            ValueError: a unit of the plan is none of these modules.
        """
        spans: list[Span] = []
        for item in self.items:
            names = self._names(item)
            if not all(name.isdecimal() and int(name) < count for name in names):
                raise ValueError(
                    f"checkpoint_sequential: expected a plan of these {count} functions, got one "
                    f"with the unit {names[-1]}: pass these functions to plan as units="
                )
            within: Any = OFFLOADED if item.offloads else None
            if item.level is not None:
                within = partial(roles.saving_at, item.level)
            spans.append((int(names[0]), int(names[-1]) + 1, within))
        planned = {i for start, stop, _ in spans for i in range(start, stop)}
        spans += [(i, i + 1, nullcontext) for i in range(count) if i not in planned]
        return sorted(spans, key=lambda span: span[0])

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        document = {**_FORMAT, **asdict(self)}
        del document["_applied"]
        Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a file that `save` wrote.

        Raises:
            ValueError: the file is not a plan, of another version, or inconsistent.
        """
        try:
            return _read(json.loads(Path(path).read_text(encoding="utf-8")))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            why = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise ValueError(
                f"Plan.load: {path} is not a plan: {why}. Save it again by plan.save"
            ) from error

    def __str__(self) -> str:
        return text_of_plan(self)

    def plot(self, path: str | Path) -> None:
        """Draw time against peak for all budgets, with this plan and the other policies.

        Beside it, memory over a step of this plan and of one that saves everything.

        The file's suffix sets the format. Needs matplotlib: `pip install fusedckpt[bench]`.
        """
        draw(self, path)


def _read(document: Any) -> Plan:
    """Return the plan that JSON was written of; raise where it is none."""
    if {name: document.pop(name) for name in _FORMAT} != _FORMAT:
        raise ValueError(f"expected {_FORMAT['format']}, version {_FORMAT['version']}")
    for unit in (units := document["chain"]["units"]):
        unit["levels"] = tuple(map(_read_level, unit["levels"]))
        unit["members"] = tuple(unit["members"])
        unit["shared"] = tuple(unit.get("shared", ()))
        unit["in_segment"] = _read_level(unit["in_segment"])
        if (recomputed := unit["recomputed"]) is not None:
            unit["recomputed"] = _read_level(recomputed)
    document["chain"]["units"] = tuple(Unit(**unit) for unit in units)
    shared = document["chain"].get("shared", ())
    document["chain"]["shared"] = tuple(SharedConstant(**constant) for constant in shared)
    document["chain"] = Chain(**document["chain"])
    document["items"] = tuple(Item(**item) for item in document["items"])
    plan = Plan(**document)
    outcome = simulate(plan.chain, plan.items)
    known = {*roles.OWN_LEVELS, *LEVELS}
    if not {level.name for unit in plan.chain.units for level in unit.levels} <= known:
        raise ValueError(f"expected levels among {sorted(known)}")
    peak = outcome.peak_bytes
    extra = outcome.extra_ms
    if plan.predicted_bytes != peak or not isclose(plan.extra_ms, extra):
        raise ValueError(f"its units give {peak} bytes and {extra} ms, it has other figures")
    return plan


def _read_level(document: Any) -> Level:
    unsaved = tuple(document.get("unsaved_shared", ()))
    return Level(**{**document, "unsaved_shared": unsaved})


def _unit(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise ValueError(
            f"Plan.apply: {type(model).__name__} has no unit {name!r}: call fusedckpt.plan for "
            "this model"
        ) from error


def structure_of(module: nn.Module) -> str:
    """Return a module's class, size, and whether a level sets the tensors that its layers save."""
    fused = " with fused layers" if has_levels(module) else ""
    count = sum(parameter.numel() for parameter in module.parameters())
    # the prefix is `fully_shard`'s
    name = type(module).__name__.removeprefix("FSDP")
    return f"{name} of {count:,} parameters{fused}"
