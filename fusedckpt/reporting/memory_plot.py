"""A memory report as one figure: what every layer keeps, and live bytes by kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from fusedckpt.reporting.figure import BLUE, FAINT, GREY, INK, RED, STYLE
from fusedckpt.reporting.tables import size

if TYPE_CHECKING:
    from fusedckpt.reporting.memory_report import MemoryReport

__all__ = ["draw"]

# modules drawn; the rest is one bar
_MOST = 14
_MIB = 2**20
_KINDS = {
    "parameters": "#b8bfc9",
    "optimizer": "#9ccaa5",
    "gradients": "#f0b98d",
    "activations": "#7fb2d9",
}


def draw(report: MemoryReport, path: Path) -> None:
    """Write the figure in the format that the path's ending names."""
    with mpl.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(rect=(0.005, 0.01, 0.99, 0.86), wspace=0.05)
        figure = Figure(figsize=(12, 5), dpi=160, layout=layout)
        bars, curve = figure.subplots(1, 2, width_ratios=(5, 6))
        _draw_modules(bars, report)
        _draw_timeline(curve, report)
        title = f"Memory of one training step: {report.model} on {report.device}"
        figure.text(0.012, 0.955, title, fontsize=14, fontweight="bold", va="center")
        figure.text(0.012, 0.918, _subtitle(report), fontsize=9, color=FAINT, va="top")
        figure.savefig(path)


def _subtitle(report: MemoryReport) -> str:
    parts = [
        f"parameters {size(report.parameter_bytes)}",
        f"gradients {size(report.gradient_bytes)}",
        f"saved for backward {size(report.saved_bytes)}",
    ]
    if report.optimizer_bytes is not None:
        parts.insert(2, f"optimizer state {size(report.optimizer_bytes)}")
    parts.append(f"live before the step {size(report.resident_bytes)}")
    return ", ".join(parts)


def _draw_modules(axes: Axes, report: MemoryReport) -> None:
    layers = by_layer(report.saved_by_module)
    rows = list(layers.items())[:_MOST]
    rest = list(layers.values())[_MOST:]
    colours = [BLUE] * len(rows)
    if rest:
        rows.append((f"{len(rest)} more", sum(rest)))
        colours.append(GREY)
    widths = [nbytes / _MIB for _, nbytes in rows]
    bars = axes.barh(range(len(rows)), widths, color=colours, height=0.7)
    axes.bar_label(bars, [size(nbytes) for _, nbytes in rows], padding=3, fontsize=8, color=INK)
    axes.set_yticks(range(len(rows)), [_shortened(name) for name, _ in rows], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.margins(x=0.18)
    axes.set_title("Saved for backward, by layer")


def by_layer(modules: Mapping[str, int]) -> dict[str, int]:
    """Return bytes by layer, the largest first: what is in `blocks.0` counts for that.

    A layer is what the first number in a name ends.
    """
    counts: Counter[str] = Counter()
    for name, nbytes in modules.items():
        found = re.match(r"(.*?\b\d+)\.", name)
        counts[found[1] if found else name] += nbytes
    return dict(counts.most_common())


def _shortened(name: str) -> str:
    return name if len(name) <= 36 else f"\N{HORIZONTAL ELLIPSIS}{name[-35:]}"


def _draw_timeline(axes: Axes, report: MemoryReport) -> None:
    times = [moment.time_ns / 1e6 for moment in report.timeline]
    peak = report.peak
    top = peak.live_bytes / _MIB
    kinds = by_kind(report)
    heights = [[nbytes / _MIB for nbytes in column] for column in kinds.values()]
    colours = [_KINDS[kind] for kind in kinds]
    axes.stackplot(times, *heights, labels=[*kinds], colors=colours, step="post", linewidth=0)
    _mark(axes, report)
    axes.plot(peak.time_ns / 1e6, top, "o", color=RED, markersize=6)
    # towards the side that has room
    late = peak.time_ns / 1e6 > times[-1] / 2
    where = f"peak {size(peak.live_bytes)}\nin {peak.phase}, {_shortened(peak.module)}"
    at, away = (peak.time_ns / 1e6, top), (-4 if late else 4, 7)
    side: Any = {"ha": "right" if late else "left", "va": "bottom"}
    axes.annotate(where, at, away, textcoords="offset points", color=RED, fontsize=9, **side)
    axes.set_xlim(0, max(times[-1], 1e-6))
    axes.set_ylim(0, top * 1.22 or 1)
    axes.set_xlabel("ms into the step, under the profiler")
    axes.set_title("Live memory (MiB)")
    # beside the title
    place: Any = {"loc": "lower right", "bbox_to_anchor": (1.01, 0.99), "borderaxespad": 0.2}
    look: Any = {"frameon": False, "fontsize": 9, "handlelength": 1, "columnspacing": 1.2}
    axes.legend(ncols=len(kinds), **place, **look)


def by_kind(report: MemoryReport) -> dict[str, list[int]]:
    """Return live bytes by kind, moment by moment, which add up to all; the constant ones first."""
    there = report.optimizer_bytes or 0
    base = max(0, report.resident_bytes - there)
    kinds = {
        "parameters": [min(base, moment.live_bytes) for moment in report.timeline],
        "optimizer": [there + moment.optimizer_bytes for moment in report.timeline],
        "gradients": [moment.gradient_bytes for moment in report.timeline],
    }
    if report.optimizer_bytes is None:
        del kinds["optimizer"]
    named = map(sum, zip(*kinds.values(), strict=True))
    rest = [max(0, m.live_bytes - own) for m, own in zip(report.timeline, named, strict=True)]
    return {**kinds, "activations": rest}


def _mark(axes: Axes, report: MemoryReport) -> None:
    """Name every phase where it begins, and draw a line there."""
    for name, moments in groupby(report.timeline, key=lambda moment: moment.phase):
        start = next(moments).time_ns / 1e6
        axes.axvline(start, color=FAINT, linewidth=0.9, linestyle=":")
        at: Any = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        text: Any = {"fontsize": 8, "color": INK, "va": "bottom", "rotation": 90}
        axes.annotate(name, (start, 0.015), (2, 0), **at, **text)
