"""`python -m bench profile`: each kernel of ours by name, how often it runs and for how long."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch.profiler import profile

from bench.env import announced
from bench.jobs import Job, check_choice, jobs_of
from bench.measure import Implementation, Work
from bench.results import Row
from bench.tables import Columns, show, significant

FILE = "profile.jsonl"
COLUMNS: Columns = {
    "kernel": lambda row: row["kernel"],
    "launches": lambda row: str(row["launches"]),
    "us": lambda row: significant(row["us"]),
}


prepare = check_choice


def _kernels(one: Implementation, work: Work) -> Iterator[Row]:
    """Profile forward and backward, once; on a CPU, which has no kernels, ATen's operations."""
    with profile() as profiler:
        one.results(work)
    is_cuda, where = work.device.type == "cuda", "device" if work.device.type == "cuda" else "cpu"
    for event in profiler.key_averages():
        if (event.device_type.name == "CUDA") == is_cuda:
            took = getattr(event, f"self_{where}_time_total")
            yield {"kernel": event.key, "launches": event.count, "us": round(took, 3)}


def _look(job: Job, is_bare: bool) -> list[Row]:
    work, rows = job.work(job.tokens), []
    for one in job.implementations():
        if one.name == "eager":
            continue
        for _ in range(2):
            one.results(work)
        if is_bare:
            with torch.cuda.profiler.profile() if work.device.type == "cuda" else nullcontext():
                one.results(work)
            continue
        found = sorted(_kernels(one, work), key=lambda row: -row["us"])
        rows += [job.columns() | {"tokens": job.tokens, "name": one.name, **row} for row in found]
        show(f"{job.title}: {one.name}", COLUMNS, found)
    return rows


def run(chosen: Namespace) -> int:
    """Print a table for each implementation of each case; write rows, each case's at once."""
    facts = announced(chosen, "")
    if not chosen.bare:
        (chosen.out / FILE).unlink(missing_ok=True)
    for job in jobs_of(chosen):
        rows = _look(job, chosen.bare)
        with (chosen.out / FILE).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row | facts) + "\n" for row in rows)
    return 0
