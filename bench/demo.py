"""Train one model five ways in lockstep and compare loss, memory and time.

Same initial weights, same batches: `eager`; torch's non-reentrant `checkpoint` around every block;
`fuse`, one call of `fusedckpt.fuse`; `fuse+ckpt`, with `fusedckpt.Checkpoint` around every
block besides; and `fuse+plan`, the fastest plan that peaks no higher than `checkpoint` does. The
steps take turns, so that whatever slows the machine down slows all of them.
"""

from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from torch import Tensor, nn

import fusedckpt
from bench import tasks
from bench.data import Batches, stdlib_text
from bench.defaults import DEMO_DEFAULTS
from bench.env import choose_device, environment, summary
from bench.model import HEAD_DIM, GatedMLP
from bench.records import save
from bench.report import Result, Run, draw, table
from bench.trainer import Trainer
from fusedckpt.planning.units import candidates

__all__ = ["Settings", "run", "settings"]

# first steps, which compile kernels and fill caches, are left out of the timing
WARMUP = 5


@dataclass(frozen=True)
class Settings:
    """Every choice that a result depends on."""

    steps: int
    layers: int
    dim: int
    seq: int
    batch: int
    model: str
    mlp: str
    dtype: str
    device: str
    seed: int
    out: Path


def settings(device: str | None, out: Path, **options: Any) -> Settings:
    """Fill in the device's defaults and check everything, before any work is done.

    Raises ValueError for values that do not fit, OSError where `out` cannot be a folder.
    """
    place = choose_device(device)
    given = {name: value for name, value in options.items() if value is not None}
    chosen = Settings(**DEMO_DEFAULTS[place.type] | given, device=str(place), out=out)
    if chosen.dim % HEAD_DIM:
        raise ValueError(f"--dim expects a multiple of the head size {HEAD_DIM}, got {chosen.dim}")
    if chosen.model != "own" and importlib.util.find_spec("transformers") is None:
        raise ValueError(f"--model {chosen.model} needs transformers: pip install transformers")
    Batches(stdlib_text(), chosen.batch, chosen.seq, chosen.seed, place)
    out.mkdir(parents=True, exist_ok=True)
    return chosen


def _trainers(chosen: Settings, batch: tuple[Tensor, Tensor]) -> tuple[list[Trainer], str]:
    """Trainers that start from the same weights, and what fuse and plan report."""
    device, dtype = torch.device(chosen.device), getattr(torch, chosen.dtype)
    torch.manual_seed(chosen.seed)
    sizes = tasks.Sizes(chosen.layers, chosen.dim, chosen.seq, chosen.mlp)
    eager = tasks.MODELS[chosen.model].make(sizes).to(device, dtype)
    checkpointed, fused, both, planned = (copy.deepcopy(eager) for _ in range(4))
    tasks.checkpoint(checkpointed)
    report = ""
    for model in (fused, both, planned):
        report = str(fusedckpt.fuse(model)) + _replace_gated(model)
    for name in candidates(both):
        both.set_submodule(name, fusedckpt.Checkpoint(both.get_submodule(name)))
    plan = _plan(planned, checkpointed, *batch)
    plan.apply(planned)
    models = {
        "eager": eager,
        "checkpoint": checkpointed,
        "fuse": fused,
        "fuse+ckpt": both,
        "fuse+plan": planned,
    }
    course = device, chosen.dim, chosen.steps
    return [Trainer(name, model, *course) for name, model in models.items()], f"{report}\n{plan}"


def _plan(
    model: nn.Module, checkpointed: nn.Module, inputs: Tensor, targets: Tensor
) -> fusedckpt.Plan:
    """Plan to peak no higher than torch's checkpoint does, or where toys are too small, little."""
    loss = partial(tasks.loss, targets=targets)
    budget = fusedckpt.report(checkpointed, inputs, loss=loss).peak_bytes
    try:
        return fusedckpt.plan(model, inputs, budget=budget, loss=loss, progress=False)
    except ValueError:
        return fusedckpt.plan(model, inputs, policy="memory", loss=loss, progress=False)


def _replace_gated(model: nn.Module) -> str:
    """Put fusedckpt.GatedMLP where fuse left a gated MLP, and say so."""
    left = [name for name, module in model.named_modules() if type(module) is GatedMLP]
    for name in left:
        old = model.get_submodule(name)
        weight = old.get_parameter("gate_proj.weight")
        hidden, dim = weight.shape
        new = fusedckpt.GatedMLP(dim, hidden, device=weight.device, dtype=weight.dtype)
        new.load_state_dict(old.state_dict())
        model.set_submodule(name, new)
    return f"\nreplaced by hand\n  {len(left):4d} x GatedMLP -> fusedckpt.GatedMLP" if left else ""


