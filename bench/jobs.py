"""Cases at sizes, each measured in a process of its own.

A crash of that process, or a hang in it, costs one row: the process says which implementation is at
work, and the case is measured again without it.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any, NamedTuple

import torch

import fusedckpt
from bench.cases import CASES, DEFAULT_TOKENS, SIZES, Case, Size, draw
from bench.implementations import implementations_of
from bench.measure import NO_GRAPH, DeviceLost, Implementation, Work
from bench.results import Row, append
from bench.show import BENIGN, LEGEND, show_rows
from fusedckpt.reporting.progress import progress

# implementations that the command stands for: it fails if one of these raises
OWN = ("eager", "fusedckpt", "ours(")
Begin = Callable[[Implementation], None]
Say = Callable[[str, Any], None]


class Job(NamedTuple):
    """One case at one size."""

    # a key of CASES
    name: str
    # a key of SIZES
    size_name: str
    # one of the sizes of that name
    size: Size
    # rows of x
    tokens: int
    # the options of the command
    chosen: Namespace

    @property
    def device(self) -> torch.device:
        """The device to measure."""
        return torch.device(self.chosen.device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all tensors."""
        return getattr(torch, self.chosen.dtype)

    @property
    def case(self) -> Case:
        """The case of this name."""
        return CASES[self.name]

    @property
    def title(self) -> str:
        """A title that tells this job from the others of a command."""
        return f"{self.name}, {self.size_name}: {self.tokens} tokens, D = {self.size.dim}"

    def implementations(self) -> list[Implementation]:
        """Return those that --only and --skip, parts of names, leave in; eager always stays."""
        path = fusedckpt.backends(self.device, self.dtype)["mlp"]
        return [
            implementation
            for implementation in implementations_of(self.name, self.size, path == "triton")
            if implementation.name == "eager" or self._is_chosen(implementation.name)
        ]

    def _is_chosen(self, name: str) -> bool:
        only = self.chosen.only
        is_wanted = not only or any(part in name for part in only)
        return is_wanted and not any(part in name for part in self.chosen.skip)

    def work(self, tokens: int) -> Work:
        """Draw inputs and gradients for a number of tokens."""
        inputs = draw(self.case, self.size, tokens, self.device, dtype=self.dtype)
        work = Work(inputs, (), self.device, self.case.num_inputs)
        with torch.no_grad():
            outputs = work.forward(self.case.eager(self.size))
        return work._replace(douts=[torch.randn_like(y) for y in outputs])


def prepare(chosen: Namespace) -> Namespace:
    """Raise ValueError for tokens that do not divide into sequences, and for unknown names."""
    for name, size_name, tokens in product(chosen.case, chosen.size, chosen.tokens):
        for size in SIZES[size_name]:
            CASES[name].seq(size, tokens)
    (toy,) = SIZES["tiny"]
    # of every case and device, so that the same options serve them all
    names = [
        implementation.name
        for case in CASES
        for implementation in implementations_of(case, toy, True)
    ]
    for option, part in [("only", p) for p in chosen.only] + [("skip", p) for p in chosen.skip]:
        if not any(part in name for name in names):
            known = ", ".join(dict.fromkeys(names))
            raise ValueError(f"--{option} {part} is part of no name: {known}")
    return chosen


def jobs_of(chosen: Namespace) -> Iterator[Job]:
    """Yield a job for each case, size and number of tokens."""
    for name, size_name in product(chosen.case, chosen.size):
        for size in SIZES[size_name]:
            default = size.tokens or DEFAULT_TOKENS[torch.device(chosen.device).type]
            for tokens in chosen.tokens or (default,):
                yield Job(name, size_name, size, tokens, chosen)


class Measurement(NamedTuple):
    """The functions of a command."""

    # the name of its file in the folder for results
    file: str
    # steps of each implementation
    num_steps: int
    # returns facts of all rows; calls begin(implementation) before each step of an implementation
    measure: Callable[[Job, list[Implementation], Begin], Row]
    # returns the row of an implementation; its facts are {} where the process died
    row: Callable[[Job, Implementation, Row], Row]


