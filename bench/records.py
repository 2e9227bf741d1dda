"""Tables, records and figures of `demo`, `finetune`, `paper`, `classics` and `ways`."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from bench import figures
from bench.figures import FAINT, GRID, INK, Panel, colour_of, lying
from bench.results import Row, ratios
from bench.tables import Columns, difference, show, significant

Rows = Sequence[Row]


def slowdown(row: Row, reference: Row) -> float:
    """Return the median of the ratios within turns, where load that comes and goes cancels."""
    return median(ratios(row["ms"], reference["ms"]))


def _trade(row: Row, reference: Row) -> str:
    """Write the MiB that each added millisecond takes off the peak; "-" where none is added."""
    added = median([a - b for a, b in zip(row["ms"], reference["ms"], strict=True)])
    if row is reference or added <= 0:
        return "-"
    # a zero loses its sign
    return f"{round((reference['peak_mib'] - row['peak_mib']) / added, 2) + 0.0:.2f}"


def _recomputed(row: Row) -> str:
    return "-" if row["recomputed"] is None else f"{100 * row['recomputed']:.0f}"


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.3f} .. {max(values):.3f}"


def columns_of(rows: Sequence[Row]) -> Columns:
    """Return the columns of ways for which a row has a value; times are beside the first way's."""
    first = rows[0]

    def number(name: str) -> Callable[[Row], str]:
        return lambda row: significant(row[name])

    columns = {
        "name": ("way", lambda row: row["name"]),
        "layers": ("layers", lambda row: f"{row['layers']}"),
        "saved_mib": ("saved\nMiB", number("saved_mib")),
        "asked_mib": ("budget\nMiB", number("asked_mib")),
        "predicted_mib": ("predicted\nMiB", number("predicted_mib")),
        "peak_mib": ("peak\nMiB", number("peak_mib")),
        "recomputed": ("recomputed\n%", _recomputed),
        "curve": ("MiB\nper ms", lambda row: _trade(row, first)),
        "ms": ("ms", lambda row: significant(median(row["ms"]))),
        "loss_difference": (f"of\n{first['name']}", lambda row: f"{slowdown(row, first):.2f}x"),
        "tokens_per_second": ("tokens\nper s", number("tokens_per_second")),
        "losses": ("last\nloss", lambda row: f"{row['losses'][-1]:.4f}"),
        "difference": ("diff.", lambda row: difference(row["loss_difference"])),
        "held_out_loss": ("held-out\nloss", lambda row: _range(row["held_out_loss"])),
        "accuracy": ("accuracy", lambda row: _range(row["accuracy"])),
    }
    known = {name for row in rows for name, value in row.items() if value is not None}
    if any("layers" in row for row in rows):
        per_layer = lambda row: slowdown(row, first) * first["layers"] / row["layers"]  # noqa: E731
        columns["loss_difference"] = ("of plain\nper layer", lambda row: f"{per_layer(row):.2f}x")
    return dict(columns[name] for name in columns if name in known | {"difference"})


def part_of(title: str, notes: Sequence[str], rows: Sequence[Row]) -> Row:
    """Print a line per way, and return the part of a record."""
    show(title, columns_of(rows), rows, notes)
    return {"title": title, "notes": notes, "rows": rows}


def publish(
    chosen: Namespace, name: str, title: str, subtitle: str, facts: Row, parts: Sequence[Row]
) -> int:
    """Write the record of a command and its figure; returns 1 where a loss is not finite."""
    settings = {key: value for key, value in vars(chosen).items() if key not in ("out", "made")}
    record = {"title": title, "subtitle": subtitle, "settings": settings, "environment": facts}
    record["parts"] = parts
    path = chosen.out / f"{name}.json"
    # a number that is not finite stays NaN or Infinity
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    draw(record, path.with_suffix(".png"))
    rows = [row for part in parts for row in part["rows"]]
    broken = [row["name"] for row in rows if not np.isfinite(row["losses"]).all()]
    if broken:
        print(f"loss not finite: {', '.join(broken)}")
    return int(bool(broken))


