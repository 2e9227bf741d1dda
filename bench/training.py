"""Ways of training one model, and their costs: bytes, FLOPs, time, and the losses they reach.

RECIPES make ways from a model. Here all share its parameters and start from the same ones, so that
as many fit as one likes; in `lockstep` each has a copy. Memory is that of a step which finds
gradients, as all but a first micro-batch do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import Optimizer
from torch.utils.benchmark.utils.timer import timer
from torch.utils.flop_counter import FlopCounterMode

import fusedckpt
from bench.clock import turns
from bench.results import MIB, Row, rounded
from bench.tables import mib
from fusedckpt import MemoryReport
from fusedckpt.memory import nbytes_of, peak_bytes
from fusedckpt.planning.units import candidates
from fusedckpt.reporting.trial import trial

# equally long parts of a step; of each a curve has the highest
SLICES = 160
# of the way from the least peak that a plan reaches to that of saving everything
BUDGETS = (0.25, 0.5, 0.75)
POLICIES = ("all", "sqrt", "speed", "memory")
NOTES = (
    "saved: for backward; peak: of a step, above parameters and gradients that exist before;",
    "budget, predicted: activation budget and predicted peak of a plan; recomputed: FLOPs of the",
    "recomputation, relative to the forward; ms: forward and backward; MiB per ms: reduction of",
    "the peak per extra millisecond; last loss: of the last step; diff.: the largest difference",
    "from the first row's in any step",
)
Tick = Callable[[str], None]


class Batch(NamedTuple):
    """A model's inputs, and the target that its loss gets besides the output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None


class Way(NamedTuple):
    """A callable that takes a batch: the model, a copy that runs otherwise, or a function."""

    name: str
    run: Callable[..., Any]
    plan: fusedckpt.Plan | None = None
    is_compiled: bool = False


