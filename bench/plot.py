"""`python -m bench plot FILE`: the figures of all results; nothing is measured."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench import training_figures
from bench.figures import INK, Panel, colour_of, family, lying, name_points, save
from bench.results import (
    Row,
    groups,
    heading,
    is_capacity,
    least_ms,
    median,
    quantiles,
    read,
    title,
)
from bench.table import sources
from bench.tables import MIB

Rows = Sequence[Row]
Points = Sequence[tuple[float, float]]
Drawing = tuple[str, Callable[[Path], None]]


def prepare(chosen: Namespace) -> tuple[Path, list[Drawing]]:
    """Read the file; returns the folder, and each figure's name and drawing function.

    Raises ValueError where there is nothing to draw, OSError as reading does.
    """
    drawings = _of_one_record(chosen.file)
    if drawings is None:
        found = [rows for rows in groups(read(chosen.file)) if _timed(rows)]
        if not found:
            raise ValueError(f"{chosen.file}: nothing was measured")
        drawings = [*_of_cases(found)]
    return chosen.out or chosen.file.parent, drawings


def _of_one_record(file: Path) -> list[Drawing] | None:
    """Return the drawing of a `demo`, `classics` or `ways` result; None where the file is none."""
    try:
        record = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return None
    try:
        draw = training_figures.drawing(record)
    except ValueError as error:
        raise ValueError(f"{file}: not a result of demo or classics ({error})") from error
    return draw and [(f"{file.stem}.png", draw)]


def _of_cases(found: Sequence[Rows]) -> Iterator[Drawing]:
    """Yield bars for each case, and for each size the front of time and memory and a roofline."""
    sets: dict[Any, list[Rows]] = {}
    names = ("device", "size", "dim", "tokens", "dtype")
    for rows in found:
        first = rows[0]
        if is_capacity(first):
            sizes = "-".join(str(first[n]) for n in ("case", "size", "dim", "memory", "dtype"))
            yield f"capacity-{sizes}.png", partial(draw_capacity, rows)
        else:
            sets.setdefault(tuple(first[name] for name in names), []).append(rows)
    are_several = len({device for device, *_ in sets}) > 1
    for number, ((_, *sizes), members) in enumerate(sets.items()):
        name = "-".join(map(str, sizes)) + (f"-{number}" if are_several else "")
        for rows in members:
            yield f"{rows[0]['case']}-{name}.png", partial(draw_bars, rows)
        # norms have nothing to trade
        traded = [rows for rows in members if rows[0]["flops"]] or members
        yield f"pareto-{name}.png", partial(draw_pareto, traded)
        limited = [rows for rows in members if least_ms(rows[0])]
        if limited:
            yield f"roofline-{name}.png", partial(draw_roofline, limited)


def run(prepared: tuple[Path, list[Drawing]]) -> int:
    """Draw every figure."""
    out, drawings = prepared
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in drawings:
        draw(out / name)
        print(f"drew {name} in {out}")
    return 0


def pareto_front(points: Points) -> list[int]:
    """Return the indices of the points that no other beats in one and equals in the other."""
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: points[index]):
        if not front or points[index][1] < points[front[-1]][1]:
            front.append(index)
    return front


def _timed(rows: Rows) -> list[Row]:
    return [row for row in rows if row["both_ms"] and row["peak_bytes"] is not None]


def _bars(rows: Rows, panels: Sequence[Panel], path: Path) -> None:
    """Write panels of a case, a line an implementation that was timed."""
    names = [row["name"] for row in _timed(rows)]
    draw = partial(lying, names=names, panels=panels)
    save(path, 1.4 + 0.27 * len(names), title(rows[0]), sources([rows]), draw=draw)


def draw_bars(rows: Rows, path: Path) -> None:
    """Write a case's times, forward and backward, beside the saved memory and the peak."""
    timed = _timed(rows)
    times = [[median(row[what]) for row in timed] for what in ("forward_ms", "both_ms")]
    sizes = [[(row[what] or 0) / MIB for row in timed] for what in ("saved_bytes", "peak_bytes")]
    spread = [quantiles(row["both_ms"])[::2] for row in timed]
    time = Panel("Time (ms): forward, then backward", times, spread=spread)
    _bars(rows, (time, Panel("Memory (MiB): saved for backward, then peak", sizes)), path)


