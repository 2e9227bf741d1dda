"""Ways of training one model, and their costs: bytes, FLOPs, time, and the losses they reach.

All ways share the model's parameters and start from the same ones, so that as many fit as one
likes. Numbers first: a way is not timed if its gradients are further from float64 than the
project's rule allows. Then memory, that of a step which finds gradients, as all but a first
micro-batch do. Then time: the ways train in turns, and each turn begins with another one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.benchmark.utils.timer import timer
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import fusedckpt
from bench.clock import turns
from bench.judge import Judge
from bench.results import MIB, Row, rounded
from bench.workload import Batch, StepOf, Way, Workload
from fusedckpt import MemoryReport
from fusedckpt.planning.units import candidates
from fusedckpt.reporting.trial import trial

# equally long parts of a step; of each a curve has the highest
SLICES = 160
PEAK_ABOVE = "parameters and gradients"
Tick = Callable[[str], None]


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


# parts of the names of ops that run once under a selective checkpoint
_COSTLY = ("mm.", "conv", "linear.", "attention", "_grouped_mm")


def _saves_costly(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_costly = any(part in str(op) for part in _COSTLY)
    return CheckpointPolicy.MUST_SAVE if is_costly else CheckpointPolicy.PREFER_RECOMPUTE


def selective(model: nn.Module) -> nn.Module:
    """Wrap units in torch's checkpoint, which keeps results of GEMMs, convolutions, attention."""
    contexts = partial(create_selective_checkpoint_contexts, _saves_costly)
    return wrap_units(model, partial(checkpoint_wrapper, context_fn=contexts))


# names of ways with a cache in their checkpoint
CACHED = ("selective",)
# a way's name -> a function that changes the model that it is given, and returns it
MODEL_WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "eager": lambda model: model,
    # torch's, non-reentrant
    "checkpoint": partial(wrap_units, wrap=checkpoint_wrapper),
    "selective": selective,
    "fuse": fused,
    "fuse+ckpt": lambda model: wrap_units(fused(model), fusedckpt.checkpoint_module),
    "fuse+recipes": partial(fused, recompute_elementwise=True),
    "fuse preact": partial(fused, save="preact"),
    "approximate": approximated,
}


class Trial:
    """One way of training a workload, with its losses and times so far."""

    def __init__(self, work: Workload, way: Way):
        self.work = work
        self.way = way
        self.losses: list[float] = []
        self.ms: list[float] = []
        # columns of its row
        self.facts: Row = {"failure": None, "is_wrong": False}
        # loss and accuracy on held-out data after each turn
        self.held_out: list[tuple[float, float]] = []

    def train(self) -> None:
        """Take a step on every batch, and put back weights and state.

        Times forward and backward: the optimizer's step is the same for all.
        """
        optimizer = self.work.optimizer(self.work.model.parameters())
        with trial(StepOf(self.way.run, self.work.model), optimizer):
            for step, batch in enumerate(self.work.batches):
                if self.work.rates is not None:
                    for group in optimizer.param_groups:
                        group["lr"] = self.work.rates[step]
                began = timer()
                # synchronizes a GPU
                loss = self.work.backward(self.way.run, batch).item()
                self.ms.append(1e3 * (timer() - began))
                self.losses.append(loss)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if self.work.held_out is not None:
                self.held_out.append(self._test(self.work.held_out))

    @torch.no_grad()
    def _test(self, batch: Batch) -> tuple[float, float]:
        self.work.model.eval()
        output = self.way.run(*batch.args, **batch.kwargs)
        self.work.model.train()
        logits = output if isinstance(output, Tensor) else output.logits
        right = logits.argmax(-1) == batch.target
        return self.work.loss(output, batch.target).item(), right.float().mean().item()

    def row(self, reference: Trial) -> Row:
        """Return its results, and the largest difference of its losses from another's, if any."""
        row = {"name": self.way.name, **self.facts, "both_ms": rounded(self.ms) or None}
        if self.way.note:
            row["note"] = self.way.note
        if self.losses:
            count = len(reference.work.batches)
            row["losses"] = self.losses[:count]
            if reference.losses:
                by_turn = np.reshape(self.losses, (-1, count))
                differences = np.abs(by_turn - reference.losses[:count])
                row["loss_difference"] = float(differences.max())
        if self.held_out:
            row["held_out_loss"], row["accuracy"] = map(list, zip(*self.held_out, strict=True))
        return row


