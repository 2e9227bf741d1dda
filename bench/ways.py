"""Compare ways of training a model: memory, recomputed FLOPs, time, gradients and losses.

Models are our own transformer, small ones of transformers' classes, or yours, from a factory that
returns (model, args), (model, kwargs) or (model, args, kwargs) on the device to measure. The loss
of yours is the output's .loss, or else the mean square of its tensors; for another, wrap the model.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

import fusedckpt
from bench import show
from bench.env import environment, summary
from bench.implementations import compiled
from bench.options import DTYPES, NATURAL, Options
from bench.results import Row
from bench.subjects import Subject, factory_of, ours, yours
from bench.tables import mib
from bench.tasks import KINDS
from bench.training import CACHED, MODEL_WAYS, Tick, compare, resident
from bench.workload import Way, Workload
from fusedckpt.planning.budget import bytes_of
from fusedckpt.reporting.progress import progress

# of the way from the least peak that a plan reaches to that of saving everything
BUDGETS = (0.25, 0.5, 0.75)
# ways with memory through a step in their rows
SHOWN = ("eager", "checkpoint", "fuse", "fuse+ckpt", "fuse+plan memory")
# all but `compile`, which stands for six
WAYS = (*MODEL_WAYS, "plan memory", "fuse+plan memory", "fuse+plan", "budgets")
USUAL = ("eager", "checkpoint", "selective", "fuse", "fuse+recipes", "fuse+ckpt")
USUAL += ("plan memory", "fuse+plan memory", "budgets")
# commands that are this one with other defaults
PRESETS: dict[str, dict[str, Any]] = {
    "demo": {
        "ways": ("eager", "checkpoint", "fuse", "fuse+ckpt", "fuse+plan"),
        "batch": 16,
        "steps": 5,
        "repeat": 4,
    },
    "finetune": {
        "model": ("llama",),
        "ways": ("eager", "checkpoint", "fuse", "fuse preact", "fuse+plan"),
        "lora": (8,),
        "base": "int8",
        "pretrain": 8,
        "steps": 4,
        "repeat": 4,
    },
    "paper": {
        "model": ("vit", "llama"),
        "ways": ("eager", "checkpoint", "fuse", "approximate"),
        "lora": (4, 0),
        "targets": "qv",
        "layers": 3,
        "dim": 128,
        "seq": 32,
        "batch": 32,
        "pretrain": 80,
        "steps": 24,
        "repeat": 1,
        "seed": (0, 1, 2),
    },
}
NOTES = (
    "ms: of forward and backward",
    "error: of all gradients against float64, relative to the first row's",
    "saved: for backward, with results that a selective checkpoint keeps",
    "budget, predicted: activation budget and predicted peak of a plan",
    "recomputed: FLOPs of the recomputation, relative to the forward's",
    "MiB per ms: reduction of the peak per extra millisecond",
    "diff.: largest difference of a loss from the first row's",
)


def options(add: Options) -> None:
    """Add the options."""
    kinds = ", ".join(KINDS)
    text = f"{kinds}, or the function that makes yours: package.module:name or file.py:name"
    add.many("model", text, ("own",))
    text = f"what to compare eager with: {', '.join(WAYS)}"
    add.many("ways", text, USUAL, choices=WAYS)
    add.flag("compile", "six ways of compiling, too")
    text = "activation budget of a plan, such as 2GiB; default: three between the extremes"
    add.many("budget", text, metavar="SIZE")
    add.count("layers", "transformer blocks", 4, 12)
    add.count("dim", "width of the residual stream, a multiple of the head size 64", 256, 1024)
    add.count("seq", "bytes per sequence", 128, 1024)
    add.count("batch", "sequences per step", 8)
    add.one("mlp", "kind of the own model's MLPs", "gelu", choices=("gelu", "swiglu"))
    text = "rank of peft's adapters on a frozen model; 0: all weights are trained"
    add.many("lora", text, (0,), type=NATURAL, metavar="R")
    text = "linears with adapters: all but the head, or queries and values"
    add.one("targets", text, "all", choices=("all", "qv"))
    add.one("base", "weights below adapters", "dense", choices=("dense", "int8"))
    add.one("pretrain", "steps that train the model before", 0, type=NATURAL, metavar="N")
    add.count("steps", "training steps per turn", 2)
    add.count("repeat", "turns of every way", 3)
    add.dtype(DTYPES[:2])
    add.many("seed", "random seed of weights and data", (0,), type=NATURAL, metavar="N")
    add.place(f"{add.command}.jsonl and {add.command}.png")
    add.set_defaults(command=add.command)


def prepare(chosen: Namespace) -> Namespace:
    """Make models of yours, and check the sizes of ours, before any work is done.

    Raises ValueError for sizes that do not fit, packages that are not installed, a spec that names
    no factory, a factory that returns something else, a budget that is none; errors of the caller's
    code come through.
    """
    device = torch.device(chosen.device)
    chosen.budgets = [bytes_of("--budget", size, device) for size in chosen.budget]
    factories = {spec: factory_of(spec) for spec in chosen.model if spec not in KINDS}
    chosen.subjects = []
    for spec in chosen.model:
        if spec in factories:
            chosen.subjects.append(yours(chosen, spec, factories[spec]))
        else:
            chosen.subjects += [ours(chosen, spec, rank) for rank in chosen.lora]
    return chosen


def _ways(work: Workload, chosen: Namespace, lost: dict[str, str], tick: Tick) -> Iterator[Way]:
    """Yield the ways that were chosen, eager first; plans that do not exist go to `lost`."""
    yield Way("eager", work.model)
    for name in [name for name in MODEL_WAYS if name in chosen.ways and name != "eager"]:
        model = work.copied()
        note = ""
        if name == "fuse":
            report = fusedckpt.fuse(model)
            note = str(report).splitlines()[0]
            # the whole report for a reader of few ways
            print(report if len(chosen.ways) < len(USUAL) else f"fuse: {note}", flush=True)
        else:
            model = MODEL_WAYS[name](model)
        is_exact = name != "approximate"
        yield Way(name, model, is_exact=is_exact, has_cache=name in CACHED, note=note)
    yield from _planned(work, chosen, lost, tick)
    if chosen.compile:
        yield from _compiled(work, lost)


def _planned(work: Workload, chosen: Namespace, lost: dict[str, str], tick: Tick) -> Iterator[Way]:
    """Yield plans: of least peak, within the peak of torch's checkpoint, and within budgets."""
    fused = work._replace(model=MODEL_WAYS["fuse"](work.copied()))
    made: dict[str, Way] = {}

    def plan(name: str, source: Workload, **limits: Any) -> Iterator[Way]:
        tick(f"planning {name}")
        try:
            made[name] = source.planned(name, **limits)
        except ValueError as error:
            lost[name] = f"no plan: {error}"
        else:
            yield made[name]

    least: dict[str, Any] = {"policy": "memory", "accumulate": True}
    if "plan memory" in chosen.ways:
        yield from plan("plan memory", work, **least)
    if "fuse+plan memory" in chosen.ways:
        yield from plan("fuse+plan memory", fused, **least)
    if "fuse+plan" in chosen.ways:
        report = work.report(MODEL_WAYS["checkpoint"](work.copied()))
        budget = report.peak_bytes - resident(report)
        yield from plan("fuse+plan", fused, activation_budget=budget)
        if "fuse+plan" in lost:
            # of toys, which are too small for such a plan
            lost.pop("fuse+plan")
            yield from plan("fuse+plan", fused, **least)
        print(made["fuse+plan"].plan if "fuse+plan" in made else "", flush=True)
    if "budgets" in chosen.ways:
        budgets = chosen.budgets
        if not budgets and "fuse+plan memory" in made:
            report = work.report(work.model)
            measured: Any = made["fuse+plan memory"].plan
            span = report.peak_bytes - measured.measured_bytes
            budgets = [measured.measured_bytes - resident(report) + int(b * span) for b in BUDGETS]
        # of a model that no plan makes smaller they are one
        for name, budget in {f"fuse+plan {mib(x)} MiB": x for x in budgets}.items():
            yield from plan(name, fused, activation_budget=budget)