def wrap_units(model: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Wrap every unit of a model that a plan would cut, and return the model."""
    for unit in candidates(model):
        model.set_submodule(unit, wrap(model.get_submodule(unit)))
    return model


def fused(model: nn.Module, **options: Any) -> nn.Module:
    """Fuse layers in place, and return the model."""
    fusedckpt.fuse(model, **options)
    return model


def approximated(model: nn.Module) -> nn.Module:
    """Replace exact activations by approximate ones, and fuse the norms alone."""
    kinds = {"GELU": fusedckpt.ReGELU2, "SiLU": fusedckpt.ReSiLU2}
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if kind := kinds.get(type(child).__name__.removesuffix("Activation")):
                setattr(parent, name, kind())
    return fused(model, mlp=False, attention=False)


# each changes the model that it is given, and returns it
RECIPES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "eager": lambda model: model,
    # torch's, non-reentrant
    "checkpoint": partial(wrap_units, wrap=checkpoint_wrapper),
    "fuse": fused,
    "fuse+ckpt": lambda model: wrap_units(fused(model), fusedckpt.Checkpoint),
    "fuse preact": partial(fused, save="preact"),
    "approximate": approximated,
}


class _Run(nn.Module):
    """A way of running a model, as a module that has its parameters, and gradients of them."""

    def __init__(self, run: Callable[..., Any], model: nn.Module):
        super().__init__()
        self.run, self.model = run, model

    def forward(self, batch: Batch) -> Any:
        for parameter in self.parameters():
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

    def once(self, run: Callable[..., Any]) -> None:
        """Take a step on the first batch that leaves no trace, such as one that compiles."""
        with trial(_Run(run, self.model)):
            self.backward(run)

    def copied(self) -> nn.Module:
        """Return a copy of the model that shares its parameters and buffers."""
        shared = [*self.model.parameters(), *self.model.buffers()]
        return copy.deepcopy(self.model, {id(tensor): tensor for tensor in shared})

    def planned(self, name: str, model: nn.Module | None = None, **options: Any) -> Way:
        """Plan a copy of the model, or the one that is given, for the first batch."""
        model = self.copied() if model is None else model
        args, kwargs, target = self.batches[0]
        options |= {"loss": lambda y: self.loss(y, target), "progress": False}
        plan = fusedckpt.plan(model, *args, **options, **kwargs)
        return Way(name, plan.apply(model), plan)

    def report(self, run: Callable[..., Any]) -> MemoryReport:
        """Take a step on the first batch, where gradients exist already."""
        batch = self.batches[0]
        model = _Run(run, self.model)
        return fusedckpt.report(model, batch, loss=lambda y: self.loss(y, batch.target))

    def flops(self, run: Callable[..., Any], backward: bool = True) -> int:
        """Return the FLOPs of forward and backward, or of the forward alone."""
        with trial(_Run(run, self.model)), FlopCounterMode(display=False) as counter:
            if backward:
                self.backward(run)
            else:
                with torch.no_grad():
                    run(*self.batches[0].args, **self.batches[0].kwargs)
        return counter.get_total_flops()

    def peak_bytes(self, run: Callable[..., Any]) -> int:
        """Return the peak of forward and backward, parameters and new gradients included."""
        held = [*self.model.parameters(), *self.model.buffers(), *self.batches[0].args]
        with trial(_Run(run, self.model)):
            return nbytes_of(held) + peak_bytes(lambda: self.backward(run), held[0].device)


class Trial:
    """One way of training a workload, with its optimizer, and its losses and times so far."""

    def __init__(self, work: Workload, way: Way):
        self.work, self.way = work, way
        self.optimizer = work.optimizer(work.model.parameters())
        self.losses: list[float] = []
        self.ms: list[float] = []
        self.facts: Row = {}

    def step(self, batch: Batch) -> None:
        """Take a step. Times forward and backward: the optimizer's step is the same for all."""
        # synchronises a GPU
        began = timer()
        loss = self.work.backward(self.way.run, batch)
        self.ms.append(1e3 * (timer() - began))
        self.losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def train(self) -> None:
        """Take a step on every batch, and put back weights and state."""
        with trial(_Run(self.way.run, self.work.model), self.optimizer):
            for batch in self.work.batches:
                self.step(batch)

    def row(self, reference: Trial) -> Row:
        """Return its results, and the largest difference of its losses from another's."""
        count = len(reference.work.batches)
        turns, first = np.reshape(self.losses, (-1, count)), reference.losses[:count]
        difference = float(np.abs(turns - first).max())
        losses = {"losses": self.losses[:count], "loss_difference": difference}
        return {"name": self.way.name, "ms": rounded(self.ms)} | losses | self.facts


def take_turns(trials: Sequence[Trial], repeat: int, tick: Tick) -> None:
    """Let each train `repeat` times, in turns."""
    for _, one in turns(trials, repeat):
        tick(one.way.name)
        one.train()


def plans(
    work: Workload,
    tick: Tick,
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
    tick: Tick,
    shown: Container[str] = (),
    failures: list[str] | None = None,
) -> list[Row]:
    """Measure memory and time of all ways; others are compared with the first.

    shown: names of ways to record memory through a step for; failures: a list that takes the
    errors of all ways but the first, instead of raising them.
    """
    forward_flops = work.flops(work.model, backward=False)
    trials: list[Trial] = []
    for way in ways:
        tick(way.name)
        try:
            if way.is_compiled:
                work.once(way.run)
            # the counter does not see what compiled code calls
            flops = None if way.is_compiled else work.flops(way.run)
            report = work.report(way.run)
        except Exception as error:
            if failures is None or not trials:
                raise
            failures.append(f"{way.name}: {type(error).__name__}: {error}")
            continue
        trials.append(Trial(work, way))
        there, plan = _resident(report), way.plan
        asked = plan and plan.budget_bytes
        least = trials[0].facts.get("flops", flops)
        more = None if flops is None else (flops - least) / max(1, forward_flops)
        trials[-1].facts = {
            "saved_mib": report.saved_bytes / MIB,
            "peak_mib": (report.peak_bytes - there) / MIB,
            "asked_mib": None if asked is None else (asked - there) / MIB,
            "predicted_mib": None if plan is None else (plan.predicted_bytes - there) / MIB,
            "flops": flops,
            "recomputed": more,
            "curve": _curve(report) if way.name in shown else None,
        }
    take_turns(trials, repeat, tick)
    return [one.row(trials[0]) for one in trials]


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
