"""Which cases are measured at which sizes, by whom: what `run` and `capacity` go through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import torch

from bench.cases import CASES, Case, draw, load_of
from bench.contender import Contender, DeviceLost, Work
from bench.measure import measure
from bench.results import Ceilings, Group
from bench.sizes import DEFAULT_TOKENS, SIZES, Size
from bench.supervisor import Event, Journal
from bench.ways import ways_of
from fusedckpt.autograd.dispatch import path_of

__all__ = ["Choice", "Job", "check_choice", "jobs_of"]


@dataclass
class Job:
    """One case at one size."""

    name: str
    case: Case
    size_name: str
    size: Size
    tokens: int
    device: torch.device
    dtype: torch.dtype
    contenders: tuple[Contender, ...]
    checked: int = 0

    @property
    def title(self) -> str:
        """What tells it from the other jobs of a command."""
        return f"{self.name}, {self.size_name}: {self.tokens} tokens, D = {self.size.dim}"

    @property
    def failed(self) -> bool:
        """Whether the command has to."""
        return any(contender.fails_the_command for contender in self.contenders)

    def leave_out(self, journal: Journal) -> None:
        """Leave out who crashed on it before."""
        crashes = journal.crashes(self.title)
        for contender in self.contenders:
            if contender.name in crashes:
                contender.lose(crashes[contender.name])

    def begin(self, contender: Contender, journal: Journal) -> None:
        """Note who is at work, unless it is out."""
        if contender.failure is None:
            journal.note(Event("at work", self.title, contender.name))

    def work(self, tokens: int) -> Work:
        """Draw inputs and gradients for a number of tokens."""
        inputs = draw(self.case, self.size, tokens, self.device, self.dtype)
        work = Work(inputs, (), self.device, self.case.num_inputs)
        with torch.no_grad():
            outputs = work.forward(self.case.eager(self.size))
        return work._replace(douts=[torch.randn_like(y) for y in outputs])

    def attempt(self, journal: Journal, take: Callable[[], None]) -> bool:
        """Do what measures this job, noting that it ended; returns whether it was interrupted."""
        interrupted = False
        try:
            self._take(take)
        except DeviceLost as error:
            journal.crash(str(error))
            raise
        except KeyboardInterrupt:
            interrupted = True
        journal.note(Event("measured", self.title))
        return interrupted

    def _take(self, take: Callable[[], None]) -> None:
        try:
            take()
        except DeviceLost:
            raise
        except Exception as error:
            # of inputs, or of eager in float64
            for contender in self.contenders:
                contender.fail(error)
        finally:
            for contender in self.contenders:
                contender.drop()

    def measure(self, repeat: int, graphs: bool, begin: Callable[[Contender], None]) -> None:
        """Check, weigh and time the contenders."""
        # compiled code of other sizes counts against the limit of recompilations
        torch.compiler.reset()
        work, eager = self.work(self.tokens), self.case.eager(self.size)
        self.checked = measure(work, self.contenders, eager, repeat, begin, graphs)

    def group(self, ceilings: Ceilings | None, facts: dict[str, Any]) -> Group:
        """What was measured, as a record."""
        rows = tuple(contender.row() for contender in self.contenders)
        load = load_of(self.case, self.size, self.tokens, self.dtype)
        sizes = (self.name, self.size_name, self.tokens, *self.size[:3])
        dtype = str(self.dtype).removeprefix("torch.")
        seq = self.case.seq(self.size, self.tokens)
        return Group(*sizes, rows, dtype, self.checked, load, ceilings, facts, seq)


class Choice(Protocol):
    """What says which jobs there are."""

    @property
    def case(self) -> tuple[str, ...]:
        """Names of cases."""
        ...

    @property
    def size(self) -> tuple[str, ...]:
        """Names of sizes."""
        ...

    @property
    def tokens(self) -> tuple[int, ...]:
        """Numbers of tokens; none: as the size or the device has it."""
        ...

    @property
    def only(self) -> tuple[str, ...]:
        """Parts of names."""
        ...

    @property
    def skip(self) -> tuple[str, ...]:
        """Parts of names."""
        ...

    @property
    def dtype(self) -> str:
        """Of every tensor."""
        ...

    @property
    def device(self) -> str:
        """Where it runs."""
        ...


def _is_chosen(name: str, chosen: Choice) -> bool:
    """Whether --only and --skip, parts of names, leave a contender in; eager always stays."""
    if name == "eager":
        return True
    wanted = not chosen.only or any(part in name for part in chosen.only)
    return wanted and not any(part in name for part in chosen.skip)


def check_choice(chosen: Choice) -> None:
    """Raise ValueError for tokens that do not divide into sequences, and for names of nobody."""
    for name, size_name, tokens in product(chosen.case, chosen.size, chosen.tokens):
        for size in SIZES[size_name]:
            CASES[name].seq(size, tokens)
    if not (chosen.only or chosen.skip):
        return
    (toy,) = SIZES["tiny"]
    # of every case and device, so that the same options serve them all
    known = dict.fromkeys(name for case in CASES for name in ways_of(case, toy, True))
    for option, parts in (("--only", chosen.only), ("--skip", chosen.skip)):
        for part in parts:
            if not any(part in name for name in known):
                raise ValueError(f"{option} {part} is part of no name: {', '.join(known)}")


def jobs_of(chosen: Choice) -> Iterator[Job]:
    """Yield a job for each case, size and number of tokens."""
    place = torch.device(chosen.device), getattr(torch, chosen.dtype)
    has_plans = path_of(*place) == "triton"
    for name in chosen.case:
        for size_name in chosen.size:
            for size in SIZES[size_name]:
                default = size.tokens or DEFAULT_TOKENS[place[0].type]
                for tokens in chosen.tokens or (default,):
                    ways = ways_of(name, size, has_plans).items()
                    found = [Contender(*way) for way in ways if _is_chosen(way[0], chosen)]
                    sizes = size_name, size, tokens
                    yield Job(name, CASES[name], *sizes, *place, tuple(found))
