"""Reproduce classic checkpointing workloads: many convolutions, a deep MLP, how deep it can go.

The literature's claim for the last: stacks ten times as deep for 20 to 30 % more time (Chen et al.,
arXiv 1604.06174; the gradient-checkpointing package of OpenAI's Salimans and Bulatov).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from bench.classics_depth import Stack, measure_depths
from bench.classics_models import Images, conv_net, final_side, images, mlp, scale
from bench.classics_plot import draw
from bench.classics_results import Depths, Part, Result, depth_table, part_table, save
from bench.classics_ways import Way, Workload, measure
from bench.defaults import CLASSICS_DEFAULTS
from bench.env import choose_device, environment, summary
from bench.model import HEAD_DIM
from bench.results import MIB
from bench.text import console as wide_console
from fusedckpt._budget import bytes_of
from fusedckpt.memory import nbytes_of

__all__ = ["Settings", "run", "settings"]

SEGMENTS = (1, 2, 4, 8, 16, 32)
MLP_SEGMENTS = (2, 3, 5, 10)
# besides a number of segments
RULES = ("sqrt", "recursive")
# of the way from the least peak that a plan reaches to that of keeping everything
BUDGETS = (0.25, 0.5, 0.75)
# between losses of order one; fused kernels round otherwise, checkpoints do not
AGREE = 1e-4


@dataclass(frozen=True)
class Settings:
    """Every choice that a result depends on."""

    part: str
    layers: int
    width: int
    batch: int
    mlp_layers: int
    mlp_width: int
    mlp_batch: int
    depth_budget: int
    depth_dim: int
    depth_seq: int
    depth_batch: int
    steps: int
    repeat: int
    device: str
    seed: int
    out: Path


def settings(device: str | None, out: Path, **options: Any) -> Settings:
    """Fill in the device's defaults and check everything, before any work is done.

    Raises ValueError for values that do not fit, OSError where `out` cannot be a folder.
    """
    place = choose_device(device)
    given = {name: value for name, value in options.items() if value is not None}
    values = CLASSICS_DEFAULTS[place.type] | given
    values["depth_budget"] = bytes_of("--depth-budget", values["depth_budget"], place)
    chosen = Settings(**values, device=str(place), out=out)
    if math.isqrt(chosen.mlp_width) ** 2 != chosen.mlp_width:
        raise ValueError(f"--mlp-width expects a square number, got {chosen.mlp_width}")
    if chosen.depth_dim % HEAD_DIM:
        raise ValueError(
            f"--depth-dim expects a multiple of the head size {HEAD_DIM}, got {chosen.depth_dim}"
        )
    out.mkdir(parents=True, exist_ok=True)
    return chosen


def _workload(
    chosen: Settings, model: Any, pictures: Images, batch: int, optimizer: Any
) -> Workload:
    device = torch.device(chosen.device)
    batches = pictures.batches(chosen.steps, batch, device)
    scale(model.to(device), batches[0][0])
    return Workload(model, batches, F.cross_entropy, optimizer)


def _budgets(work: Workload) -> list[Way]:
    """Return plans from the least peak to that of keeping everything."""
    least, most = work.plan(policy="memory"), work.plan(policy="none")
    low, high = (plan.measured_bytes or plan.predicted_bytes for plan in (least, most))
    ways = [Way("plan memory", plan=least)]
    for share in BUDGETS if high > low else ():
        budget = int(low + share * (high - low))
        ways.append(Way(f"plan {budget / MIB:,.0f} MiB", plan=work.plan(budget=budget)))
    return ways


def _conv(chosen: Settings, tick: Callable[[str], None]) -> Part:
    torch.manual_seed(chosen.seed)
    pictures = images(28, chosen.seed)
    model = conv_net(chosen.layers, chosen.width)
    work = _workload(chosen, model, pictures, chosen.batch, partial(torch.optim.SGD, lr=1e-3))
    tick("planning")
    segments = [k for k in SEGMENTS if k <= chosen.layers]
    ours = map(Way.ours, [*segments, *RULES])
    ways = [Way("plain"), *map(Way.torch, segments), *ours, *_budgets(work)]
    side = final_side(chosen.layers)
    title = (
        f"Convolutional net: 1 -> {chosen.width}, {chosen.layers} x [conv {chosen.width}, ReLU,"
        f" pool] down to {side} x {side}; batch {chosen.batch}"
    )
    rows = measure(work, ways, chosen.repeat, tick)
    return Part(title, _notes(work, pictures, AGAIN), rows)


def _mlp(chosen: Settings, tick: Callable[[str], None]) -> Part:
    torch.manual_seed(chosen.seed)
    pictures = images(math.isqrt(chosen.mlp_width), chosen.seed)
    model = mlp(chosen.mlp_layers, chosen.mlp_width)
    flat = pictures._replace(x=pictures.x.flatten(1))
    work = _workload(chosen, model, flat, chosen.mlp_batch, partial(torch.optim.Adam, lr=1e-4))
    tick("planning")
    segments = [k for k in MLP_SEGMENTS if k <= chosen.mlp_layers]
    planned = [Way("plan sqrt", plan=work.plan(policy="sqrt")), *_budgets(work)]
    ours = map(Way.ours, [*segments, *RULES])
    ways = [Way("plain"), *map(Way.torch, segments), *ours, *planned]
    title = (
        f"MLP: {chosen.mlp_layers} layers of {chosen.mlp_width}, 10 outputs, ReLU; batch"
        f" {chosen.mlp_batch}, Adam"
    )
    rows = measure(work, ways, chosen.repeat, tick)
    return Part(title, _notes(work, pictures, TRADE), rows)


def _depths(chosen: Settings, tick: Callable[[str], None]) -> Depths:
    sizes = Stack(
        chosen.depth_dim,
        chosen.depth_seq,
        chosen.depth_batch,
        chosen.steps,
        chosen.seed,
        torch.device(chosen.device),
    )
    return measure_depths(sizes, chosen.depth_budget, chosen.repeat, tick)


def _notes(work: Workload, pictures: Images, last: str) -> tuple[str, ...]:
    size = nbytes_of(work.model.parameters()) / MIB
    return (
        f"{pictures.source};",
        f"{size:,.1f} MiB of parameters, as much of gradients",
        "torch k, fusedckpt k: checkpoint_sequential with k segments",
        "saved: kept for backward; rise: what a step adds to gradients that are there",
        "peak: of forward and backward, with parameters and gradients, from none;",
        "predicted: that peak, by the plan; ms: of forward and backward",
        last,
        f"last loss: of step {len(work.batches)}; diff.: the largest of all steps to plain's",
    )


AGAIN = (
    "again: FLOPs that backward repeats, of the forward's\n"
    "no plan peaks below the backward of the first block, where pictures are largest"
)
TRADE = "MiB per ms: what the rise loses for each millisecond more"


# how each part is measured and shown, in the order of Result
PARTS: dict[str, tuple[Callable[..., Any], Callable[..., Table]]] = {
    "conv": (_conv, partial(part_table, has_trade=False)),
    "mlp": (_mlp, partial(part_table, has_trade=True)),
    "depth": (_depths, depth_table),
}


def _parts(chosen: Settings, console: Console) -> Iterator[Any]:
    """Measure and print the parts that were asked for; yield None for others."""
    for name, (measured, table) in PARTS.items():
        if chosen.part not in (name, "all"):
            yield None
            continue
        with console.status(name) as status:
            # without a terminal, where a status is not seen, a line for each step
            show = status.update if console.is_terminal else partial(print, file=sys.stderr)
            part = measured(chosen, lambda what, name=name, show=show: show(f"{name}: {what}"))
        console.print(table(part))
        console.print("\n".join(part.notes), "", sep="\n", markup=False, highlight=False)
        yield part


def run(chosen: Settings) -> int:
    """Measure the parts, print, write classics.json and classics.png.

    Returns 1 where losses disagree, else 0.
    """
    console = wide_console()
    facts = environment(torch.device(chosen.device), torch.float32)
    subtitle = f"{summary(facts)}; float32, medians of {chosen.repeat} x {chosen.steps} steps"
    console.print(subtitle, markup=False, highlight=False)
    record = asdict(chosen)
    # nothing that a result depends on
    del record["out"]
    result = Result(subtitle, record, facts, *_parts(chosen, console))
    save(result, chosen.out / "classics.json")
    draw(result, chosen.out / "classics.png")
    place = f"wrote classics.json and classics.png to {chosen.out}"
    console.print(place, markup=False, highlight=False)
    worst = result.worst_difference()
    # so written, a NaN fails
    agree = worst <= AGREE
    if not agree:
        console.print(f"[bold red]losses differ by {worst:.1e}, more than {AGREE:.0e}")
    return int(not agree)
