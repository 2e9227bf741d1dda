"""Ways of training one model, and what each costs: bytes, FLOPs, time, and the losses it reaches.

All ways share one model and start from the same weights, so that as many fit as one likes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode

import fusedckpt
from bench.classics_results import Row
from bench.results import Timing
from fusedckpt.memory import nbytes_of, peak_bytes, saved_tensors

__all__ = ["Trial", "Way", "Workload", "measure", "take_turns"]

Forward = Callable[[nn.Sequential, Tensor], Tensor]


def _plain(model: nn.Sequential, x: Tensor) -> Tensor:
    return model(x)


def _torch(segments: int, model: nn.Sequential, x: Tensor) -> Tensor:
    return checkpoint_sequential(model, segments, x, use_reentrant=False)


def _ours(segments: int | str, model: nn.Sequential, x: Tensor) -> Tensor:
    return fusedckpt.checkpoint_sequential(model, segments, x)


class Way(NamedTuple):
    """A way of running a model: a forward of its own, or a plan."""

    name: str
    forward: Forward = _plain
    plan: fusedckpt.Plan | None = None

    @classmethod
    def torch(cls, segments: int) -> Way:
        """PyTorch's checkpoint_sequential."""
        return cls(f"torch {segments}", partial(_torch, segments))

    @classmethod
    def ours(cls, segments: int | str) -> Way:
        """Ours."""
        return cls(f"fusedckpt {segments}", partial(_ours, segments))

    @contextmanager
    def on(self, model: nn.Sequential) -> Iterator[Callable[[Tensor], Tensor]]:
        """Yield the forward of a model, which the plan, if any, is applied to meanwhile."""
        if self.plan is None:
            yield partial(self.forward, model)
            return
        self.plan.apply(model)
        try:
            yield partial(self.forward, model)
        finally:
            self.plan.undo()


class Workload(NamedTuple):
    """What is trained, on which batches, one step each, by which optimizer."""

    model: nn.Sequential
    batches: Sequence[tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Iterator[nn.Parameter]], Optimizer]

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.batches[0][0].device

    def backward(self, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Run forward and backward on the first batch."""
        x, target = self.batches[0]
        loss = self.loss(forward(x), target)
        loss.backward()
        return loss

    def plan(self, **options: Any) -> fusedckpt.Plan:
        """Plan for the first batch."""
        x, target = self.batches[0]
        loss = partial(self._loss_of, target)
        return fusedckpt.plan(self.model, x, loss=loss, progress=False, **options)

    def _loss_of(self, target: Tensor, output: Tensor) -> Tensor:
        return self.loss(output, target)

    def resident_bytes(self) -> int:
        """Return what is there before a step: parameters, buffers, the batch."""
        return nbytes_of([*self.model.parameters(), *self.model.buffers(), *self.batches[0]])

    def flops(self, forward: Callable[[Tensor], Tensor]) -> int:
        """Return the FLOPs of forward and backward."""
        with FlopCounterMode(display=False) as counter:
            self.backward(forward)
        self.model.zero_grad(set_to_none=True)
        return counter.get_total_flops()

    def forward_flops(self) -> int:
        """Return the FLOPs of the forward alone."""
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            self.model(self.batches[0][0])
        return counter.get_total_flops()

    def saved_bytes(self, forward: Callable[[Tensor], Tensor]) -> int:
        """Return what forward and loss keep for backward."""
        x, target = self.batches[0]
        with saved_tensors(exclude=[x, target, *self.model.buffers()]) as saved:
            self.loss(forward(x), target)
        return saved.nbytes

    def rise_bytes(self, forward: Callable[[Tensor], Tensor]) -> int:
        """Return how high a step climbs above its start, where gradients are there already."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        rise = peak_bytes(lambda: self.backward(forward), self.device)
        self.model.zero_grad(set_to_none=True)
        return rise

    def peak_bytes(self, forward: Callable[[Tensor], Tensor]) -> int:
        """Return the peak of forward and backward, parameters and new gradients included."""
        self.model.zero_grad(set_to_none=True)
        rise = peak_bytes(lambda: self.backward(forward), self.device)
        self.model.zero_grad(set_to_none=True)
        return self.resident_bytes() + rise


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
        start = [parameter.detach().clone() for parameter in self.work.model.parameters()]
        optimizer = self.work.optimizer(self.work.model.parameters())
        self.losses.append([])
        with self.way.on(self.work.model) as forward:
            for batch in self.work.batches:
                work = self.work._replace(batches=[batch])
                began = self._now()
                loss = work.backward(forward)
                self.samples.append(1e3 * (self._now() - began))
                self.losses[-1].append(loss.item())
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, before in zip(self.work.model.parameters(), start, strict=True):
                parameter.copy_(before)

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
        for trial in (*trials[first:], *trials[:first]):
            tick(trial.way.name)
            trial.train()


def measure(
    work: Workload, ways: Sequence[Way], repeat: int, tick: Callable[[str], None]
) -> tuple[Row, ...]:
    """Weigh and time all ways; the first is the one that others are held to."""
    trials = [Trial(work, way) for way in ways]
    forward_flops = work.forward_flops()
    weights: list[tuple[int, int, int]] = []
    flops: list[int] = []
    for way in ways:
        tick(way.name)
        with way.on(work.model) as forward:
            flops.append(work.flops(forward))
            weights.append(
                (work.saved_bytes(forward), work.rise_bytes(forward), work.peak_bytes(forward))
            )
    take_turns(trials, repeat, tick)
    return tuple(
        Row(
            trial.way.name,
            *weights[i],
            predicted_bytes=trial.way.plan.predicted_bytes if trial.way.plan else None,
            recomputed=(flops[i] - flops[0]) / forward_flops,
            ms=Timing.of(trial.samples),
            losses=tuple(trial.losses[0]),
            loss_difference=trial.difference(trials[0]),
        )
        for i, trial in enumerate(trials)
    )