def _compiled(work: Workload, lost: dict[str, str]) -> Iterator[Way]:
    """Yield ways of compiling; the first steps of each, which compile it, are not measured."""
    made = {
        "compile": torch.compile(work.copied()),
        "compile 0.5": compiled(0.5)(work.copied()),
        "compile 0": compiled(0.0)(work.copied()),
        "fuse+compile": torch.compile(MODEL_WAYS["fuse"](work.copied())),
        "fuse preact+compile": torch.compile(MODEL_WAYS["fuse preact"](work.copied())),
    }
    report = work.report(work.model)
    budget = (report.peak_bytes - resident(report)) // 2
    name = f"fuse+plan {mib(budget)} MiB+compile"
    try:
        fused = MODEL_WAYS["fuse"](work.copied())
        way = work.planned(name, fused, activation_budget=budget, accumulate=True)
        made[name] = torch.compile(way.run)
    except ValueError as error:
        lost[name] = f"no plan: {error}"
    for name, model in made.items():
        yield Way(name, model, is_compiled=True)


def _measured(chosen: Namespace, subject: Subject, seed: int) -> list[Row]:
    """Return a row for every way of training a model from a seed."""
    work = subject.work(seed)
    # by the name of a way, why it is none
    lost: dict[str, str] = {}
    count = sum(p.numel() for p in work.model.parameters())
    trained = sum(p.numel() for p in work.model.parameters() if p.requires_grad)
    num_ways = len(chosen.ways) + 2 * ("budgets" in chosen.ways) + 6 * chosen.compile
    with progress(
        f"{chosen.command} {subject.columns['case']}", num_ways * (2 + chosen.repeat)
    ) as tick:
        ways = list(_ways(work, chosen, lost, tick))
        rows = compare(work, ways, chosen.repeat, tick, SHOWN)
    empty = dict.fromkeys(("both_ms", "saved_bytes", "peak_bytes"))
    rows += [{"name": n, "failure": why, "is_wrong": False, **empty} for n, why in lost.items()]
    sizes = {"title": _title(subject.columns, type(work.model).__name__, count, trained)}
    return [{**subject.columns, **sizes, "parameters": count, "trained": trained} | r for r in rows]


