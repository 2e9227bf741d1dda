"""Figures of measured groups: time and memory as bars, one against the other, and a roofline."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench.results import MIB, Ceilings, Group, Row
from bench.table import significant, source
from fusedckpt._figure import BLUE, FAINT, GREY, INK, RED, STYLE

__all__ = ["draw_bars", "draw_pareto", "draw_roofline", "pareto_front"]

GREEN = "#009e73"
# who an implementation belongs to, by how its name starts; the rest are other libraries
FAMILIES = {
    "eager": ("eager", GREY),
    "torch.compile": ("torch.compile", RED),
    "checkpoint": ("torch.utils.checkpoint", "#e69f00"),
    "torch(": ("torch.utils.checkpoint", "#e69f00"),
    "fusedckpt": ("fusedckpt", BLUE),
    "ours(": ("fusedckpt.checkpoint", "#56b4e9"),
}
OTHERS = ("other libraries", GREEN)


def family(name: str) -> tuple[str, str]:
    """Return who an implementation belongs to, and their colour."""
    return next((found for start, found in FAMILIES.items() if name.startswith(start)), OTHERS)


def timed(group: Group) -> list[Row]:
    """Return the rows that have a time and a peak."""
    return [row for row in group.rows if row.both_ms is not None and row.peak_bytes is not None]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points that no other beats in one and equals in the other."""
    order = sorted(range(len(points)), key=lambda index: points[index])
    front: list[int] = []
    for index in order:
        if not front or points[index][1] < points[front[-1]][1]:
            front.append(index)
    return front


def _save(path: Path, size: tuple[float, float], head: str, group: Group, draw: Any) -> None:
    """Draw below a title, over a line that says where the numbers come from."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, dpi=160, layout="constrained")
        draw(figure)
        figure.suptitle(head, x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.supxlabel(source(group), x=0.01, ha="left", fontsize=7.5, color=FAINT)
        figure.savefig(path)


def _bars(
    axes: Axes,
    rows: Sequence[Row],
    title: str,
    parts: tuple[Sequence[float], Sequence[float]],
    spread: Sequence[tuple[float, float]] | None = None,
) -> None:
    """Draw a bar a row, from the end of one part to that of the next, fainter; then the spread."""
    before = [0.0] * len(rows)
    for part, shade in zip(parts, (1.0, 0.45), strict=True):
        colours = [(family(row.name)[1], shade) for row in rows]
        widths = [max(0.0, end - start) for start, end in zip(before, part, strict=True)]
        axes.barh(range(len(rows)), widths, 0.72, left=before, color=colours)
        before = [max(pair) for pair in zip(before, part, strict=True)]
    for place, end in enumerate(before):
        edge = end
        if spread is not None:
            axes.plot(spread[place], (place, place), color=INK, linewidth=0.9)
            edge = max(end, spread[place][1])
        where: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
        axes.annotate(significant(end), (edge, place), (4, 0), fontsize=8.5, color=INK, **where)
    axes.set_title(title)
    axes.margins(x=0.16)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.xaxis.set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)


def draw_bars(group: Group, path: Path) -> None:
    """Write a group's times, forward and backward, beside what is kept and the peak."""
    rows = timed(group)
    both = [row.both_ms for row in rows if row.both_ms]
    forward = [row.forward_ms.median for row in rows if row.forward_ms]
    kept = [(row.saved_bytes or 0) / MIB for row in rows]
    peaks = [(row.peak_bytes or 0) / MIB for row in rows]

    def draw(figure: Figure) -> None:
        time, memory = figure.subplots(1, 2, sharey=True)
        medians, spread = [t.median for t in both], [(t.p20, t.p80) for t in both]
        _bars(time, rows, "Time (ms): forward, then backward", (forward, medians), spread)
        time.set_yticks(range(len(rows)), [row.name for row in rows], color=INK)
        _bars(memory, rows, "Memory (MiB): kept for backward, then peak", (kept, peaks))

    _save(path, (10, 1.5 + 0.27 * len(rows)), group.title, group, draw)


def _names(axes: Axes, points: Sequence[tuple[float, float]], rows: Sequence[Row]) -> None:
    """Write names beside points, moved down where they would meet."""
    scale, lowest = axes.transData.transform, float("inf")
    behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.3}
    for point, row in sorted(zip(points, rows, strict=True), key=lambda pair: -pair[0][1]):
        height = float(scale(point)[1])
        placed = min(height, lowest - 17)
        lowest = placed
        # pixels to points
        shift = (7, (placed - height) * 72 / axes.figure.dpi)
        style = {"fontsize": 7, "va": "center", "color": FAINT, "bbox": behind, "zorder": 1}
        axes.annotate(row.name, point, shift, textcoords="offset points", **style)


