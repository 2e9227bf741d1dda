"""`python -m bench paper`: exact layers, approximate ones and checkpoints, in fine-tuning.

A small ViT on scikit-learn's digits and a small Llama on the standard library's sources are trained
a little, then fine-tuned five ways in lockstep, by LoRA on q and v and in full, from several seeds:
`eager`; transformers' gradient `checkpoint`; `fuse`, exact layers that save only their inputs;
`fuse approximate`, with codes in MLPs without a gate; and `approximate`, ReGELU2 and ReSiLU2 in the
eager model, as arXiv 2406.16282 has them, beside our norms.
"""

from __future__ import annotations

import copy
import itertools
import math
from argparse import Namespace
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import nn

from bench import figures, lockstep, tasks
from bench.env import environment, summary
from bench.results import Row, chosen_of, save
from bench.tables import Columns, show
from bench.tasks import Batch

# pictures and windows that no step sees
HELD_OUT = 256
RATE_WIDTH = 1000
WAYS = ("eager", "checkpoint", "fuse", "fuse approximate", "approximate")
# all weights are tuned at a fourth of the rate of adapters
FULL_RATE = 4
COLOURS = {"fuse approximate": "#009e73", "approximate": "#cc79a7"}
COLUMNS: Columns = {
    "fine-tuning": lambda run: run["part"],
    "way": lambda run: run["name"],
    "saved\nMiB": lambda run: f"{run['saved_mib']:,.2f}",
    "peak\nMiB": lambda run: f"{run['peak_mib']:,.2f}",
    "peak to\neager's": lambda run: f"{run['peak_ratio']:.2f}",
    "ms per\nstep": lambda run: f"{run['ms_per_step']:,.1f}",
    "time to\neager's": lambda run: f"{run['time_ratio']:.2f}",
    "last\nloss": lambda run: _spread(run["loss_last"], 3),
    "held-out\nloss": lambda run: _spread(run["held_out_loss"], 3),
    "accuracy\n%": lambda run: _spread([100 * x for x in run["accuracy"]], 1),
}


def prepare(chosen: Namespace) -> Namespace:
    """Check everything, before any work is done. Raises ValueError for values that do not fit."""
    if find_spec("sklearn") is None:
        raise ValueError("paper needs scikit-learn: pip install scikit-learn")
    # ViT sees pictures of eight by eight
    return lockstep.checked(_of(chosen, "llama", chosen.seeds[0]), "transformers", "peft")


def _of(chosen: Namespace, kind: str, seed: int) -> Namespace:
    """Return the options with the model and the seed that tasks read."""
    seq = 64 if kind == "vit" else chosen.seq
    return Namespace(**{**vars(chosen), "model": kind, "seed": seed, "seq": seq})


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{min(values):.{digits}f} .. {max(values):.{digits}f}"


@cache
def _digits() -> Batch:
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(pictures).float().view(-1, 1, 8, 8) / 8 - 1
    return x, torch.from_numpy(labels).long()


