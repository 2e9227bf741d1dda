"""Reproduce classic checkpointing workloads: many convolutions, a deep MLP, how deep it can go.

The literature's claim for the last: stacks ten times as deep for 20 to 30 % more time (Chen et al.,
arXiv 1604.06174; the gradient-checkpointing package of OpenAI's Salimans and Bulatov).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from bench.classics_depth import Stack, measure_depths, num_steps
from bench.classics_models import Images, conv_net, final_side, images, mlp, scale
from bench.classics_plot import draw
from bench.classics_results import NOTES, Depths, Part, Result, Row, depth_table, part_table
from bench.classics_ways import NUM_PLANS, Batch, Way, Workload, compare, plans
from bench.defaults import CLASSICS_DEFAULTS
from bench.env import choose_device, environment, summary
from bench.model import HEAD_DIM
from bench.records import save
from bench.results import MIB
from bench.text import console as wide_console
from bench.text import steps
from fusedckpt.memory import nbytes_of
from fusedckpt.planning.budget import bytes_of

__all__ = ["Settings", "run", "settings"]

SEGMENTS = {"conv": (1, 2, 4, 8, 16, 32), "mlp": (2, 3, 5, 10)}
# besides a number of segments
RULES = ("sqrt", "recursive")
# whose memory through a step is drawn
SHOWN = ("plain", "fusedckpt sqrt", "fusedckpt recursive", "plan memory")
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
    return Workload(model, [Batch((x,), {}, y) for x, y in batches], F.cross_entropy, optimizer)


def _segments(chosen: Settings, part: str) -> list[int]:
    layers = chosen.layers if part == "conv" else chosen.mlp_layers
    return [k for k in SEGMENTS[part] if k <= layers]


def _num_steps(chosen: Settings, part: str) -> int:
    if part == "depth":
        return num_steps(chosen.repeat)
    ways = 1 + 2 * len(_segments(chosen, part)) + len(RULES) + NUM_PLANS
    return NUM_PLANS + ways * (1 + chosen.repeat)


def _compared(
    chosen: Settings, part: str, work: Workload, tick: Callable[..., None]
) -> tuple[Row, ...]:
    segments, model = _segments(chosen, part), work.model
    stock = [Way.torch(model, k) for k in segments]
    ours = [Way.ours(model, k) for k in [*segments, *RULES]]
    ways = [Way("plain", model), *stock, *ours, *plans(work, tick)]
    return compare(work, ways, chosen.repeat, tick, SHOWN)


def _conv(chosen: Settings, tick: Callable[..., None]) -> Part:
    torch.manual_seed(chosen.seed)
    pictures = images(28, chosen.seed)
    model = conv_net(chosen.layers, chosen.width)
    work = _workload(chosen, model, pictures, chosen.batch, partial(torch.optim.SGD, lr=1e-3))
    side = final_side(chosen.layers)
    title = (
        f"Convolutional net: 1 -> {chosen.width}, {chosen.layers} x [conv {chosen.width}, ReLU,"
        f" pool] down to {side} x {side}; batch {chosen.batch}"
    )
    return Part(title, _notes(work, pictures), _compared(chosen, "conv", work, tick))


def _mlp(chosen: Settings, tick: Callable[..., None]) -> Part:
    torch.manual_seed(chosen.seed)
    pictures = images(math.isqrt(chosen.mlp_width), chosen.seed)
    model = mlp(chosen.mlp_layers, chosen.mlp_width)
    flat = pictures._replace(x=pictures.x.flatten(1))
    work = _workload(chosen, model, flat, chosen.mlp_batch, partial(torch.optim.Adam, lr=1e-4))
    title = (
        f"MLP: {chosen.mlp_layers} layers of {chosen.mlp_width}, 10 outputs, ReLU; batch"
        f" {chosen.mlp_batch}, Adam"
    )
    return Part(title, _notes(work, pictures), _compared(chosen, "mlp", work, tick))


def _depths(chosen: Settings, tick: Callable[..., None]) -> Depths:
    sizes = Stack(
        chosen.depth_dim,
        chosen.depth_seq,
        chosen.depth_batch,
        chosen.steps,
        chosen.seed,
        torch.device(chosen.device),
    )
    return measure_depths(sizes, chosen.depth_budget, chosen.repeat, tick)


def _notes(work: Workload, pictures: Images) -> tuple[str, ...]:
    size = nbytes_of(work.model.parameters()) / MIB
    segments = "torch k, fusedckpt k: checkpoint_sequential with k segments"
    return (f"{pictures.source}; {size:,.1f} MiB of parameters", segments, *NOTES)


# how each part is measured and shown, in the order of Result
PARTS: dict[str, tuple[Callable[..., Any], Callable[..., Table]]] = {
    "conv": (_conv, part_table),
    "mlp": (_mlp, part_table),
    "depth": (_depths, depth_table),
}


def _parts(chosen: Settings, console: Console) -> Iterator[Any]:
    """Measure and print the parts that were asked for; yield None for others."""
    wanted = [name for name in PARTS if chosen.part in (name, "all")]
    with steps(console, {name: _num_steps(chosen, name) for name in wanted}) as begin:
        for name, (measured, table) in PARTS.items():
            if name not in wanted:
                yield None
                continue
            part = measured(chosen, partial(begin, name))
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
