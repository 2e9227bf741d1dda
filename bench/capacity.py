"""Find how many tokens each implementation fits into the same memory, and their speed."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial

import torch

from bench import jobs
from bench.cases import SEQUENCE
from bench.clock import Stopwatch
from bench.env import announced
from bench.jobs import Begin, Job, Measurement, jobs_of, measure_all
from bench.measure import WARMUP, Implementation, Truth, Work, in_turns
from bench.options import Options
from bench.results import MIB, Row
from fusedckpt.memory import peak_bytes

FILE = "capacity.jsonl"
# the cases that can trade time for memory
BLOCKS = ("norm_gated_mlp_residual", "decoder_layer", "stack")
# how near the number of tokens comes to the largest that fits
PRECISION = 1 / 8
prepare = jobs.prepare


def options(add: Options) -> None:
    """Add the options."""
    jobs.options(add, ("gpt2",), cases=BLOCKS)
    add.count("memory", "MiB that forward and backward may add", 1 << 10, 1 << 14)
    jobs.add_rounds(add, 3, 10)
    add.place(FILE)


def most(fits: Callable[[int], bool], guess: int = 1, precision: float = 0.0) -> int:
    """Return the largest count that fits, up to a share of it; 0 where 1 does not.

    Goes up or down from a guess by steps that double, then bisects; asks of no count twice. All
    counts below one that fits are taken to fit too.
    """
    low, high, step = guess, guess, 1
    if fits(guess):
        while fits(high := low + step):
            low, step = high, 2 * step
    else:
        while (low := max(0, high - step)) and not fits(low):
            high, step = low, 2 * step
    while high - low > max(1, precision * low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _forget(one: Implementation) -> None:
    """Free compiled code: it is of one size, and sizes are limited."""
    # half a second each
    if one.name.startswith("torch.compile"):
        torch.compiler.reset()


def _fit(job: Job, one: Implementation) -> None:
    """Find how many tokens fit; raises the errors of `one`, except lack of memory."""
    # a sequence, which is as long for all
    least, peaks = job.size.tokens or SEQUENCE, dict[int, int]()

    def fits(count: int) -> bool:
        _forget(one)
        try:
            work = one.own(job.work(count * least))
            peaks[count] = peak_bytes(lambda: work.results(one.fn), work.device)
        except torch.OutOfMemoryError:
            return False
        finally:
            one.drop()
        return peaks[count] <= job.chosen.memory * MIB

    if count := most(fits, precision=PRECISION):
        one.facts |= {"tokens": count * least, "peak_bytes": peaks[count]}
    else:
        one.failure = f"not even {least} tokens fit"


def _measure(job: Job, implementations: list[Implementation], begin: Begin) -> Row:
    """Check numbers at the fewest tokens, find the most that fit, and time all at these."""

    def each(fn: Callable[[Implementation], None], one: Implementation) -> None:
        begin(one)
        one.attempt(fn)

    work = job.work(job.size.tokens or SEQUENCE)
    truth = Truth(work, job.case.eager(job.size))
    for one in implementations:
        each(truth.check, one)
        one.drop()
    del truth, work
    for one in implementations:
        each(partial(_fit, job), one)
    works: dict[str, Work] = {}
    watch = Stopwatch(job.device)

    def time(one: Implementation) -> None:
        if one.name not in works:
            _forget(one)
            works[one.name] = job.work(one.facts["tokens"])
        one.time(works[one.name], watch)

    in_turns(implementations, job.chosen.repeat, partial(each, time))
    return {}


def _row(job: Job, one: Implementation, facts: Row) -> Row:
    """Return a line of capacity.jsonl, but for the environment."""
    names = ("name", "failure", "is_wrong", "both_ms")
    fits = {"memory": job.chosen.memory, "tokens": 0, "peak_bytes": 0} | one.facts
    return job.columns() | fits | {name: one.row()[name] for name in names}


def run(chosen: Namespace) -> int:
    """Measure case after case, print each, write its rows to capacity.jsonl."""
    facts, measurement = announced(chosen, ""), Measurement(FILE, 0, _measure, _row)
    measurement = measurement._replace(num_steps=2 + WARMUP + chosen.repeat)
    return measure_all(chosen, list(jobs_of(chosen)), measurement, facts, keeps=False)
