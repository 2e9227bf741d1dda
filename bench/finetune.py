"""`python -m bench finetune`: adapt one small Llama by LoRA five ways in lockstep, and compare.

The base is trained a little, then frozen; peft's LoRA goes on every linear but the head. Same
adapters, same batches: `eager`; transformers' gradient `checkpoint`; `fuse`, and `fuse preact`,
which keeps GEMM outputs; and `fuse+plan`, the fastest plan that peaks no higher than `checkpoint`.
"""

from __future__ import annotations

import copy
import math
from argparse import Namespace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

import fusedckpt
from bench import tasks
from bench.demo import Trainer, batches_of, plan_below, show_runs, train
from bench.env import environment, summary
from bench.models import HEAD_DIM
from bench.quantised import quantise
from bench.results import Row, save
from bench.training_figures import draw_demo

TITLE = "LoRA on every linear: what each way of training costs"


def prepare(chosen: Namespace) -> Namespace:
    """Check everything, before any work is done. Raises ValueError for values that do not fit."""
    if chosen.dim % HEAD_DIM:
        raise ValueError(f"--dim expects a multiple of the head size {HEAD_DIM}, got {chosen.dim}")
    for package in ("transformers", "peft"):
        if find_spec(package) is None:
            raise ValueError(f"finetune needs {package}: pip install {package}")
    batches_of(chosen)
    chosen.model = "llama"
    return chosen


def _base(chosen: Namespace, batches: tasks.Batches) -> nn.Module:
    """Return a Llama that was trained for a little."""
    torch.manual_seed(chosen.seed)
    model = tasks.model_of(chosen).to(torch.device(chosen.device), getattr(torch, chosen.dtype))
    train(
        "base", [Trainer("base", model, chosen.dim, chosen.pretrain)], chosen.pretrain, batches.draw
    )
    return model.requires_grad_(False)


def _adapted(base: nn.Module, rank: int, seed: int) -> nn.Module:
    import peft

    torch.manual_seed(seed)
    # the adapters' input is dropped by no rate, so that losses can be compared
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    model: Any = peft.get_peft_model(copy.deepcopy(base), config)  # type: ignore[arg-type]
    return model.train()


def _trainers(
    chosen: Namespace, eager: nn.Module, batch: Any
) -> tuple[list[Trainer], fusedckpt.FuseReport, fusedckpt.Plan]:
    """Return trainers that start from the same adapters, and what fuse and plan report."""
    checkpointed, fused, kept, planned = (copy.deepcopy(eager) for _ in range(4))
    tasks.checkpoint(checkpointed)
    report = fusedckpt.fuse(fused)
    fusedckpt.fuse(kept, save="preact")
    fusedckpt.fuse(planned)
    plan = plan_below(planned, checkpointed, *batch)
    plan.apply(planned)
    models = {"eager": eager, "checkpoint": checkpointed, "fuse": fused, "fuse preact": kept}
    models["fuse+plan"] = planned
    trainers = [Trainer(name, model, chosen.dim, chosen.steps) for name, model in models.items()]
    return trainers, report, plan


def _result(chosen: Namespace, kind: str, rank: int, base: nn.Module, facts: Row) -> Row:
    batches = batches_of(chosen)
    eager = _adapted(base, rank, chosen.seed)
    trainers, report, plan = _trainers(chosen, eager, batches.draw())
    train(f"{kind}, rank {rank}", trainers, chosen.steps, batches.draw)
    inputs, targets = batches.draw()
    trained = sum(p.numel() for p in eager.parameters() if p.requires_grad)
    subtitle = (
        f"{summary(facts)} ({facts['paths']['gated_mlp']})\n"
        f"transformers' llama, {chosen.layers} layers, dim {chosen.dim}, {kind} base, rank {rank}: "
        f"{trained / 1e6:.2f} M trained, {chosen.dtype}; batch {chosen.batch} x {chosen.seq} bytes"
    )
    # but what nothing depends on
    settings = {name: x for name, x in vars(chosen).items() if name not in ("out", "command")}
    tokens = chosen.batch * chosen.seq
    return {
        "title": TITLE,
        "subtitle": subtitle,
        "settings": settings | {"base": kind, "rank": rank, "trained": trained},
        "environment": facts,
        # with what did not run fused
        "fused": f"{report}\n{plan}",
        "runs": [one.row(trainers[0], inputs, targets, tokens) for one in trainers],
    }


def run(chosen: Namespace) -> int:
    """Train, print and write; 1 where a loss was not finite, else 0."""
    facts = environment(torch.device(chosen.device), getattr(torch, chosen.dtype))
    dense = _base(chosen, batches_of(chosen))
    status = 0
    for kind in chosen.base:
        base = dense if kind == "dense" else quantise(copy.deepcopy(dense))
        for rank in chosen.rank:
            result = _result(chosen, kind, rank, base, facts)
            name = f"finetune_{kind}_r{rank}"
            save(result, chosen.out / f"{name}.json")
            draw_demo(result, chosen.out / f"{name}.png")
            show_runs(result)
            print(f"wrote {name}.json and {name}.png to {chosen.out}")
            losses = [loss for one in result["runs"] for loss in one["losses"]]
            status |= not all(map(math.isfinite, losses))
    return int(status)