def _batches(chosen: Namespace, count: int) -> tuple[list[Batch], Batch]:
    """Return batches, and data that is in none of them."""
    if chosen.model != "vit":
        text = tasks.stdlib_text()
        edge = len(text) * 9 // 10
        held = Namespace(**{**vars(chosen), "batch": max(1, HELD_OUT // 8)})
        (other,) = tasks.batches_of(held, 1, text[edge:])
        return tasks.batches_of(chosen, count, text[:edge]), other
    generator = torch.Generator().manual_seed(chosen.seed)
    dtype = getattr(torch, chosen.dtype)
    x, labels = (t.to(chosen.device) for t in _digits())
    order = torch.randperm(len(x), generator=generator)
    known, held = order[:-HELD_OUT], order[-HELD_OUT:]
    places = torch.randint(len(known), (count, chosen.batch), generator=generator)
    found = [(x[i].to(dtype), labels[i]) for i in known[places]]
    return found, (x[held].to(dtype), labels[held])


def _tuned(base: nn.Module, tuning: str, chosen: Namespace) -> nn.Module:
    """Return the model to fine-tune: all of it, or adapters of q and v, and the classifier."""
    model = copy.deepcopy(base)
    if tuning == "full":
        return model
    import peft

    head = ["classifier"] if chosen.model == "vit" else None
    ranks = {"r": chosen.rank, "lora_alpha": 2 * chosen.rank}
    config = peft.LoraConfig(**ranks, target_modules=["q_proj", "v_proj"], modules_to_save=head)
    return peft.get_peft_model(model, config).train()  # type: ignore[arg-type]


@torch.no_grad()
def _judged(model: nn.Module, held: Batch) -> tuple[float, float]:
    """Return loss and accuracy on data that was not trained on."""
    output: Any = model.eval()(held[0])
    model.train()
    right = output.logits.argmax(-1) == held[1]
    return tasks.loss(output, held[1]).item(), right.float().mean().item()


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
    adapted = _tuned(base, tuning, chosen)
    models = lockstep.models_of(adapted, WAYS)
    part = f"{chosen.model} {tuning}"
    trainers = lockstep.train(part, models, width, batches[:-1])
    tokens, found = chosen.batch * chosen.seq, []
    for one in trainers:
        row = one.row(trainers[0], batches[-1], tokens)
        loss, accuracy = _judged(one.model, held)
        found.append(row | {"part": part, "held_out_loss": loss, "accuracy": accuracy})
    return found


def _gathered(rows: Sequence[Row], eager: Sequence[Row]) -> Row:
    """Return one way's row over all seeds: losses by seed, medians of costs."""
    lists = ("loss_last", "held_out_loss", "accuracy", "losses")
    found = {key: rows[0][key] for key in ("part", "name", "saved_mib", "peak_mib")}
    found |= {key: [row[key] for row in rows] for key in lists}
    times = [median(row["ms_per_step"] for row in one) for one in (rows, eager)]
    found["ms_per_step"], found["time_ratio"] = times[0], times[0] / times[1]
    return found | {"peak_ratio": rows[0]["peak_mib"] / eager[0]["peak_mib"]}


def _draw(runs: Sequence[Row], path: Path, record: Row) -> None:
    """Draw the losses of every fine-tuning, the mean of seeds and their range."""
    parts = list(dict.fromkeys(run["part"] for run in runs))

    def panels(figure: Any) -> None:
        grid = figure.subplots(math.ceil(len(parts) / 2), 2, squeeze=False).flat
        for axes, part in zip(grid, parts, strict=False):
            # lines that coincide show beside one another: the later are thinner
            widths = itertools.count(6.0, -1.2)
            for run in (run for run in runs if run["part"] == part):
                colour = COLOURS.get(run["name"], figures.colour_of(run["name"]))
                losses, steps = list(zip(*run["losses"], strict=True)), range(len(run["losses"][0]))
                costs = f"peak {run['peak_mib']:.1f} MiB, {run['ms_per_step']:.0f} ms"
                label = f"{run['name']}: {costs}"
                means = [fmean(one) for one in losses]
                axes.plot(steps, means, color=colour, label=label, lw=next(widths))
                if run["name"] in ("eager", "approximate"):
                    low, high = map(min, losses), map(max, losses)
                    axes.fill_between(steps, list(low), list(high), color=colour, alpha=0.13, lw=0)
            axes.set(title=part, xlabel="step", ylabel="loss")
            axes.legend(fontsize=7)

    height = 3.2 * math.ceil(len(parts) / 2)
    figures.save(path, height, record["title"], [record["subtitle"]], panels)


def run(chosen: Namespace) -> int:
    """Fine-tune, print a table, write record and figure; 1 where a loss was not finite, else 0."""
    facts = environment(torch.device(chosen.device), getattr(torch, chosen.dtype))
    runs: list[Row] = []
    for kind in chosen.models:
        for tuning in chosen.tuning:
            seeds = [_seed(_of(chosen, kind, seed), tuning) for seed in chosen.seeds]
            by_way = list(zip(*seeds, strict=True))
            runs += [_gathered(rows, by_way[0]) for rows in by_way]
    title = "Exact, approximate and checkpointed fine-tuning"
    subtitle = (
        f"{summary(facts)}\n{chosen.layers} layers of {chosen.dim}, {chosen.dtype}; LoRA of rank "
        f"{chosen.rank} on q, v; {len(chosen.seeds)} seeds, lines: their mean, "
        "bands: the range of eager and approximate"
    )
    record = {"title": title, "subtitle": subtitle, "settings": chosen_of(chosen)}
    show(title, COLUMNS, runs, [subtitle], words=2)
    save(record | {"environment": facts, "fine_tunings": runs}, chosen.out / "paper.json")
    _draw(runs, chosen.out / "paper.png", record)
    print(f"wrote paper.json and paper.png to {chosen.out}")
    return int(not all(math.isfinite(x) for one in runs for row in one["losses"] for x in row))