def draw_capacity(rows: Rows, path: Path) -> None:
    """Write how many tokens fit, beside how fast they are."""
    values = {
        "Tokens that fit": [float(row["tokens"]) for row in _timed(rows)],
        "Tokens per second, there": [
            row["tokens"] / median(row["both_ms"]) * 1e3 for row in _timed(rows)
        ],
    }
    panels = [Panel(head, [v], [f"{x:,.0f}" for x in v]) for head, v in values.items()]
    _bars(rows, panels, path)


def _pareto(axes: Axes, rows: Rows) -> None:
    timed = _timed(rows)
    points = [(row["peak_bytes"] / MIB, median(row["both_ms"])) for row in timed]
    front = [points[index] for index in pareto_front(points)]
    axes.step(*zip(*front, strict=True), where="post", color="#c9c9c9", zorder=0)
    for point, row in zip(points, timed, strict=True):
        edge = INK if point in front else "none"
        colour = colour_of(row["name"])
        axes.scatter(*point, s=34, color=colour, edgecolors=edge, linewidths=0.9, zorder=2)
    axes.margins(0.12)
    axes.set_title(heading(rows[0]))
    axes.set_xlabel("peak (MiB)")
    axes.set_ylabel("forward + backward (ms)")
    axes.grid(color="#f0f0f0")
    axes.set_axisbelow(True)
    name_points(axes, points, [row["name"] for row in timed])


def draw_pareto(found: Sequence[Rows], path: Path) -> None:
    """Write time against peak memory, a panel a case; outlined: nothing beats it in both."""
    columns = min(2, len(found))
    lines = -(-len(found) // columns)

    def fill(figure: Figure) -> None:
        panels = list(figure.subplots(lines, columns, squeeze=False).flat)
        for axes, rows in zip(panels, found, strict=False):
            _pareto(axes, rows)
        for axes in panels[len(found) :]:
            axes.set_visible(False)

    head = f"Time against memory: {found[0][0]['size']}, {found[0][0]['tokens']} tokens"
    save(path, 3.2 * lines + 0.7, head, sources(found), draw=fill)


def _share(axes: Axes, place: int, rows: Rows, least: float) -> None:
    """Draw a case's line: the share of its own run's ceiling that each family reaches."""
    families = list(dict.fromkeys(family(row["name"]) for row in rows))
    for row in rows:
        mine = family(row["name"])
        # families lie below one another, so that none hides another
        lower = 0.13 * (families.index(mine) - (len(families) - 1) / 2)
        share = 100 * least / median(row["both_ms"])
        axes.scatter(share, place + lower, s=26, color=mine.colour, zorder=2)


def draw_roofline(found: Sequence[Rows], path: Path) -> None:
    """Write how near each implementation comes to the ceiling of the run that measured it."""
    found = sorted(found, key=lambda rows: rows[0]["flops"] / rows[0]["bytes"])

    def fill(figure: Figure) -> None:
        axes, names, kinds = figure.subplots(), [], {}
        for place, rows in enumerate(found):
            least = least_ms(rows[0]) or (0.0, 0.0)
            _share(axes, place, _timed(rows), max(least))
            kinds |= dict.fromkeys(family(row["name"]) for row in _timed(rows))
            intensity = f"{rows[0]['flops'] / rows[0]['bytes']:,.0f} GEMM FLOPs per byte"
            limit = "matmul" if least[0] > least[1] else "copy"
            names.append(f"{rows[0]['case']}\n{intensity}: {limit}")
        axes.set_yticks(range(len(names)), names, fontsize=8.5, color=INK)
        axes.set_ylim(len(names) - 0.4, -0.6)
        # the ceilings are in sight; data in a cache is read faster than by the copy
        axes.set_xlim(0, max(104, axes.get_xlim()[1]))
        axes.axvline(100, color=INK, linewidth=1.2)
        axes.set_xlabel(
            "least time at the ceiling, over the time taken (%); recomputed FLOPs are not counted"
        )
        axes.grid(color="#f0f0f0")
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        dots = [Line2D([], [], marker="o", ls="", color=c, label=label) for label, c in kinds]
        figure.legend(handles=dots, loc="outside right upper", frameon=False)

    first = found[0][0]
    head = f"Share of the ceilings: {first['size']}, {first['tokens']} tokens"
    save(path, 1.4 + 0.55 * len(found), head, sources(found), draw=fill)
