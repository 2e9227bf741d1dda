"""Train one model five ways, step by step in turn, and compare loss, memory and time.

Same initial weights, same batches: `eager`; torch's non-reentrant `checkpoint` around every block;
`fuse`, one call of `fusedckpt.fuse`; `fuse+ckpt`, with `fusedckpt.Checkpoint` around every
block besides; and `fuse+plan`, the fastest plan that peaks no higher than `checkpoint` does.
"""

from __future__ import annotations

from argparse import Namespace

import torch

from bench import lockstep, tasks
from bench.env import environment
from bench.options import Options

WAYS = ("eager", "checkpoint", "fuse", "fuse+ckpt")


def options(add: Options) -> None:
    """Add the options."""
    add.count("steps", "training steps", 24, 200)
    add.count("batch", "sequences per step", 16, 8)
    text = "what to train: the demo's own transformer, or one of transformers' classes"
    add.one("model", text, "own", choices=("own", *tasks.CLASSES))
    text = "kind of the own model's MLPs: plain with GELU, or gated"
    add.one("mlp", text, "gelu", choices=("gelu", "swiglu"))
    lockstep.options(add, "demo.json and demo.png")


def prepare(chosen: Namespace) -> Namespace:
    """Check everything, before any work is done. Raises ValueError for values that do not fit."""
    packages = ("transformers",) if chosen.model != "own" else ()
    return lockstep.checked("demo", chosen, *packages)


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
    )
