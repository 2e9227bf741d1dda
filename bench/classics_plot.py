"""The figure of `python -m bench classics`: a row per part that was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import NullLocator

from bench.classics_results import Depths, Part, Result, Row
from bench.figures import name_points
from bench.picture import CHECKPOINT, EAGER, OURS, PLAN
from bench.results import MIB
from fusedckpt._figure import FAINT, INK, STYLE

__all__ = ["draw"]

# how ways look, by how their names start
FAMILIES: dict[str, tuple[str, str]] = {
    "plain": (EAGER.colour, "s"),
    "torch": (CHECKPOINT.colour, "o"),
    "fusedckpt": (OURS.colour, "o"),
    "plan": (PLAN.colour, "D"),
}
HEIGHT = 3.5


def draw(result: Result, path: Path) -> None:
    """Write the figure: curves and bars of each part."""
    rows: list[tuple[str, Callable[[SubFigure], None]]] = []
    if result.conv:
        rows.append((result.conv.title, partial(_draw_conv, part=result.conv)))
    if result.mlp:
        rows.append((result.mlp.title, partial(_draw_mlp, part=result.mlp)))
    if result.depth:
        rows.append((result.depth.title, partial(_draw_depths, depths=result.depth)))
    with mpl.rc_context(STYLE):
        size = (10, HEIGHT * len(rows) + 0.5)
        figure = Figure(figsize=size, dpi=200, layout="constrained")
        figure.suptitle(result.subtitle, x=0.01, ha="left", fontsize=9, color=FAINT)
        parts = figure.subfigures(len(rows), 1, squeeze=False, hspace=0.06)[:, 0]
        for part, (title, fill) in zip(parts, rows, strict=True):
            part.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
            fill(part)
        figure.savefig(path)


def _family(row: Row) -> str:
    return row.name.split()[0]


def _of(part: Part, family: str) -> list[Row]:
    return [row for row in part.rows if _family(row) == family]


def _draw_conv(figure: SubFigure, part: Part) -> None:
    kept, trade = figure.subplots(1, 2)
    _draw_segments(kept, part)
    _draw_trade(trade, part, lambda row: row.peak_bytes, "peak of a step, MiB")


def _draw_segments(axes: Axes, part: Part) -> None:
    """Draw what is kept and how high a step climbs, by the number of segments."""
    # where the curves lie on one another, the thinner one is on top
    for family, width in (("torch", 3.0), ("fusedckpt", 1.5)):
        rows = [row for row in _of(part, family) if row.name.split()[1].isdecimal()]
        count = [int(row.name.split()[1]) for row in rows]
        colour, marker = FAMILIES[family]
        style: dict[str, Any] = {
            "color": colour,
            "marker": marker,
            "markersize": 2 + width,
            "linewidth": width,
        }
        axes.plot(count, _mib(rows, "peak_bytes"), label=f"{family}, peak", **style)
        kept = _mib(rows, "saved_bytes")
        axes.plot(count, kept, linestyle="--", label=f"{family}, kept", **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(count, [str(k) for k in count])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0)
    axes.set_title("Memory by segments (MiB)")
    axes.set_xlabel("segments")
    axes.grid(axis="y", color="#ececec")
    axes.legend(frameon=False, fontsize=8)


def _mib(rows: Sequence[Row], name: str) -> list[float]:
    return [getattr(row, name) / MIB for row in rows]


def _draw_trade(axes: Axes, part: Part, size: Callable[[Row], int], label: str) -> None:
    """Draw time against memory: towards the lower left is better."""
    points = [(size(row) / MIB, row.slowdown(part.rows[0])) for row in part.rows]
    for row, spot in zip(part.rows, points, strict=True):
        colour, marker = FAMILIES[_family(row)]
        axes.plot(*spot, marker, color=colour, markersize=6)
    axes.set_title("Time against memory")
    axes.set_xlabel(label)
    axes.set_ylabel("time of plain")
    axes.margins(x=0.12, y=0.12)
    axes.grid(color="#ececec")
    name_points(axes, points, [row.name for row in part.rows])


def _draw_mlp(figure: SubFigure, part: Part) -> None:
    memory, time, trade = figure.subplots(1, 3, width_ratios=(3.4, 2, 4))
    names = ("plain", "torch 3", "fusedckpt 3", "plan sqrt")
    rows = [row for row in part.rows if row.name in names]
    clusters = {"kept": _mib(rows, "saved_bytes"), "rise of a step": _mib(rows, "rise_bytes")}
    _draw_bars(memory, rows, clusters, "Memory (MiB)")
    _draw_bars(time, rows, {"median step": [row.ms.median for row in rows]}, "Time (ms)")
    _draw_trade(trade, part, lambda row: row.rise_bytes, "rise of a step, MiB")


def _draw_bars(axes: Axes, rows: Sequence[Row], groups: dict[str, list[float]], title: str) -> None:
    """One cluster per group, a bar per way, the value on each."""
    width = 0.8 / len(rows)
    for i, row in enumerate(rows):
        heights = [values[i] for values in groups.values()]
        centres = [group + (i - (len(rows) - 1) / 2) * width for group in range(len(groups))]
        label, colour = row.name, FAMILIES[_family(row)][0]
        bars = axes.bar(centres, heights, width=0.92 * width, color=colour, label=label)
        texts = [f"{height:,.{int(height < 100)}f}" for height in heights]
        axes.bar_label(bars, texts, padding=2, fontsize=7, color=INK)
    axes.set_title(title)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.tick_params(axis="x", length=0)
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)
    axes.margins(y=0.1)
    if len(groups) > 1:
        axes.legend(frameon=False, fontsize=8, loc="upper left")


def _draw_depths(figure: SubFigure, depths: Depths) -> None:
    deep, slow = figure.subplots(1, 2, sharey=True)
    reference = depths.rows[0]
    layers = [float(row.layers) for row in depths.rows]
    times = [row.slowdown(reference) for row in depths.rows]
    texts = [f"{row.layers} ({row.layers / reference.layers:.1f}x)" for row in depths.rows]
    _draw_lying(deep, depths, layers, texts, "Layers that fit")
    texts = [f"{slowdown:.2f}x" for slowdown in times]
    _draw_lying(slow, depths, times, texts, "Time per layer, of plain's")


def _draw_lying(
    axes: Axes, depths: Depths, values: list[float], texts: list[str], title: str
) -> None:
    names = [row.name for row in depths.rows]
    colours = [_colour(name) for name in names]
    bars = axes.barh(range(len(names)), values, color=colours, height=0.7)
    axes.bar_label(bars, texts, padding=3, fontsize=9, color=INK)
    axes.set_yticks(range(len(names)), names)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.margins(x=0.2)
    axes.set_title(title)


def _colour(name: str) -> str:
    family = name.replace(",", " ").split()[0]
    return FAMILIES["plan" if family == "fused" else family][0]
