"""Figures of measured groups: time and memory as bars, one against the other, and of ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench.picture import family, save
from bench.results import MIB, Ceilings, Group, Row
from bench.table import sources
from bench.text import significant
from fusedckpt.reporting.figure import INK

__all__ = ["draw_bars", "draw_pareto", "draw_roofline", "name_points", "pareto_front", "timed"]


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
        colours = [(family(row.name).colour, shade) for row in rows]
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

    save(path, 1.4 + 0.27 * len(rows), group.title, sources([group]), draw)


def _apart(values: Sequence[float], gap: float) -> list[float]:
    """Return ascending values moved no further than it takes to lie `gap` apart."""
    right, left = list(values), list(values)
    for index in range(1, len(values)):
        right[index] = max(right[index], right[index - 1] + gap)
        left[-1 - index] = min(left[-1 - index], left[-index] - gap)
    return [sum(pair) / 2 for pair in zip(right, left, strict=True)]


def name_points(
    axes: Axes, points: Sequence[tuple[float, float]], names: Sequence[str], gap: float = 0.058
) -> None:
    """Write names right of the axes, each with a line to its point; gap: of the axes' height."""
    (low, high), order = axes.get_ylim(), sorted(range(len(points)), key=lambda i: points[i][::-1])
    heights = [(points[index][1] - low) / (high - low) for index in order]
    arrow = {"arrowstyle": "-", "color": "#b5b5b5", "linewidth": 0.6, "shrinkA": 1, "shrinkB": 2}
    for place, (index, height) in enumerate(zip(order, _apart(heights, gap), strict=True)):
        # no lower than the axes, and no higher
        inside = max(gap * place, min(height, 1 - gap * (len(names) - 1 - place)))
        axes.annotate(
            names[index], points[index], (1.03, inside), textcoords=axes.transAxes,
            arrowprops=arrow | {"relpos": (0, 0.5)}, fontsize=8, va="center", color=INK, zorder=1,
        )  # fmt: skip


def _pareto(axes: Axes, group: Group) -> None:
    rows = timed(group)
    points = [((row.peak_bytes or 0) / MIB, row.both_ms.median) for row in rows if row.both_ms]
    front = [points[index] for index in pareto_front(points)]
    axes.step(*zip(*front, strict=True), where="post", color="#c9c9c9", zorder=0)
    for point, row in zip(points, rows, strict=True):
        edge = INK if point in front else "none"
        colour = family(row.name).colour
        axes.scatter(*point, s=34, color=colour, edgecolors=edge, linewidths=0.9, zorder=2)
    axes.margins(0.12)
    axes.set_title(group.heading)
    axes.set_xlabel("peak (MiB)")
    axes.set_ylabel("forward + backward (ms)")
    axes.grid(color="#f0f0f0")
    axes.set_axisbelow(True)
    name_points(axes, points, [row.name for row in rows])


def draw_pareto(groups: Sequence[Group], path: Path) -> None:
    """Write time against peak memory, a panel a case; outlined: nothing beats it in both."""
    columns = min(2, len(groups))
    lines = -(-len(groups) // columns)

    def draw(figure: Figure) -> None:
        panels = list(figure.subplots(lines, columns, squeeze=False).flat)
        for axes, group in zip(panels, groups, strict=False):
            _pareto(axes, group)
        for axes in panels[len(groups) :]:
            axes.set_visible(False)

    first = groups[0]
    head = f"Time against memory: {first.size}, {first.tokens} tokens"
    save(path, 3.2 * lines + 0.7, head, sources(groups), draw)


def _families(groups: Sequence[Group]) -> list[Line2D]:
    """Return what a legend shows."""
    names = [row.name for group in groups for row in timed(group)]
    return [
        Line2D([], [], marker="o", linestyle="", color=colour, label=label)
        for label, colour in dict.fromkeys(map(family, names))
    ]


def _share(axes: Axes, place: int, group: Group, ceilings: Ceilings) -> None:
    """Draw a case's line: what share of its own run's ceiling each family reaches."""
    rows = [row for row in timed(group) if row.both_ms]
    families = list(dict.fromkeys(family(row.name) for row in rows))
    for row in rows:
        assert row.both_ms is not None
        mine = family(row.name)
        # families lie below one another, so that none hides another
        lower = 0.13 * (families.index(mine) - (len(families) - 1) / 2)
        share = 100 * ceilings.least_ms(group.load) / row.both_ms.median
        axes.scatter(share, place + lower, s=26, color=mine.colour, zorder=2)


def draw_roofline(groups: Sequence[Group], path: Path) -> None:
    """Write how near each way comes to what the run that measured it could do at most."""
    shown = [(group, group.ceilings) for group in groups if group.ceilings and timed(group)]
    if not shown:
        return
    shown.sort(key=lambda pair: pair[0].load.flops / pair[0].load.nbytes)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for place, (group, ceilings) in enumerate(shown):
            _share(axes, place, group, ceilings)
        names = [
            f"{group.case}\n{group.load.flops / group.load.nbytes:,.0f} GEMM FLOPs per byte: "
            f"{'matmul' if ceilings.is_matmul(group.load) else 'copy'}"
            for group, ceilings in shown
        ]
        axes.set_yticks(range(len(shown)), names, fontsize=8.5, color=INK)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        # the ceilings are in sight; what a cache holds is read faster than by the copy
        axes.set_xlim(0, max(104, axes.get_xlim()[1]))
        axes.axvline(100, color=INK, linewidth=1.2)
        axes.set_xlabel(
            "least time at the ceiling, over the time taken (%); what is recomputed earns nothing"
        )
        axes.grid(color="#f0f0f0")
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        figure.legend(handles=_families(groups), loc="outside right upper", frameon=False)

    first, _ = shown[0]
    head = f"Share of the ceilings: {first.size}, {first.tokens} tokens"
    save(path, 1.4 + 0.55 * len(shown), head, sources([group for group, _ in shown]), draw)
