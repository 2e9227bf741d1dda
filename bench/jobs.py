"""Which cases are measured at which sizes, each in a process of its own: `run` and `capacity`.

A crash of that process, or a hang in it, costs one row: the process says which implementation is at
work, and the case is measured again without it.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any, NamedTuple

import torch

import fusedckpt
from bench import table
from bench.cases import CASES, Case, draw
from bench.implementations import implementations_of
from bench.measure import DeviceLost, Implementation, Work
from bench.processes import Stops, isolated
from bench.results import Row, append
from bench.settings import DEFAULT_TOKENS, SIZES, Size
from bench.tables import progress

# implementations that the command stands for: it fails if one of these raises
OWN = ("eager", "fusedckpt", "ours(")
BENIGN = ("not installed", "interrupted", "not even")
Say = Callable[[str, Any], None]
Begin = Callable[[Implementation], None]


class Job(NamedTuple):
    """One case at one size."""

    name: str
    size_name: str
    size: Size
    tokens: int
    device: torch.device
    dtype: torch.dtype
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()

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
        path = fusedckpt.paths(self.device, self.dtype)["mlp"]
        found = implementations_of(self.name, self.size, path == "triton")
        return [one for one in found if one.name == "eager" or self._is_chosen(one.name)]

    def _is_chosen(self, name: str) -> bool:
        wanted = not self.only or any(part in name for part in self.only)
        return wanted and not any(part in name for part in self.skip)

    def work(self, tokens: int) -> Work:
        """Draw inputs and gradients for a number of tokens."""
        inputs = draw(self.case, self.size, tokens, self.device, dtype=self.dtype)
        work = Work(inputs, (), self.device, self.case.num_inputs)
        with torch.no_grad():
            outputs = work.forward(self.case.eager(self.size))
        return work._replace(douts=[torch.randn_like(y) for y in outputs])

    def columns(self) -> Row:
        """Return the columns that its rows have in common."""
        return {
            "case": self.name,
            "size": self.size_name,
            "dim": self.size.dim,
            "hidden": self.size.hidden,
            "dtype": str(self.dtype).removeprefix("torch."),
        }


def check_choice(chosen: Namespace) -> Namespace:
    """Raise ValueError for tokens that do not divide into sequences, and for unknown names."""
    for name, size_name, tokens in product(chosen.case, chosen.size, getattr(chosen, "tokens", ())):
        for size in SIZES[size_name]:
            CASES[name].seq(size, tokens)
    (toy,) = SIZES["tiny"]
    for option, parts in (("--only", chosen.only), ("--skip", chosen.skip)):
        for part in parts:
            # of every case and device, so that the same options serve them all
            found = (one for case in CASES for one in implementations_of(case, toy, True))
            known = dict.fromkeys(one.name for one in found)
            if not any(part in name for name in known):
                raise ValueError(f"{option} {part} is part of no name: {', '.join(known)}")
    return chosen


def jobs_of(chosen: Namespace) -> Iterator[Job]:
    """Yield a job for each case, size and number of tokens."""
    device, dtype = torch.device(chosen.device), getattr(torch, chosen.dtype)
    for name, size_name in product(chosen.case, chosen.size):
        for size in SIZES[size_name]:
            default = size.tokens or DEFAULT_TOKENS[device.type]
            for tokens in getattr(chosen, "tokens", ()) or (default,):
                place = size_name, size, tokens, device, dtype
                yield Job(name, *place, chosen.only, chosen.skip)


class Measurement:
    """The work of `run` or `capacity` on a job: it goes to the process that measures.

    file: its name in the folder for results; num_steps: of each implementation; keeps: whether rows
    are added to those that the file holds.
    """

    file: str
    num_steps: int
    keeps = False

    def measure(
        self, job: Job, implementations: list[Implementation], begin: Begin, found: Row
    ) -> None:
        """Measure, with begin(one) before each step of one; found: more facts for `row`."""
        raise NotImplementedError

    def row(self, job: Job, one: Implementation, found: Row) -> Row:
        """Return the results of an implementation; nothing is found where its process died."""
        raise NotImplementedError

    def is_kept(self, job: Job, rows: list[Row]) -> bool:
        """Whether the rows of a job that was interrupted go into the file."""
        raise NotImplementedError

    def note(self, rows: list[Row]) -> None:
        """Keep facts that later jobs need from the rows of a job."""


def _attempt(say: Say, measurement: Measurement, job: Job, lost: Mapping[str, str]) -> None:
    implementations, found, is_interrupted = job.implementations(), Row(), False
    for one in implementations:
        one.failure = lost.get(one.name, one.failure)

    def begin(one: Implementation) -> None:
        if one.failure is None:
            say("at", one.name)

    try:
        with torch.cuda.device(job.device) if job.device.type == "cuda" else nullcontext():
            measurement.measure(job, implementations, begin, found)
    except DeviceLost:
        raise
    except KeyboardInterrupt:
        is_interrupted = True
    except Exception as error:
        # of inputs, or of eager in float64
        for one in implementations:
            one.fail(error)
    if not is_interrupted:
        say("at", None)
    for one in implementations:
        one.drop()
    say("rows", ([measurement.row(job, one, found) for one in implementations], is_interrupted))


def _measure(say: Say, *args: Any) -> None:
    """Measure a job, and say its rows, or why nothing more can be measured in this process."""
    try:
        _attempt(say, *args)
    except DeviceLost as error:
        say("lost", str(error))


def _rows(
    job: Job, chosen: Namespace, measurement: Measurement, stops: Stops, tick: Callable[..., None]
) -> tuple[list[Row], bool]:
    """Measure a job, again without implementations that crash it; returns rows, is_interrupted."""
    lost: dict[str, str] = {}
    while True:
        heard: dict[str, Any] = {}

        def hear(kind: str, said: Any, heard: dict[str, Any] = heard) -> None:
            heard[kind] = said
            if kind == "at" and said is not None:
                tick(said, says=False)

        if chosen.in_process:
            _measure(hear, measurement, job, lost)
            ended = "in this process"
        else:
            args = (measurement, job, lost)
            ended = isolated(_measure, args, hear, chosen.timeout, stops=stops)
        rows, is_interrupted = heard.get("rows", (None, False))
        # one whose time is up is interrupted too
        if rows and (chosen.in_process or stops.count or not is_interrupted):
            return rows, is_interrupted
        why = "interrupted" if stops.count else f"crashed: {heard.get('lost', ended)}"
        name = heard.get("at")
        if stops.count or name is None:
            failed = job.implementations()
            for one in failed:
                one.failure = one.failure or why
            return [measurement.row(job, one, {}) for one in failed], stops.count > 0
        lost[name] = why
        print(f"{job.title}: {name} {why}; once more without it", file=sys.stderr)


def _fails(row: Row) -> bool:
    """Whether the numbers are wrong, or ours or eager raised."""
    has_failed = row["failure"] is not None and not row["failure"].startswith(BENIGN)
    return row["is_wrong"] or (has_failed and row["name"].startswith(OWN))


def measure_all(
    chosen: Namespace, jobs: Sequence[Job], measurement: Measurement, facts: Row
) -> int:
    """Measure job after job, print and append the rows of each; returns the exit status.

    It is 1 where an implementation was wrong or eager or ours raised, 130 where interrupted, else
    0. Earlier rows in the file go, unless they are kept, once there are rows in their place.
    """
    has_failed = is_interrupted = False
    path, keeps = chosen.out / measurement.file, measurement.keeps
    total = measurement.num_steps * sum(len(job.implementations()) for job in jobs)
    with (
        nullcontext(Stops()) if chosen.in_process else Stops() as stops,
        progress(path.stem, total) as tick,
    ):
        for job in jobs:
            tick(job.title, counts=False)
            rows, is_interrupted = _rows(job, chosen, measurement, stops, tick=tick)
            rows = [row | facts for row in rows]
            if not is_interrupted or measurement.is_kept(job, rows):
                if not keeps:
                    path.unlink(missing_ok=True)
                append(rows, path)
                measurement.note(rows)
                table.show_rows(rows)
                keeps = True
            if is_interrupted:
                break
            has_failed |= any(map(_fails, rows))
    if path.exists():
        print(f"results are in {path}")
    if is_interrupted:
        print("interrupted")
        return 130
    return int(has_failed)