def take_turns(trials: Sequence[Trial], repeat: int, tick: Tick) -> None:
    """Let each train `repeat` times, in turns."""
    for _, member in turns(trials, repeat):
        tick(member.way.name)
        member.train()


def compare(
    work: Workload, ways: Sequence[Way], repeat: int, tick: Tick, shown: Container[str] = ()
) -> list[Row]:
    """Judge, weigh and time all ways; times and losses are compared with the first.

    shown: names of ways to record memory through a step for. An error of a way but the first, and
    wrong gradients, are its row's `failure`.
    """
    forward_flops = work.flops(work.model, backward=False)
    judge = Judge(work)
    trials = [Trial(work, way) for way in ways]
    for member in trials:
        tick(member.way.name)
        try:
            member.facts |= _weighed(member, trials[0], forward_flops, shown)
            member.facts |= judge.verdict(member.way)
        except Exception as error:
            if member is trials[0]:
                raise
            lines = str(error).strip().splitlines() or [""]
            member.facts["failure"] = f"{type(error).__name__}: {lines[0]}"
    take_turns([member for member in trials if member.facts["failure"] is None], repeat, tick)
    sizes = {"saved_bytes": None, "peak_bytes": None, "peak_above": PEAK_ABOVE}
    return [sizes | member.row(trials[0]) for member in trials]


def _weighed(member: Trial, first: Trial, forward_flops: int, shown: Container[str]) -> Row:
    """Return the bytes and FLOPs of a step; a way that is compiled takes one before."""
    work = member.work
    way = member.way
    if way.is_compiled:
        work.once(way.run)
    # the counter does not see the calls of compiled code
    flops = None if way.is_compiled else work.flops(way.run)
    report = work.report(way.run)
    facts = {
        "saved_bytes": report.saved_bytes + (_cached(report) if way.has_cache else 0),
        "peak_bytes": report.peak_bytes - resident(report),
        "flops": flops,
    }
    if flops is not None:
        least = first.facts.get("flops", flops)
        facts["recomputed"] = (flops - least) / max(1, forward_flops)
    if way.plan is not None:
        facts["predicted_bytes"] = way.plan.predicted_bytes - resident(report)
        if way.plan.budget_bytes is not None:
            facts["budget_bytes"] = way.plan.budget_bytes - resident(report)
    if way.name in shown:
        facts["curve"] = _curve(report)
    return facts


def _cached(report: MemoryReport) -> int:
    """Return the bytes that modules keep for backward beside those that autograd saves."""
    # the outermost module makes gradients
    return sum(nbytes for owner, nbytes in report.held.items() if owner != "(model)")


def resident(report: MemoryReport) -> int:
    """Return the bytes of parameters and gradients, which no activation budget bounds."""
    return report.parameter_bytes + report.gradient_bytes


def _curve(report: MemoryReport) -> Row:
    """Return memory through a step: ms, ms of the forward, the highest of each part and the end."""
    times = np.array([moment.time_ns for moment in report.timeline])
    lives = np.array([moment.live_bytes for moment in report.timeline]) - resident(report)
    starts = np.arange(SLICES) * times[-1] / SLICES
    # bytes that live on from before, or more
    highest = lives[np.searchsorted(times, starts, side="right") - 1]
    np.maximum.at(highest, np.searchsorted(starts, times, side="right") - 1, lives)
    forward = next(m.time_ns for m in report.timeline if m.phase == "backward")
    mib = [round(nbytes / MIB, 3) for nbytes in [*highest.tolist(), lives[-1].item()]]
    return {"ms": times[-1].item() / 1e6, "forward_ms": forward / 1e6, "mib": mib}
