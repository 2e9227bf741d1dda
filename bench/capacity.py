"""`python -m bench capacity`: how many tokens fit in a given memory, and how fast they are."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from bench.clock import Stopwatch
from bench.env import announced
from bench.jobs import Begin, Job, Measurement, check_choice, jobs_of, measure_all
from bench.measure import WARMUP, Implementation, Truth, Work, in_turns
from bench.results import Row
from bench.search import most
from bench.settings import SEQUENCE
from bench.tables import MIB
from fusedckpt.memory import peak_bytes

# how near the number of tokens comes to the largest that fits
PRECISION = 1 / 8


prepare = check_choice


def _forget(one: Implementation) -> None:
    """Free compiled code: it is of one size, and sizes are limited."""
    # half a second each
    if one.name.startswith("torch.compile"):
        torch.compiler.reset()


class Capacity(Measurement):
    """Numbers at the least tokens, the most that fit of each implementation, and its times."""

    file = "capacity.jsonl"

    def __init__(self, chosen: Namespace):
        self.memory, self.repeat = chosen.memory, chosen.repeat
        # numbers, the most tokens, and turns
        self.num_steps = 2 + WARMUP + chosen.repeat

    def measure(
        self, job: Job, implementations: list[Implementation], begin: Begin, found: Row
    ) -> None:
        """Check numbers, find the most tokens that fit, time all; found: tokens, bytes by name."""

        def step(one: Implementation, fn: Callable[[Implementation], Any]) -> None:
            begin(one)
            one.attempt(fn)

        truth = Truth.that_fits(job.work(_least(job)), job.case.eager(job.size))
        for one in implementations:
            step(one, truth.check)
            one.drop()
        del truth
        for one in implementations:
            step(one, lambda one: self.fit(job, one, found))
        works: dict[str, Work] = {}
        watch = Stopwatch(job.device)

        def time(one: Implementation) -> None:
            if one.name not in works:
                _forget(one)
                works[one.name] = job.work(found[one.name][0])
            one.time(works[one.name], watch)

        in_turns(implementations, self.repeat, lambda one: step(one, time))

    def fit(self, job: Job, one: Implementation, found: Row) -> None:
        """Find how many tokens fit; raises the errors of `one`, except lack of memory."""
        # sequences are as long for all
        least, peaks = _least(job), dict[int, int]()

        def fits(count: int) -> bool:
            _forget(one)
            try:
                work = one.own(job.work(count * least))
                peaks[count] = peak_bytes(lambda: work.results(one.fn), work.device)
            except torch.OutOfMemoryError:
                return False
            finally:
                one.drop()
            return peaks[count] <= self.memory * MIB

        if count := most(fits, precision=PRECISION):
            found[one.name] = count * least, peaks[count]
        else:
            one.failure = f"not even {least} tokens fit"

    def row(self, job: Job, one: Implementation, found: Row) -> Row:
        """Return a line of capacity.jsonl, but for the environment."""
        tokens, peak = found.get(one.name, (0, 0))
        names = ("name", "failure", "is_wrong", "both_ms")
        own = {name: value for name, value in one.row().items() if name in names}
        fits = {"memory": self.memory, "tokens": tokens, "peak_bytes": peak}
        return job.columns() | fits | own

    def is_kept(self, job: Job, rows: list[Row]) -> bool:
        """Whether something is known of an interrupted job."""
        return any(row["tokens"] for row in rows)


def _least(job: Job) -> int:
    """Return the least that is tried: a sequence."""
    return job.size.tokens or SEQUENCE


def run(chosen: Namespace) -> int:
    """Measure case after case, print each, append its rows to capacity.jsonl."""
    facts = announced(chosen, "")
    return measure_all(chosen, list(jobs_of(chosen)), Capacity(chosen), facts)
