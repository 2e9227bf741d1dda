"""The figures of results: bars and fronts of `run`, and one figure of a command that trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from bench import figures
from bench.figures import FAINT, GRID, INK, Panel, color_of, lying
from bench.results import (
    MIB,
    Row,
    Rows,
    heading,
    is_timed,
    ms_of,
    quantiles,
    ratios,
    slowdown,
    title,
)
from bench.tables import significant, sources

# ways that are bars beside their losses; more are dots of time against memory
FEW = 6


def draw_all(cases: Sequence[Rows], out: Path, stem: str) -> None:
    """Draw the figures of a file's cases, of timed or estimated rows, and print their names."""
    out.mkdir(parents=True, exist_ok=True)
    if cases[0][0]["command"] == "contexts":
        draw_contexts(cases, out / f"{stem}.png")
        print(f"drew {stem}.png in {out}")
        return
    timed = [[row for row in rows if is_timed(row)] for rows in cases]
    timed = [rows for rows in timed if rows]
    runs = [rows for rows in timed if rows[0]["command"] == "run"]
    names = _draw_runs(runs, out)
    if trained := [rows for rows in timed if rows not in runs]:
        draw_training(trained, out / f"{stem}.png")
        names.append(f"{stem}.png")
    for name in names:
        print(f"drew {name} in {out}")


