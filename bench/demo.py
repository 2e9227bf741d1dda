"""`python -m bench demo`: train one model five ways in lockstep; compare loss, memory and time.

Same initial weights, same batches: `eager`; torch's non-reentrant `checkpoint` around every block;
`fuse`, one call of `fusedckpt.fuse`; `fuse+ckpt`, with `fusedckpt.Checkpoint` around every
block besides; and `fuse+plan`, the fastest plan that peaks no higher than `checkpoint` does. The
steps take turns, so that whatever slows the machine down slows all of them.
"""

from __future__ import annotations

import copy
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark.utils.timer import timer

import fusedckpt
from bench import tasks
from bench.env import environment, summary
from bench.models import HEAD_DIM, GatedMLP
from bench.results import Row, save
from bench.tables import MIB, difference, progress, show
from bench.training_figures import draw_demo
from bench.ways import wrap_units
from fusedckpt.memory import peak_bytes, saved_tensors

# first steps, which compile kernels and fill caches, are left out of the timing
WARMUP = 5
TITLE = "One model, the same batches: what each way of training costs"


def prepare(chosen: Namespace) -> Namespace:
    """Check everything, before any work is done. Raises ValueError for values that do not fit."""
    if chosen.dim % HEAD_DIM:
        raise ValueError(f"--dim expects a multiple of the head size {HEAD_DIM}, got {chosen.dim}")
    if chosen.model != "own" and find_spec("transformers") is None:
        raise ValueError(f"--model {chosen.model} needs transformers: pip install transformers")
    batches_of(chosen)
    return chosen