def _title(columns: Row, kind: str, count: int, trained: int) -> str:
    """Return the trained model, its data and optimizer, in a line."""
    if "layers" not in columns:
        return f"{kind} of {columns['case']}: {count:,} parameters"
    name = {"own": "own transformer"}.get(columns["case"], f"transformers' {columns['case']}")
    text = f"{name}, {columns['layers']} layers of {columns['dim']}"
    text += f", {columns['batch']} x {columns['seq']} tokens: {count / 1e6:.1f} M parameters"
    if not columns["lora"]:
        return text
    return (
        f"{text}, {columns['base']}; LoRA of rank {columns['lora']}: {trained / 1e6:.2f} M trained"
    )


def _gathered(rows: Sequence[Row]) -> Row:
    """Return one way's row over all seeds: all times and scores, and the mean of losses.

    It is that of a seed which failed, if any; one with wrong gradients comes first.
    """
    if failed := [by_seed for by_seed in rows if by_seed["failure"]]:
        return max(failed, key=lambda by_seed: by_seed["is_wrong"])
    row = copy.copy(rows[0])
    for name in ("both_ms", "held_out_loss", "accuracy"):
        if row.get(name):
            row[name] = [value for by_seed in rows for value in by_seed[name]]
    if "losses" in row:
        row["losses"] = np.mean([by_seed["losses"] for by_seed in rows], 0).tolist()
    differences = [r["loss_difference"] for r in rows if "loss_difference" in r]
    if differences:
        row["loss_difference"] = max(differences)
    return row


def run(chosen: Namespace) -> int:
    """Measure, print, write rows and figure; 1 where a way failed or was wrong, else 0."""
    device = torch.device(chosen.device)
    dtype = getattr(torch, chosen.dtype)
    facts = environment(device, dtype)
    how = f"{chosen.dtype}, medians of {chosen.repeat} x {chosen.steps} steps"
    print(f"{summary(facts)}; {how}\nwrites {show.files_of(chosen)}", flush=True)
    cases: list[list[Row]] = []
    for subject in chosen.subjects:
        by_seed = [_measured(chosen, subject, seed) for seed in chosen.seed]
        by_name = [{row["name"]: row for row in rows} for rows in by_seed]
        names = [name for name in by_name[0] if all(name in rows for rows in by_name)]
        rows = [_gathered([rows[name] for rows in by_name]) for name in names]
        shared = {"command": chosen.command, "dtype": chosen.dtype, "seeds": list(chosen.seed)}
        cases.append([shared | row | facts for row in rows])
        show.show_rows(cases[-1], NOTES)
    return show.publish(chosen, cases)
