"""Time and weigh every implementation of the chosen cases at the chosen sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from bench.cases import CASES
from bench.ceilings import measure_ceilings
from bench.contender import Contender
from bench.defaults import RUN_DEFAULTS
from bench.env import choose_device, environment, summary
from bench.jobs import Job, check_choice, jobs_of
from bench.measure import OTHER_STEPS
from bench.results import Ceilings, Group, Row, append, read
from bench.supervisor import INTERRUPTED, Event, Journal
from bench.table import table
from bench.text import console as wide_console

__all__ = ["FILE", "Settings", "run", "settings"]

FILE = "run.jsonl"


@dataclass(frozen=True)
class Settings:
    """Every choice that a result depends on, and where it goes.

    No tokens: as the size or the device has it; journal: what supervisor.py reads.
    """

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
    journal: Path | None = None


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

    Raises ValueError for a device that is not there, names of nobody, or tokens that do not divide
    into sequences, OSError where `out` cannot be a folder.
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
    found = Settings(**chosen, graphs=graphs, resume=resume, device=str(place), out=out)
    check_choice(found)
    return found


def _is_settled(contender: Contender, row: Row | None, repeat: int) -> bool:
    """Whether a row says it all: in rounds enough, or by a failure that would come again."""
    if row is None or row.failure == "interrupted":
        return False
    if row.failure == "not installed":
        return contender.failure is not None
    return row.both_ms is None or len(row.both_ms.samples) >= repeat


def _num_samples(group: Group | None) -> int:
    rows = group.rows if group is not None else ()
    return sum(len(row.both_ms.samples) for row in rows if row.both_ms is not None)


def _is_named(facts: dict[str, Any]) -> bool:
    """Whether the commit says what was measured."""
    return facts["commit"] is not None and not facts["commit"].endswith("-dirty")


class Session:
    """A command's choices, what it runs on, and what is measured so far."""

    def __init__(self, chosen: Settings, facts: dict[str, Any], console: Console):
        self.chosen, self.facts, self.console = chosen, facts, console
        self.path = chosen.out / FILE
        self.journal = Journal(chosen.journal)
        self.earlier = self._earlier()
        # by whether they are those of toys
        self.ceilings: dict[bool, Ceilings] = {}
        # what is there is replaced, but not before there is something to put in its place
        self.replaces = not chosen.resume and not self.journal.done
        self.failed = any(self.journal.done.values())

    def _earlier(self) -> dict[tuple[Any, ...], Group]:
        """What --resume finds of this device and commit."""
        if not (self.chosen.resume and _is_named(self.facts) and self.path.exists()):
            return {}
        names = ("device", "commit", "torch", "triton")
        return {
            (group.case, group.size, group.tokens, group.dim, group.dtype): group
            for group in read(self.path)
            if group.environment and all(group.environment[n] == self.facts[n] for n in names)
        }

    def earlier_of(self, job: Job) -> Group | None:
        """What --resume finds of a job."""
        key = (job.name, job.size_name, job.tokens, job.size.dim, self.chosen.dtype)
        return self.earlier.get(key)

    def _is_done(self, job: Job) -> bool:
        found = self.earlier_of(job)
        rows = {row.name: row for row in found.rows} if found else {}
        return job.title in self.journal.done or all(
            _is_settled(contender, rows.get(contender.name), self.chosen.repeat)
            for contender in job.contenders
        )

    def jobs(self) -> list[Job]:
        """What is left to be done, without whoever crashed on it."""
        jobs = [job for job in jobs_of(self.chosen) if not self._is_done(job)]
        for job in jobs:
            job.leave_out(self.journal)
        return jobs

    def _take(self, job: Job, begin: Callable[[Contender], None]) -> None:
        is_tiny = job.size_name == "tiny"
        if is_tiny not in self.ceilings:
            self.ceilings[is_tiny] = measure_ceilings(job.device, job.dtype, 8 if is_tiny else 1)
        job.measure(self.chosen.repeat, self.chosen.graphs, begin)

    def measure(self, job: Job, advance: Callable[[], None]) -> bool:
        """Measure a job, keep and print what is found; returns whether it was interrupted."""

        def begin(contender: Contender) -> None:
            job.begin(contender, self.journal)
            advance()

        interrupted = job.attempt(self.journal, lambda: self._take(job, begin))
        group = job.group(self.ceilings.get(job.size_name == "tiny"), self.facts)
        if not interrupted or _num_samples(group) > _num_samples(self.earlier_of(job)):
            self._keep(group)
        if not interrupted:
            self.failed |= job.failed
            self.journal.note(Event("done", job.title, why="failed" if job.failed else ""))
        return interrupted

    def _keep(self, group: Group) -> None:
        if self.replaces:
            self.path.unlink(missing_ok=True)
            self.replaces = False
        append(group, self.path)
        self.console.print(table(group))


def _measure(session: Session, jobs: list[Job]) -> bool:
    """Measure job after job; returns whether it was interrupted."""
    each = OTHER_STEPS + session.chosen.repeat
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%, left"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=session.console, transient=True) as progress:
        task = progress.add_task("", total=each * sum(len(job.contenders) for job in jobs))
        for job in jobs:
            progress.update(task, description=f"{job.name}, {job.size_name}, {job.tokens}")
            if session.measure(job, lambda: progress.advance(task)):
                return True
    return False


def run(chosen: Settings) -> int:
    """Measure, print a table per case and size, append each to run.jsonl.

    Returns 1 where an implementation was wrong or eager or ours raised, 130 where interrupted, else
    0. Raises DeviceLost where a GPU is of no more use to this process.
    """
    console = wide_console()
    device, dtype = torch.device(chosen.device), getattr(torch, chosen.dtype)
    facts = environment(device, dtype)
    head = f"{summary(facts)}; {chosen.dtype}, medians of {chosen.repeat} rounds"
    console.print(head, markup=False, highlight=False)
    if chosen.resume and not _is_named(facts):
        console.print("no commit names what is measured here: nothing counts as measured before")
    session = Session(chosen, facts, console)
    jobs = session.jobs()
    if not jobs:
        console.print("nothing left to measure")
        return int(session.failed)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        interrupted = _measure(session, jobs)
    if (chosen.out / FILE).exists():
        console.print(f"results are in {chosen.out / FILE}", markup=False, highlight=False)
    if interrupted:
        console.print("interrupted")
        return INTERRUPTED
    return int(session.failed)
