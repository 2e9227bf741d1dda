"""`python -m bench capacity`: how many tokens fit in a given memory, and how fast they are."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from bench.clock import Stopwatch
from bench.env import environment, summary
from bench.jobs import Job, Measuring, Say, check_choice, jobs_of, measure_all
from bench.measure import WARMUP, Implementation, Truth, Work, in_turns
from bench.results import Row
from bench.settings import SEQUENCE
from bench.table import show_rows
from fusedckpt.memory import peak_bytes

FILE = "capacity.jsonl"
MIB = 2**20
# tokens are told apart by an eighth
HALVINGS = 3


def prepare(chosen: Namespace) -> Namespace:
    """Raise ValueError for unknown names."""
    check_choice(chosen)
    return chosen


def most_tokens(fits: Callable[[int], bool], least: int) -> int:
    """Return the most tokens that fit: `least`, doubled, then to an eighth; 0 for none.

    What fits is taken to fit with fewer tokens too. All are multiples of `least`, so that sequences
    are as long for all.
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


def _forget(one: Implementation) -> None:
    """Let go of what was compiled: it is of one size, and sizes are limited."""
    # half a second each
    if one.name.startswith("torch.compile"):
        torch.compiler.reset()


class Search:
    """What fits of each implementation of a job, and then its times there."""

    def __init__(self, job: Job, memory: int, repeat: int):
        self.job, self.limit, self.repeat = job, memory * MIB, repeat
        # the least that is tried is a sequence
        self.least = job.size.tokens or SEQUENCE
        # tokens and the bytes that they add, by name
        self.fits: dict[str, tuple[int, int]] = {}

    def fit(self, one: Implementation) -> None:
        """Find how many tokens fit; raises what it raises, but for lack of memory."""
        peaks: dict[int, int] = {}

        def fits(tokens: int) -> bool:
            _forget(one)
            try:
                work = one.own(self.job.work(tokens))
                peaks[tokens] = peak_bytes(lambda: work.results(one.fn), work.device)
            except torch.OutOfMemoryError:
                return False
            finally:
                one.drop()
            return peaks[tokens] <= self.limit

        tokens = most_tokens(fits, self.least)
        if tokens:
            self.fits[one.name] = tokens, peaks[tokens]
        else:
            one.failure = f"not even {self.least} tokens fit"

    def take(self, implementations: list[Implementation], begin: Callable[..., None]) -> None:
        """Check numbers at the least tokens, find what fits, then time all in turns."""

        def step(one: Implementation, fn: Callable[[Implementation], Any]) -> None:
            begin(one)
            one.attempt(fn)

        truth = Truth.that_fits(self.job.work(self.least), self.job.case.eager(self.job.size))
        for one in implementations:
            step(one, truth.check)
            one.drop()
        del truth
        for one in implementations:
            step(one, self.fit)
        works: dict[str, Work] = {}
        watch = Stopwatch(self.job.device)

        def time(one: Implementation) -> None:
            tokens, _ = self.fits[one.name]
            if one.name not in works:
                _forget(one)
                works[one.name] = self.job.work(tokens)
            one.time(works[one.name], watch)

        in_turns(implementations, self.repeat, lambda one: step(one, time))


def _row(job: Job, one: Implementation, memory: int, fits: tuple[int, int] = (0, 0)) -> Row:
    names = ("name", "failure", "is_wrong", "both_ms")
    own = {name: value for name, value in one.row().items() if name in names}
    return job.columns() | {"memory": memory, "tokens": fits[0], "peak_bytes": fits[1]} | own


def _measure(say: Say, job: Job, lost: dict[str, str], memory: int, repeat: int) -> None:
    """Measure a job, in a process of its own."""
    search = Search(job, memory, repeat)
    implementations, is_interrupted = job.attempt(say, lost, search.take)
    rows = [_row(job, one, memory, search.fits.get(one.name, (0, 0))) for one in implementations]
    say("rows", rows, is_interrupted)


def run(chosen: Namespace) -> int:
    """Measure case after case, print each, append its rows to capacity.jsonl."""
    facts = environment(torch.device(chosen.device), getattr(torch, chosen.dtype))
    print(f"{summary(facts)}; {chosen.dtype}", flush=True)
    how = Measuring(
        _measure,
        options=lambda job: (chosen.memory, chosen.repeat),
        blank=lambda job, one: _row(job, one, chosen.memory),
        # numbers, what fits, and turns
        num_steps=2 + WARMUP + chosen.repeat,
        is_kept=lambda job, rows: any(row["tokens"] for row in rows),
        show=show_rows,
    )
    jobs = list(jobs_of(chosen))
    return measure_all(chosen, jobs, how, facts, chosen.out / FILE, replaces=True)