def batches_of(chosen: Namespace) -> tasks.Batches:
    """Return endless batches of the standard library's text."""
    device, text = torch.device(chosen.device), tasks.stdlib_text()
    return tasks.Batches(text, chosen.batch, chosen.seq, chosen.seed, device)


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

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte."""
        return tasks.loss(self.model(inputs), targets)

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """Forward, backward and update, timed together."""
        # synchronises a GPU
        start = timer()
        loss = self.loss(inputs, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step_ms.append(1e3 * (timer() - start))
        self.schedule.step()
        self.losses.append(loss.item())

    def row(self, eager: Trainer, inputs: Tensor, targets: Tensor, tokens: int) -> Row:
        """Return what training cost; memory is that of one more batch.

        Saved: what forward and loss keep for backward, without inputs, parameters and buffers;
        peak: how high forward and backward climb above a step's start, new gradients included.
        """
        held = [inputs, targets, *self.model.parameters(), *self.model.buffers()]
        with saved_tensors(exclude=held) as saved:
            self.loss(inputs, targets)
        peak = peak_bytes(lambda: self.loss(inputs, targets).backward(), inputs.device)
        self.optimizer.zero_grad(set_to_none=True)
        timed = self.step_ms[min(WARMUP, len(self.step_ms) - 1) :]
        losses = torch.tensor([self.losses, eager.losses], dtype=torch.float64)
        return {
            "name": self.name,
            "loss_first": self.losses[0],
            "loss_last": self.losses[-1],
            # torch's max keeps a NaN, Python's may drop it
            "loss_difference": (losses[0] - losses[1]).abs().max().item(),
            "saved_mib": saved.nbytes / MIB,
            "peak_mib": peak / MIB,
            "ms_per_step": median(timed),
            "tokens_per_second": tokens / median(timed) * 1e3,
            "losses": self.losses,
            "step_ms": timed,
        }


def train(
    part: str,
    trainers: Sequence[Trainer],
    steps: int,
    draw_batch: Callable[[], tuple[Tensor, Tensor]],
) -> None:
    """Train all on the same batches, in turns: who goes first changes from step to step."""
    with progress(part, steps) as tick:
        for step in range(steps):
            losses = "  ".join(f"{one.name} {one.losses[-1]:.3f}" for one in trainers if step)
            tick(losses, says=False)
            inputs, targets = draw_batch()
            first = step % len(trainers)
            for trainer in (*trainers[first:], *trainers[:first]):
                trainer.step(inputs, targets)


def trainers_of(chosen: Namespace, batch: tuple[Tensor, Tensor]) -> tuple[list[Trainer], str]:
    """Return trainers that start from the same weights, and what fuse and plan report."""
    torch.manual_seed(chosen.seed)
    dtype = getattr(torch, chosen.dtype)
    eager = tasks.model_of(chosen).to(torch.device(chosen.device), dtype)
    checkpointed, fused, both, planned = (copy.deepcopy(eager) for _ in range(4))
    tasks.checkpoint(checkpointed)
    report = ""
    for model in (fused, both, planned):
        report = str(fusedckpt.fuse(model)) + _replace_gated(model)
    wrap_units(both, fusedckpt.Checkpoint)
    plan = plan_below(planned, checkpointed, *batch)
    plan.apply(planned)
    models = {"eager": eager, "checkpoint": checkpointed, "fuse": fused, "fuse+ckpt": both}
    models["fuse+plan"] = planned
    trainers = [Trainer(name, model, chosen.dim, chosen.steps) for name, model in models.items()]
    return trainers, f"{report}\n{plan}"


def plan_below(
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


def _subtitle(chosen: Namespace, facts: Row, num_parameters: int) -> str:
    kind = f"transformers' {chosen.model}"
    if chosen.model == "own":
        kind = "own transformer" + (" with SwiGLU" if chosen.mlp == "swiglu" else "")
    return (
        f"{summary(facts)} ({facts['paths']['linear_act']})\n"
        f"{kind}, {chosen.layers} layers, dim {chosen.dim}, {num_parameters / 1e6:.1f} M"
        f" parameters, {chosen.dtype}; batch {chosen.batch} x {chosen.seq} bytes"
    )


def show_runs(result: Row) -> None:
    """Print a line per way of training."""
    runs = result["runs"]
    heads = ["run", "first\nloss", "last\nloss", f"max diff.\nto {runs[0]['name']}"]
    heads += ["saved\nMiB", "peak\nMiB", "ms per\nstep", "tokens\nper s"]
    rows = [
        [
            run["name"],
            *(f"{run[name]:.3f}" for name in ("loss_first", "loss_last")),
            "-" if run is runs[0] else difference(run["loss_difference"]),
            *(f"{run[name]:,.1f}" for name in ("saved_mib", "peak_mib", "ms_per_step")),
            f"{run['tokens_per_second']:,.0f}",
        ]
        for run in runs
    ]
    show(result["title"], heads, rows, [result["subtitle"], result["fused"]])


def run(chosen: Namespace) -> int:
    """Train, print, write demo.json and demo.png; 1 where a loss was not finite, else 0."""
    batches, dtype = batches_of(chosen), getattr(torch, chosen.dtype)

    def draw_batch() -> tuple[Tensor, Tensor]:
        inputs, targets = tasks.BATCHES[chosen.model](*batches.draw())
        return inputs.to(dtype) if inputs.is_floating_point() else inputs, targets

    trainers, fused = trainers_of(chosen, draw_batch())
    train("demo", trainers, chosen.steps, draw_batch)
    inputs, targets = draw_batch()
    num_parameters = sum(p.numel() for p in trainers[0].model.parameters())
    facts = environment(torch.device(chosen.device), dtype)
    # but what nothing depends on
    record: Any = {name: x for name, x in vars(chosen).items() if name not in ("out", "command")}
    tokens = chosen.batch * chosen.seq
    result = {
        "title": TITLE,
        "subtitle": _subtitle(chosen, facts, num_parameters),
        "settings": record | {"parameters": num_parameters},
        "environment": facts,
        "fused": fused,
        "runs": [one.row(trainers[0], inputs, targets, tokens) for one in trainers],
    }
    save(result, chosen.out / "demo.json")
    draw_demo(result, chosen.out / "demo.png")
    show_runs(result)
    print(f"wrote demo.json and demo.png to {chosen.out}")
    broken = [one.name for one in trainers if not all(map(math.isfinite, one.losses))]
    if broken:
        print(f"loss not finite: {', '.join(broken)}")
    return int(bool(broken))
