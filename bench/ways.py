"""Compare ways of training a model of yours.

Trains it eager, with torch's non-reentrant checkpoint around every unit that `fusedckpt.plan`
finds, fused, fused with `fusedckpt.Checkpoint` around every unit, and under plans; compares memory,
recomputed FLOPs, time and losses. `--compile` adds torch.compile: alone, with two budgets for its
activations, and on what is fused and planned. All share the model's parameters. The factory returns
(model, args), (model, kwargs) or (model, args, kwargs), on the device to measure. The loss is the
output's .loss, or else the mean square of its tensors; for another loss, wrap the model.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

import fusedckpt
from bench.env import environment, summary
from bench.implementations import compiled
from bench.options import Options
from bench.records import part_of, publish
from bench.tables import mib, progress
from bench.training import BUDGETS, NOTES, RECIPES, Batch, Tick, Way, Workload, compare, plans
from fusedckpt.planning.budget import bytes_of
from fusedckpt.reporting.step import default_loss

# ways with a figure of memory through a step
SHOWN = ("eager", "checkpoint", "fuse", "fuse+ckpt", "fuse+plan memory")


def options(add: Options) -> None:
    """Add the options."""
    text = "the function that makes the model and its inputs: package.module:name or file.py:name"
    add.many("model", text, required=True, metavar="MODULE:FACTORY")
    text = "activation budget of a plan, such as 2GiB; default: three between the extremes"
    add.many("budget", text, metavar="SIZE")
    add.flag("compile", "compile it, too")
    add.count("steps", "training steps per turn, on the same inputs", 2)
    add.count("repeat", "turns of every way", 3)
    add.seed()
    add.place("ways.json and ways.png", has_device=False)


def prepare(chosen: Namespace) -> Namespace:
    """Make each model, and its batch.

    Raises ValueError for a spec that names no factory, a factory that returns something else, a
    budget that is none; errors of the caller's code come through.
    """
    factories, chosen.made = {spec: _factory(spec) for spec in chosen.model}, []
    for spec, factory in factories.items():
        torch.manual_seed(chosen.seed)
        model, batch = _given(spec, factory())
        device = next(model.parameters()).device
        budgets = [bytes_of("--budget", size, device) for size in chosen.budget]
        chosen.made.append((spec, model, batch, budgets))
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
    parts = made if isinstance(made, (tuple, list)) else (made,)
    model, *given = parts
    kwargs = given.pop() if given and isinstance(given[-1], dict) else {}
    args = given.pop() if given and isinstance(given[-1], (Tensor, tuple, list)) else ()
    if given or not isinstance(model, nn.Module) or len(parts) == 1:
        came = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(
            f"--model {spec} is to return (model, args), (model, kwargs) or (model, args, "
            f"kwargs): an nn.Module, a tuple or one tensor, a dict; it returned ({came})"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"--model {spec}: no parameter of the {type(model).__name__} is trained")
    return model, Batch((args,) if isinstance(args, Tensor) else tuple(args), kwargs)


def _ways(work: Workload, given: Sequence[int], notes: list[str], tick: Tick) -> Iterator[Way]:
    yield Way("eager", work.model)
    yield Way("checkpoint", RECIPES["checkpoint"](work.copied()))
    fused = work._replace(model=work.copied())
    notes.append(f"fuse: {str(fusedckpt.fuse(fused.model)).splitlines()[0]}")
    yield Way("fuse", fused.model)
    yield Way("fuse+ckpt", RECIPES["fuse+ckpt"](work.copied()))
    asked = [("fuse+plan", fused, (), [budget]) for budget in given]
    rules = [
        ("plan", work, ["memory"], []),
        ("fuse+plan", fused, ["memory"], [] if asked else None),
    ]
    for name, source, policies, budgets in (*rules, *asked):
        try:
            yield from plans(source, tick, name, policies, budgets=budgets)
        except ValueError as error:
            notes.append(f"{name}: {error}")


def _compiled(work: Workload, notes: list[str]) -> Iterator[Way]:
    """Yield ways of compiling; the first steps of each, which compile it, are not measured."""
    made = {
        "compile": torch.compile(work.copied()),
        "compile 0.5": compiled(0.5)(work.copied()),
        "compile 0": compiled(0.0)(work.copied()),
        "fuse+compile": torch.compile(RECIPES["fuse"](work.copied())),
        "fuse preact+compile": torch.compile(RECIPES["fuse preact"](work.copied())),
    }
    plain = work.report(work.model)
    budget = (plain.peak_bytes - plain.parameter_bytes - plain.gradient_bytes) // 2
    name = f"fuse+plan {mib(budget)} MiB+compile"
    try:
        fused = RECIPES["fuse"](work.copied())
        options = {"activation_budget": budget, "accumulate": True}
        made[name] = torch.compile(work.planned(name, fused, **options).run)
    except ValueError as error:
        notes.append(f"{name}: {error}")
    for name, model in made.items():
        yield Way(name, model, is_compiled=True)


def _part(chosen: Namespace, spec: str, model: Any, batch: Batch, budgets: Sequence[int]) -> Any:
    """Measure and print one model; return its part of the record, and whether all ways ran."""
    notes, failures = list[str](), list[str]()
    if getattr(getattr(model, "config", None), "use_cache", False):
        # a second run of a layer would add to it once more
        model.config.use_cache = False
        notes.append("model.config.use_cache was set to False, as checkpoints need")
    sgd, batches = partial(torch.optim.SGD, lr=1e-3), [batch] * chosen.steps
    work = Workload(model, batches, lambda output, target: default_loss(output), sgd)
    num_budgets = len(budgets or BUDGETS)
    total = 2 + num_budgets + (6 + num_budgets + 6 * chosen.compile) * (1 + chosen.repeat)
    with progress("ways", total) as tick:
        ways = list(_ways(work, budgets, notes, tick))
        ways += _compiled(work, notes) if chosen.compile else ()
        rows = compare(work, ways, chosen.repeat, tick, shown=SHOWN, failures=failures)
    size = sum(parameter.numel() for parameter in model.parameters())
    title = f"{type(model).__name__} of {spec}: {size:,} parameters"
    return part_of(title, [*notes, *failures, *NOTES], rows), not failures


def run(chosen: Namespace) -> int:
    """Measure, print, write ways.json and ways.png; 1 where a way failed, else 0."""
    first = next(chosen.made[0][1].parameters())
    facts, dtype = environment(first.device, first.dtype), str(first.dtype).removeprefix("torch.")
    subtitle = f"{summary(facts)}; {dtype}, medians of {chosen.repeat} x {chosen.steps} steps"
    print(f"{subtitle}\nwrites ways.json and ways.png to {chosen.out}", flush=True)
    parts, ran = zip(*[_part(chosen, *made) for made in chosen.made], strict=True)
    status = publish(chosen, "ways", "Ways of training a model of yours", subtitle, facts, parts)
    return int(not all(ran) or status)