def draw_contexts(cases: Sequence[Rows], path: Path) -> None:
    """Draw the largest inputs of each model that fits a card, a panel a card, a bar a way."""
    shown = [[row for row in rows if row["largest"][-1]["size"]] for rows in cases]
    shown = [rows for rows in shown if rows]

    def draw(figure: Figure) -> None:
        heights = [2 + len(rows) for rows in shown]
        parts = figure.subfigures(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
        for part, rows in zip(parts, shown, strict=True):
            sizes = [[card["size"] for card in row["largest"]] for row in rows]
            panels = [
                Panel(
                    f"{card['card_bytes'] >> 30} GiB",
                    [column],
                    [f"{x:,}" if x else "-" for x in column],
                )
                for card, column in zip(rows[0]["largest"], zip(*sizes, strict=True), strict=True)
            ]
            lying(part, [row["name"] for row in rows], panels)
            part.suptitle(rows[0]["title"], x=0.01, ha="left", fontsize=10)

    height = 0.3 * sum(2 + len(rows) for rows in shown)
    # of several runs
    ways = [[row] for rows in shown for row in rows]
    head = "Most tokens of a training step, estimated"
    note = "a tenth of the card left free; no GPU was used"
    figures.save(path, height, head, [note, *sources(ways)], draw)


def _draw_runs(cases: Sequence[Rows], out: Path) -> list[str]:
    """Draw bars for each case of `run`, and for each size the front of time and memory."""
    names: list[str] = []
    sizes: dict[tuple[Any, ...], list[Rows]] = {}
    for rows in cases:
        first = rows[0]
        if "memory" in first:
            keys = ("case", "size", "dim", "memory", "dtype")
            names.append(f"memory-{'-'.join(str(first[key]) for key in keys)}.png")
            _draw_fits(rows, out / names[-1])
        else:
            keys = ("device", "size", "dim", "tokens", "dtype")
            sizes.setdefault(tuple(first[key] for key in keys), []).append(rows)
    are_several = len({device for device, *_ in sizes}) > 1
    for number, ((_, *keys), members) in enumerate(sizes.items()):
        name = "-".join(map(str, keys)) + (f"-{number}" if are_several else "")
        for rows in members:
            names.append(f"{rows[0]['case']}-{name}.png")
            _draw_bars(rows, out / names[-1])
        # norms have nothing to trade
        traded = [rows for rows in members if rows[0]["flops"]] or members
        names.append(f"pareto-{name}.png")
        _draw_pareto(traded, out / names[-1])
    return names


def _bars(rows: Rows, panels: Sequence[Panel], path: Path) -> None:
    """Write panels of a case, a line an implementation that was timed."""
    names = [row["name"] for row in rows]
    height = 1.4 + 0.27 * len(names)
    lines = sources([rows])
    figures.save(path, height, title(rows[0]), lines, lambda figure: lying(figure, names, panels))


def _draw_bars(rows: Rows, path: Path) -> None:
    """Write a case's times, forward and backward, beside the saved memory and the peak."""
    first = rows[0]
    times = [[ms_of(row, first, what) for row in rows] for what in ("forward_ms", "both_ms")]
    sizes = [[(row[what] or 0) / MIB for row in rows] for what in ("saved_bytes", "peak_bytes")]
    unit = ms_of(first, first)
    # of one that was not timed beside the first row there is no spread
    spread = [
        [unit * x for x in quantiles(ratios(row["both_ms"], first["both_ms"]))[::2]] for row in rows
    ]
    time = Panel("Time (ms): forward, then backward", times, spread=spread)
    _bars(rows, (time, Panel("Memory (MiB): saved for backward, then peak", sizes)), path)


def _draw_fits(rows: Rows, path: Path) -> None:
    """Write how many tokens fit, beside how fast they are."""
    rates = [row["fits"] / ms_of(row, rows[0]) * 1e3 for row in rows]
    values = {"Tokens that fit": [row["fits"] for row in rows], "Tokens per second, there": rates}
    panels = [Panel(head, [v], [f"{x:,.0f}" for x in v]) for head, v in values.items()]
    _bars(rows, panels, path)


def _draw_pareto(cases: Sequence[Rows], path: Path) -> None:
    """Write time against peak memory, a panel a case."""
    lines = math.ceil(len(cases) / 2)

    def fill(figure: Figure) -> None:
        panels = list(figure.subplots(lines, min(2, len(cases)), squeeze=False).flat)
        for axes, rows in zip(panels, cases, strict=False):
            points = [(row["peak_bytes"] / MIB, ms_of(row, rows[0])) for row in rows]
            names = [row["name"] for row in rows]
            figures.trade(axes, points, names, heading(rows[0]), "forward + backward (ms)")
        for axes in panels[len(cases) :]:
            axes.set_visible(False)

    head = f"Time against memory: {cases[0][0]['size']}, {cases[0][0]['tokens']} tokens"
    figures.save(path, 3.2 * lines + 0.7, head, sources(cases), fill)


def draw_training(cases: Sequence[Rows], path: Path) -> None:
    """Write the figure of a command that trains, a part a case; none where no way was timed."""
    timed = [[row for row in rows if is_timed(row)] for rows in cases]
    cases = [rows for rows in timed if rows]
    if not cases:
        path.unlink(missing_ok=True)
        return
    fills = [_fill_of(rows) for rows in cases]
    heights = [7.0 if fill is _many else 3.2 for fill in fills]

    def fill(figure: Figure) -> None:
        places = figure.subfigures(
            len(cases), 1, squeeze=False, hspace=0.06, height_ratios=heights
        )[:, 0]  # fmt: skip
        for place, rows, draw in zip(places, cases, fills, strict=True):
            place.suptitle(title(rows[0]), x=0.01, ha="left", fontsize=11, fontweight="bold")
            draw(place, rows)

    head = _HEADS.get(cases[0][0]["command"], "Ways of training a model")
    figures.save(path, sum(heights) + 0.3, head, sources(cases), fill)


_HEADS = {
    "demo": "One model, the same batches: the cost of each way of training",
    "finetune": "LoRA on every linear: the cost of each way of training",
    "paper": "Exact, approximate and checkpointed fine-tuning",
    "classics": "Classic workloads",
}


def _fill_of(rows: Rows) -> Callable[[Any, Rows], None]:
    if "depth" in rows[0]:
        return _depths
    return _few if len(rows) <= FEW else _many


def _few(figure: SubFigure, rows: Rows) -> None:
    """Draw loss curves, which lie on one another, beside memory and time."""

    def panel(head: str, values: Sequence[float]) -> Panel:
        changes = ["", *(f" ({value / values[0] - 1:+.0%})" for value in values[1:])]
        texts = [significant(v) + change for v, change in zip(values, changes, strict=True)]
        return Panel(head, [values], texts)

    places: Any = figure.subfigures(1, 2, width_ratios=(3, 7))
    left, right = places
    axes: Axes = left.subplots()
    # the curves lie on one another: each is drawn thinner than the one below it
    for row, width in zip(rows, (9.0, 6.6, 4.6, 2.8, 1.2, 0.8), strict=False):
        steps = range(1, len(row["losses"]) + 1)
        # one step is no line
        marker = "o" if len(row["losses"]) == 1 else None
        look = {"color": color_of(row["name"]), "marker": marker, "markersize": 3 + 1.5 * width}
        axes.plot(steps, row["losses"], linewidth=width, **look)
    axes.set(title="Training loss (nats)", xlabel="step")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.grid(axis="y", color=GRID)
    panels = (
        panel("Saved (MiB)", [row["saved_bytes"] / MIB for row in rows]),
        panel("Peak (MiB)", [row["peak_bytes"] / MIB for row in rows]),
        panel("Forward + backward (ms)", [ms_of(row, rows[0]) for row in rows]),
    )
    lying(right, [row["name"] for row in rows], panels)


def _kind(name: str) -> str:
    """Return a name of this color: in classics `fusedckpt` is its checkpoint_sequential."""
    return "fuse" if name == "fusedckpt recursive" else name.replace("fusedckpt", "ours(")


def _many(figure: SubFigure, rows: Rows) -> None:
    """Draw memory through a step of each way that has it, above time against memory."""
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(2, 3))[:, 0]
    _curves(above, [row for row in rows if row.get("curve")])
    points = [(row["peak_bytes"] / MIB, slowdown(row, rows[0])) for row in rows]
    label = f"time, a multiple of {rows[0]['name']}'s"
    names = [row["name"] for row in rows]
    axes = below.subplots()
    figures.trade(axes, points, names, "Time against memory", label, [*map(_kind, names)])
    axes.set_xlabel(f"peak of a step, MiB, above {rows[0]['peak_above']}")


