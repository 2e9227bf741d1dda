"""Time and weigh every implementation of the chosen cases at the chosen sizes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from bench.cases import CASES
from bench.ceilings import measure_ceilings
from bench.defaults import RUN_DEFAULTS
from bench.env import choose_device, environment, summary
from bench.jobs import INTERRUPTED, Job, jobs_of
from bench.measure import STEPS_BEFORE_TIMING
from bench.results import Group, append, read
from bench.table import table
from bench.text import console as wide_console

__all__ = ["FILE", "Settings", "run", "settings"]

FILE = "run.jsonl"


@dataclass(frozen=True)
class Settings:
    """Every choice that a result depends on; no tokens: as the size or the device has it."""

    case: tuple[str, ...]
    size: tuple[str, ...]
    tokens: tuple[int, ...]
    dtype: str
    device: str
    repeat: int
    only: tuple[str, ...]
    skip: tuple[str, ...]
    graphs: bool
    resume: bool
    out: Path


def settings(
    device: str | None,
    out: Path,
    case: Sequence[str] | None,
    size: Sequence[str] | None,
    tokens: Sequence[int] | None,
    only: Sequence[str] | None,
    skip: Sequence[str] | None,
    graphs: bool,
    resume: bool,
    **options: Any,
) -> Settings:
    """Fill in the device's defaults and check everything, before any work is done.

    Raises ValueError for a device that is not there, OSError where `out` cannot be a folder.
    """
    place = choose_device(device)
    default = RUN_DEFAULTS[place.type]
    given = {name: value for name, value in options.items() if value is not None}
    out.mkdir(parents=True, exist_ok=True)
    if resume and (out / FILE).exists():
        read(out / FILE)
    names = {"case": case or CASES, "size": size or [default["size"]], "tokens": tokens or ()}
    names |= {"only": only or (), "skip": skip or ()}
    # a name given twice is meant once
    once: dict[str, Any] = {key: tuple(dict.fromkeys(value)) for key, value in names.items()}
    chosen = default | given | once
    return Settings(**chosen, graphs=graphs, resume=resume, device=str(place), out=out)


def _is_whole(group: Group, repeat: int) -> bool:
    """Whether no interrupt left rows without times, or with fewer than asked for."""
    times = [row.both_ms for row in group.rows if row.both_ms is not None]
    cut = any(row.failure == "interrupted" for row in group.rows)
    return not cut and all(len(time.samples) >= repeat for time in times)


def _left(jobs: list[Job], chosen: Settings, facts: dict[str, Any]) -> list[Job]:
    """Leave out what --resume finds measured, on this device and at this commit."""
    path = chosen.out / FILE
    if not chosen.resume or not path.exists():
        path.unlink(missing_ok=True)
        return jobs
    names = ("device", "commit", "torch", "triton")
    done = {
        (group.case, group.size, group.tokens, group.dim, group.dtype)
        for group in read(path)
        if group.environment and all(group.environment[n] == facts[n] for n in names)
        if _is_whole(group, chosen.repeat)
    }
    keys = ((j.name, j.size_name, j.tokens, j.size.dim, chosen.dtype) for j in jobs)
    return [job for job, key in zip(jobs, keys, strict=True) if key not in done]


def _measure(jobs: list[Job], chosen: Settings, console: Console, facts: dict[str, Any]) -> bool:
    """Measure job after job, printing and writing each; returns whether it was interrupted."""
    each = STEPS_BEFORE_TIMING + chosen.repeat
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%, left"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    ceilings = measure_ceilings(
        torch.device(chosen.device), getattr(torch, chosen.dtype), 8 if "tiny" in chosen.size else 1
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=each * sum(len(job.contenders) for job in jobs))
        for job in jobs:
            progress.update(task, description=f"{job.name}, {job.size_name}, {job.tokens}")
            interrupted = False
            try:
                job.measure(chosen.repeat, chosen.graphs, lambda: progress.advance(task))
            except KeyboardInterrupt:
                interrupted = True
            group = job.group(ceilings, facts)
            append(group, chosen.out / FILE)
            console.print(table(group))
            if interrupted:
                return True
    return False


def run(chosen: Settings) -> int:
    """Measure, print a table per case and size, append each to run.jsonl.

    Returns 1 where an implementation was wrong, 130 where interrupted, else 0.
    """
    console = wide_console()
    device, dtype = torch.device(chosen.device), getattr(torch, chosen.dtype)
    facts = environment(device, dtype)
    head = f"{summary(facts)}; {chosen.dtype}, medians of {chosen.repeat} rounds"
    console.print(head, markup=False, highlight=False)
    jobs = _left(list(jobs_of(chosen)), chosen, facts)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        interrupted = _measure(jobs, chosen, console, facts)
    console.print(f"wrote {FILE} to {chosen.out}", markup=False, highlight=False)
    wrong = any(contender.is_wrong for job in jobs for contender in job.contenders)
    return INTERRUPTED if interrupted else int(wrong)
