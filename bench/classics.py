"""Reproduce the classic workloads of gradient checkpointing.

Trains many convolutions, a deep MLP and the deepest stack that fits a budget: plain, with torch's
checkpoint_sequential, with ours, and under plans. The literature's claim for the last: stacks ten
times as deep for 20 to 30 % more time (Chen et al., arXiv 1604.06174; the gradient-checkpointing
package of OpenAI's Salimans and Bulatov). Peaks are measured, not computed, and a deeper stack is
taken to peak higher.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import fusedckpt
from bench import models, show, tasks, training
from bench.env import environment, summary
from bench.models import HEAD_DIM
from bench.options import Options
from bench.results import MIB, Row, rounded
from bench.search import most
from bench.tables import mib
from bench.training import Tick, Trial, resident
from bench.ways import BUDGETS, NOTES
from bench.workload import Batch, Way, Workload
from fusedckpt.memory import nbytes_of
from fusedckpt.planning.budget import bytes_of
from fusedckpt.reporting.progress import progress

SEGMENTS = {"conv": (1, 2, 4, 8, 16, 32), "mlp": (2, 3, 5, 10)}
# besides a number of segments
RULES = ("sqrt", "recursive")
# ways with memory drawn through a step
SHOWN = ("plain", "fusedckpt sqrt", "fusedckpt recursive", "plan memory")
# between losses of order one; fused kernels round otherwise, checkpoints do not
AGREE = 1e-4
POLICIES = ("all", "sqrt", "speed", "memory")
NUM_PLANS = len(POLICIES) + len(BUDGETS)


def options(add: Options) -> None:
    """Add the options."""
    text = "many convolutions, a deep MLP, or how deep a stack can go"
    add.one("part", text, "all", choices=("conv", "mlp", "depth", "all"))
    add.count("layers", "convolutions", 100)
    # 320 channels on a CPU would be 92 million parameters and 1.1 TFLOP a step
    add.count("width", "channels of the convolutions, 320 in the classic net", 32, 320)
    add.count("batch", "images per step", 64)
    add.count("mlp-layers", "layers of the MLP", 20)
    add.count("mlp-width", "width of the MLP and of its input, a square number", 1024)
    add.count("mlp-batch", "images per step of the MLP", 32)
    add.count("depth-dim", "width of the stack, a multiple of the head size 64", 64)
    add.count("depth-seq", "tokens per sequence of the stack", 128)
    add.count("depth-batch", "sequences per step of the stack", 8, 512)
    # more activations than parameters
    text = "memory that a step of the stack may take"
    add.one("depth-budget", text, "24MiB", "4GiB", metavar="SIZE")
    add.count("steps", "training steps per turn", 2)
    add.count("repeat", "turns of every way", 2, 10)
    add.seed()
    add.place("classics.jsonl and classics.png")
    add.set_defaults(command=add.command)


def prepare(chosen: Namespace) -> Namespace:
    """Check everything, before any work is done. Raises ValueError for values that do not fit."""
    tasks.needs("classics", "sklearn")
    device = torch.device(chosen.device)
    chosen.depth_budget = bytes_of("--depth-budget", chosen.depth_budget, device)
    if math.isqrt(chosen.mlp_width) ** 2 != chosen.mlp_width:
        raise ValueError(f"--mlp-width expects a square number, got {chosen.mlp_width}")
    if chosen.depth_dim % HEAD_DIM:
        raise ValueError(
            f"--depth-dim expects a multiple of the head size {HEAD_DIM}, got {chosen.depth_dim}"
        )
    return chosen


def in_segments(model: Any, library: str, segments: int | str) -> Way:
    """Return torch's checkpoint_sequential, or ours."""
    run = partial(fusedckpt.checkpoint_sequential, model, segments)
    if library == "torch":
        run = partial(checkpoint_sequential, model, segments, use_reentrant=False)
    return Way(f"{library} {segments}", run)


def batches_of(chosen: Namespace, side: int, batch: int) -> list[Batch]:
    """Return digits of mean 0 and deviation 1 as batches, from the start again where they end."""
    x, labels = tasks.digits(side)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(chosen.seed))
    rows = order[torch.arange(chosen.steps * batch) % len(x)]
    pairs = [(x[i].to(chosen.device), labels[i].to(chosen.device)) for i in rows.split(batch)]
    return [Batch((x,), {}, y) for x, y in pairs]


def _work(chosen: Namespace, is_conv: bool) -> tuple[Workload, str]:
    """Return a net that learns digits, and its title."""
    return _conv_work(chosen) if is_conv else _mlp_work(chosen)


