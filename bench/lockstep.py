"""One model trained in several ways, step by step in turn: demo, finetune and paper.

Every way has a copy of the model and an optimizer of its own, the same weights and batches.
A slowdown of the machine slows all of them.
"""

from __future__ import annotations

import copy
import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark.utils.timer import timer

import fusedckpt
from bench import tasks
from bench.clock import turns
from bench.env import summary
from bench.models import HEAD_DIM
from bench.results import Row, chosen_of, largest_difference
from bench.tables import MIB, Columns, difference, progress, show
from bench.tasks import Batch
from bench.training import wrap_units
from bench.training_figures import publish
from fusedckpt.memory import peak_bytes, saved_tensors

# first steps, which compile kernels and fill caches, are left out of the timing
WARMUP = 5
ACTIVATIONS = {
    "GELU": fusedckpt.ReGELU2,
    "GELUActivation": fusedckpt.ReGELU2,
    "SiLU": fusedckpt.ReSiLU2,
    "SiLUActivation": fusedckpt.ReSiLU2,
}


def checked(chosen: Namespace, *packages: str) -> Namespace:
    """Raise ValueError for values that do not fit, and for packages that are not installed."""
    if chosen.dim % HEAD_DIM:
        raise ValueError(f"--dim expects a multiple of the head size {HEAD_DIM}, got {chosen.dim}")
    for package in packages:
        if find_spec(package) is None:
            raise ValueError(f"{chosen.command} needs {package}: pip install {package}")
    tasks.batches_of(chosen, 1)
    return chosen


class Trainer:
    """One model with its optimizer, its losses and the time of its steps."""

    def __init__(self, name: str, model: nn.Module, dim: int, steps: int):
        self.name, self.model = name, model
        self.losses: list[float] = []
        self.step_ms: list[float] = []
        lr = min(3e-3, 0.75 / dim)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1
        )
        ramp = max(1, steps // 10)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / ramp, 1.1 - step / steps)
        )

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy in nats per byte."""
        inputs, targets = batch
        return tasks.loss(self.model(inputs), targets)

    def step(self, batch: Batch) -> None:
        """Forward, backward and update, timed together."""
        # synchronises a GPU
        start = timer()
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step_ms.append(1e3 * (timer() - start))
        self.schedule.step()
        self.losses.append(loss.item())

    def row(self, eager: Trainer, batch: Batch, tokens: int) -> Row:
        """Return the losses and costs of training; memory is that of one more batch.

        Saved: by forward and loss for backward, without inputs, parameters and buffers;
        peak: how high forward and backward climb above a step's start, new gradients included.
        """
        with saved_tensors(exclude=[*batch, *self.model.parameters(), *self.model.buffers()]) as s:
            self.loss(batch)
        peak = peak_bytes(lambda: self.loss(batch).backward(), batch[0].device)
        self.optimizer.zero_grad(set_to_none=True)
        timed = self.step_ms[min(WARMUP, len(self.step_ms) - 1) :]
        return {
            "name": self.name,
            "loss_first": self.losses[0],
            "loss_last": self.losses[-1],
            "loss_difference": largest_difference(self.losses, eager.losses),
            "saved_mib": s.nbytes / MIB,
            "peak_mib": peak / MIB,
            "ms_per_step": median(timed),
            "tokens_per_second": tokens / median(timed) * 1e3,
            "losses": self.losses,
            "step_ms": timed,
        }


def train(
    part: str, models: Mapping[str, nn.Module], dim: int, batches: Sequence[Batch]
) -> list[Trainer]:
    """Train all models on the same batches, in turns."""
    trainers = [Trainer(name, model, dim, len(batches)) for name, model in models.items()]
    with progress(part, len(trainers) * len(batches)) as tick:
        for step, one in turns(trainers, len(batches)):
            tick(f"{one.name} {one.losses[-1]:.3f}" if step else one.name, says=False)
            one.step(batches[step])
    return trainers


def fused(model: nn.Module, **options: Any) -> nn.Module:
    """Fuse layers in place, and return the model."""
    fusedckpt.fuse(model, **options)
    return model


def approximated(model: nn.Module) -> nn.Module:
    """Put approximate activations in the place of exact ones, and fuse the norms alone."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__ in ACTIVATIONS:
                setattr(parent, name, ACTIVATIONS[type(child).__name__]())
    return fused(model, mlp=False, attention=False)


