"""Compare time and memory of functions with eager, torch.compile and checkpoint.

Checks every implementation of each case numerically, then measures its memory and, in turns, its
time: eager, torch.compile, torch.utils.checkpoint, fusedckpt at every level, and other libraries.
Each case runs in its own process. `--memory` finds how many tokens each implementation fits into
the same memory, and times it there; `--profile` lists the kernels that ours launch.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.profiler import profile

from bench import jobs
from bench.cases import CASES, SEQUENCE, SIZES, load_of
from bench.clock import Stopwatch, ceilings
from bench.env import announced
from bench.jobs import Begin, Job, Measurement, jobs_of, measure_all
from bench.measure import WARMUP, Implementation, Truth, Work, in_turns, measure
from bench.options import POSITIVE, Options
from bench.results import MIB, Row, groups, key_of, read
from bench.search import most
from fusedckpt.memory import peak_bytes

FILE = "run.jsonl"
# names that results must share to count as measured before
SAME = ("device", "commit", "torch", "triton")
# the cases that can trade time for memory, at the widths of one model
BLOCKS = ("norm_gated_mlp_residual", "decoder_layer", "stack")
# how near the number of tokens that fit comes to the largest
PRECISION = 1 / 8


def options(add: Options) -> None:
    """Add the options."""
    text = "what to measure; default: all, with --memory those that can trade time for it"
    add.many("case", text, choices=CASES)
    add.many("size", f"widths: {', '.join(SIZES)}", ("cpu",), ("llama-3-8b",), choices=SIZES)
    text = "rows of x; default: 4096 on a CPU, 8192 on a GPU, 48 at tiny"
    add.many("tokens", text, type=POSITIVE, metavar="N")
    add.dtype()
    add.many("only", "only implementations with this in their name, and eager")
    add.many("skip", "no implementations with this in their name")
    text = "find how many tokens fit where forward and backward may add so many MiB"
    add.one("memory", text, type=POSITIVE, metavar="MIB")
    add.flag("profile", "list the kernels of each implementation, and how long they take, too")
    add.count("repeat", "timed rounds", 10, 50)
    add.count("timeout", "seconds that one step of an implementation may take", 600)
    add.flag("in-process", "measure in this process, for a debugger: a crash ends the command")
    add.flag("no-graphs", "launch kernels from Python on a GPU instead of replaying CUDA graphs")
    add.flag("resume", "keep rows of this device and commit in the file, measure the rest")
    add.place(FILE)


def prepare(chosen: Namespace) -> Namespace:
    """Check everything, before any work is done. Raises as `jobs.prepare` and `read` do."""
    chosen.case = chosen.case or (BLOCKS if chosen.memory else tuple(CASES))
    if chosen.memory and chosen.tokens:
        raise ValueError("--memory finds the tokens: expected no --tokens")
    chosen.earlier = {}
    if chosen.resume and (path := chosen.out / FILE).exists():
        chosen.earlier = {key_of(rows[0]): rows for rows in groups(read(path))}
    return jobs.prepare(chosen)


def _measure(job: Job, implementations: list[Implementation], begin: Begin) -> Row:
    """Measure a case at a number of tokens."""
    work = job.work(job.tokens)
    chosen = job.chosen
    graphs = job.device.type == "cuda" and not chosen.no_graphs
    measure(work, implementations, job.case.eager(job.size), chosen.repeat, begin, graphs)
    if chosen.profile:
        for implementation in implementations:
            begin(implementation)
            implementation.attempt(partial(_profile, work))
    return {}


def _profile(work: Work, implementation: Implementation) -> None:
    implementation.facts["kernels"] = list(_kernels(implementation, work))


def _kernels(implementation: Implementation, work: Work) -> Iterator[tuple[str, int, float]]:
    """Profile forward and backward, once; on a CPU, which has no kernels, ATen's operations.

    Yields names, launches and microseconds, the longest first.
    """
    with profile() as profiler:
        implementation.results(work)
    is_cuda = work.device.type == "cuda"
    kind = f"self_{'device' if is_cuda else 'cpu'}_time_total"
    events = [e for e in profiler.key_averages() if (e.device_type.name == "CUDA") == is_cuda]
    for event in sorted(events, key=lambda event: -getattr(event, kind)):
        yield event.key, event.count, round(getattr(event, kind), 3)


def _forget(implementation: Implementation) -> None:
    """Free compiled code: it is of one size, and sizes are limited."""
    # half a second each
    if implementation.name.startswith("torch.compile"):
        torch.compiler.reset()


def _fit(job: Job, implementation: Implementation) -> None:
    """Find how many tokens fit; raises the implementation's errors, except lack of memory."""
    # a sequence, which is as long for all
    least = job.size.tokens or SEQUENCE
    peaks: dict[int, int] = {}

    def fits(count: int) -> bool:
        _forget(implementation)
        try:
            work = implementation.packed(job.work(count * least))
            peaks[count] = peak_bytes(lambda: work.results(implementation.fn), work.device)
        except torch.OutOfMemoryError:
            return False
        finally:
            implementation.drop()
        return peaks[count] <= job.chosen.memory * MIB

    if count := most(fits, precision=PRECISION):
        implementation.facts |= {"fits": count * least, "peak_bytes": peaks[count]}
    else:
        implementation.failure = f"not even {least} tokens fit"