def _conv_work(chosen: Namespace) -> tuple[Workload, str]:
    side = models.final_side(chosen.layers)
    title = (
        f"Convolutional net: 1 -> {chosen.width}, {chosen.layers} x [conv {chosen.width}, ReLU, "
        f"pool] down to {side} x {side}; batch {chosen.batch}"
    )
    batches = batches_of(chosen, 28, chosen.batch)
    net = models.conv_net(chosen.layers, chosen.width)
    return Workload(net, batches, F.cross_entropy, partial(torch.optim.SGD, lr=1e-3)), title


def _mlp_work(chosen: Namespace) -> tuple[Workload, str]:
    layers = chosen.mlp_layers
    width = chosen.mlp_width
    title = f"MLP: {layers} layers of {width}, 10 outputs, ReLU; batch {chosen.mlp_batch}, Adam"
    batches = batches_of(chosen, math.isqrt(width), chosen.mlp_batch)
    flat = [batch._replace(args=(batch.args[0].flatten(1),)) for batch in batches]
    adam = partial(torch.optim.Adam, lr=1e-4)
    return Workload(models.mlp(layers, width), flat, F.cross_entropy, adam), title


def _compared(chosen: Namespace, part: str) -> list[Row]:
    """Compare the ways of training a model on pictures."""
    torch.manual_seed(chosen.seed)
    work, title = _work(chosen, is_conv=part == "conv")
    model: Any = work.model.to(chosen.device)
    models.scale(model, work.batches[0].args[0])
    layers = chosen.layers if part == "conv" else chosen.mlp_layers
    segments = [k for k in SEGMENTS[part] if k <= layers]
    counts = [("torch", k) for k in segments] + [("fusedckpt", k) for k in [*segments, *RULES]]
    fixed = [Way("plain", model)]
    fixed += [in_segments(model, library, count) for library, count in counts]
    total = NUM_PLANS + (len(fixed) + NUM_PLANS) * (1 + chosen.repeat)
    with progress(part, total) as tick:
        ways = [*fixed, *_plans(work, tick)]
        rows = training.compare(work, ways, chosen.repeat, tick, SHOWN)
    width = chosen.width if part == "conv" else chosen.mlp_width
    batch = chosen.batch if part == "conv" else chosen.mlp_batch
    sizes = {"case": part, "title": title, "layers": layers, "dim": width, "batch": batch}
    return [sizes | {"parameter_bytes": nbytes_of(model.parameters())} | row for row in rows]


def _plans(work: Workload, tick: Tick) -> Iterator[Way]:
    """Plan by rules, then within budgets from the least peak to the model's own."""
    ways = []
    for policy in POLICIES:
        tick(f"planning {policy}")
        ways.append(work.planned(f"plan {policy}", policy=policy, accumulate=True))
    yield from ways
    report = work.report(work.model)
    least = min(way.plan.measured_bytes for way in ways)
    span = report.peak_bytes - least
    budgets = [least - resident(report) + int(share * span) for share in BUDGETS]
    # of a model that no plan makes smaller they are one
    for name, budget in {f"plan {mib(budget)} MiB": budget for budget in budgets}.items():
        tick(f"planning {name}")
        yield work.planned(name, activation_budget=budget)


def stack_of(chosen: Namespace, layers: int, is_fused: bool = False) -> Workload:
    """Return a stack that starts as every stack of this depth does."""
    torch.manual_seed(chosen.seed)
    shape = (chosen.depth_batch, chosen.depth_seq, chosen.depth_dim)
    device = chosen.device
    batches = [(torch.randn(shape), torch.randn(shape)) for _ in range(chosen.steps)]
    model = models.stack(layers, chosen.depth_dim, chosen.depth_seq).to(device)
    if is_fused:
        fusedckpt.fuse(model)
    on_device = [Batch((x.to(device),), {}, y.to(device)) for x, y in batches]
    return Workload(model, on_device, F.mse_loss, partial(torch.optim.SGD, lr=0.1))


def _every_block(model: Any, x: Tensor) -> Tensor:
    for block in model:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def _planned(work: Workload, **options: Any) -> Way:
    return work.planned("plan", work.model, **({"policy": "memory"} | options))


# the ways of the deepest stack: a name -> the way, for a workload
DEPTH_WAYS: dict[str, Callable[[Workload], Way]] = {
    "plain": lambda work: Way("plain", work.model),
    "torch sqrt(n)": lambda work: in_segments(
        work.model, "torch", max(1, math.isqrt(len(list(work.model.children()))))
    ),
    "torch, every block": lambda work: Way("torch", partial(_every_block, work.model)),
    "fusedckpt recursive": lambda work: in_segments(work.model, "fusedckpt", "recursive"),
    "plan memory": _planned,
    "fused, plan memory": _planned,
}
# time that the budget buys back where the depth that torch reaches is enough
SAME = "plan, same depth"


