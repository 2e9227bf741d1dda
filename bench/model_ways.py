"""`python -m bench ways --model module:factory`: the ways of training a model of the caller's.

Eager; torch's non-reentrant checkpoint around every unit that `fusedckpt.plan` finds; `fuse`, alone
and with `fusedckpt.Checkpoint` around every unit; plans. All share the model's parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fusedckpt
from bench.classics_plot import draw
from bench.classics_results import NOTES, Part, Result, part_table
from bench.classics_ways import BUDGETS, Batch, Way, Workload, compare, plans
from bench.env import environment, summary
from bench.records import save
from bench.text import console as wide_console
from bench.text import steps
from fusedckpt.planning.budget import bytes_of
from fusedckpt.planning.units import candidates
from fusedckpt.reporting.step import default_loss

__all__ = ["Settings", "run", "settings"]

SHOWN = ("eager", "checkpoint", "fuse", "fuse+ckpt", "fuse+plan memory")


@dataclass(frozen=True)
class Settings:
    """A model with what it gets, and every other choice that a result depends on."""

    spec: str
    model: nn.Module
    batch: Batch
    budget: tuple[int, ...]
    steps: int
    repeat: int
    seed: int
    out: Path


def settings(model: str, budget: list[str] | None, seed: int, out: Path, **counts: int) -> Settings:
    """Make the model.

    Raises ValueError for a spec that names no factory, a factory that returns something else, a
    budget that is none, OSError where `out` cannot be a folder; what the caller's code raises comes
    through.
    """
    factory = _factory(model)
    torch.manual_seed(seed)
    made, batch = _given(model, factory())
    device = next(made.parameters()).device
    sizes = tuple(bytes_of("--budget", size, device) for size in budget or ())
    out.mkdir(parents=True, exist_ok=True)
    return Settings(model, made, batch, sizes, seed=seed, out=out, **counts)


def _factory(spec: str) -> Callable[[], Any]:
    place, _, name = spec.rpartition(":")
    if place.endswith(".py"):
        file = Path(place)
        if not file.is_file():
            raise ValueError(f"--model: there is no file {file}")
        sys.path.insert(0, str(file.parent.resolve()))
        place = file.stem
    if not place or not name:
        raise ValueError(f"--model expects module:factory or file.py:factory, got {spec!r}")
    try:
        factory = resolve_name(f"{place}:{name}")
    except (AttributeError, ImportError, ValueError) as error:
        raise ValueError(f"--model {spec}: {error}") from error
    if not callable(factory):
        raise ValueError(f"--model {spec}: {name} is no function")
    return factory


def _given(spec: str, made: Any) -> tuple[nn.Module, Batch]:
    """Read what a factory returns: (model, args), (model, kwargs) or (model, args, kwargs)."""
    args, kwargs = (), {}
    match made:
        case (nn.Module() as model, dict() as kwargs):
            pass
        case (nn.Module() as model, (Tensor() | tuple() | list()) as args):
            pass
        case (nn.Module() as model, (Tensor() | tuple() | list()) as args, dict() as kwargs):
            pass
        case _:
            parts = made if isinstance(made, (tuple, list)) else (made,)
            came = ", ".join(type(part).__name__ for part in parts)
            raise ValueError(
                f"--model {spec} is to return (model, args), (model, kwargs) or (model, args, "
                f"kwargs): an nn.Module, a tuple or one tensor, a dict; it returned ({came})"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"--model {spec}: no parameter of the {type(model).__name__} is trained")
    return model, Batch((args,) if isinstance(args, Tensor) else tuple(args), kwargs)


def _wrapped(work: Workload, name: str, wrap: Callable[[nn.Module], nn.Module]) -> Way:
    """Wrap every unit of a copy of the model."""
    model = work.copied()
    for unit in candidates(model):
        model.set_submodule(unit, wrap(model.get_submodule(unit)))
    return Way(name, model)


def _ways(
    chosen: Settings, work: Workload, notes: list[str], tick: Callable[[str], None]
) -> Iterator[Way]:
    yield Way("eager", work.model)
    yield _wrapped(work, "checkpoint", checkpoint_wrapper)
    fused = work._replace(model=work.copied())
    notes.append(f"fuse: {str(fusedckpt.fuse(fused.model)).splitlines()[0]}")
    yield Way("fuse", fused.model)
    yield _wrapped(fused, "fuse+ckpt", fusedckpt.Checkpoint)
    asked = [("fuse+plan", fused, (), [budget]) for budget in chosen.budget]
    rules = [
        ("plan", work, ["memory"], []),
        ("fuse+plan", fused, ["memory"], [] if asked else None),
    ]
    for name, source, policies, budgets in (*rules, *asked):
        try:
            yield from plans(source, tick, name, policies, budgets)
        except ValueError as error:
            notes.append(f"{name}: {error}")


def _workload(chosen: Settings, notes: list[str]) -> Workload:
    config: Any = getattr(chosen.model, "config", None)
    if getattr(config, "use_cache", False):
        # a second run of a layer would add to it once more
        config.use_cache = False
        notes.append("model.config.use_cache was set to False, as checkpoints need")
    sgd = partial(torch.optim.SGD, lr=1e-3)
    return Workload(chosen.model, [chosen.batch] * chosen.steps, _loss, sgd)


def _loss(output: Any, target: None) -> Tensor:
    return default_loss(output)


def run(chosen: Settings) -> int:
    """Measure, print, write ways.json and ways.png; 1 where a way failed, else 0."""
    console, notes = wide_console(), list[str]()
    work = _workload(chosen, notes)
    first = next(iter(chosen.model.parameters()))
    facts = environment(first.device, first.dtype)
    dtype = str(first.dtype).removeprefix("torch.")
    count = f"medians of {chosen.repeat} x {chosen.steps} steps"
    subtitle = f"{summary(facts)}; {dtype}, {count}"
    console.print(subtitle, markup=False, highlight=False)
    num_budgets = len(chosen.budget or BUDGETS)
    total = 2 + num_budgets + (6 + num_budgets) * (1 + chosen.repeat)
    failures: list[str] = []
    with steps(console, {"ways": total}) as begin:
        tick = partial(begin, "ways")
        ways = list(_ways(chosen, work, notes, tick))
        rows = compare(work, ways, chosen.repeat, tick, SHOWN, failures)
    size = sum(parameter.numel() for parameter in chosen.model.parameters())
    title = f"{type(chosen.model).__name__} of {chosen.spec}: {size:,} parameters"
    part = Part(title, (*notes, *failures, *NOTES), rows)
    record = {name: getattr(chosen, name) for name in ("spec", "budget", "steps", "repeat", "seed")}
    result = Result(subtitle, record, facts, own=part)
    save(result, chosen.out / "ways.json")
    draw(result, chosen.out / "ways.png")
    console.print(part_table(part))
    console.print("\n".join(part.notes), markup=False, highlight=False)
    console.print(f"wrote ways.json and ways.png to {chosen.out}", markup=False, highlight=False)
    return int(bool(failures))
