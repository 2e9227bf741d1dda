"""`python -m bench ways --model module:factory`: the ways of training a model of the caller's.

Eager; torch's non-reentrant checkpoint around every unit that `fusedckpt.plan` finds; `fuse`, alone
and with `fusedckpt.Checkpoint` around every unit; plans. All share the model's parameters.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fusedckpt
from bench.env import environment, summary
from bench.tables import progress
from bench.training import (
    BUDGETS,
    Batch,
    Way,
    Workload,
    compare,
    plans,
    show_ways,
    wrap_units,
)
from bench.training_figures import publish
from fusedckpt.planning.budget import bytes_of
from fusedckpt.reporting.step import default_loss

SETTINGS = ("model", "budget", "steps", "repeat", "seed")
# ways with a figure of memory through a step
SHOWN = ("eager", "checkpoint", "fuse", "fuse+ckpt", "fuse+plan memory")


def prepare(chosen: Namespace) -> Namespace:
    """Make the model, and its batch.

    Raises ValueError for a spec that names no factory, a factory that returns something else, a
    budget that is none; errors of the caller's code come through.
    """
    factory = _factory(chosen.model)
    torch.manual_seed(chosen.seed)
    chosen.made, chosen.batch = _given(chosen.model, factory())
    device = next(chosen.made.parameters()).device
    chosen.budgets = [bytes_of("--budget", size, device) for size in chosen.budget]
    return chosen


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
    """Read the result of a factory: (model, args), (model, kwargs) or (model, args, kwargs)."""
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


def _ways(
    chosen: Namespace, work: Workload, notes: list[str], tick: Callable[[str], None]
) -> Iterator[Way]:
    yield Way("eager", work.model)
    yield Way("checkpoint", wrap_units(work.copied(), checkpoint_wrapper))
    fused = work._replace(model=work.copied())
    notes.append(f"fuse: {str(fusedckpt.fuse(fused.model)).splitlines()[0]}")
    yield Way("fuse", fused.model)
    yield Way("fuse+ckpt", wrap_units(fused.copied(), fusedckpt.Checkpoint))
    asked = [("fuse+plan", fused, (), [budget]) for budget in chosen.budgets]
    rules = [
        ("plan", work, ["memory"], []),
        ("fuse+plan", fused, ["memory"], [] if asked else None),
    ]
    for name, source, policies, budgets in (*rules, *asked):
        try:
            yield from plans(source, tick, name, policies, budgets=budgets)
        except ValueError as error:
            notes.append(f"{name}: {error}")


def run(chosen: Namespace) -> int:
    """Measure, print, write ways.json and ways.png; 1 where a way failed, else 0."""
    model, notes, failures = chosen.made, list[str](), list[str]()
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        # a second run of a layer would add to it once more
        config.use_cache = False
        notes.append("model.config.use_cache was set to False, as checkpoints need")
    sgd, batches = partial(torch.optim.SGD, lr=1e-3), [chosen.batch] * chosen.steps
    work = Workload(model, batches, lambda output, target: default_loss(output), sgd)
    first = next(model.parameters())
    facts = environment(first.device, first.dtype)
    dtype = str(first.dtype).removeprefix("torch.")
    subtitle = f"{summary(facts)}; {dtype}, medians of {chosen.repeat} x {chosen.steps} steps"
    print(subtitle, flush=True)
    num_budgets = len(chosen.budgets or BUDGETS)
    total = 2 + num_budgets + (6 + num_budgets) * (1 + chosen.repeat)
    with progress("ways", total) as tick:
        ways = list(_ways(chosen, work, notes, tick))
        rows = compare(work, ways, chosen.repeat, tick, shown=SHOWN, failures=failures)
    size = sum(parameter.numel() for parameter in model.parameters())
    title = f"{type(model).__name__} of {chosen.model}: {size:,} parameters"
    settings = {name: getattr(chosen, name) for name in SETTINGS}
    record = {"subtitle": subtitle, "settings": settings, "environment": facts}
    record["own"] = show_ways(title, [*notes, *failures], rows)
    publish(record, chosen.out, "ways")
    return int(bool(failures))