def trial_of(chosen: Namespace, name: str, layers: int) -> Trial:
    """Return a stack of so many layers, to be trained in one of the ways."""
    planned = partial(_planned, policy="budget", budget=chosen.depth_budget)
    work = stack_of(chosen, layers, is_fused=name.startswith("fused,"))
    return Trial(work, (planned if name == SAME else DEPTH_WAYS[name])(work)._replace(name=name))


def peak_of(trial: Trial) -> int:
    """Return the peak of a step, with parameters and gradients."""
    plan = trial.way.plan
    if plan is not None and plan.measured_bytes is not None:
        # the same step, measured just now
        return plan.measured_bytes
    return trial.work.peak_bytes(trial.way.run)


def _depths(chosen: Namespace) -> list[Row]:
    """Find the depth of every way, then time them in turns.

    Raises ValueError where not even one plain block fits.
    """
    depths: dict[str, int] = {}
    with progress("depth", len(DEPTH_WAYS) + (len(DEPTH_WAYS) + 1) * (chosen.repeat + 1)) as tick:
        for name in DEPTH_WAYS:
            tick(f"{name}: searching")

            def fits(layers: int, name: str = name) -> bool:
                return peak_of(trial_of(chosen, name, layers)) <= chosen.depth_budget

            # a way fits about as much as the one before
            depths[name] = most(fits, [1, *depths.values()][-1])
            if not depths[name]:
                budget = f"--depth-budget: {chosen.depth_budget} bytes"
                raise ValueError(f"{budget} do not fit one block")
        depths[SAME] = min(depths["torch, every block"], depths["plan memory"])
        trials = {name: trial_of(chosen, name, layers) for name, layers in depths.items()}
        peaks = {name: trial.work.peak_bytes(trial.way.run) for name, trial in trials.items()}
        training.take_turns(list(trials.values()), chosen.repeat, tick)
        shallow = {name: trial_of(chosen, name, depths["plain"]) for name in depths}
        training.take_turns(list(shallow.values()), 1, tick)
    title = (
        f"The deepest stack within {chosen.depth_budget / MIB:,.0f} MiB: transformer blocks of"
        f" {chosen.depth_dim}, {chosen.depth_batch} x {chosen.depth_seq} tokens"
    )
    sizes = {"case": "depth", "title": title, "dim": chosen.depth_dim, "batch": chosen.depth_batch}
    sizes |= {"seq": chosen.depth_seq, "memory": chosen.depth_budget / MIB, "saved_bytes": None}
    rows = []
    for name, trial in trials.items():
        row = trial.row(trial) | shallow[name].row(shallow["plain"])
        row |= {"both_ms": rounded(trial.ms)}
        row |= {"depth": depths[name], "peak_bytes": peaks[name], "peak_above": ABOVE}
        rows.append(sizes | row)
    return rows


ABOVE = "zero, parameters and gradients included"
SEGMENTED = "torch k, fusedckpt k: checkpoint_sequential with k segments"
DEPTH_NOTES = (
    "ms: of forward and backward at that depth",
    "torch sqrt(n), fusedckpt recursive: checkpoint_sequential; plan memory: of least peak",
    "plan, same depth: the fastest plan within the budget, at torch's every block's",
    "last loss, diff.: at plain's depth, and the largest difference to plain's",
)


def run(chosen: Namespace) -> int:
    """Measure the parts, print, write rows and figure; 1 where losses or gradients disagree."""
    facts = environment(torch.device(chosen.device), torch.float32)
    how = f"float32, medians of {chosen.repeat} x {chosen.steps} steps"
    print(f"{summary(facts)}; {how}\nwrites {show.files_of(chosen)}", flush=True)
    names = ("conv", "mlp", "depth") if chosen.part == "all" else (chosen.part,)
    cases = []
    for name in names:
        rows = _depths(chosen) if name == "depth" else _compared(chosen, name)
        shared = {"command": "classics", "dtype": "float32"}
        cases.append([shared | row | facts for row in rows])
        show.show_rows(cases[-1], DEPTH_NOTES if name == "depth" else (SEGMENTED, *NOTES))
    status = show.publish(chosen, cases)
    worst = max(row.get("loss_difference", 0.0) for rows in cases for row in rows)
    if worst > AGREE:
        print(f"losses differ by {worst:.1e}, more than {AGREE:.0e}")
    return int(worst > AGREE or status)
