"""`python -m bench run`: check and measure every implementation of the chosen cases and sizes."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from bench import clock
from bench.cases import load_of
from bench.env import announced
from bench.jobs import Begin, Job, Measurement, check_choice, jobs_of, measure_all
from bench.measure import OTHER_STEPS, Implementation, measure
from bench.results import Row, groups, is_capacity, key_of, read


def prepare(chosen: Namespace) -> Namespace:
    """Check everything, before any work is done.

    Raises ValueError for unknown names, tokens that do not divide into sequences, and a file that
    cannot be resumed.
    """
    if chosen.resume and (chosen.out / Run.file).exists():
        read(chosen.out / Run.file)
    return check_choice(chosen)


def _is_settled(one: Implementation, row: Row | None, repeat: int) -> bool:
    """Whether a row says it all: in rounds enough, or by a failure that would come again."""
    if row is None or row["failure"] == "interrupted":
        return False
    if row["failure"] == "not installed":
        return one.failure is not None
    return row["both_ms"] is None or len(row["both_ms"]) >= repeat


def _num_samples(rows: list[Row]) -> int:
    return sum(len(row["both_ms"] or ()) for row in rows)


class Run(Measurement):
    """The rows that `--resume` finds, and the ceilings that were measured so far."""

    file = "run.jsonl"

    def __init__(self, chosen: Namespace, facts: Row):
        self.repeat, self.graphs, self.keeps = chosen.repeat, not chosen.no_graphs, chosen.resume
        self.num_steps, self.facts = OTHER_STEPS + chosen.repeat, facts
        self.earlier: dict[Any, list[Row]] = {}
        # by whether they are those of toys
        self.ceilings: dict[bool, tuple[float, float]] = {}
        path, commit = chosen.out / self.file, facts["commit"]
        self.is_named = commit is not None and not commit.endswith("-dirty")
        if chosen.resume and self.is_named and path.exists():
            names = ("device", "commit", "torch", "triton")
            for rows in groups(row for row in read(path) if not is_capacity(row)):
                if all(rows[0][name] == facts[name] for name in names):
                    self.earlier[key_of(rows[0])] = rows

    def measure(
        self, job: Job, implementations: list[Implementation], begin: Begin, found: Row
    ) -> None:
        """Take the ceilings, unless they are known, then check, measure and check again."""
        is_toy = job.size_name == "tiny"
        found["most"] = self.ceilings.get(is_toy) or clock.ceilings(
            job.device, job.dtype, 8 if is_toy else 1
        )
        work, eager = job.work(job.tokens), job.case.eager(job.size)
        found["checked"] = measure(
            work, implementations, eager, self.repeat, begin=begin, graphs=self.graphs
        )

    def row(self, job: Job, one: Implementation, found: Row) -> Row:
        """Return a line of run.jsonl, but for the environment."""
        most = found.get("most", (None, None))
        return {
            **job.columns(),
            "tokens": job.tokens,
            "seq": job.case.seq(job.size, job.tokens),
            "kv": job.size.kv,
            **load_of(job.case, job.size, job.tokens, job.dtype),
            "checked_tokens": found.get("checked", 0),
            "matmul_tflops": most[0],
            "copy_gbytes": most[1],
            **one.row(),
        }

    def _before(self, job: Job) -> list[Row]:
        """Return the rows of a job that were measured before."""
        (eager, *_) = job.implementations()
        return self.earlier.get(key_of(self.row(job, eager, {}) | self.facts), [])

    def is_left(self, job: Job) -> bool:
        """Whether some implementation of a job is to be measured."""
        rows = {row["name"]: row for row in self._before(job)}
        found = job.implementations()
        return not all(_is_settled(one, rows.get(one.name), self.repeat) for one in found)

    def is_kept(self, job: Job, rows: list[Row]) -> bool:
        """Whether an interrupted job has more samples than there were."""
        return _num_samples(rows) > _num_samples(self._before(job))

    def note(self, rows: list[Row]) -> None:
        """Keep the ceilings."""
        row = rows[0]
        if row["matmul_tflops"] is not None:
            most = row["matmul_tflops"], row["copy_gbytes"]
            self.ceilings.setdefault(row["size"] == "tiny", most)


def run(chosen: Namespace) -> int:
    """Measure, print a table per case and size, append its rows to run.jsonl."""
    facts = announced(chosen, f", medians of {chosen.repeat} rounds")
    measurement = Run(chosen, facts)
    if chosen.resume and not measurement.is_named:
        print("no commit names what is measured here: nothing counts as measured before")
    jobs = [job for job in jobs_of(chosen) if measurement.is_left(job)]
    if not jobs:
        print("nothing left to measure")
        return 0
    return measure_all(chosen, jobs, measurement, facts)
