"""Which cases are measured at which sizes, each in a process of its own: `run` and `capacity`.

What kills that process, or hangs in it, costs one row: the process says which implementation is at
work, and the case is measured again without it.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fusedckpt
from bench.cases import CASES, Case, draw
from bench.implementations import implementations_of
from bench.measure import DeviceLost, Implementation, Work
from bench.processes import Stops, isolated
from bench.results import Row, append
from bench.settings import DEFAULT_TOKENS, SIZES, Size
from bench.tables import progress

# what the command stands for: it fails if one of these raises
OWN = ("eager", "fusedckpt", "ours(")
BENIGN = ("not installed", "interrupted", "not even")
Say = Callable[..., None]


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
        """What is computed."""
        return CASES[self.name]

    @property
    def title(self) -> str:
        """What tells it from the other jobs of a command."""
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
        inputs = draw(self.case, self.size, tokens, self.device, self.dtype)
        work = Work(inputs, (), self.device, self.case.num_inputs)
        with torch.no_grad():
            outputs = work.forward(self.case.eager(self.size))
        return work._replace(douts=[torch.randn_like(y) for y in outputs])

    def columns(self) -> Row:
        """What its rows have in common."""
        return {
            "case": self.name,
            "size": self.size_name,
            "dim": self.size.dim,
            "hidden": self.size.hidden,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def attempt(
        self,
        say: Say,
        lost: dict[str, str],
        take: Callable[[list[Implementation], Callable[..., None]], None],
    ) -> tuple[list[Implementation], bool]:
        """Do take(implementations, begin); returns them, and whether it was interrupted.

        lost: why some are left out; begin: said to be at work. Raises DeviceLost.
        """
        implementations = self.implementations()
        for one in implementations:
            one.failure = lost.get(one.name, one.failure)

        def begin(one: Implementation) -> None:
            if one.failure is None:
                say("at", one.name)

        is_interrupted = False
        try:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                take(implementations, begin)
        except DeviceLost:
            raise
        except KeyboardInterrupt:
            is_interrupted = True
        except Exception as error:
            # of inputs, or of eager in float64
            for one in implementations:
                one.fail(error)
        say("at", None)
        for one in implementations:
            one.drop()
        return implementations, is_interrupted


def check_choice(chosen: Namespace) -> None:
    """Raise ValueError for tokens that do not divide into sequences, and for unknown names."""
    for name, size_name, tokens in product(chosen.case, chosen.size, getattr(chosen, "tokens", ())):
        for size in SIZES[size_name]:
            CASES[name].seq(size, tokens)
    if not (chosen.only or chosen.skip):
        return
    (toy,) = SIZES["tiny"]
    # of every case and device, so that the same options serve them all
    known = dict.fromkeys(one.name for case in CASES for one in implementations_of(case, toy, True))
    for option, parts in (("--only", chosen.only), ("--skip", chosen.skip)):
        for part in parts:
            if not any(part in name for name in known):
                raise ValueError(f"{option} {part} is part of no name: {', '.join(known)}")


def jobs_of(chosen: Namespace) -> Iterator[Job]:
    """Yield a job for each case, size and number of tokens."""
    device, dtype = torch.device(chosen.device), getattr(torch, chosen.dtype)
    for name, size_name in product(chosen.case, chosen.size):
        for size in SIZES[size_name]:
            default = size.tokens or DEFAULT_TOKENS[device.type]
            for tokens in getattr(chosen, "tokens", ()) or (default,):
                place = size_name, size, tokens, device, dtype
                yield Job(name, *place, chosen.only, chosen.skip)


class _Heard:
    """What the process that measures a job has said."""

    def __init__(self, tick: Callable[..., None]):
        self.tick, self.name, self.why = tick, None, None
        self.rows: list[Row] | None = None
        self.is_interrupted = False

    def __call__(self, kind: str, *said: Any) -> None:
        if kind == "at":
            (self.name,) = said
            if self.name is not None:
                self.tick(self.name, says=False)
        elif kind == "lost":
            (self.why,) = said
        else:
            self.rows, self.is_interrupted = said


def _reported(say: Say, work: Callable[..., None], *args: Any) -> None:
    try:
        work(say, *args)
    except DeviceLost as error:
        say("lost", str(error))


class Measuring(NamedTuple):
    """How a command measures a job and what becomes of the rows.

    work: (say, job, lost, *options) -> says rows; blank: those of what it was not measured for;
    num_steps: of an implementation; is_kept: whether the rows of an interrupted job are.
    """

    work: Callable[..., None]
    options: Callable[[Job], tuple[Any, ...]]
    blank: Callable[[Job, Implementation], Row]
    num_steps: int
    is_kept: Callable[[Job, list[Row]], bool]
    show: Callable[[list[Row]], None]


def _rows(
    job: Job, chosen: Namespace, how: Measuring, stops: Stops, tick: Callable[..., None]
) -> tuple[list[Row], bool]:
    """Measure a job, again without what crashes it; returns rows, and if it was interrupted."""
    lost: dict[str, str] = {}
    while True:
        heard = _Heard(tick)
        args = (how.work, job, lost, *how.options(job))
        if chosen.in_process:
            _reported(heard, *args)
            ended = "in this process"
        else:
            ended = isolated(_reported, args, heard, chosen.timeout, stops)
        if heard.rows is not None:
            return heard.rows, heard.is_interrupted
        why = "interrupted" if stops.count else f"crashed: {heard.why or ended}"
        if stops.count or heard.name is None:
            failed = job.implementations()
            for one in failed:
                one.failure = one.failure or why
            return [how.blank(job, one) for one in failed], stops.count > 0
        lost[heard.name] = why
        print(f"{job.title}: {heard.name} {why}; once more without it", file=sys.stderr)


def _fails(row: Row) -> bool:
    """Whether the numbers are wrong, or ours or eager raised."""
    has_failed = row["failure"] is not None and not row["failure"].startswith(BENIGN)
    return row["is_wrong"] or (has_failed and row["name"].startswith(OWN))


def measure_all(
    chosen: Namespace, jobs: Sequence[Job], how: Measuring, facts: Row, path: Path, replaces: bool
) -> int:
    """Measure job after job, print and append the rows of each; returns the exit status.

    It is 1 where an implementation was wrong or eager or ours raised, 130 where interrupted, else
    0. replaces: what the file holds goes, but not before there is something to put in its place.
    """
    has_failed = is_interrupted = False
    total = how.num_steps * sum(len(job.implementations()) for job in jobs)
    with (
        nullcontext(Stops()) if chosen.in_process else Stops() as stops,
        progress(path.stem, total) as tick,
    ):
        for job in jobs:
            tick(job.title, counts=False)
            rows, is_interrupted = _rows(job, chosen, how, stops, tick)
            rows = [row | facts for row in rows]
            if not is_interrupted or how.is_kept(job, rows):
                if replaces:
                    path.unlink(missing_ok=True)
                append(rows, path)
                how.show(rows)
                replaces = False
            if is_interrupted:
                break
            has_failed |= any(map(_fails, rows))
    if path.exists():
        print(f"results are in {path}")
    if is_interrupted:
        print("interrupted")
        return 130
    return int(has_failed)
