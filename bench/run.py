"""Compare time and memory of functions with eager, torch.compile and checkpoint.

Checks every implementation of each case numerically, then measures its memory and, in turns, its
time: eager, torch.compile, torch.utils.checkpoint, fusedckpt at every level, and other libraries.
Each case runs in its own process.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from bench import jobs
from bench.cases import load_of
from bench.clock import ceilings
from bench.env import announced
from bench.jobs import Begin, Job, Measurement, jobs_of, measure_all
from bench.measure import WARMUP, Implementation, measure
from bench.options import Options
from bench.results import Row, groups, is_capacity, key_of, read

FILE = "run.jsonl"
# names that results must share to count as measured before
SAME = ("device", "commit", "torch", "triton")


def options(add: Options) -> None:
    """Add the options."""
    jobs.options(add, ("cpu",))
    jobs.add_tokens(add)
    jobs.add_rounds(add, 10, 50)
    add.flag("no-graphs", "launch kernels from Python on a GPU instead of replaying CUDA graphs")
    add.flag("resume", "keep rows of this device and commit in the file, measure the rest")
    add.place(FILE)


def prepare(chosen: Namespace) -> Namespace:
    """Check everything, before any work is done. Raises as `jobs.prepare` and `read` do."""
    chosen.earlier = {}
    if chosen.resume and (path := chosen.out / FILE).exists():
        runs = groups(row for row in read(path) if not is_capacity(row))
        chosen.earlier = {key_of(rows[0]): rows for rows in runs}
    return jobs.prepare(chosen)


def _measure(job: Job, implementations: list[Implementation], begin: Begin) -> Row:
    work, eager, chosen = job.work(job.tokens), job.case.eager(job.size), job.chosen
    graphs = job.device.type == "cuda" and not chosen.no_graphs
    measure(work, implementations, eager, chosen.repeat, begin, graphs)
    return {}


def _row(job: Job, one: Implementation, facts: Row) -> Row:
    """Return a line of run.jsonl, but for the environment."""
    return {
        **job.columns(),
        **{"tokens": job.tokens, "seq": job.case.seq(job.size, job.tokens), "kv": job.size.kv},
        **load_of(job.case, job.size, job.tokens, job.dtype),
        **one.row(),
    }


def _is_settled(one: Implementation, row: Row | None, repeat: int) -> bool:
    """Whether a row says it all: in rounds enough, or by a failure that would come again."""
    if row is None:
        return False
    if row["failure"] == "not installed":
        return one.failure is not None
    return row["both_ms"] is None or len(row["both_ms"]) >= repeat


def _is_left(job: Job, facts: Row) -> bool:
    """Whether an earlier run of the same commit lacks an implementation of a job."""
    found = job.implementations()
    key = key_of(_row(job, found[0], {}) | facts)
    rows = [r for r in job.chosen.earlier.get(key, ()) if all(r[n] == facts[n] for n in SAME)]
    by_name: dict[str, Any] = {row["name"]: row for row in rows}
    return not all(_is_settled(one, by_name.get(one.name), job.chosen.repeat) for one in found)


def run(chosen: Namespace) -> int:
    """Measure, print a table per case and size, append its rows to run.jsonl."""
    facts = announced(chosen, f", medians of {chosen.repeat} rounds")
    if chosen.resume and (facts["commit"] or "-dirty").endswith("-dirty"):
        print("no commit names what is measured here: nothing counts as measured before")
        chosen.earlier = {}
    left = [job for job in jobs_of(chosen) if _is_left(job, facts)]
    if not left:
        print("nothing left to measure")
        return 0
    # not for every process
    chosen.earlier = {}
    is_toy = set(chosen.size) == {"tiny"}
    dtype = getattr(torch, chosen.dtype)
    matmul, copy = ceilings(torch.device(chosen.device), dtype, 8 if is_toy else 1)
    facts |= {"matmul_tflops": matmul, "copy_gbytes": copy}
    measurement = Measurement(FILE, 3 + WARMUP + chosen.repeat, _measure, _row)
    return measure_all(chosen, left, measurement, facts, keeps=chosen.resume)
