"""Finetune a small Llama with LoRA on all linears five ways, step by step in turn, and compare.

The base is trained a little on the standard library's sources, then frozen; peft's LoRA goes on
every linear but the head. Same adapters, same batches: `eager`; torch's `checkpoint` around every
layer; `fuse`, and `fuse preact`, which saves GEMM outputs; and `fuse+plan`, the fastest plan that
peaks no higher than `checkpoint`.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from itertools import product
from typing import Any

import torch

from bench import lockstep, tasks
from bench.env import environment
from bench.options import POSITIVE, Options
from bench.quantised import quantise

WAYS = ("eager", "checkpoint", "fuse", "fuse preact")
# kinds of the weights below adapters
BASES = ("dense", "quantised")


def options(add: Options) -> None:
    """Add the options."""
    add.many("base", "kind of frozen weights", BASES, choices=BASES)
    add.many("rank", "rank of the adapters", (8, 64), type=POSITIVE, metavar="N")
    add.count("pretrain", "training steps of the base", 8, 100)
    add.count("steps", "training steps of the adapters", 16, 100)
    add.count("batch", "sequences per step", 8)
    lockstep.options(add, "a json and a png for every base and rank")


def prepare(chosen: Namespace) -> Namespace:
    """Check everything, before any work is done. Raises ValueError for values that do not fit."""
    chosen.model = "llama"
    return lockstep.checked("finetune", chosen, "transformers", "peft")


def run(chosen: Namespace) -> int:
    """Train, print and write; 1 where a loss was not finite, else 0."""
    import peft

    facts = environment(torch.device(chosen.device), getattr(torch, chosen.dtype))
    torch.manual_seed(chosen.seed)
    dense, status = tasks.model_of(chosen), 0
    batches = tasks.batches_of(chosen, chosen.pretrain)
    lockstep.train("base", {"base": dense}, chosen.dim, batches)
    dense.requires_grad_(False)
    for kind, rank in product(chosen.base, chosen.rank):
        base: Any = copy.deepcopy(dense)
        base = base if kind == "dense" else quantise(base)
        torch.manual_seed(chosen.seed)
        # the adapters' input is dropped by no rate, so that losses can be compared
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        model = peft.get_peft_model(base, config).train()
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        status |= lockstep.compare(
            chosen,
            model,
            WAYS,
            file=f"finetune_{kind}_r{rank}",
            title="LoRA on every linear: what each way of training costs",
            subtitle=(
                f"transformers' llama, {chosen.layers} layers, dim {chosen.dim}, {kind} base, rank "
                f"{rank}: {trained / 1e6:.2f} M trained"
            ),
            facts=facts,
        )
    return status
