"""`python -m bench finetune`: adapt one small Llama by LoRA five ways in lockstep, and compare.

The base is trained a little, then frozen; peft's LoRA goes on every linear but the head. Same
adapters, same batches: `eager`; transformers' gradient `checkpoint`; `fuse`, and `fuse preact`,
which keeps GEMM outputs; and `fuse+plan`, the fastest plan that peaks no higher than `checkpoint`.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from typing import Any

import torch
from torch import nn

import fusedckpt
from bench import lockstep, tasks
from bench.env import environment
from bench.quantised import quantise
from bench.tasks import Batch


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


def _models(eager: nn.Module, batch: Batch) -> tuple[dict[str, nn.Module], str]:
    """Return a model with the same adapters for each way, and the reports of fuse and plan."""
    checkpointed = tasks.checkpoint(copy.deepcopy(eager))
    fused, kept, planned = (copy.deepcopy(eager) for _ in range(3))
    # with the modules that did not run fused
    report = fusedckpt.fuse(fused)
    fusedckpt.fuse(kept, save="preact")
    fusedckpt.fuse(planned)
    plan = lockstep.plan_below(planned, checkpointed, batch)
    models = {"eager": eager, "checkpoint": checkpointed, "fuse": fused, "fuse preact": kept}
    return models | {"fuse+plan": planned}, f"{report}\n{plan}"


def _record(chosen: Namespace, kind: str, rank: int, base: nn.Module, facts: Any) -> Any:
    first, *batches = tasks.batches_of(chosen, chosen.steps + 2)
    models, fused = _models(_adapted(base, rank, chosen.seed), first)
    trained = sum(p.numel() for p in models["eager"].parameters() if p.requires_grad)
    return lockstep.compare(
        chosen,
        models,
        batches,
        title="LoRA on every linear: what each way of training costs",
        subtitle=(
            f"transformers' llama, {chosen.layers} layers, dim {chosen.dim}, {kind} base, rank "
            f"{rank}: {trained / 1e6:.2f} M trained"
        ),
        settings={"base": kind, "rank": rank, "trained": trained},
        environment=facts,
        fused=fused,
    )


def run(chosen: Namespace) -> int:
    """Train, print and write; 1 where a loss was not finite, else 0."""
    facts = environment(torch.device(chosen.device), getattr(torch, chosen.dtype))
    dense, status = _base(chosen), 0
    for kind in chosen.base:
        base = dense if kind == "dense" else quantise(copy.deepcopy(dense))
        for rank in chosen.rank:
            record = _record(chosen, kind, rank, base, facts=facts)
            status |= lockstep.finish(record, chosen, f"finetune_{kind}_r{rank}")
    return status
