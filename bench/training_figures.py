"""The figures of `demo`, `classics` and `ways`, drawn from their records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from bench.figures import (
    BLUE,
    FAINT,
    INK,
    OURS,
    STYLE,
    Panel,
    clusters,
    colour_of,
    lying,
    name_points,
)
from bench.results import Row, checked, save
from bench.tables import MIB, difference
from bench.training import slowdown

HEIGHT = 3.5
# of the axes' height, where a note on losses ends
NOTE = 0.59
Rows = Sequence[Row]
_RECORD = {"subtitle": "str", "settings": "dict", "environment": "dict"}
_NUMBERS = {"name": "str", "losses": "list", "loss_difference": "float"}
_RUN = _NUMBERS | dict.fromkeys(("saved_mib", "peak_mib", "ms_per_step"), "float")
_WAY = _NUMBERS | {"ms": "list", "saved_bytes": "int", "rise_bytes": "int"}
_DEPTH = _NUMBERS | {"ms": "list", "layers": "int", "peak_bytes": "int"}


def publish(record: Row, out: Path, name: str) -> None:
    """Write a record and its figure."""
    save(record, out / f"{name}.json")
    draw = draw_demo if "runs" in record else draw_classics
    draw(record, out / f"{name}.png")
    print(f"wrote {name}.json and {name}.png to {out}")


def drawing(record: Any) -> Callable[[Path], None] | None:
    """Return a function that draws a record; None for other JSON. Raises ValueError if damaged."""
    if not isinstance(record, dict) or not {"runs", "depth", "own"} & record.keys():
        return None
    checked(record, _RECORD)
    if "runs" in record:
        for row in _rows(checked(record, {"title": "str"}), "runs"):
            checked(row, _RUN)
        return partial(draw_demo, record)
    for name in ("conv", "mlp", "depth", "own"):
        if (part := record.get(name)) is not None:
            for row in _rows(checked(part, {"title": "str"}), "rows"):
                checked(row, _DEPTH if name == "depth" else _WAY)
    return partial(draw_classics, record)


def _rows(record: Row, name: str) -> list[Any]:
    rows = record.get(name)
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{name} is not a list of rows")
    return rows


def _draw_losses(axes: Axes, runs: Rows) -> None:
    # the curves lie on one another: each is drawn thinner than the one below it
    for run, width in zip(runs, (9.0, 6.6, 4.6, 2.8, 1.2), strict=False):
        steps = range(1, len(run["losses"]) + 1)
        axes.plot(steps, run["losses"], color=colour_of(run["name"]), linewidth=width)
    # so that no late loss lies behind the note
    low, high = axes.get_ylim()
    late = max(loss for run in runs for loss in run["losses"][2 * len(run["losses"]) // 5 :])
    axes.set_ylim(low, max(high, low + (late - low) / NOTE))
    axes.set_title("Training loss (nats per byte)")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(
        MaxNLocator("auto", integer=True, min_n_ticks=1, steps=(1, 2, 5, 10))
    )
    axes.grid(axis="y", color="#ececec")
    lines = [f"{run['name']}  {difference(run['loss_difference'])}" for run in runs[1:]]
    note = "\n".join([f"largest difference to {runs[0]['name']}", *lines])
    place = {"transform": axes.transAxes, "ha": "right", "va": "top"}
    behind = {"facecolor": "white", "edgecolor": "none"}
    axes.text(1.0, 0.97, note, color=FAINT, linespacing=1.3, bbox=behind, **place)


def _change_label(value: float, reference: float, index: int) -> str:
    change = f"\n{value / reference - 1:+.0%}".replace("-", "\N{MINUS SIGN}") if index else ""
    return f"{value:,.{int(value < 10)}f}{change}"


def draw_demo(result: Row, path: Path) -> None:
    """Write the figure of the demo: loss curves, memory, time."""
    runs = result["runs"]
    colours = [colour_of(run["name"]) for run in runs]
    with mpl.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(rect=(0.005, 0.01, 0.99, 0.73), wspace=0.06)
        figure = Figure(figsize=(12, 4.9), dpi=200, layout=layout)
        losses, memory, time = figure.subplots(1, 3, width_ratios=(3.6, 5.2, 2.8))
        _draw_losses(losses, runs)
        groups = {
            "saved for backward": [run["saved_mib"] for run in runs],
            "peak of a step": [run["peak_mib"] for run in runs],
        }
        clusters(memory, colours, groups, _change_label, size=9)
        memory.set_title("Memory (MiB)")
        steps = {"median step": [run["ms_per_step"] for run in runs]}
        clusters(time, colours, steps, _change_label, size=9)
        time.set_title("Time (ms)")
        figure.text(0.012, 0.955, result["title"], fontsize=14, fontweight="bold", va="center")
        look: dict[str, Any] = {"color": FAINT, "va": "top", "linespacing": 1.4}
        figure.text(0.012, 0.915, result["subtitle"], fontsize=9, **look)
        swatches = [Patch(color=colour_of(run["name"]), label=run["name"]) for run in runs]
        # below the lines of the subtitle, which may be as wide as the figure
        figure.legend(handles=swatches, loc=(0.005, 0.77), ncols=len(runs), frameon=False)
        figure.savefig(path)


def draw_classics(result: Row, path: Path) -> None:
    """Write the figure of the classics, or of ways: curves and bars of each part."""
    kinds: dict[str, tuple[Callable[..., None], float]] = {
        "conv": (_draw_own, 2 * HEIGHT),
        "mlp": (_draw_own, 2 * HEIGHT),
        "depth": (_draw_depths, HEIGHT),
        "own": (_draw_own, 2 * HEIGHT),
    }
    shown = [(result[name], *kind) for name, kind in kinds.items() if result.get(name)]
    heights = [height for *_, height in shown]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, sum(heights) + 0.5), dpi=200, layout="constrained")
        figure.suptitle(result["subtitle"], x=0.01, ha="left", fontsize=9, color=FAINT)
        places = figure.subfigures(
            len(shown), 1, squeeze=False, hspace=0.06, height_ratios=heights
        )[:, 0]  # fmt: skip
        for place, (part, fill, _) in zip(places, shown, strict=True):
            place.suptitle(part["title"], x=0.01, ha="left", fontsize=12, fontweight="bold")
            fill(place, part["rows"])
        figure.savefig(path)


def _colour(name: str) -> str:
    """Of the classics, where fusedckpt is its checkpoint_sequential."""
    if name == "fusedckpt recursive":
        return BLUE
    return OURS.colour if name.startswith("fusedckpt") else colour_of(name)


def _draw_own(figure: SubFigure, rows: Rows) -> None:
    _draw_trade(_below_curves(figure, rows).subplots(), rows)


def _below_curves(figure: SubFigure, rows: Rows) -> SubFigure:
    """Draw memory through a step of each way that has it, and return the place below."""
    shown = [row for row in rows if row["curve"]]
    if not shown:
        return figure
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(2, 3))[:, 0]
    _draw_curves(above, shown)
    return below


def _draw_curves(figure: SubFigure, shown: Rows) -> None:
    """Draw a panel a way: up in forward, down in backward."""
    panels = figure.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False)[0]
    for axes, row in zip(panels, shown, strict=True):
        curve, colour = row["curve"], _colour(row["name"])
        count = len(curve["mib"])
        times = [curve["ms"] * index / (count - 1) for index in range(count)]
        axes.fill_between(times, curve["mib"], color=colour, alpha=0.25, linewidth=0)
        axes.plot(times, curve["mib"], color=colour, linewidth=1.2)
        axes.axvline(curve["forward_ms"], color=INK, linewidth=0.8, linestyle=":")
        axes.set_title(f"{row['name']}: {row['rise_bytes'] / MIB:,.1f}", fontsize=9)
        axes.grid(axis="y", color="#ececec")
    panels[0].set_ylabel("live MiB")
    panels[0].set_ylim(bottom=0)
    panels[0].set_xlim(left=0)
    text = "ms into a step, under the profiler; dotted: forward ends, backward begins"
    figure.supxlabel(text, fontsize=9, color=FAINT)
    head = "Memory through a step, and its peak (MiB)"
    figure.suptitle(head, x=0.01, ha="left", fontsize=11, fontweight="bold")


def _draw_trade(axes: Axes, rows: Rows) -> None:
    """Draw time against memory: towards the lower left is better."""
    points = [(row["rise_bytes"] / MIB, slowdown(row, rows[0])) for row in rows]
    for row, spot in zip(rows, points, strict=True):
        marker = "s" if row is rows[0] else "D" if "plan" in row["name"] else "o"
        axes.plot(*spot, marker, color=_colour(row["name"]), markersize=6)
    axes.set_title("Time against memory")
    axes.set_xlabel("peak of a step, MiB, beside parameters and gradients")
    axes.set_ylabel(f"time, a multiple of {rows[0]['name']}'s")
    axes.margins(x=0.12, y=0.12)
    axes.grid(color="#ececec")
    name_points(axes, points, [row["name"] for row in rows], 0.98 / max(17, len(points)))


def _draw_depths(figure: SubFigure, rows: Rows) -> None:
    layers = [row["layers"] for row in rows]
    times = [slowdown(row, rows[0]) * layers[0] / row["layers"] for row in rows]
    panels = (
        Panel("Layers that fit", [layers], [f"{n} ({n / layers[0]:.1f}x)" for n in layers]),
        Panel("Time per layer, of plain's", [times], [f"{time:.2f}x" for time in times]),
    )
    lying(figure, [row["name"] for row in rows], panels, _colour)
