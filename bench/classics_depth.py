"""How deep can it go: the deepest stack of transformer blocks whose step fits a budget.

The peak of a step is measured, not computed; depths are searched by doubling, then between what
fits and what does not, taking for granted that a deeper stack peaks higher.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedckpt
from bench.classics_models import stack
from bench.classics_results import Depth, Depths
from bench.classics_ways import Batch, Trial, Way, Workload, take_turns
from bench.results import MIB, Timing

__all__ = ["Stack", "deepest", "measure_depths", "num_steps"]

# where the search gives up
LIMIT = 4096


@dataclass(frozen=True)
class Stack:
    """Sizes of the blocks and of their input `[batch, seq, dim]`, and the steps trained."""

    dim: int
    seq: int
    batch: int
    steps: int
    seed: int
    device: torch.device

    def workload(self, layers: int, fused: bool = False) -> Workload:
        """Return a stack that starts as every stack of this depth does."""
        torch.manual_seed(self.seed)
        shape = (self.batch, self.seq, self.dim)
        batches = [(torch.randn(shape), torch.randn(shape)) for _ in range(self.steps)]
        model = stack(layers, self.dim, self.seq).to(self.device)
        if fused:
            fusedckpt.fuse(model)
        on_device = [Batch((x.to(self.device),), {}, y.to(self.device)) for x, y in batches]
        return Workload(model, on_device, F.mse_loss, partial(torch.optim.SGD, lr=0.1))


Recipe = Callable[[Stack, int], Trial]


def _every_block(model: nn.Sequential, x: Tensor) -> Tensor:
    for block in model:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def _as(way: Callable[[Any], Way]) -> Recipe:
    """Return the recipe of a way of running a stack."""

    def recipe(sizes: Stack, layers: int) -> Trial:
        work = sizes.workload(layers)
        return Trial(work, way(work.model))

    return recipe


def _planned(
    sizes: Stack, layers: int, fused: bool = False, policy: str = "memory", **options: Any
) -> Trial:
    work = sizes.workload(layers, fused)
    return Trial(work, work.planned("plan", work.model, policy=policy, **options))


RECIPES: dict[str, Recipe] = {
    "plain": _as(partial(Way, "plain")),
    "torch sqrt(n)": _as(lambda model: Way.torch(model, max(1, math.isqrt(len(model))))),
    "torch, every block": _as(lambda model: Way("torch", partial(_every_block, model))),
    "fusedckpt recursive": _as(lambda model: Way.ours(model, "recursive")),
    "plan memory": _planned,
    "fused, plan memory": partial(_planned, fused=True),
}


def deepest(peak: Callable[[int], int], budget: int, guess: int = 1) -> int:
    """Return the largest number of layers whose peak fits the budget, 0 where one does not.

    Goes up or down from the guess by steps that double, then bisects, at first where the peak
    would meet the budget if it grew evenly.
    """
    peaks = {0: 0}

    def fits(layers: int) -> bool:
        if layers not in peaks:
            peaks[layers] = peak(layers)
        return peaks[layers] <= budget

    low, high, step = guess, guess, 1
    if fits(guess):
        while low < LIMIT and fits(high := low + step):
            low, step = high, 2 * step
    else:
        while not fits(low := max(0, high - step)):
            high, step = low, 2 * step
    share = (budget - peaks[low]) / (peaks[high] - peaks[low])
    middle = low + int(share * (high - low))
    while high - low > 1:
        middle = min(high - 1, max(low + 1, middle))
        low, high = (middle, high) if fits(middle) else (low, middle)
        middle = (low + high) // 2
    return low


def _peak(trial: Trial) -> int:
    plan = trial.way.plan
    if plan is not None and plan.measured_bytes is not None:
        # the same step, measured just now
        return plan.measured_bytes
    return _measured(trial)


def _measured(trial: Trial) -> int:
    return trial.work.peak_bytes(trial.way.run)


def _depths_of(sizes: Stack, budget: int, tick: Callable[..., None]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, recipe in RECIPES.items():
        tick(f"{name}: searching")

        def peak(layers: int, name: str = name, recipe: Recipe = recipe) -> int:
            tick(f"{name}, {layers} layers", counts=False)
            return _peak(recipe(sizes, layers))

        # a way fits about as much as the one before
        found[name] = deepest(peak, budget, [1, *found.values()][-1])
        if not found[name]:
            raise ValueError(f"--depth-budget: {budget} bytes are too few for one block")
    return found


def num_steps(repeat: int) -> int:
    """Return how many steps `measure_depths` has: a search each, then turns, the last shallow."""
    return len(RECIPES) + (len(RECIPES) + 1) * (repeat + 1)


def measure_depths(sizes: Stack, budget: int, repeat: int, tick: Callable[..., None]) -> Depths:
    """Find the depth of every way, then time them in turns.

    Raises ValueError where not even one plain block fits.
    """
    found = _depths_of(sizes, budget, tick)
    recipes = dict(RECIPES)
    # time that the budget buys back where what torch reaches is deep enough
    name = "plan, same depth"
    recipes[name] = partial(_planned, policy="budget", budget=budget)
    found[name] = min(found["torch, every block"], found["plan memory"])
    trials = {name: recipe(sizes, found[name]) for name, recipe in recipes.items()}
    peaks = {name: _measured(trial) for name, trial in trials.items()}
    take_turns(list(trials.values()), repeat, tick)
    shallow = {name: recipe(sizes, found["plain"]) for name, recipe in recipes.items()}
    for name, trial in shallow.items():
        tick(f"{name}, {found['plain']} layers")
        trial.train()
    rows = tuple(
        Depth(
            name,
            layers=found[name],
            peak_bytes=peaks[name],
            ms=Timing.of(trial.samples),
            losses=tuple(shallow[name].losses[0]),
            loss_difference=shallow[name].difference(shallow["plain"]),
        )
        for name, trial in trials.items()
    )
    return Depths(_title(sizes, budget), _NOTES, budget, rows)


_NOTES = (
    "peak: of forward and backward, with parameters and gradients; ms: of both",
    "torch sqrt(n), fusedckpt recursive: checkpoint_sequential; plan memory: of least peak",
    "plan, same depth: the fastest plan within the budget, at torch's every block's",
    "last loss, diff.: at plain's depth, and the largest difference to plain's",
)


def _title(sizes: Stack, budget: int) -> str:
    return (
        f"The deepest stack within {budget / MIB:,.0f} MiB: transformer blocks of {sizes.dim},"
        f" {sizes.batch} x {sizes.seq} tokens"
    )