def _measure_memory(job: Job, implementations: list[Implementation], begin: Begin) -> Row:
    """Check numbers at the fewest tokens, find the most that fit, and time all at these."""

    def each(fn: Callable[[Implementation], None], implementation: Implementation) -> None:
        begin(implementation)
        implementation.attempt(fn)

    work = job.work(job.size.tokens or SEQUENCE)
    truth = Truth(work, job.case.eager(job.size))
    for implementation in implementations:
        each(truth.check, implementation)
        implementation.drop()
    del truth, work
    for implementation in implementations:
        each(partial(_fit, job), implementation)
    works: dict[str, Work] = {}
    watch = Stopwatch(job.device)

    def time(implementation: Implementation) -> None:
        if implementation.name not in works:
            _forget(implementation)
            works[implementation.name] = job.work(implementation.facts["fits"])
        implementation.time(works[implementation.name], watch)

    in_turns(implementations, job.chosen.repeat, partial(each, time))
    return {}


def _row(job: Job, implementation: Implementation, facts: Row) -> Row:
    """Return a row, but for the environment."""
    widths = {"dim": job.size.dim, "hidden": job.size.hidden, "kv": job.size.kv}
    case = {"command": "run", "case": job.name, "size": job.size_name, **widths}
    case["dtype"] = job.chosen.dtype
    if job.chosen.memory:
        names = ("name", "failure", "is_wrong", "both_ms", "saved_bytes", "peak_bytes")
        row = {name: implementation.row()[name] for name in names}
        return case | {"memory": job.chosen.memory, "fits": 0} | row | implementation.facts
    return {
        **case,
        **{"tokens": job.tokens, "seq": job.case.seq(job.size, job.tokens)},
        **load_of(job.case, job.size, job.tokens, job.dtype),
        **implementation.row(),
    }


def _is_settled(implementation: Implementation, row: Row | None, chosen: Namespace) -> bool:
    """Whether a row needs no new run: it has enough rounds, or a failure that would come again."""
    if row is None:
        return False
    if row["failure"] == "not installed":
        return implementation.failure is not None
    is_listed = "kernels" in row or not chosen.profile
    return row["both_ms"] is None or (is_listed and len(row["both_ms"]) >= chosen.repeat)


def _is_left(job: Job, facts: Row) -> bool:
    """Whether an earlier run of the same commit lacks an implementation of a job."""
    implementations = job.implementations()
    key = key_of(_row(job, implementations[0], {}) | facts)
    rows = [r for r in job.chosen.earlier.get(key, ()) if all(r[n] == facts[n] for n in SAME)]
    by_name: dict[str, Any] = {row["name"]: row for row in rows}
    return not all(
        _is_settled(implementation, by_name.get(implementation.name), job.chosen)
        for implementation in implementations
    )


def run(chosen: Namespace) -> int:
    """Measure, print a table per case and size, append its rows to run.jsonl."""
    facts = announced(chosen, f", medians of {chosen.repeat} rounds")
    if chosen.resume and (facts["commit"] or "-dirty").endswith("-dirty"):
        print("this code has no commit of its own: nothing counts as measured before")
        chosen.earlier = {}
    left = [job for job in jobs_of(chosen) if _is_left(job, facts)]
    if not left:
        print("nothing left to measure")
        return 0
    # not for every process
    chosen.earlier = {}
    if chosen.memory:
        measurement = Measurement(FILE, 2 + WARMUP + chosen.repeat, _measure_memory, _row)
    else:
        is_toy = set(chosen.size) == {"tiny"}
        dtype = getattr(torch, chosen.dtype)
        matmul, copy = ceilings(torch.device(chosen.device), dtype, 8 if is_toy else 1)
        facts |= {"matmul_tflops": matmul, "copy_gbytes": copy}
        num_steps = 3 + WARMUP + chosen.repeat + chosen.profile
        measurement = Measurement(FILE, num_steps, _measure, _row)
    return measure_all(chosen, left, measurement, facts, keeps=chosen.resume)