# recipes: each takes a copy of the eager model
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "eager": lambda model: model,
    "checkpoint": tasks.checkpoint,
    "fuse": fused,
    "fuse+ckpt": lambda model: wrap_units(fused(model), fusedckpt.Checkpoint),
    "fuse preact": partial(fused, save="preact"),
    "fuse approximate": partial(fused, approximate=True),
    "approximate": approximated,
}


def models_of(eager: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Return a model with the same weights for each way."""
    return {name: WAYS[name](copy.deepcopy(eager)) for name in names}


def _planned(eager: nn.Module, checkpointed: nn.Module, batch: Batch) -> tuple[nn.Module, str]:
    """Return a fused model under a plan that peaks no higher than torch's checkpoint, and reports.

    Where toys are too small for such a plan, the plan is that of least peak.
    """
    inputs, targets = batch
    loss = partial(tasks.loss, targets=targets)
    budget = fusedckpt.report(checkpointed, inputs, loss=loss).peak_bytes
    model = copy.deepcopy(eager)
    report = fusedckpt.fuse(model)
    plan = partial(fusedckpt.plan, model, inputs, loss=loss, progress=False)
    try:
        found = plan(budget=budget)
    except ValueError:
        found = plan(policy="memory")
    found.apply(model)
    return model, f"{report}\n{found}"


def compare(
    chosen: Namespace,
    eager: nn.Module,
    names: Sequence[str],
    file: str,
    title: str,
    subtitle: str,
    facts: Row,
    **settings: Any,
) -> int:
    """Train ways by name, the first of which is eager, and one under a plan; print and write.

    The first batch is for the plan, and memory is that of a step with the last. Returns 1 where a
    loss was not finite, else 0.
    """
    first, *batches = tasks.batches_of(chosen, chosen.steps + 2)
    models = models_of(eager, names)
    models["fuse+plan"], reports = _planned(eager, models["checkpoint"], first)
    trainers = train(chosen.command, models, chosen.dim, batches[:-1])
    tokens = chosen.batch * chosen.seq
    runs = [one.row(trainers[0], batches[-1], tokens) for one in trainers]
    subtitle = (
        f"{summary(facts)} ({facts['paths']['linear_act']})\n{subtitle}, {chosen.dtype};"
        f" batch {chosen.batch} x {chosen.seq} bytes"
    )
    record = {"title": title, "subtitle": subtitle, "settings": chosen_of(chosen) | settings}
    record |= {"environment": facts, "fused": reports, "runs": runs}
    show(title, _columns(runs[0]), runs, [subtitle, reports])
    publish(record, chosen.out, file)
    broken = [run["name"] for run in runs if not all(map(math.isfinite, run["losses"]))]
    if broken:
        print(f"loss not finite: {', '.join(broken)}")
    return int(bool(broken))


def _columns(eager: Row) -> Columns:
    return {
        "run": lambda run: run["name"],
        "first\nloss": lambda run: f"{run['loss_first']:.3f}",
        "last\nloss": lambda run: f"{run['loss_last']:.3f}",
        f"max diff.\nto {eager['name']}": lambda run: (
            "-" if run is eager else difference(run["loss_difference"])
        ),
        "saved\nMiB": lambda run: f"{run['saved_mib']:,.1f}",
        "peak\nMiB": lambda run: f"{run['peak_mib']:,.1f}",
        "ms per\nstep": lambda run: f"{run['ms_per_step']:,.1f}",
        "tokens\nper s": lambda run: f"{run['tokens_per_second']:,.0f}",
    }
