"""Fine-tune a small ViT and a small Llama: exact, approximate, checkpointed.

On scikit-learn's digits and the standard library's sources they are trained a little, then
fine-tuned four ways in lockstep, by LoRA on q and v and in full, from several seeds: `eager`;
torch's `checkpoint` around every layer; `fuse`, exact layers that save only their inputs; and
`approximate`, ReGELU2 and ReSiLU2 in the eager model, as arXiv 2406.16282 has them, beside our
norms.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import nn

from bench import lockstep, tasks
from bench.env import environment, summary
from bench.options import NATURAL, Options
from bench.records import part_of, publish
from bench.results import Row
from bench.tasks import Batch

# pictures and windows that no step sees
HELD_OUT = 256
RATE_WIDTH = 1000
WAYS = ("eager", "checkpoint", "fuse", "approximate")
KINDS, TUNINGS = ("vit", "llama"), ("lora", "full")
# all weights are tuned at a fourth of the rate of adapters
FULL_RATE = 4


def options(add: Options) -> None:
    """Add the options."""
    add.many("models", "models to fine-tune", KINDS, choices=KINDS)
    add.many("tuning", "adapters of q and v, or all weights", TUNINGS, choices=TUNINGS)
    add.many("seeds", "random seeds", (0, 1, 2), type=NATURAL, metavar="N")
    add.count("pretrain", "training steps of the base", 80, 200)
    add.count("steps", "fine-tuning steps", 24, 200)
    add.count("batch", "pictures or sequences per step", 32)
    add.count("rank", "rank of the adapters", 4)
    lockstep.options(add, "paper.json and paper.png", (3, 12), (128, 768), 32)


def prepare(chosen: Namespace) -> Namespace:
    """Check everything, before any work is done. Raises ValueError for values that do not fit."""
    tasks.needs("paper", "sklearn")
    lockstep.checked("paper", _of(chosen, "llama", chosen.seeds[0]), "transformers", "peft")
    return chosen


def _of(chosen: Namespace, kind: str, seed: int) -> Namespace:
    """Return the options with the model and the seed that tasks read."""
    # ViT sees pictures of eight by eight
    seq = 64 if kind == "vit" else chosen.seq
    return Namespace(**{**vars(chosen), "model": kind, "seed": seed, "seq": seq})


def _batches(chosen: Namespace, count: int) -> tuple[list[Batch], Batch]:
    """Return batches, and data that is in none of them."""
    if chosen.model != "vit":
        text = tasks.stdlib_text()
        edge = len(text) * 9 // 10
        held = Namespace(**{**vars(chosen), "batch": max(1, HELD_OUT // 8)})
        (other,) = tasks.batches_of(held, 1, text[edge:])
        return tasks.batches_of(chosen, count, text[:edge]), other
    generator = torch.Generator().manual_seed(chosen.seed)
    x, labels = (t.to(chosen.device) for t in tasks.digits(8))
    x = (x / 8 - 1).to(getattr(torch, chosen.dtype))
    order = torch.randperm(len(x), generator=generator)
    known, held = order[:-HELD_OUT], order[-HELD_OUT:]
    places = torch.randint(len(known), (count, chosen.batch), generator=generator)
    return [(x[i], labels[i]) for i in known[places]], (x[held], labels[held])


def _tuned(base: nn.Module, tuning: str, chosen: Namespace) -> nn.Module:
    """Return the model to fine-tune: all of it, or adapters of q and v, and the classifier."""
    model: Any = copy.deepcopy(base)
    if tuning == "full":
        return model
    import peft

    head = ["classifier"] if chosen.model == "vit" else None
    ranks = {"r": chosen.rank, "lora_alpha": 2 * chosen.rank}
    config = peft.LoraConfig(**ranks, target_modules=["q_proj", "v_proj"], modules_to_save=head)
    return peft.get_peft_model(model, config).train()


@torch.no_grad()
def _judged(model: nn.Module, held: Batch) -> Row:
    """Return loss and accuracy on data that was not trained on."""
    output: Any = model.eval()(held[0])
    model.train()
    right = output.logits.argmax(-1) == held[1]
    loss = tasks.loss(output, held[1]).item()
    return {"held_out_loss": loss, "accuracy": right.float().mean().item()}


def _seed(chosen: Namespace, tuning: str) -> list[Row]:
    """Fine-tune once in every way, and return a row for each."""
    torch.manual_seed(chosen.seed)
    first, held = _batches(chosen, chosen.pretrain)
    base = tasks.model_of(chosen)
    # sets the learning rate: a ViT learns nothing at that of a Llama as small
    width = max(RATE_WIDTH, chosen.dim) if chosen.model == "vit" else chosen.dim
    lockstep.train("base", {"base": base}, width, first)
    width *= FULL_RATE if tuning == "full" else 1
    batches = _batches(chosen, chosen.pretrain + chosen.steps + 1)[0][chosen.pretrain :]
    models = lockstep.models_of(_tuned(base, tuning, chosen), WAYS)
    trials = lockstep.train(f"{chosen.model} {tuning}", models, width, batches[:-1])
    for one in trials:
        one.facts = lockstep.costs(one, batches[-1]) | _judged(one.work.model, held)
    return [one.row(trials[0]) for one in trials]


def _gathered(rows: Sequence[Row]) -> Row:
    """Return one way's row over all seeds: means of losses, all times, and the range of scores."""
    found = rows[0] | {"ms": [ms for row in rows for ms in row["ms"]]}
    found["losses"] = np.mean([row["losses"] for row in rows], 0).tolist()
    found["loss_difference"] = max(row["loss_difference"] for row in rows)
    return found | {key: [row[key] for row in rows] for key in ("held_out_loss", "accuracy")}


def run(chosen: Namespace) -> int:
    """Fine-tune, print a table, write record and figure; 1 where a loss was not finite, else 0."""
    facts = environment(torch.device(chosen.device), getattr(torch, chosen.dtype))
    print(f"writes paper.json and paper.png to {chosen.out}", flush=True)
    parts: list[Row] = []
    for kind, tuning in product(chosen.models, chosen.tuning):
        seeds = [_seed(_of(chosen, kind, seed), tuning) for seed in chosen.seeds]
        rows = [_gathered(rows) for rows in zip(*seeds, strict=True)]
        parts.append(part_of(f"{kind} {tuning}", (), rows))
    title = "Exact, approximate and checkpointed fine-tuning"
    subtitle = (
        f"{summary(facts)}\n{chosen.layers} layers of {chosen.dim}, {chosen.dtype}; LoRA of rank "
        f"{chosen.rank} on q, v; losses: the mean of {len(chosen.seeds)} seeds"
    )
    return publish(chosen, "paper", title, subtitle, facts, parts)