def _pareto(axes: Axes, group: Group) -> None:
    rows = timed(group)
    points = [((row.peak_bytes or 0) / MIB, row.both_ms.median) for row in rows if row.both_ms]
    front = [points[index] for index in pareto_front(points)]
    axes.step(*zip(*front, strict=True), where="post", color="#c9c9c9", zorder=0)
    for point, row in zip(points, rows, strict=True):
        on_front = point in front
        axes.scatter(
            *point, s=34, color=family(row.name)[1], edgecolors=INK if on_front else "none",
            linewidths=0.9, zorder=2,
        )  # fmt: skip
    axes.margins(0.12)
    low, high = axes.get_xlim()
    # room for the names
    axes.set_xlim(low, high + 0.35 * (high - low))
    axes.set_title(group.case)
    axes.set_xlabel("peak (MiB)")
    axes.set_ylabel("forward + backward (ms)")
    axes.grid(color="#f0f0f0")
    axes.set_axisbelow(True)
    _names(axes, points, rows)


def draw_pareto(groups: Sequence[Group], path: Path) -> None:
    """Write time against peak memory, a panel a case; outlined: nothing beats it in both."""
    columns = min(3, len(groups))
    lines = -(-len(groups) // columns)

    def draw(figure: Figure) -> None:
        panels = list(figure.subplots(lines, columns, squeeze=False).flat)
        for axes, group in zip(panels, groups, strict=False):
            _pareto(axes, group)
        for axes in panels[len(groups) :]:
            axes.set_visible(False)

    first = groups[0]
    head = f"Time against memory: {first.size}, {first.tokens} tokens"
    _save(path, (max(9, 5 * columns + 0.5), 3.9 * lines + 0.8), head, first, draw)


def _roof(axes: Axes, ceilings: Ceilings, reach: tuple[float, float]) -> None:
    knee = 1e3 * ceilings.tflops / ceilings.gbytes
    xs = [min(reach[0], knee) / 3, knee, 3 * max(reach[1], knee)]
    axes.plot(xs, [min(x / knee, 1) * 1e3 * ceilings.tflops for x in xs], color=INK, linewidth=1.2)
    copy, matmul = significant(ceilings.gbytes), significant(ceilings.tflops)
    axes.set_title(f"Ceilings of the same run: copy {copy} GB/s, matmul {matmul} TFLOP/s")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs per byte that the case needs at least")
    axes.set_ylabel("GFLOP/s, what is recomputed not counted")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
        axis.set_minor_formatter("")
    axes.grid(color="#f0f0f0")


def _apart(values: Sequence[float], gap: float) -> list[float]:
    """Return ascending values moved no further than it takes to lie `gap` apart."""
    right, left = list(values), list(values)
    for index in range(1, len(values)):
        right[index] = max(right[index], right[index - 1] + gap)
        left[-1 - index] = min(left[-1 - index], left[-index] - gap)
    return [sum(pair) / 2 for pair in zip(right, left, strict=True)]


def _cases(axes: Axes, marks: dict[str, float]) -> None:
    """Write the cases' names below the points, led to their intensities where those are close."""
    names = sorted(marks, key=lambda name: marks[name])
    low, high = (log10(x) for x in axes.get_xlim())
    found = [log10(marks[name]) for name in names]
    style = {"color": "#d4d4d4", "linewidth": 0.8, "zorder": 0}
    where = axes.get_xaxis_transform()
    for name, x, place in zip(names, found, _apart(found, 0.024 * (high - low)), strict=True):
        axes.plot((10**place, 10**x, 10**x), (0.4, 0.45, 1), transform=where, **style)
        words = {"rotation": 90, "fontsize": 8, "color": FAINT, "ha": "center", "va": "top"}
        axes.text(10**place, 0.39, name, transform=where, **words)


def _families(groups: Sequence[Group]) -> list[Line2D]:
    """Return what a legend shows."""
    names = [row.name for group in groups for row in timed(group)]
    return [
        Line2D([], [], marker="o", linestyle="", color=colour, label=label)
        for label, colour in dict.fromkeys(map(family, names))
    ]


def draw_roofline(groups: Sequence[Group], path: Path) -> None:
    """Write each GEMM case's useful FLOP/s over its useful FLOPs per byte, below the ceilings."""
    shown = [group for group in groups if group.load.flops and group.ceilings and timed(group)]
    if not shown:
        return
    first, ceilings = shown[0], shown[0].ceilings
    assert ceilings is not None
    marks = {group.case: group.load.flops / group.load.nbytes for group in shown}

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        _roof(axes, ceilings, (min(marks.values()), max(marks.values())))
        rates = [
            (marks[group.case], group.load.flops / row.both_ms.median / 1e6, family(row.name)[1])
            for group in shown
            for row in timed(group)
            if row.both_ms is not None
        ]
        for x, rate, colour in rates:
            axes.scatter(x, rate, s=26, color=colour, alpha=0.85, zorder=2)
        # the names take the lower half
        top, lowest = axes.get_ylim()[1], min(rate for _, rate, _ in rates)
        axes.set_ylim(lowest**2 / top, top)
        _cases(axes, marks)
        figure.legend(handles=_families(shown), loc="outside right upper", frameon=False)

    _save(path, (10, 5.4), f"Roofline: {first.size}, {first.tokens} tokens", first, draw)
