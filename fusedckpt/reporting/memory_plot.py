"""A memory report as one figure: the bytes that every layer saves, and live bytes by kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

from fusedckpt.reporting.figure import BLUE, FAINT, GREY, INK, MIB, RED, panels
from fusedckpt.reporting.tables import size
from fusedckpt.reporting.timeline import Moment

# the class of `memory_report.py`, which imports this module
MemoryReport: TypeAlias = Any

# modules drawn; the others are one bar
_MOST_BARS = 14
# of the axis of time: its numbers in a moment's, and its text
_UNITS_OF_AXIS = {"ms": 1e6, "ops": 1}
_TIMES_OF_AXIS = {"ms": "ms into the step, under the profiler", "ops": "ops into the step"}
_KINDS_DRAWN = {
    "parameters": "#b8bfc9",
    "optimizer": "#9ccaa5",
    "gradients": "#f0b98d",
    "activations": "#7fb2d9",
}


def draw_memory(report: MemoryReport, path: str | Path) -> None:
    """Write the figure in the format that the path's ending names."""
    # the axes leave room for two lines of title
    rect = (0.005, 0.01, 0.99, 0.86)
    with panels(path, "MemoryReport.plot", rect, width_ratios=(5, 6)) as (figure, axes):
        _draw_modules(axes[0], by_layer(report.saved_by_module))
        unit = "ops" if report.is_estimate else "ms"
        _draw_timeline(axes[1], report.timeline, report.live_by_kind, unit)
        sizes = {**report.sizes, "live before the step": report.resident_bytes}
        subtitle = ", ".join(f"{kind} {size(n)}" for kind, n in sizes.items() if n is not None)
        title = f"Memory of one training step: {report.model} on {report.device}"
        figure.text(0.012, 0.955, title, fontsize=14, fontweight="bold", va="center")
        figure.text(0.012, 0.918, subtitle, fontsize=9, color=FAINT, va="top")


def by_layer(modules: Mapping[str, int]) -> dict[str, int]:
    """Return bytes by layer, the largest first: modules in `blocks.0` count for that.

    The name of a layer ends with the first number in the name of a module.
    """
    counts: Counter[str] = Counter()
    for name, nbytes in modules.items():
        match = re.match(r"(.*?\b\d+)\.", name)
        counts[match[1] if match else name] += nbytes
    return dict(counts.most_common())


def _draw_modules(axes: Any, layers: Mapping[str, int]) -> None:
    rows = list(layers.items())[:_MOST_BARS]
    more = list(layers.values())[_MOST_BARS:]
    colors = [BLUE] * len(rows)
    if more:
        rows.append((f"{len(more)} more", sum(more)))
        colors.append(GREY)
    widths = [nbytes / MIB for _, nbytes in rows]
    bars = axes.barh(range(len(rows)), widths, color=colors, height=0.7)
    axes.bar_label(bars, [size(nbytes) for _, nbytes in rows], padding=3, fontsize=8, color=INK)
    axes.set_yticks(range(len(rows)), [_shortened(name) for name, _ in rows], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.margins(x=0.18)
    axes.set_title("Saved for backward, by layer")


def _shortened(name: str) -> str:
    return name if len(name) <= 36 else f"\N{HORIZONTAL ELLIPSIS}{name[-35:]}"


def _draw_timeline(
    axes: Any, timeline: Sequence[Moment], live: Mapping[str, Sequence[int]], unit: str
) -> None:
    scale = _UNITS_OF_AXIS[unit]
    times = [moment.time_ns / scale for moment in timeline]
    heights = [[nbytes / MIB for nbytes in column] for column in live.values()]
    colors = [_KINDS_DRAWN[kind] for kind in live]
    axes.stackplot(times, *heights, labels=[*live], colors=colors, step="post", linewidth=0)
    # every phase by name, and a line where it begins
    for name, moments in groupby(timeline, key=lambda moment: moment.phase):
        start = next(moments).time_ns / scale
        axes.axvline(start, color=FAINT, linewidth=0.9, linestyle=":")
        at: Any = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        look: Any = {"fontsize": 8, "color": INK, "va": "bottom", "rotation": 90}
        axes.annotate(name, (start, 0.015), (2, 0), **at, **look)
    peak = max(timeline, key=lambda moment: moment.live_bytes)
    _mark_peak(axes, peak, peak.time_ns / scale, times[-1])
    axes.set_xlim(0, max(times[-1], 1e-6))
    axes.set_xlabel(_TIMES_OF_AXIS[unit])
    axes.set_title("Live MiB")
    # beside the title
    place: Any = {"loc": "lower right", "bbox_to_anchor": (1.01, 0.99), "borderaxespad": 0.2}
    style: Any = {"frameon": False, "fontsize": 9, "handlelength": 1, "columnspacing": 1.2}
    axes.legend(ncols=len(live), **place, **style)


def _mark_peak(axes: Any, peak: Moment, time: float, end: float) -> None:
    at = time, peak.live_bytes / MIB
    axes.plot(*at, "o", color=RED, markersize=6)
    # towards the side that has room
    is_late = at[0] > end / 2
    where = f"peak {size(peak.live_bytes)}\nin {peak.phase}, {_shortened(peak.module)}"
    side: Any = {"ha": "right" if is_late else "left", "va": "bottom"}
    away: Any = {"xytext": (-4 if is_late else 4, 7), "textcoords": "offset points"}
    axes.annotate(where, at, **away, color=RED, fontsize=9, **side)
    axes.set_ylim(0, at[1] * 1.22 or 1)