def draw(record: Row, path: Path) -> None:
    """Write the figure of a record. Raises KeyError or TypeError if it is damaged."""
    parts = record["parts"]
    fills = [_fill_of(part["rows"]) for part in parts]
    heights = [7.0 if fill is _ways else 3.2 for fill in fills]

    def fill(figure: Figure) -> None:
        places = figure.subfigures(
            len(parts), 1, squeeze=False, hspace=0.06, height_ratios=heights
        )[:, 0]  # fmt: skip
        for place, part, draw_part in zip(places, parts, fills, strict=True):
            place.suptitle(part["title"], x=0.01, ha="left", fontsize=11, fontweight="bold")
            draw_part(place, part["rows"])

    titles = {part["title"] for part in parts}
    lines = [line for line in record["subtitle"].splitlines() if line not in titles]
    figures.save(path, sum(heights) + 0.3, record["title"], lines, fill)


def _fill_of(rows: Rows) -> Callable[[Any, Rows], None]:
    if "layers" in rows[0]:
        return _depths
    return _ways if any(row.get("curve") for row in rows) else _lockstep


def _lockstep(figure: SubFigure, rows: Rows) -> None:
    """Draw loss curves, which lie on one another, beside memory and time."""

    def panel(head: str, values: Sequence[float]) -> Panel:
        changes = ["", *(f" ({value / values[0] - 1:+.0%})" for value in values[1:])]
        texts = [significant(v) + change for v, change in zip(values, changes, strict=True)]
        return Panel(head, [values], texts)

    places: Any = figure.subfigures(1, 2, width_ratios=(3, 7))
    left, right = places
    axes: Axes = left.subplots()
    # the curves lie on one another: each is drawn thinner than the one below it
    for row, width in zip(rows, (9.0, 6.6, 4.6, 2.8, 1.2), strict=False):
        steps = range(1, len(row["losses"]) + 1)
        axes.plot(steps, row["losses"], color=colour_of(row["name"]), linewidth=width)
    axes.set(title="Training loss (nats)", xlabel="step")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.grid(axis="y", color=GRID)
    panels = (
        panel("Saved (MiB)", [row["saved_mib"] for row in rows]),
        panel("Peak (MiB)", [row["peak_mib"] for row in rows]),
        panel("Step (ms)", [median(row["ms"]) for row in rows]),
    )
    lying(right, [row["name"] for row in rows], panels)


def _kind(name: str) -> str:
    """Return a name of this colour: in classics `fusedckpt` is its checkpoint_sequential."""
    return "fuse" if name == "fusedckpt recursive" else name.replace("fusedckpt", "ours(")


def _ways(figure: SubFigure, rows: Rows) -> None:
    """Draw memory through a step of each way that has it, above time against memory."""
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(2, 3))[:, 0]
    _curves(above, [row for row in rows if row["curve"]])
    points = [(row["peak_mib"], slowdown(row, rows[0])) for row in rows]
    label, names = f"time, a multiple of {rows[0]['name']}'s", [row["name"] for row in rows]
    axes = below.subplots()
    figures.trade(axes, points, names, "Time against memory", label, [*map(_kind, names)])
    axes.set_xlabel("peak of a step, MiB, beside parameters and gradients")


def _curves(figure: SubFigure, shown: Rows) -> None:
    """Draw a panel a way: up in forward, down in backward."""
    panels = figure.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False)[0]
    for axes, row in zip(panels, shown, strict=True):
        curve, colour = row["curve"], colour_of(_kind(row["name"]))
        count = len(curve["mib"])
        times = [curve["ms"] * index / (count - 1) for index in range(count)]
        axes.fill_between(times, curve["mib"], color=colour, alpha=0.25, linewidth=0)
        axes.plot(times, curve["mib"], color=colour, linewidth=1.2)
        axes.axvline(curve["forward_ms"], color=INK, linewidth=0.8, linestyle=":")
        axes.set_title(f"{row['name']}: {row['peak_mib']:,.1f}", fontsize=9)
        axes.grid(axis="y", color=GRID)
    panels[0].set_ylabel("live MiB")
    panels[0].set_ylim(bottom=0)
    panels[0].set_xlim(left=0)
    text = "memory through a step and its peak; ms, under the profiler; dotted: backward begins"
    figure.supxlabel(text, fontsize=9, color=FAINT)


def _depths(figure: SubFigure, rows: Rows) -> None:
    layers = [row["layers"] for row in rows]
    times = [slowdown(row, rows[0]) * layers[0] / row["layers"] for row in rows]
    panels = (
        Panel("Layers that fit", [layers], [f"{n} ({n / layers[0]:.1f}x)" for n in layers]),
        Panel("Time per layer, of plain's", [times], [f"{time:.2f}x" for time in times]),
    )
    lying(figure, [row["name"] for row in rows], panels, lambda name: colour_of(_kind(name)))
