"""List the kernels that fusedckpt launches, how often each runs and for how long.

Runs forward and backward of every level and variant of the cases under torch's profiler.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator

from torch.profiler import profile

from bench import jobs
from bench.cases import CASES
from bench.env import announced
from bench.jobs import jobs_of
from bench.measure import Implementation, Work
from bench.options import Options
from bench.results import Row
from bench.tables import Columns, show, significant

FILE = "profile.jsonl"
COLUMNS: Columns = {
    "kernel": lambda row: row["kernel"],
    "launches": lambda row: str(row["launches"]),
    "us": lambda row: significant(row["us"]),
}
prepare = jobs.prepare


def options(add: Options) -> None:
    """Add the options."""
    jobs.options(add, ("cpu",), cases=tuple(CASES)[:-2], only=("fusedckpt",))
    jobs.add_tokens(add)
    add.place(FILE)


def _kernels(one: Implementation, work: Work) -> Iterator[Row]:
    """Profile forward and backward, once; on a CPU, which has no kernels, ATen's operations."""
    with profile() as profiler:
        one.results(work)
    is_cuda, where = work.device.type == "cuda", "device" if work.device.type == "cuda" else "cpu"
    for event in profiler.key_averages():
        if (event.device_type.name == "CUDA") == is_cuda:
            took = getattr(event, f"self_{where}_time_total")
            yield {"kernel": event.key, "launches": event.count, "us": round(took, 3)}


def run(chosen: Namespace) -> int:
    """Print a table for each implementation of each case; write rows, each case's at once."""
    facts, path = announced(chosen, ""), chosen.out / FILE
    print(f"results go to {path}", flush=True)
    path.write_text("")
    for job in jobs_of(chosen):
        work = job.work(job.tokens)
        for one in job.implementations()[1:]:
            for _ in range(2):
                one.results(work)
            found = sorted(_kernels(one, work), key=lambda row: -row["us"])
            show(f"{job.title}: {one.name}", COLUMNS, found)
            shared = job.columns() | {"tokens": job.tokens, "name": one.name} | facts
            with path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(shared | row) + "\n" for row in found)
    return 0
