"""The ways to cut a model into units, each measured as a chain."""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedckpt.memory import nbytes_of
from fusedckpt.planning import roles
from fusedckpt.planning.calls import seconds
from fusedckpt.planning.chain import Chain
from fusedckpt.planning.code_between import chain_of
from fusedckpt.planning.costs import Kinds, Scout, Survey
from fusedckpt.planning.plan_input import Policy, names_of
from fusedckpt.planning.unit_costs import kind_of
from fusedckpt.planning.units import candidates, parts_of
from fusedckpt.planning.ways import once
from fusedckpt.reporting.step import Step
from fusedckpt.reporting.trial import aliased, tensors_of

__all__ = ["Cut", "chains", "cuts_of", "forward_of"]


class Cut(NamedTuple):
    """Names of modules that may be units, and by unit of what in it may run again on its own."""

    names: Sequence[str]
    parts: Mapping[str, Sequence[str]]


def cuts_of(model: nn.Module, policy: Policy, units: Any) -> list[Cut]:
    """Return the cuts to choose from: the one that was given, or that of a rule, as it is."""
    names = names_of(model, policy, units)
    if units is not None or policy not in ("budget", "memory"):
        return [Cut(names, {})]
    finer = candidates(model, finer=True)
    found = [names, finer] if finer != names else [names]
    return [Cut(names, _parts(model, names)) for names in found]


def _parts(model: nn.Module, units: Sequence[str]) -> dict[str, list[str]]:
    # but for what is elsewhere, too
    places = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    found = {unit: model.get_submodule(unit) for unit in units}
    return {
        unit: [name for name in parts_of(module) if places[module.get_submodule(name)] == 1]
        for unit, module in found.items()
    }


def chains(
    step: Step,
    cuts: Sequence[Cut],
    stepping: int,
    forward_ms: float,
    selective: bool,
    progress: bool,
) -> list[tuple[Chain, dict[str, str]]]:
    """Return the chains of cuts that have units, and why other modules of these are none.

    stepping: bytes that the optimizer's step takes for a moment. forward_ms: of the whole model.
    selective: see `measured`.

    Raises:
        ValueError: there are no units.
    """
    kinds: Kinds = {}
    with _ticking(sum(len(cut.names) for cut in cuts), progress) as tick:
        surveys = [Survey(Scout(), kinds, tick, selective, cut.parts) for cut in cuts]
        for survey, cut in zip(surveys, cuts, strict=True):
            _survey(step, cut.names, survey)
    reasons = [survey.left_out(cut.names) for survey, cut in zip(surveys, cuts, strict=True)]
    found = [
        (chain_of(step, survey.units(), stepping, forward_ms), why)
        for survey, why in zip(surveys, reasons, strict=True)
        if survey.units()
    ]
    if not found:
        why = [f"{name} {why}" for name, why in reasons[0].items()]
        told = "; ".join([*why[:3], f"{len(why) - 3} more"] if len(why) > 4 else why)
        raise ValueError(
            f"plan: expected a unit of {type(step.model).__name__} that runs exactly once, "
            f"name some with units=: {told or 'it has no parts'}"
        )
    return found


def _survey(step: Step, names: Sequence[str], survey: Survey) -> None:
    """Measure the units, one after the other, where they are called."""
    modules = {name: step.model.get_submodule(name) for name in names}
    for role in (survey.scout.role, survey.probe):
        with roles.assigned({m: role(name, m) for name, m in modules.items()}):
            args, kwargs = aliased((step.args, step.kwargs))
            step.model(*args, **kwargs)


def forward_of(step: Step) -> tuple[float, int]:
    """Return the ms that the model's forward takes, and the bytes of what it returns."""
    device, given = step.parameters()[0].device, aliased((step.args, step.kwargs))
    held = [*step.parameters(), *step.model.buffers(), *step.inputs()]
    outputs: list[Any] = []

    def forward() -> float:
        args, kwargs = aliased(given)
        start = seconds(device)
        # so that no more is kept than units may keep
        with torch.no_grad():
            outputs[:] = [step.model(*args, **kwargs)]
        return 1e3 * (seconds(device) - start)

    key = kind_of(step.model, *given), device, torch.get_num_threads()
    found = once(key, lambda: min(forward(), forward()))
    if not outputs:
        forward()
    return found, nbytes_of([*tensors_of(outputs), *held]) - nbytes_of(held)


@contextmanager
def _ticking(total: int, progress: bool) -> Iterator[Callable[[], None]]:
    """Yield what is to be called for every unit that is done."""
    if not progress or importlib.util.find_spec("rich") is None:
        yield lambda: None
        return
    console = importlib.import_module("rich.console").Console(stderr=True)
    with importlib.import_module("rich.progress").Progress(console=console, transient=True) as bar:
        task = bar.add_task("measuring units", total=total)
        yield lambda: bar.advance(task)
