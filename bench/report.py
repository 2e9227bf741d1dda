"""Plain result records, and the table and the figure drawn from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from rich.table import Table

from bench.picture import draw_clusters, family
from bench.text import difference
from fusedckpt.reporting.figure import FAINT, STYLE

__all__ = ["Result", "Run", "draw", "table"]


@dataclass(frozen=True)
class Run:
    """What one way of training cost; the first run of a result is the one others are held to."""

    name: str
    loss_first: float
    loss_last: float
    loss_difference: float
    saved_mib: float
    peak_mib: float
    ms_per_step: float
    tokens_per_second: float
    losses: tuple[float, ...]
    step_ms: tuple[float, ...]


@dataclass(frozen=True)
class Result:
    """All runs of one command with what is needed to repeat them."""

    title: str
    subtitle: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    fused: str
    runs: tuple[Run, ...]


def table(result: Result) -> Table:
    """One row per run."""
    out = Table(
        title=result.title, caption=result.subtitle, title_style="bold", caption_justify="left"
    )
    out.add_column("run", style="bold")
    reference = result.runs[0]
    for head in (
        "first\nloss",
        "last\nloss",
        f"max diff.\nto {reference.name}",
        "saved\nMiB",
        "peak\nMiB",
        "ms per\nstep",
        "tokens\nper s",
    ):
        out.add_column(head, justify="right")
    for run in result.runs:
        out.add_row(
            run.name,
            f"{run.loss_first:.3f}",
            f"{run.loss_last:.3f}",
            "-" if run is reference else difference(run.loss_difference),
            f"{run.saved_mib:,.1f}",
            f"{run.peak_mib:,.1f}",
            f"{run.ms_per_step:,.1f}",
            f"{run.tokens_per_second:,.0f}",
        )
    return out


def _draw_losses(axes: Axes, runs: Sequence[Run]) -> None:
    # the curves lie on one another: each is drawn thinner than the one below it
    for run, width in zip(runs, (9.0, 6.6, 4.6, 2.8, 1.2), strict=False):
        steps = range(1, len(run.losses) + 1)
        axes.plot(steps, run.losses, color=family(run.name).colour, linewidth=width)
    axes.set_title("Training loss (nats per byte)")
    axes.set_xlabel("step")
    axes.grid(axis="y", color="#ececec")
    differences = "\n".join(f"{run.name}  {difference(run.loss_difference)}" for run in runs[1:])
    note = f"largest difference to {runs[0].name}\n{differences}"
    place = {"transform": axes.transAxes, "ha": "right", "va": "top"}
    behind = {"facecolor": "white", "edgecolor": "none"}
    axes.text(1.0, 0.97, note, color=FAINT, linespacing=1.3, bbox=behind, **place)


def _bar_label(value: float, reference: float, index: int) -> str:
    change = f"\n{value / reference - 1:+.0%}".replace("-", "\N{MINUS SIGN}") if index else ""
    return f"{value:,.{int(value < 10)}f}{change}"


def draw(result: Result, path: Path) -> None:
    """Write the figure: loss curves, memory, time."""
    with mpl.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(rect=(0.005, 0.01, 0.99, 0.73), wspace=0.06)
        figure = Figure(figsize=(12, 4.9), dpi=200, layout=layout)
        losses, memory, time = figure.subplots(1, 3, width_ratios=(3.6, 5.2, 2.8))
        runs = result.runs
        _draw_losses(losses, runs)
        groups = {
            "kept for backward": [run.saved_mib for run in runs],
            "peak of a step": [run.peak_mib for run in runs],
        }
        colours = [family(run.name).colour for run in runs]
        draw_clusters(memory, colours, groups, _bar_label, 9)
        memory.set_title("Memory (MiB)")
        steps = {"median step": [run.ms_per_step for run in runs]}
        draw_clusters(time, colours, steps, _bar_label, 9)
        time.set_title("Time (ms)")
        figure.text(0.012, 0.955, result.title, fontsize=14, fontweight="bold", va="center")
        figure.text(
            0.012, 0.915, result.subtitle, fontsize=9, color=FAINT, va="top", linespacing=1.4
        )
        swatches = [Patch(color=family(run.name).colour, label=run.name) for run in runs]
        # below the lines of the subtitle, which may be as wide as the figure
        figure.legend(handles=swatches, loc=(0.005, 0.77), ncols=len(runs), frameon=False)
        figure.savefig(path)
