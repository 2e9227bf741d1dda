"""How many tokens fit in a given memory, and how fast they then are, for every implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from bench.capacity_report import Capacity, Fit, append, table
from bench.clock import Stopwatch
from bench.contender import Contender, Work
from bench.defaults import BLOCKS, CAPACITY_DEFAULTS
from bench.env import choose_device, environment, summary
from bench.jobs import Job, check_choice, jobs_of
from bench.measure import WARMUP, Truth
from bench.results import MIB, Timing
from bench.sizes import SEQUENCE
from bench.supervisor import INTERRUPTED, Event, Journal
from bench.text import console as wide_console
from fusedckpt.memory import peak_bytes

__all__ = ["FILE", "Settings", "most_tokens", "run", "settings"]

FILE = "capacity.jsonl"
# tokens are told apart by an eighth
HALVINGS = 3


@dataclass(frozen=True)
class Settings:
    """Every choice that a result depends on, and where it goes.

    memory: in MiB; journal: what supervisor.py reads; tokens: none, as they are what is looked for.
    """

    case: tuple[str, ...]
    size: tuple[str, ...]
    memory: int
    dtype: str
    device: str
    repeat: int
    only: tuple[str, ...]
    skip: tuple[str, ...]
    out: Path
    journal: Path | None = None
    tokens: tuple[int, ...] = ()


def settings(
    device: str | None,
    out: Path,
    case: Sequence[str] | None,
    size: Sequence[str] | None,
    only: Sequence[str] | None,
    skip: Sequence[str] | None,
    **options: Any,
) -> Settings:
    """Fill in the device's defaults and check everything, before any work is done.

    Raises ValueError for a device that is not there or names of nobody, OSError where `out` cannot
    be a folder.
    """
    place = choose_device(device)
    default = CAPACITY_DEFAULTS[place.type]
    given = {name: value for name, value in options.items() if value is not None}
    out.mkdir(parents=True, exist_ok=True)
    names = {"case": case or BLOCKS, "size": size or [default["size"]]}
    names |= {"only": only or (), "skip": skip or ()}
    once: dict[str, Any] = {key: tuple(dict.fromkeys(value)) for key, value in names.items()}
    chosen = default | given | once
    found = Settings(**chosen, device=str(place), out=out)
    check_choice(found)
    return found


def _least(job: Job) -> int:
    """The least tokens that are tried: a sequence."""
    return job.size.tokens or SEQUENCE


def most_tokens(fits: Callable[[int], bool], least: int) -> int:
    """Return the most tokens that fit: `least`, doubled, then to an eighth; 0 for none.

    What fits is taken to fit with fewer tokens too. All are multiples of `least`, so that sequences
    are as long for everyone.
    """
    if not fits(least):
        return 0
    low = least
    while fits(2 * low):
        low *= 2
    step = low // 2
    for _ in range(HALVINGS):
        if step >= least and fits(low + step):
            low += step
        step //= 2
    return low


class Rival:
    """A contender, what fits of it, and its times there."""

    def __init__(self, contender: Contender):
        self.contender = contender
        self.tokens = self.peak = 0
        self.work: Work | None = None

    def peak_of(self, work: Work) -> int:
        """Return what forward and backward add to memory, in bytes."""
        own = self.contender.own(work)
        return peak_bytes(lambda: own.results(self.contender.fn), own.device)

    def fit(self, job: Job, chosen: Settings, tick: Callable[[], None]) -> None:
        """Find how many tokens fit; raises what the contender raises, but for lack of memory.

        That not even a sequence fits is a result too.
        """
        peaks: dict[int, int] = {}

        def fits(tokens: int) -> bool:
            tick()
            if self.contender.name.startswith("torch.compile"):
                # compiled code is of one size; half a second each
                torch.compiler.reset()
            try:
                peaks[tokens] = self.peak_of(job.work(tokens))
            except torch.OutOfMemoryError:
                return False
            finally:
                self.contender.drop()
            return peaks[tokens] <= chosen.memory * MIB

        self.tokens = most_tokens(fits, _least(job))
        if not self.tokens:
            self.contender.failure = f"not even {_least(job)} tokens fit"
            return
        self.peak = peaks[self.tokens]
        self.work = job.work(self.tokens)

    def time(self, watch: Stopwatch) -> None:
        """Take one sample."""
        assert self.work is not None
        forward, backward, both = watch.times(*self.contender.steps(self.work, None))
        self.contender.samples.append((forward, backward, both))

    def row(self) -> Fit:
        """What is known, as a record."""
        failure = self.contender.failure
        samples = [] if failure else [both for *_, both in self.contender.samples]
        failure = failure or (None if samples else "interrupted")
        times = Timing.of(samples) if samples else None
        return Fit(self.contender.name, failure, self.tokens, self.peak, times)


def _measure(
    job: Job, chosen: Settings, rivals: Sequence[Rival], journal: Journal, tick: Callable[[], None]
) -> None:
    """Check numbers at the least tokens, find what fits, then time everyone in turns."""

    def step(rival: Rival, fn: Callable[[Contender], Any]) -> None:
        job.begin(rival.contender, journal)
        rival.contender.attempt(fn)

    truth = Truth.that_fits(job.work(_least(job)), job.case.eager(job.size))
    for rival in rivals:
        step(rival, truth.check)
        rival.contender.drop()
    del truth
    for rival in rivals:
        step(rival, lambda _, rival=rival: rival.fit(job, chosen, tick))
    torch.compiler.reset()
    watch = Stopwatch(job.device)
    for turn in range(WARMUP + chosen.repeat):
        first = turn % len(rivals)
        for rival in (*rivals[first:], *rivals[:first]):
            step(rival, lambda _, rival=rival: rival.time(watch))
            tick()
            if turn < WARMUP:
                rival.contender.samples.clear()


def _attempt(
    job: Job, chosen: Settings, rivals: Sequence[Rival], journal: Journal, console: Console
) -> bool:
    """Measure a job below a progress bar; returns whether it was interrupted."""
    job.leave_out(journal)
    with Progress(console=console, transient=True) as progress:
        # how many sizes are tried is not known before
        total = len(rivals) * (4 + HALVINGS + WARMUP + chosen.repeat)
        task = progress.add_task(f"{job.name}, {job.size_name}", total=total)
        tick = partial(progress.advance, task)
        return job.attempt(journal, lambda: _measure(job, chosen, rivals, journal, tick))


def _measure_all(chosen: Settings, facts: dict[str, Any], console: Console) -> int:
    """Measure job after job, printing and writing each; returns the command's status."""
    journal, path = Journal(chosen.journal), chosen.out / FILE
    written, failed = bool(journal.done), any(journal.done.values())
    for job in jobs_of(chosen):
        if job.title in journal.done:
            continue
        rivals = [Rival(contender) for contender in job.contenders]
        interrupted = _attempt(job, chosen, rivals, journal, console)
        sizes = (job.name, job.size_name, *job.size[:2], chosen.dtype, chosen.memory)
        found = Capacity(*sizes, facts, tuple(rival.row() for rival in rivals))
        if not interrupted or any(rival.tokens for rival in rivals):
            if not written:
                # what is there is replaced, but not before there is something to put in its place
                path.unlink(missing_ok=True)
            append(found, path)
            console.print(table(found))
            written = True
        if interrupted:
            console.print("interrupted")
            return INTERRUPTED
        failed |= job.failed
        journal.note(Event("done", job.title, why="failed" if job.failed else ""))
    return int(failed)


def run(chosen: Settings) -> int:
    """Measure case after case, print each, append it to capacity.jsonl.

    Returns 1 where an implementation was wrong or eager or ours raised, 130 where interrupted, else
    0. Raises DeviceLost where a GPU is of no more use to this process.
    """
    console = wide_console()
    device = torch.device(chosen.device)
    facts = environment(device, getattr(torch, chosen.dtype))
    console.print(f"{summary(facts)}; {chosen.dtype}", markup=False, highlight=False)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        status = _measure_all(chosen, facts, console)
    if (chosen.out / FILE).exists():
        console.print(f"results are in {chosen.out / FILE}", markup=False, highlight=False)
    return status
