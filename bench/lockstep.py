"""One model trained in several ways, step by step in turn: demo, finetune and paper.

Every way has a copy of the model and an optimizer of its own, the same weights and batches.
A slowdown of the machine slows all of them.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

import fusedckpt
from bench import tasks
from bench.clock import turns
from bench.env import summary
from bench.models import HEAD_DIM
from bench.options import DTYPES, Options
from bench.records import part_of, publish
from bench.results import MIB, Row
from bench.tables import progress
from bench.training import RECIPES, Batch, Trial, Way, Workload
from fusedckpt.memory import peak_bytes, saved_tensors

# steps that are left out of the timing
WARMUP = 5


Pair = tuple[int, int]


def options(
    add: Options, files: str, layers: Pair = (4, 12), dim: Pair = (256, 1024), seq: int = 128
) -> None:
    """Add the options of a model that is trained in lockstep."""
    add.count("layers", "transformer blocks", *layers)
    add.count("dim", "width of the residual stream, a multiple of the head size 64", *dim)
    add.count("seq", "bytes per sequence", seq, 1024)
    add.dtype(DTYPES[:2])
    add.seed()
    add.place(files)


def checked(command: str, chosen: Namespace, *packages: str) -> Namespace:
    """Raise ValueError for values that do not fit, and for packages that are not installed."""
    if chosen.dim % HEAD_DIM:
        raise ValueError(f"--dim expects a multiple of the head size {HEAD_DIM}, got {chosen.dim}")
    tasks.needs(command, *packages)
    tasks.batches_of(chosen, 1)
    return chosen


def workload(model: nn.Module, batches: Sequence[tasks.Batch]) -> Workload:
    """Return a model with AdamW, whose rate `train` sets."""
    optimizer = partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.1)
    return Workload(model, [Batch((x,), {}, y) for x, y in batches], tasks.loss, optimizer)


def train(
    part: str, models: Mapping[str, nn.Module], dim: int, batches: Sequence[tasks.Batch]
) -> list[Trial]:
    """Train all models on the same batches, in turns."""
    works = {name: workload(model, batches) for name, model in models.items()}
    trials = [Trial(work, Way(name, work.model)) for name, work in works.items()]
    rate, count, ramp = min(3e-3, 0.75 / dim), len(batches), max(1, len(batches) // 10)
    with progress(part, len(trials) * count) as tick:
        for step, one in turns(trials, count):
            tick(f"{one.way.name} {one.losses[-1]:.3f}" if step else one.way.name)
            for group in one.optimizer.param_groups:
                group["lr"] = rate * min((step + 1) / ramp, 1.1 - step / count)
            one.step(one.work.batches[step])
    return trials


def costs(one: Trial, batch: tasks.Batch) -> Row:
    """Return the memory of one more batch.

    Saved: by forward and loss for backward, without inputs, parameters and buffers; peak: how high
    forward and backward climb above a step's start, new gradients included.
    """
    (x, y), model = batch, one.work.model
    with saved_tensors(exclude=[x, y, *model.parameters(), *model.buffers()]) as saved:
        one.work.loss(model(x), y)
    peak = peak_bytes(lambda: one.work.loss(model(x), y).backward(), x.device)
    model.zero_grad(set_to_none=True)
    # the first steps compile kernels and fill caches
    one.ms = one.ms[min(WARMUP, len(one.ms) - 1) :]
    return {"saved_mib": saved.nbytes / MIB, "peak_mib": peak / MIB}


def models_of(eager: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Return a model with the same weights for each way."""
    return {name: RECIPES[name](copy.deepcopy(eager)) for name in names}


def _planned(eager: nn.Module, checkpointed: nn.Module, batch: tasks.Batch) -> tuple[Any, str]:
    """Return a fused model under a plan that peaks no higher than torch's checkpoint, and reports.

    Where toys are too small for such a plan, the plan is that of least peak.
    """
    loss = partial(tasks.loss, targets=batch[1])
    budget = fusedckpt.report(checkpointed, batch[0], loss=loss).peak_bytes
    model = copy.deepcopy(eager)
    report, work = fusedckpt.fuse(model), workload(model, [batch])
    try:
        way = work.planned("plan", model, budget=budget)
    except ValueError:
        way = work.planned("plan", model, policy="memory")
    return way.run, f"{report}\n{way.plan}"


def compare(
    chosen: Namespace,
    eager: nn.Module,
    names: Sequence[str],
    file: str,
    title: str,
    subtitle: str,
    facts: Row,
) -> int:
    """Train ways by name, the first of which is eager, and one under a plan; print and write.

    The first batch is for the plan, and memory is that of a step with the last. Times are of
    forward and backward. Returns 1 where a loss was not finite, else 0.
    """
    print(f"writes {file}.json and {file}.png to {chosen.out}", flush=True)
    first, *batches = tasks.batches_of(chosen, chosen.steps + 2)
    models = models_of(eager, names)
    models["fuse+plan"], reports = _planned(eager, models["checkpoint"], first)
    trials = train(file, models, chosen.dim, batches[:-1])
    for one in trials:
        one.facts = costs(one, batches[-1])
        one.facts["tokens_per_second"] = 1e3 * chosen.batch * chosen.seq / median(one.ms)
    subtitle = (
        f"{summary(facts)} ({facts['paths']['linear_act']})\n{subtitle}, {chosen.dtype};"
        f" batch {chosen.batch} x {chosen.seq} bytes"
    )
    rows = [one.row(trials[0]) for one in trials]
    part = part_of(title, [subtitle, reports], rows) | {"title": subtitle.splitlines()[1]}
    return publish(chosen, file, title, subtitle, facts, [part])
