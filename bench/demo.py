"""`python -m bench demo`: train one model five ways in lockstep; compare loss, memory and time.

Same initial weights, same batches: `eager`; torch's non-reentrant `checkpoint` around every block;
`fuse`, one call of `fusedckpt.fuse`; `fuse+ckpt`, with `fusedckpt.Checkpoint` around every
block besides; and `fuse+plan`, the fastest plan that peaks no higher than `checkpoint` does.
"""

from __future__ import annotations

import copy
from argparse import Namespace

import torch
from torch import nn

import fusedckpt
from bench import lockstep, tasks
from bench.env import environment
from bench.tasks import Batch
from bench.training import wrap_units


def prepare(chosen: Namespace) -> Namespace:
    """Check everything, before any work is done. Raises ValueError for values that do not fit."""
    return lockstep.checked(chosen, *(("transformers",) if chosen.model != "own" else ()))


def models_of(chosen: Namespace, batch: Batch) -> tuple[dict[str, nn.Module], str]:
    """Return a model with the same weights for each way, and the reports of fuse and plan."""
    torch.manual_seed(chosen.seed)
    eager = tasks.model_of(chosen)
    checkpointed, fused = tasks.checkpoint(copy.deepcopy(eager)), copy.deepcopy(eager)
    report = fusedckpt.fuse(fused)
    both = wrap_units(copy.deepcopy(fused), fusedckpt.Checkpoint)
    planned = copy.deepcopy(fused)
    plan = lockstep.plan_below(planned, checkpointed, batch)
    models = {"eager": eager, "checkpoint": checkpointed, "fuse": fused, "fuse+ckpt": both}
    return models | {"fuse+plan": planned}, f"{report}\n{plan}"


def run(chosen: Namespace) -> int:
    """Train, print, write demo.json and demo.png; 1 where a loss was not finite, else 0."""
    first, *batches = tasks.batches_of(chosen, chosen.steps + 2)
    models, fused = models_of(chosen, first)
    kind = f"transformers' {chosen.model}"
    if chosen.model == "own":
        kind = "own transformer" + (" with SwiGLU" if chosen.mlp == "swiglu" else "")
    size = sum(p.numel() for p in models["eager"].parameters())
    record = lockstep.compare(
        chosen,
        models,
        batches,
        title="One model, the same batches: what each way of training costs",
        subtitle=f"{kind}, {chosen.layers} layers, dim {chosen.dim}, {size / 1e6:.1f} M parameters",
        settings={"parameters": size},
        environment=environment(torch.device(chosen.device), getattr(torch, chosen.dtype)),
        fused=fused,
    )
    return lockstep.finish(record, chosen, "demo")
