"""Time and weigh every implementation of the chosen cases at the chosen sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from bench.cases import CASES, Case, draw, implementations
from bench.env import choose_device, environment, summary
from bench.measure import STEPS_BEFORE_TIMING, Contender, Work, measure
from bench.options import RUN_DEFAULTS
from bench.report import save
from bench.results import Group, Results, table
from bench.sizes import DEFAULT_TOKENS, SIZES, Size
from fusedckpt._dispatch import path_of

__all__ = ["Settings", "run", "settings"]

INTERRUPTED = 130


@dataclass(frozen=True)
class Settings:
    """Every choice that a result depends on; tokens None: as the size or the device has it."""

    case: tuple[str, ...]
    size: tuple[str, ...]
    tokens: int | None
    dtype: str
    device: str
    repeat: int
    out: Path


def settings(
    device: str | None,
    out: Path,
    case: Sequence[str] | None,
    size: Sequence[str] | None,
    tokens: int | None,
    **options: Any,
) -> Settings:
    """Fill in the device's defaults and check everything, before any work is done.

    Raises ValueError for a device that is not there, OSError where `out` cannot be a folder.
    """
    place = choose_device(device)
    default = RUN_DEFAULTS[place.type]
    given = {name: value for name, value in options.items() if value is not None}
    out.mkdir(parents=True, exist_ok=True)
    names = {"case": tuple(case or CASES), "size": tuple(size or [default["size"]])}
    # a name given twice is meant once
    once: dict[str, Any] = {key: tuple(dict.fromkeys(value)) for key, value in names.items()}
    chosen = default | given | once
    return Settings(**chosen, tokens=tokens, device=str(place), out=out)


@dataclass(frozen=True)
class Job:
    """One case at one size."""

    name: str
    case: Case
    size_name: str
    size: Size
    tokens: int
    contenders: tuple[Contender, ...]

    def measure(
        self, device: torch.device, dtype: torch.dtype, repeat: int, tick: Callable[[], None]
    ) -> None:
        """Measure the contenders; an error of inputs or of eager in float64 fails them all."""
        # compiled code of other sizes counts against the limit of recompilations
        torch.compiler.reset()
        try:
            inputs = draw(self.case, self.size, self.tokens, device, dtype)
            with torch.no_grad():
                outputs = Work(inputs, (), device).forward(self.case.eager)
            work = Work(inputs, [torch.randn_like(y) for y in outputs], device)
            del outputs
            measure(work, self.contenders, self.case.eager, repeat, tick)
        except Exception as error:
            for contender in self.contenders:
                contender.fail(error)

    def group(self) -> Group:
        """What was measured, as a record."""
        rows = tuple(contender.row() for contender in self.contenders)
        return Group(self.name, self.size_name, self.tokens, *self.size[:3], rows=rows)


def _jobs(chosen: Settings) -> list[Job]:
    device = torch.device(chosen.device)
    has_plans = path_of(device, getattr(torch, chosen.dtype)) == "triton"
    jobs = []
    for name in chosen.case:
        for size_name in chosen.size:
            for size in SIZES[size_name]:
                tokens = chosen.tokens or size.tokens or DEFAULT_TOKENS[device.type]
                ways = implementations(CASES[name], has_plans).items()
                contenders = tuple(Contender(way, fn) for way, fn in ways)
                jobs.append(Job(name, CASES[name], size_name, size, tokens, contenders))
    return jobs


def _measure(jobs: list[Job], chosen: Settings, console: Console) -> tuple[list[Group], bool]:
    """Measure job after job, printing each; keeps what is there when interrupted."""
    device, dtype = torch.device(chosen.device), getattr(torch, chosen.dtype)
    steps = sum((STEPS_BEFORE_TIMING + chosen.repeat) * len(job.contenders) for job in jobs)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%, left"),
        TimeRemainingColumn(),
    )
    groups: list[Group] = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=steps)
        for job in jobs:
            progress.update(task, description=f"{job.name}, {job.size_name}")
            interrupted = False
            try:
                job.measure(device, dtype, chosen.repeat, lambda: progress.advance(task))
            except KeyboardInterrupt:
                interrupted = True
            groups.append(job.group())
            console.print(table(groups[-1]))
            if interrupted:
                return groups, True
    return groups, False


def run(chosen: Settings) -> int:
    """Measure, print a table per case and size, write run.json.

    Returns 1 where an implementation was wrong, 130 where interrupted, else 0.
    """
    console = Console()
    device, dtype = torch.device(chosen.device), getattr(torch, chosen.dtype)
    facts = environment(device, dtype)
    head = f"{summary(facts)}; {chosen.dtype}, medians of {chosen.repeat} rounds"
    console.print(head, markup=False, highlight=False)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        groups, interrupted = _measure(_jobs(chosen), chosen, console)
    record = asdict(chosen) | {"out": str(chosen.out)}
    save(Results(record, facts, tuple(groups)), chosen.out / "run.json")
    console.print(f"wrote run.json to {chosen.out}", markup=False, highlight=False)
    wrong = any(row.is_wrong for group in groups for row in group.rows)
    return INTERRUPTED if interrupted else int(wrong)
