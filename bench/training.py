"""Ways of training one model, and their costs: bytes, FLOPs, time, and the losses they reach.

All share the model's parameters and start from the same ones, so that as many fit as one likes.
Memory is that of a step which finds gradients there, as all but a first micro-batch do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.benchmark.utils.timer import timer
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode

import fusedckpt
from bench.clock import turns
from bench.results import Row, largest_difference, median, ratios, rounded
from bench.tables import MIB, Columns, difference, mib, show, significant
from fusedckpt import MemoryReport
from fusedckpt.memory import nbytes_of, peak_bytes
from fusedckpt.planning.units import candidates
from fusedckpt.reporting.trial import trial

# equally long parts of a step; of each a curve has the highest
SLICES = 160
# of the way from the least peak that a plan reaches to that of saving everything
BUDGETS = (0.25, 0.5, 0.75)
POLICIES = ("all", "sqrt", "speed", "memory")
NUM_PLANS = len(POLICIES) + len(BUDGETS)
NOTES = (
    "saved: for backward; peak: of a step, above parameters and gradients that exist before;",
    "budget, predicted: activation budget and predicted peak of a plan; recomputed: FLOPs of the",
    "recomputation, relative to the forward; ms: forward and backward; MiB per ms: reduction of",
    "the peak per extra millisecond; last loss: of the last step; diff.: the largest difference",
    "from the first row's in any step",
)


# of the tables here and of the depths'
LOSSES: Columns = {
    "last\nloss": lambda row: f"{row['losses'][-1]:.4f}",
    "diff.": lambda row: difference(row["loss_difference"]),
}


class Way(NamedTuple):
    """A callable that takes a batch: the model, a copy that runs otherwise, or a function."""

    name: str
    run: Callable[..., Any]
    plan: fusedckpt.Plan | None = None


def in_segments(model: Any, whose: str, segments: int | str) -> Way:
    """Return torch's checkpoint_sequential, or ours."""
    run = partial(fusedckpt.checkpoint_sequential, model, segments)
    if whose == "torch":
        run = partial(checkpoint_sequential, model, segments, use_reentrant=False)
    return Way(f"{whose} {segments}", run)


def wrap_units(model: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Wrap every unit of a model that a plan would cut, and return the model."""
    for unit in candidates(model):
        model.set_submodule(unit, wrap(model.get_submodule(unit)))
    return model


class Batch(NamedTuple):
    """A model's inputs, and the target that its loss gets besides the output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None


class _Run(nn.Module):
    """A way of running a model, as a module that has the model's parameters."""

    def __init__(self, run: Callable[..., Any], model: nn.Module, accumulates: bool = False):
        super().__init__()
        self.run, self.model, self.accumulates = run, model, accumulates

    def forward(self, batch: Batch) -> Any:
        for parameter in self.parameters() if self.accumulates else ():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return self.run(*batch.args, **batch.kwargs)


class Workload(NamedTuple):
    """A model to train, its batches, one step each, its loss and its optimizer."""

    model: nn.Module
    batches: Sequence[Batch]
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Iterator[nn.Parameter]], Optimizer]

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
        args, kwargs, _ = self.batches[0]
        loss = self._first_loss
        plan = fusedckpt.plan(model, *args, loss=loss, progress=False, **options, **kwargs)
        return Way(name, plan.apply(model), plan)

    def _first_loss(self, output: Any) -> Tensor:
        return self.loss(output, self.batches[0].target)

    def report(self, run: Callable[..., Any]) -> MemoryReport:
        """Take a step on the first batch where gradients are there already."""
        model = _Run(run, self.model, accumulates=True)
        return fusedckpt.report(model, self.batches[0], loss=self._first_loss)

    def flops(self, run: Callable[..., Any], backward: bool = True) -> int:
        """Return the FLOPs of forward and backward, or of the forward alone."""
        args, kwargs, _ = self.batches[0]
        with trial(_Run(run, self.model)), FlopCounterMode(display=False) as counter:
            if backward:
                self.backward(run)
            else:
                with torch.no_grad():
                    run(*args, **kwargs)
        return counter.get_total_flops()

    def peak_bytes(self, run: Callable[..., Any]) -> int:
        """Return the peak of forward and backward, parameters and new gradients included."""
        held = [*self.model.parameters(), *self.model.buffers(), *self.batches[0].args]
        with trial(_Run(run, self.model)):
            return nbytes_of(held) + peak_bytes(lambda: self.backward(run), held[0].device)


