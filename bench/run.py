"""`python -m bench run`: memory and time of every implementation of the chosen cases and sizes."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from bench import clock, table
from bench.cases import load_of
from bench.env import environment, summary
from bench.jobs import Job, Measuring, Say, check_choice, jobs_of, measure_all
from bench.measure import OTHER_STEPS, Implementation, measure
from bench.results import Row, groups, is_capacity, key_of, read

FILE = "run.jsonl"


def prepare(chosen: Namespace) -> Namespace:
    """Check everything, before any work is done.

    Raises ValueError for unknown names, tokens that do not divide into sequences, and a file that
    cannot be resumed.
    """
    check_choice(chosen)
    if chosen.resume and (chosen.out / FILE).exists():
        read(chosen.out / FILE)
    return chosen


def _row(job: Job, one: Implementation, checked: int = 0, most: Any = (None, None)) -> Row:
    return {
        **job.columns(),
        "tokens": job.tokens,
        "seq": job.case.seq(job.size, job.tokens),
        "kv": job.size.kv,
        **load_of(job.case, job.size, job.tokens, job.dtype),
        "checked_tokens": checked,
        "matmul_tflops": most[0],
        "copy_gbytes": most[1],
        **one.row(),
    }


def _measure(
    say: Say, job: Job, lost: dict[str, str], repeat: int, graphs: bool, ceilings: Any
) -> None:
    """Measure a job, in a process of its own."""
    found: dict[str, Any] = {}

    def take(implementations: list[Implementation], begin: Any) -> None:
        shrink = 8 if job.size_name == "tiny" else 1
        found["most"] = ceilings or clock.ceilings(job.device, job.dtype, shrink)
        work, eager = job.work(job.tokens), job.case.eager(job.size)
        found["checked"] = measure(work, implementations, eager, repeat, begin, graphs)

    implementations, is_interrupted = job.attempt(say, lost, take)
    say("rows", [_row(job, one, **found) for one in implementations], is_interrupted)


def _is_settled(one: Implementation, row: Row | None, repeat: int) -> bool:
    """Whether a row says it all: in rounds enough, or by a failure that would come again."""
    if row is None or row["failure"] == "interrupted":
        return False
    if row["failure"] == "not installed":
        return one.failure is not None
    return row["both_ms"] is None or len(row["both_ms"]) >= repeat


def _num_samples(rows: list[Row]) -> int:
    return sum(len(row["both_ms"] or ()) for row in rows)


class Session:
    """What `--resume` finds, and the ceilings that were measured so far."""

    def __init__(self, chosen: Namespace, facts: Row):
        self.chosen, self.facts = chosen, facts
        self.earlier: dict[Any, list[Row]] = {}
        # by whether they are those of toys
        self.ceilings: dict[bool, tuple[float, float]] = {}
        path, commit = chosen.out / FILE, facts["commit"]
        self.is_named = commit is not None and not commit.endswith("-dirty")
        if chosen.resume and self.is_named and path.exists():
            names = ("device", "commit", "torch", "triton")
            for rows in groups(row for row in read(path) if not is_capacity(row)):
                if all(rows[0][name] == facts[name] for name in names):
                    self.earlier[key_of(rows[0])] = rows

    def rows_of(self, job: Job) -> list[Row]:
        """What was measured of a job before."""
        (eager, *_) = job.implementations()
        return self.earlier.get(key_of(_row(job, eager) | self.facts), [])

    def is_left(self, job: Job) -> bool:
        """Whether some implementation of a job is to be measured."""
        rows = {row["name"]: row for row in self.rows_of(job)}
        return not all(
            _is_settled(one, rows.get(one.name), self.chosen.repeat)
            for one in job.implementations()
        )

    def options(self, job: Job) -> tuple[Any, ...]:
        """What `_measure` takes besides."""
        ceilings = self.ceilings.get(job.size_name == "tiny")
        return self.chosen.repeat, not self.chosen.no_graphs, ceilings

    def is_kept(self, job: Job, rows: list[Row]) -> bool:
        """Whether an interrupted job has more samples than there were."""
        return _num_samples(rows) > _num_samples(self.rows_of(job))

    def show(self, rows: list[Row]) -> None:
        """Print the rows of a job, and keep its ceilings."""
        row = rows[0]
        if row["matmul_tflops"] is not None:
            most = row["matmul_tflops"], row["copy_gbytes"]
            self.ceilings.setdefault(row["size"] == "tiny", most)
        table.show_rows(rows)


def run(chosen: Namespace) -> int:
    """Measure, print a table per case and size, append its rows to run.jsonl."""
    facts = environment(torch.device(chosen.device), getattr(torch, chosen.dtype))
    print(f"{summary(facts)}; {chosen.dtype}, medians of {chosen.repeat} rounds", flush=True)
    session = Session(chosen, facts)
    if chosen.resume and not session.is_named:
        print("no commit names what is measured here: nothing counts as measured before")
    jobs = [job for job in jobs_of(chosen) if session.is_left(job)]
    if not jobs:
        print("nothing left to measure")
        return 0
    each = OTHER_STEPS + chosen.repeat
    how = Measuring(
        _measure, session.options, _row, each, session.is_kept, session.show
    )  # fmt: skip
    return measure_all(chosen, jobs, how, facts, chosen.out / FILE, replaces=not chosen.resume)
