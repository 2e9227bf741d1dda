"""Ways of training one model, and what each costs: bytes, FLOPs, time, and the losses it reaches.

All share the model's parameters and start from the same ones, so that as many fit as one likes.
Memory is that of a step which finds gradients there, as all but a first micro-batch do.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode

import fusedckpt
from bench.classics_results import Curve, Row
from bench.results import MIB, Timing
from bench.text import significant
from fusedckpt.memory import nbytes_of, peak_bytes
from fusedckpt.reporting.memory_report import MemoryReport, measure
from fusedckpt.reporting.step import Step
from fusedckpt.reporting.trial import trial

__all__ = [
    "BUDGETS", "NUM_PLANS", "Batch", "Trial", "Way", "Workload", "compare", "plans", "take_turns",
]  # fmt: skip

# equally long parts of a step; of each a curve has the highest
SLICES = 160
# of the way from the least peak that a plan reaches to that of keeping everything
BUDGETS = (0.25, 0.5, 0.75)
POLICIES = ("all", "sqrt", "speed", "memory")
NUM_PLANS = len(POLICIES) + len(BUDGETS)


class Way(NamedTuple):
    """What is called with a batch: the model, a copy that runs otherwise, or a function."""

    name: str
    run: Callable[..., Any]
    plan: fusedckpt.Plan | None = None

    @classmethod
    def torch(cls, model: Any, segments: int) -> Way:
        """PyTorch's checkpoint_sequential."""
        run = partial(checkpoint_sequential, model, segments, use_reentrant=False)
        return cls(f"torch {segments}", run)

    @classmethod
    def ours(cls, model: Any, segments: int | str) -> Way:
        """Ours."""
        run = partial(fusedckpt.checkpoint_sequential, model, segments)
        return cls(f"fusedckpt {segments}", run)


class Batch(NamedTuple):
    """What a model gets, and what its loss gets besides the output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None


class _Run(nn.Module):
    """A way of running a model, as a module that has the model's parameters."""

    def __init__(self, run: Callable[..., Any], model: nn.Module):
        super().__init__()
        self.run, self.model = run, model

    def forward(self, batch: Batch) -> Any:
        return self.run(*batch.args, **batch.kwargs)


class Workload(NamedTuple):
    """What is trained, on which batches, one step each, by which optimizer."""

    model: nn.Module
    batches: Sequence[Batch]
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Iterator[nn.Parameter]], Optimizer]

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return next(self.model.parameters()).device

    def backward(self, run: Callable[..., Any], batch: Batch | None = None) -> Tensor:
        """Run forward and backward, by default on the first batch."""
        batch = batch or self.batches[0]
        # held through backward, as in most loops
        output = run(*batch.args, **batch.kwargs)
        loss = self.loss(output, batch.target)
        loss.backward()
        return loss.detach()

    def copied(self) -> nn.Module:
        """Return a copy of the model that shares its parameters and buffers."""
        shared = [*self.model.parameters(), *self.model.buffers()]
        return copy.deepcopy(self.model, {id(tensor): tensor for tensor in shared})

    def planned(self, name: str, model: nn.Module | None = None, **options: Any) -> Way:
        """Plan a copy of the model, or the one that is given, for the first batch."""
        model = self.copied() if model is None else model
        args, kwargs, target = self.batches[0]
        loss = partial(self._loss_of, target)
        plan = fusedckpt.plan(model, *args, loss=loss, progress=False, **options, **kwargs)
        return Way(name, plan.apply(model), plan)

    def _loss_of(self, target: Any, output: Any) -> Tensor:
        return self.loss(output, target)

    def report(self, run: Callable[..., Any]) -> MemoryReport:
        """Take a step on the first batch where gradients are there already."""
        batch = self.batches[0]
        trained: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        gradients = {parameter: torch.zeros_like(parameter) for parameter in trained}
        loss = partial(self._loss_of, batch.target)
        step = Step(_Run(run, self.model), (batch,), {}, loss, None, gradients)
        with trial(step.model, None, batch):
            return measure(step)

    def flops(self, run: Callable[..., Any]) -> int:
        """Return the FLOPs of forward and backward."""
        with trial(_Run(run, self.model)), FlopCounterMode(display=False) as counter:
            self.backward(run)
        return counter.get_total_flops()

    def forward_flops(self) -> int:
        """Return the FLOPs of the forward alone."""
        args, kwargs, _ = self.batches[0]
        with trial(self.model), torch.no_grad(), FlopCounterMode(display=False) as counter:
            self.model(*args, **kwargs)
        return counter.get_total_flops()

    def peak_bytes(self, run: Callable[..., Any]) -> int:
        """Return the peak of forward and backward, parameters and new gradients included."""
        held = [*self.model.parameters(), *self.model.buffers(), *self.batches[0].args]
        with trial(_Run(run, self.model)):
            return nbytes_of(held) + peak_bytes(lambda: self.backward(run), self.device)