def _train(
    trainers: list[Trainer],
    draw_batch: Callable[[], tuple[Tensor, Tensor]],
    steps: int,
    console: Console,
) -> None:
    """Give every trainer each batch; who goes first changes from step to step."""
    columns = (
        TextColumn("[bold]{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[ms]:.0f} ms/step"),
    )
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, TaskID] = {
            trainer.name: progress.add_task(trainer.name, total=steps, loss=math.nan, ms=math.nan)
            for trainer in trainers
        }
        for step in range(steps):
            inputs, targets = draw_batch()
            first = step % len(trainers)
            for trainer in trainers[first:] + trainers[:first]:
                trainer.step(inputs, targets)
                loss, ms = trainer.losses[-1], trainer.step_ms[-1]
                progress.update(tasks[trainer.name], advance=1, loss=loss, ms=ms)


def _record(
    trainer: Trainer, eager: Trainer, chosen: Settings, inputs: Tensor, targets: Tensor
) -> Run:
    timed = trainer.step_ms[min(WARMUP, len(trainer.step_ms) - 1) :]
    losses = torch.tensor([trainer.losses, eager.losses], dtype=torch.float64)
    return Run(
        name=trainer.name,
        loss_first=trainer.losses[0],
        loss_last=trainer.losses[-1],
        # torch's max keeps a NaN, Python's may drop it
        loss_difference=(losses[0] - losses[1]).abs().max().item(),
        saved_mib=trainer.saved_mib(inputs, targets),
        peak_mib=trainer.peak_mib(inputs, targets),
        ms_per_step=median(timed),
        tokens_per_second=chosen.batch * chosen.seq / median(timed) * 1e3,
        losses=tuple(trainer.losses),
        step_ms=tuple(timed),
    )


def _model(chosen: Settings) -> str:
    if chosen.model != "own":
        return f"transformers' {chosen.model}"
    return "own transformer" + (" with SwiGLU" if chosen.mlp == "swiglu" else "")


def _subtitle(chosen: Settings, facts: dict[str, Any], num_parameters: int) -> str:
    return (
        f"{summary(facts)} ({facts['paths']['linear_act']})\n"
        f"{_model(chosen)}, {chosen.layers} layers, dim {chosen.dim},"
        f" {num_parameters / 1e6:.1f} M parameters,"
        f" {chosen.dtype}; batch {chosen.batch} x {chosen.seq} bytes"
    )


def run(chosen: Settings) -> int:
    """Train, print, write demo.json and demo.png; 1 where a loss was not finite, else 0."""
    console = Console()
    device, dtype = torch.device(chosen.device), getattr(torch, chosen.dtype)
    batches = Batches(stdlib_text(), chosen.batch, chosen.seq, chosen.seed, device)

    def draw_batch() -> tuple[Tensor, Tensor]:
        inputs, targets = tasks.MODELS[chosen.model].batch(*batches.draw())
        return inputs.to(dtype) if inputs.is_floating_point() else inputs, targets

    trainers, fused = _trainers(chosen, draw_batch())
    _train(trainers, draw_batch, chosen.steps, console)
    inputs, targets = draw_batch()
    num_parameters = sum(p.numel() for p in trainers[0].model.parameters())
    record = asdict(chosen) | {"parameters": num_parameters}
    # nothing that a result depends on
    del record["out"]
    facts = environment(device, dtype)
    result = Result(
        title="One model, the same batches: what each way of training costs",
        subtitle=_subtitle(chosen, facts, num_parameters),
        settings=record,
        environment=facts,
        fused=fused,
        runs=tuple(_record(trainer, trainers[0], chosen, inputs, targets) for trainer in trainers),
    )
    save(result, chosen.out / "demo.json")
    draw(result, chosen.out / "demo.png")
    console.print(table(result))
    console.print(fused, markup=False, highlight=False, soft_wrap=True)
    console.print(f"wrote demo.json and demo.png to {chosen.out}", markup=False, highlight=False)
    broken = [run.name for run in result.runs if not all(map(math.isfinite, run.losses))]
    if broken:
        console.print(f"[bold red]loss not finite: {', '.join(broken)}")
    return int(bool(broken))
