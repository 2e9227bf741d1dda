"""The figure of `python -m bench classics`: a row per part that was measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from bench.classics_results import Curve, Depths, Part, Result, Row
from bench.figures import name_points
from bench.picture import OURS, draw_clusters, family
from bench.results import MIB
from fusedckpt.reporting.figure import BLUE, FAINT, INK, STYLE

__all__ = ["draw"]

HEIGHT = 3.5


def draw(result: Result, path: Path) -> None:
    """Write the figure: curves and bars of each part."""
    found: list[tuple[Part | Depths | None, Callable[..., None], float]] = [
        (result.conv, _draw_conv, 2 * HEIGHT),
        (result.mlp, _draw_mlp, HEIGHT),
        (result.depth, _draw_depths, HEIGHT),
        (result.own, _draw_own, 2 * HEIGHT),
    ]
    rows = [(part, fill, height) for part, fill, height in found if part]
    heights = [height for *_, height in rows]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, sum(heights) + 0.5), dpi=200, layout="constrained")
        figure.suptitle(result.subtitle, x=0.01, ha="left", fontsize=9, color=FAINT)
        places = figure.subfigures(
            len(rows), 1, squeeze=False, hspace=0.06, height_ratios=heights
        )[:, 0]  # fmt: skip
        for place, (part, fill, _) in zip(places, rows, strict=True):
            place.suptitle(part.title, x=0.01, ha="left", fontsize=12, fontweight="bold")
            fill(place, part)
        figure.savefig(path)


def _colour(name: str) -> str:
    if "recursive" in name:
        return BLUE
    return (OURS if name.startswith("fusedckpt") else family(name)).colour


def _draw_conv(figure: SubFigure, part: Part) -> None:
    segments, trade = _below_curves(figure, part).subplots(1, 2)
    _draw_segments(segments, part)
    _draw_trade(trade, part)


def _draw_own(figure: SubFigure, part: Part) -> None:
    _draw_trade(_below_curves(figure, part).subplots(), part)


def _below_curves(figure: SubFigure, part: Part) -> SubFigure:
    """Draw memory through a step of each way that has it, and return the place below."""
    shown = [(row, row.curve) for row in part.rows if row.curve]
    if not shown:
        return figure
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(2, 3))[:, 0]
    _draw_curves(above, shown)
    return below


def _draw_curves(figure: SubFigure, shown: Sequence[tuple[Row, Curve]]) -> None:
    """Draw a panel a way: up in forward, down in backward."""
    panels = figure.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (row, curve) in zip(panels, shown, strict=True):
        colour, count = _colour(row.name), len(curve.mib)
        times = [curve.ms * index / count for index in range(count)]
        axes.fill_between(times, curve.mib, color=colour, alpha=0.25, linewidth=0)
        axes.plot(times, curve.mib, color=colour, linewidth=1.2)
        axes.axvline(curve.forward_ms, color=INK, linewidth=0.8, linestyle=":")
        axes.set_title(f"{row.name}: {row.rise_bytes / MIB:,.1f}", fontsize=9)
        axes.grid(axis="y", color="#ececec")
    panels[0].set_ylabel("live MiB")
    panels[0].set_ylim(bottom=0)
    panels[0].set_xlim(left=0)
    figure.supxlabel(
        "ms into a step, under the profiler; dotted: forward ends, backward begins", fontsize=9,
        color=FAINT,
    )  # fmt: skip
    title = "Memory through a step, and its peak (MiB)"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")


def _draw_segments(axes: Axes, part: Part) -> None:
    """Draw what is kept and how high a step climbs, by the number of segments."""
    # where the curves lie on one another, the thinner one is on top
    for whose, width in (("torch", 3.0), ("fusedckpt", 1.5)):
        rows = [row for row in part.rows if re.fullmatch(rf"{whose} \d+", row.name)]
        count = [int(row.name.split()[1]) for row in rows]
        style: dict[str, Any] = {
            "color": _colour(whose),
            "marker": "o",
            "markersize": 2 + width,
            "linewidth": width,
        }
        axes.plot(count, _mib(rows, "rise_bytes"), label=f"{whose}, peak", **style)
        kept = _mib(rows, "saved_bytes")
        axes.plot(count, kept, linestyle="--", label=f"{whose}, kept", **style)
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


def _draw_trade(axes: Axes, part: Part) -> None:
    """Draw time against memory: towards the lower left is better."""
    reference = part.rows[0]
    points = [(row.rise_bytes / MIB, row.slowdown(reference)) for row in part.rows]
    for row, spot in zip(part.rows, points, strict=True):
        marker = "s" if row is reference else "D" if "plan" in row.name else "o"
        axes.plot(*spot, marker, color=_colour(row.name), markersize=6)
    axes.set_title("Time against memory")
    axes.set_xlabel("peak of a step, MiB, beside parameters and gradients")
    axes.set_ylabel(f"time, a multiple of {reference.name}'s")
    axes.margins(x=0.12, y=0.12)
    axes.grid(color="#ececec")
    name_points(axes, points, [row.name for row in part.rows], 0.98 / max(17, len(points)))


def _draw_mlp(figure: SubFigure, part: Part) -> None:
    memory, time, trade = figure.subplots(1, 3, width_ratios=(3.4, 2, 4))
    names = ("plain", "torch 3", "fusedckpt 3", "plan sqrt")
    rows = [row for row in part.rows if row.name in names]
    clusters = {"kept": _mib(rows, "saved_bytes"), "peak of a step": _mib(rows, "rise_bytes")}
    colours = [_colour(row.name) for row in rows]
    draw_clusters(memory, colours, clusters, _label, 7)
    memory.set_title("Memory (MiB)")
    swatches = [Patch(color=_colour(row.name), label=row.name) for row in rows]
    memory.legend(handles=swatches, frameon=False, fontsize=8, loc="upper left")
    draw_clusters(time, colours, {"median step": [row.ms.median for row in rows]}, _label, 7)
    time.set_title("Time (ms)")
    _draw_trade(trade, part)


def _label(height: float, *_: Any) -> str:
    return f"{height:,.{int(height < 100)}f}"


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