class Trial:
    """One way of training a workload, and what is known of it so far."""

    def __init__(self, work: Workload, way: Way):
        self.work, self.way = work, way
        self.losses: list[list[float]] = []
        self.samples: list[float] = []

    def train(self) -> None:
        """From the weights that are there, take a step on every batch, and put the weights back.

        Times forward and backward: the optimizer's step is the same for all.
        """
        optimizer = self.work.optimizer(self.work.model.parameters())
        self.losses.append([])
        with trial(_Run(self.way.run, self.work.model), optimizer):
            for batch in self.work.batches:
                began = self._now()
                loss = self.work.backward(self.way.run, batch)
                self.samples.append(1e3 * (self._now() - began))
                self.losses[-1].append(loss.item())
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    def _now(self) -> float:
        if self.work.device.type == "cuda":
            torch.cuda.synchronize(self.work.device)
        return time.perf_counter()

    def difference(self, reference: Trial) -> float:
        """Return how far any loss of any turn is from the reference's."""
        # torch's max keeps a NaN, Python's may drop it
        mine = torch.tensor(self.losses, dtype=torch.float64)
        theirs = torch.tensor(reference.losses[0], dtype=torch.float64)
        return (mine - theirs).abs().max().item()


def take_turns(trials: Sequence[Trial], repeat: int, tick: Callable[[str], None]) -> None:
    """Let each train `repeat` times; who begins changes from turn to turn."""
    for turn in range(repeat):
        first = turn % len(trials)
        for one in (*trials[first:], *trials[:first]):
            tick(one.way.name)
            one.train()


def plans(
    work: Workload,
    tick: Callable[[str], None],
    name: str = "plan",
    policies: Sequence[str] = POLICIES,
    budgets: Sequence[int] | None = None,
) -> Iterator[Way]:
    """Plan by rules, then within budgets: None for some from the least peak to the model's own."""
    ways = []
    for policy in policies:
        tick(f"planning {name} {policy}")
        ways.append(work.planned(f"{name} {policy}", policy=policy, accumulate=True))
    yield from ways
    if budgets is None:
        plain = work.report(work.model)
        least = min(way.plan.measured_bytes for way in ways)
        span, there = plain.peak_bytes - least, _resident(plain)
        budgets = [int(least + share * span) - there for share in BUDGETS]
    # of a model that no plan makes smaller they are one
    for title, budget in {f"{name} {significant(x / MIB)} MiB": x for x in budgets}.items():
        tick(f"planning {title}")
        yield work.planned(title, activation_budget=budget)


def compare(
    work: Workload,
    ways: Sequence[Way],
    repeat: int,
    tick: Callable[[str], None],
    shown: Container[str] = (),
    failures: list[str] | None = None,
) -> tuple[Row, ...]:
    """Weigh and time all ways; the first is the one that others are held to.

    shown: those whose memory through a step is recorded, too; failures: where to note what others
    than the first raised, instead of raising it.
    """
    forward_flops = work.forward_flops()
    found: list[tuple[Trial, MemoryReport, int]] = []
    for way in ways:
        tick(way.name)
        try:
            found.append((Trial(work, way), work.report(way.run), work.flops(way.run)))
        except Exception as error:
            if failures is None or not found:
                raise
            failures.append(f"{way.name}: {type(error).__name__}: {error}")
    trials = [trial for trial, *_ in found]
    take_turns(trials, repeat, tick)
    return tuple(
        Row(
            trial.way.name,
            saved_bytes=report.saved_bytes,
            rise_bytes=report.peak_bytes - _resident(report),
            asked_bytes=_rise(report, trial.way.plan and trial.way.plan.budget_bytes),
            predicted_bytes=_rise(report, trial.way.plan and trial.way.plan.predicted_bytes),
            recomputed=(total - found[0][2]) / forward_flops if forward_flops else 0.0,
            ms=Timing.of(trial.samples),
            losses=tuple(trial.losses[0]),
            loss_difference=trial.difference(trials[0]),
            curve=_curve(report) if trial.way.name in shown else None,
        )
        for trial, report, total in found
    )


def _resident(report: MemoryReport) -> int:
    """Return the bytes of parameters and gradients, which no activation budget bounds."""
    return report.resident_bytes - report.input_bytes - report.buffer_bytes


def _rise(report: MemoryReport, peak: int | None) -> int | None:
    return None if peak is None else peak - _resident(report)


def _curve(report: MemoryReport) -> Curve:
    times = np.array([moment.time_ns for moment in report.timeline])
    lives = np.array([moment.live_bytes for moment in report.timeline]) - _resident(report)
    starts = np.arange(SLICES) * times[-1] / SLICES
    # what lives on from before, or more
    highest = lives[np.searchsorted(times, starts, side="right") - 1]
    np.maximum.at(highest, np.searchsorted(starts, times, side="right") - 1, lives)
    forward = next(m.time_ns for m in report.timeline if m.phase == "backward")
    mib = tuple(round(nbytes / MIB, 3) for nbytes in highest.tolist())
    return Curve(times[-1].item() / 1e6, forward / 1e6, mib)