def _attempt(say: Say, measurement: Measurement, job: Job, lost: Mapping[str, str]) -> None:
    """Measure a job, and say its rows, or why nothing more can be measured in this process."""
    implementations = job.implementations()
    facts: Row = {}
    for implementation in implementations:
        why = lost.get(implementation.name)
        implementation.is_launched = NO_GRAPH in (why or "")
        if why is not None and not implementation.is_launched:
            implementation.failure = why

    def begin(implementation: Implementation) -> None:
        if implementation.failure is None:
            say("at", implementation.name)

    try:
        with torch.cuda.device(job.device) if job.device.type == "cuda" else nullcontext():
            facts = measurement.measure(job, implementations, begin)
    except DeviceLost as error:
        return say("lost", str(error))
    except Exception as error:
        # of inputs, or of eager in float64
        for implementation in implementations:
            implementation.fail(error)
    say("rows", [measurement.row(job, implementation, facts) for implementation in implementations])


def _child(there: Any, *args: Any) -> None:
    # a terminal's Ctrl-C reaches the waiting process, which ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _attempt(lambda *said: there.send(said), *args)


def _isolated(hear: Say, seconds: float, args: tuple[Any, ...]) -> str:
    """Attempt a job in a process of its own; return how it ended, in words.

    seconds: that it may be silent.
    """
    # forked from a process that has imported torch and done nothing with it: no driver is open yet
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "bench.run"])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(there, *args), daemon=True)
    process.start()
    there.close()
    try:
        while here.poll(seconds):
            hear(*here.recv())
        return f"out of time after {seconds:g} s"
    except EOFError:
        process.join(seconds)
        status = process.exitcode or 0
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"
    finally:
        process.kill()
        process.join()


def rows_of(job: Job, measurement: Measurement, tick: Callable[[str], None]) -> list[Row]:
    """Measure a job, again without implementations that crash it."""
    lost: dict[str, str] = {}
    while True:
        heard: dict[str, Any] = {}

        def hear(kind: str, said: Any, heard: dict[str, Any] = heard) -> None:
            heard[kind] = said
            if kind == "at":
                tick(f"{job.title}: {said}")

        if job.chosen.in_process:
            _attempt(hear, measurement, job, lost)
            ended = "in this process"
        else:
            ended = _isolated(hear, job.chosen.timeout, (measurement, job, lost))
        if "rows" in heard:
            return heard["rows"]
        name = heard.get("at")
        why = f"crashed: {heard.get('lost', ended)}"
        if name is None or NO_GRAPH not in lost.get(name, NO_GRAPH):
            failed = job.implementations()
            for implementation in failed:
                implementation.failure = implementation.failure or why
            return [measurement.row(job, implementation, {}) for implementation in failed]
        lost[name] = why
        how = "launched from Python" if NO_GRAPH in why else "without it"
        print(f"{job.title}: {name} {why}; once more {how}", file=sys.stderr)


def _fails(row: Row) -> bool:
    """Whether the numbers are wrong, or ours or eager raised."""
    has_failed = row["failure"] is not None and not row["failure"].startswith(BENIGN)
    return row["is_wrong"] or (has_failed and row["name"].startswith(OWN))


def measure_all(
    chosen: Namespace, jobs: Sequence[Job], measurement: Measurement, facts: Row, keeps: bool
) -> int:
    """Measure job after job, print and append the rows of each; return the exit status.

    It is 1 where an implementation was wrong or eager or ours raised, else 0. Unless `keeps`,
    earlier rows in the file go, once the first case is measured.
    """
    has_failed = False
    path = chosen.out / measurement.file
    print(f"results go to {path}", flush=True)
    total = measurement.num_steps * sum(len(job.implementations()) for job in jobs)
    with progress(path.stem, total) as tick:
        for job in jobs:
            rows = [row | facts for row in rows_of(job, measurement, tick)]
            if not keeps:
                path.unlink(missing_ok=True)
            keeps = True
            append(rows, path)
            show_rows(rows)
            has_failed |= any(map(_fails, rows))
    print(LEGEND)
    return int(has_failed)
