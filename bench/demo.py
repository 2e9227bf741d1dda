"""`python -m bench demo`: train one model five ways in lockstep; compare loss, memory and time.

Same initial weights, same batches: `eager`; torch's non-reentrant `checkpoint` around every block;
`fuse`, one call of `fusedckpt.fuse`; `fuse+ckpt`, with `fusedckpt.Checkpoint` around every
block besides; and `fuse+plan`, the fastest plan that peaks no higher than `checkpoint` does.
"""

from __future__ import annotations

from argparse import Namespace

import torch

from bench import lockstep, tasks
from bench.env import environment

WAYS = ("eager", "checkpoint", "fuse", "fuse+ckpt")


def prepare(chosen: Namespace) -> Namespace:
    """Check everything, before any work is done. Raises ValueError for values that do not fit."""
    return lockstep.checked(chosen, *(("transformers",) if chosen.model != "own" else ()))


def run(chosen: Namespace) -> int:
    """Train, print, write demo.json and demo.png; 1 where a loss was not finite, else 0."""
    torch.manual_seed(chosen.seed)
    model = tasks.model_of(chosen)
    kind = f"transformers' {chosen.model}"
    if chosen.model == "own":
        kind = "own transformer" + (" with SwiGLU" if chosen.mlp == "swiglu" else "")
    size = sum(p.numel() for p in model.parameters())
    return lockstep.compare(
        chosen,
        model,
        WAYS,
        file="demo",
        title="One model, the same batches: what each way of training costs",
        subtitle=f"{kind}, {chosen.layers} layers, dim {chosen.dim}, {size / 1e6:.1f} M parameters",
        facts=environment(torch.device(chosen.device), getattr(torch, chosen.dtype)),
        parameters=size,
    )
