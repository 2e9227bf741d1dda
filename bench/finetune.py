"""`python -m bench finetune`: adapt one small Llama by LoRA five ways in lockstep, and compare.

The base is trained a little, then frozen; peft's LoRA goes on every linear but the head. Same
adapters, same batches: `eager`; transformers' gradient `checkpoint`; `fuse`, and `fuse preact`,
which keeps GEMM outputs; and `fuse+plan`, the fastest plan that peaks no higher than `checkpoint`.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from itertools import product
from typing import Any

import torch
from torch import nn

from bench import lockstep, tasks
from bench.env import environment
from bench.quantised import quantise

WAYS = ("eager", "checkpoint", "fuse", "fuse preact")


def prepare(chosen: Namespace) -> Namespace:
    """Check everything, before any work is done. Raises ValueError for values that do not fit."""
    chosen.model = "llama"
    return lockstep.checked(chosen, "transformers", "peft")


def _base(chosen: Namespace) -> nn.Module:
    """Return a Llama that was trained for a little."""
    torch.manual_seed(chosen.seed)
    model = tasks.model_of(chosen)
    batches = tasks.batches_of(chosen, chosen.pretrain)
    lockstep.train("base", {"base": model}, chosen.dim, batches)
    return model.requires_grad_(False)


def _adapted(base: nn.Module, rank: int, seed: int) -> nn.Module:
    import peft

    torch.manual_seed(seed)
    # the adapters' input is dropped by no rate, so that losses can be compared
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    model: Any = peft.get_peft_model(copy.deepcopy(base), config)  # type: ignore[arg-type]
    return model.train()


def run(chosen: Namespace) -> int:
    """Train, print and write; 1 where a loss was not finite, else 0."""
    facts = environment(torch.device(chosen.device), getattr(torch, chosen.dtype))
    dense, status = _base(chosen), 0
    for kind, rank in product(chosen.base, chosen.rank):
        base = dense if kind == "dense" else quantise(copy.deepcopy(dense))
        model = _adapted(base, rank, chosen.seed)
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
            **{"base": kind, "rank": rank, "trained": trained},
        )
    return status
