"""`python -m bench classics`: many convolutions, a deep MLP, and how deep a stack can go.

The literature's claim for the last: stacks ten times as deep for 20 to 30 % more time (Chen et al.,
arXiv 1604.06174; the gradient-checkpointing package of OpenAI's Salimans and Bulatov). Its peaks
are measured, not computed, and a deeper stack is taken to peak higher.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedckpt
from bench import models, training
from bench.env import environment, summary
from bench.models import HEAD_DIM
from bench.results import Row, chosen_of, largest_difference, median
from bench.search import most
from bench.tables import MIB, Columns, mib, progress, show, significant
from bench.training import NUM_PLANS, Batch, Trial, Way, Workload, in_segments, slowdown
from bench.training_figures import publish
from fusedckpt.memory import nbytes_of
from fusedckpt.planning.budget import bytes_of

SEGMENTS = {"conv": (1, 2, 4, 8, 16, 32), "mlp": (2, 3, 5, 10)}
BATCHES = {"conv": "batch", "mlp": "mlp_batch"}
# besides a number of segments
RULES = ("sqrt", "recursive")
# ways with memory drawn through a step
SHOWN = ("plain", "fusedckpt sqrt", "fusedckpt recursive", "plan memory")
# between losses of order one; fused kernels round otherwise, checkpoints do not
AGREE = 1e-4
Tick = Callable[..., None]


def prepare(chosen: Namespace) -> Namespace:
    """Check everything, before any work is done. Raises ValueError for values that do not fit."""
    device = torch.device(chosen.device)
    chosen.depth_budget = bytes_of("--depth-budget", chosen.depth_budget, device)
    if math.isqrt(chosen.mlp_width) ** 2 != chosen.mlp_width:
        raise ValueError(f"--mlp-width expects a square number, got {chosen.mlp_width}")
    if chosen.depth_dim % HEAD_DIM:
        raise ValueError(
            f"--depth-dim expects a multiple of the head size {HEAD_DIM}, got {chosen.depth_dim}"
        )
    return chosen


def _segments(chosen: Namespace, part: str) -> list[int]:
    layers = chosen.layers if part == "conv" else chosen.mlp_layers
    return [k for k in SEGMENTS[part] if k <= layers]


def _num_steps(chosen: Namespace, part: str) -> int:
    if part == "depth":
        # a search each, then turns, the last shallow
        return len(RECIPES) + (len(RECIPES) + 1) * (chosen.repeat + 1)
    ways = 1 + 2 * len(_segments(chosen, part)) + len(RULES) + NUM_PLANS
    return NUM_PLANS + ways * (1 + chosen.repeat)


def _conv(chosen: Namespace) -> tuple[nn.Sequential, models.Images, Any, str]:
    side = models.final_side(chosen.layers)
    title = (
        f"Convolutional net: 1 -> {chosen.width}, {chosen.layers} x [conv {chosen.width}, ReLU,"
        f" pool] down to {side} x {side}; batch {chosen.batch}"
    )
    model = models.conv_net(chosen.layers, chosen.width)
    return model, models.images(28, chosen.seed), partial(torch.optim.SGD, lr=1e-3), title


def _mlp(chosen: Namespace) -> tuple[nn.Sequential, models.Images, Any, str]:
    title = (
        f"MLP: {chosen.mlp_layers} layers of {chosen.mlp_width}, 10 outputs, ReLU; batch"
        f" {chosen.mlp_batch}, Adam"
    )
    model = models.mlp(chosen.mlp_layers, chosen.mlp_width)
    pictures = models.images(math.isqrt(chosen.mlp_width), chosen.seed)
    flat = pictures._replace(x=pictures.x.flatten(1))
    return model, flat, partial(torch.optim.Adam, lr=1e-4), title


def _part(part: str, chosen: Namespace, tick: Tick) -> Row:
    """Compare the ways of training a model on pictures."""
    torch.manual_seed(chosen.seed)
    model, pictures, optimizer, title = {"conv": _conv, "mlp": _mlp}[part](chosen)
    device, batch = torch.device(chosen.device), vars(chosen)[BATCHES[part]]
    batches = pictures.batches(chosen.steps, batch, device)
    models.scale(model.to(device), batches[0][0])
    work = Workload(model, [Batch((x,), {}, y) for x, y in batches], F.cross_entropy, optimizer)
    segments = _segments(chosen, part)
    stock = [in_segments(model, "torch", k) for k in segments]
    ours = [in_segments(model, "fusedckpt", k) for k in [*segments, *RULES]]
    ways = [Way("plain", model), *stock, *ours, *training.plans(work, tick)]
    notes = [
        f"{pictures.source}; {mib(nbytes_of(model.parameters()))} MiB of parameters",
        "torch k, fusedckpt k: checkpoint_sequential with k segments",
    ]
    rows = training.compare(work, ways, chosen.repeat, tick, shown=SHOWN)
    return training.show_ways(title, notes, rows)


def stack_of(chosen: Namespace, layers: int, fused: bool = False) -> Workload:
    """Return a stack that starts as every stack of this depth does."""
    torch.manual_seed(chosen.seed)
    shape, device = (chosen.depth_batch, chosen.depth_seq, chosen.depth_dim), chosen.device
    batches = [(torch.randn(shape), torch.randn(shape)) for _ in range(chosen.steps)]
    model = models.stack(layers, chosen.depth_dim, chosen.depth_seq).to(device)
    if fused:
        fusedckpt.fuse(model)
    on_device = [Batch((x.to(device),), {}, y.to(device)) for x, y in batches]
    return Workload(model, on_device, F.mse_loss, partial(torch.optim.SGD, lr=0.1))


def _every_block(model: Any, x: Tensor) -> Tensor:
    for block in model:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def _planned(work: Workload, **options: Any) -> Way:
    return work.planned("plan", work.model, **({"policy": "memory"} | options))


RECIPES: dict[str, Callable[[Workload], Way]] = {
    "plain": lambda work: Way("plain", work.model),
    "torch sqrt(n)": lambda work: in_segments(
        work.model, "torch", max(1, math.isqrt(len(list(work.model.children()))))
    ),
    "torch, every block": lambda work: Way("torch", partial(_every_block, work.model)),
    "fusedckpt recursive": lambda work: in_segments(work.model, "fusedckpt", "recursive"),
    "plan memory": _planned,
    "fused, plan memory": _planned,
}


def trial_of(chosen: Namespace, name: str, layers: int) -> Trial:
    """Return a stack of so many layers, to be trained by a recipe."""
    if name == "plan, same depth":
        recipe = partial(_planned, policy="budget", budget=chosen.depth_budget)
    else:
        recipe = RECIPES[name]
    work = stack_of(chosen, layers, fused=name.startswith("fused,"))
    trial = Trial(work, recipe(work))
    trial.way = trial.way._replace(name=name)
    return trial


def _peak(trial: Trial, is_planned: bool = True) -> int:
    plan = trial.way.plan
    if is_planned and plan is not None and plan.measured_bytes is not None:
        # the same step, measured just now
        return plan.measured_bytes
    return trial.work.peak_bytes(trial.way.run)


def _depths(chosen: Namespace, tick: Tick) -> Row:
    """Find the depth of every way, then time them in turns.

    Raises ValueError where not even one plain block fits.
    """
    found: dict[str, int] = {}
    for name in RECIPES:
        tick(f"{name}: searching")

        def fits(layers: int, name: str = name) -> bool:
            tick(f"{name}, {layers} layers", counts=False)
            return _peak(trial_of(chosen, name, layers)) <= chosen.depth_budget

        # a way fits about as much as the one before
        found[name] = most(fits, [1, *found.values()][-1])
        if not found[name]:
            raise ValueError(f"--depth-budget: {chosen.depth_budget} bytes do not fit one block")
    # time that the budget buys back where the depth that torch reaches is enough
    found["plan, same depth"] = min(found["torch, every block"], found["plan memory"])
    trials = {name: trial_of(chosen, name, layers) for name, layers in found.items()}
    peaks = {name: _peak(trial, is_planned=False) for name, trial in trials.items()}
    training.take_turns(list(trials.values()), chosen.repeat, tick)
    shallow = {name: trial_of(chosen, name, found["plain"]) for name in found}
    for name, trial in shallow.items():
        tick(f"{name}, {found['plain']} layers")
        trial.train()
    alike = {name: trial.columns(shallow["plain"]) for name, trial in shallow.items()}
    rows = [
        trial.columns(trial)
        | {name: alike[what][name] for name in ("losses", "loss_difference")}
        | {"layers": found[what], "peak_bytes": peaks[what]}
        for what, trial in trials.items()
    ]
    title = (
        f"The deepest stack within {chosen.depth_budget / MIB:,.0f} MiB: transformer blocks of"
        f" {chosen.depth_dim}, {chosen.depth_batch} x {chosen.depth_seq} tokens"
    )
    _show_depths(title, rows)
    part = {"title": title, "notes": DEPTH_NOTES, "budget_bytes": chosen.depth_budget}
    return part | {"rows": rows}


DEPTH_NOTES = (
    "peak: of forward and backward, with parameters and gradients; ms: of both",
    "torch sqrt(n), fusedckpt recursive: checkpoint_sequential; plan memory: of least peak",
    "plan, same depth: the fastest plan within the budget, at torch's every block's",
    "last loss, diff.: at plain's depth, and the largest difference to plain's",
)


def _show_depths(title: str, rows: list[Row]) -> None:
    """Print a line per way: its depth, and the cost of a layer."""
    plain = rows[0]
    columns: Columns = {
        "way": lambda row: row["name"],
        "layers": lambda row: str(row["layers"]),
        "layers\nof plain": lambda row: f"{row['layers'] / plain['layers']:.1f}x",
        "peak\nMiB": lambda row: mib(row["peak_bytes"]),
        "ms": lambda row: significant(median(row["ms"])),
        "ms per\nlayer": lambda row: f"{median(row['ms']) / row['layers']:.2f}",
        "of\nplain": lambda row: f"{slowdown(row, plain) * plain['layers'] / row['layers']:.2f}x",
        **training.LOSSES,
    }
    show(title, columns, rows, DEPTH_NOTES)


PARTS: dict[str, Callable[[Namespace, Tick], Row]] = {
    "conv": partial(_part, "conv"),
    "mlp": partial(_part, "mlp"),
    "depth": _depths,
}


def run(chosen: Namespace) -> int:
    """Measure the parts, print, write classics.json and classics.png; 1 where losses disagree."""
    facts = environment(torch.device(chosen.device), torch.float32)
    subtitle = f"{summary(facts)}; float32, medians of {chosen.repeat} x {chosen.steps} steps"
    print(subtitle, flush=True)
    result: Row = {"subtitle": subtitle, "settings": chosen_of(chosen), "environment": facts}
    differences = []
    for name, measured in PARTS.items():
        result[name] = None
        if chosen.part in (name, "all"):
            with progress(name, _num_steps(chosen, name)) as tick:
                result[name] = part = measured(chosen, tick)
            differences += [row["loss_difference"] for row in part["rows"]]
    publish(result, chosen.out, "classics")
    worst = largest_difference(differences, 0.0)
    # so written, a NaN fails
    if worst <= AGREE:
        return 0
    print(f"losses differ by {worst:.1e}, more than {AGREE:.0e}")
    return 1