class Trial:
    """One way of training a workload, and its losses and times so far."""

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
                # synchronises a GPU
                began = timer()
                loss = self.work.backward(self.way.run, batch)
                self.samples.append(1e3 * (timer() - began))
                self.losses[-1].append(loss.item())
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    def columns(self, reference: Trial) -> Row:
        """Return its times and losses, and the difference of its losses from another's."""
        return {
            "name": self.way.name,
            "ms": rounded(self.samples),
            "losses": self.losses[0],
            "loss_difference": largest_difference(self.losses, reference.losses[0]),
        }


def take_turns(trials: Sequence[Trial], repeat: int, tick: Callable[[str], None]) -> None:
    """Let each train `repeat` times, in turns."""
    for _, one in turns(trials, repeat):
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
    for title, budget in {f"{name} {mib(x)} MiB": x for x in budgets}.items():
        tick(f"planning {title}")
        yield work.planned(title, activation_budget=budget)


def compare(
    work: Workload,
    ways: Sequence[Way],
    repeat: int,
    tick: Callable[[str], None],
    shown: Container[str] = (),
    failures: list[str] | None = None,
) -> list[Row]:
    """Measure memory and time of all ways; others are held to the first.

    shown: names of ways to record memory through a step for; failures: a list that takes the
    errors of all ways but the first, instead of raising them.
    """
    forward_flops = work.flops(work.model, backward=False)
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
    rows = []
    for one, report, flops in found:
        plan, there = one.way.plan, _resident(report)
        asked = plan and plan.budget_bytes
        row = one.columns(trials[0]) | {
            "saved_bytes": report.saved_bytes,
            "rise_bytes": report.peak_bytes - there,
            "asked_bytes": None if asked is None else asked - there,
            "predicted_bytes": None if plan is None else plan.predicted_bytes - there,
            "recomputed": (flops - found[0][2]) / forward_flops if forward_flops else 0.0,
            "curve": _curve(report) if one.way.name in shown else None,
        }
        rows.append(row)
    return rows


def _resident(report: MemoryReport) -> int:
    """Return the bytes of parameters and gradients, which no activation budget bounds."""
    return report.parameter_bytes + report.gradient_bytes


def _curve(report: MemoryReport) -> Row:
    """Return memory through a step: ms, ms of the forward, the highest of each part and the end."""
    times = np.array([moment.time_ns for moment in report.timeline])
    lives = np.array([moment.live_bytes for moment in report.timeline]) - _resident(report)
    starts = np.arange(SLICES) * times[-1] / SLICES
    # bytes that live on from before, or more
    highest = lives[np.searchsorted(times, starts, side="right") - 1]
    np.maximum.at(highest, np.searchsorted(starts, times, side="right") - 1, lives)
    forward = next(m.time_ns for m in report.timeline if m.phase == "backward")
    mib = [round(nbytes / MIB, 3) for nbytes in [*highest.tolist(), lives[-1].item()]]
    return {"ms": times[-1].item() / 1e6, "forward_ms": forward / 1e6, "mib": mib}


def slowdown(row: Row, reference: Row) -> float:
    """Return the median of the ratios within turns, where load that comes and goes cancels."""
    return median(ratios(row["ms"], reference["ms"]))


def _trade(row: Row, reference: Row) -> str:
    """MiB that each added millisecond takes off the peak; "-" where none is added."""
    added = median([a - b for a, b in zip(row["ms"], reference["ms"], strict=True)])
    if row is reference or added <= 0:
        return "-"
    # a zero loses its sign
    rate = (reference["rise_bytes"] - row["rise_bytes"]) / MIB / added
    return f"{round(rate, 2) + 0.0:.2f}"


def show_ways(title: str, notes: Sequence[str], rows: Sequence[Row]) -> Row:
    """Print a line per way, and return the part of a record."""
    notes = [*notes, *NOTES]
    columns: Columns = {
        "way": lambda row: row["name"],
        "saved\nMiB": lambda row: mib(row["saved_bytes"]),
        "budget\nMiB": lambda row: mib(row["asked_bytes"]),
        "predicted\nMiB": lambda row: mib(row["predicted_bytes"]),
        "peak\nMiB": lambda row: mib(row["rise_bytes"]),
        "recomputed\n%": lambda row: f"{100 * row['recomputed']:.0f}",
        "MiB\nper ms": lambda row: _trade(row, rows[0]),
        "ms": lambda row: significant(median(row["ms"])),
        f"of\n{rows[0]['name']}": lambda row: f"{slowdown(row, rows[0]):.2f}x",
        **LOSSES,
    }
    show(title, columns, rows, notes)
    return {"title": title, "notes": notes, "rows": rows}