def _curves(figure: SubFigure, shown: Rows) -> None:
    """Draw a panel a way: up in forward, down in backward."""
    if not shown:
        return
    panels = figure.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False)[0]
    for axes, row in zip(panels, shown, strict=True):
        curve = row["curve"]
        color = color_of(_kind(row["name"]))
        count = len(curve["mib"])
        times = [curve["ms"] * index / (count - 1) for index in range(count)]
        axes.fill_between(times, curve["mib"], color=color, alpha=0.25, linewidth=0)
        axes.plot(times, curve["mib"], color=color, linewidth=1.2)
        axes.axvline(curve["forward_ms"], color=INK, linewidth=0.8, linestyle=":")
        axes.set_title(f"{row['name']}: {row['peak_bytes'] / MIB:,.1f}", fontsize=9)
        axes.grid(axis="y", color=GRID)
    panels[0].set_ylabel("live MiB")
    panels[0].set_ylim(bottom=0)
    panels[0].set_xlim(left=0)
    text = "memory through a step and its peak; ms, under the profiler; dotted: backward begins"
    figure.supxlabel(text, fontsize=9, color=FAINT)


def _depths(figure: SubFigure, rows: Rows) -> None:
    """Draw how many blocks fit, beside the time of a block."""
    first: Row = rows[0]
    depths = [row["depth"] for row in rows]
    times = [slowdown(row, first) * first["depth"] / row["depth"] for row in rows]
    panels = (
        Panel("Blocks that fit", [depths], [f"{n} ({n / depths[0]:.1f}x)" for n in depths]),
        Panel(f"Time per block, of {first['name']}'s", [times], [f"{t:.2f}x" for t in times]),
    )
    lying(figure, [row["name"] for row in rows], panels, lambda name: color_of(_kind(name)))
