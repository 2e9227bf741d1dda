"""`python -m bench plot FILE`: the figures of a results file; nothing is measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench import capacity_report, classics_plot, classics_results, report
from bench.capacity_report import Capacity, capacities
from bench.figures import draw_bars, draw_pareto, draw_roofline, timed
from bench.records import build, lines
from bench.results import Group, groups

__all__ = ["Settings", "run", "settings"]


@dataclass(frozen=True)
class Settings:
    """What to draw, and the folder for it."""

    groups: tuple[Group, ...]
    out: Path
    capacities: tuple[Capacity, ...] = ()
    # of a file that is one record: the figure's name, and what draws it
    picture: tuple[str, Callable[[Path], None]] | None = None


def settings(file: Path, out: Path | None) -> Settings:
    """Read the file. Raises ValueError where it has nothing to draw, OSError as read does."""
    if (drawing := _of_one_record(file)) is not None:
        return Settings((), _folder(file, out), picture=(f"{file.stem}.png", drawing))
    found = lines(file)
    shown = tuple(group for group in groups(found) if timed(group))
    fits = tuple(one for one in capacities(found) if any(row.both_ms for row in one.rows))
    if not shown and not fits:
        raise ValueError(f"{file}: nothing was measured")
    return Settings(shown, _folder(file, out), fits)


def _folder(file: Path, out: Path | None) -> Path:
    out = out or file.parent
    out.mkdir(parents=True, exist_ok=True)
    return out


def _of_one_record(file: Path) -> Callable[[Path], None] | None:
    """Return what draws a result of `demo` or `classics`; None where the file is none."""
    try:
        record = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return None
    for key, kind, draw in (
        ("runs", report.Result, report.draw),
        ("depth", classics_results.Result, classics_plot.draw),
    ):
        if isinstance(record, dict) and key in record:
            try:
                return partial(draw, build(kind, record))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{file}: not a result of demo or classics ({error})") from error
    return None


def _sets(shown: tuple[Group, ...]) -> Iterator[tuple[str, list[Group]]]:
    """Groups of one device, size and dtype, which share a figure, by a name for its file."""
    found: dict[Any, list[Group]] = {}
    for group in shown:
        key = (group.device, group.size, group.dim, group.tokens, group.dtype)
        found.setdefault(key, []).append(group)
    several = len({device for device, *_ in found}) > 1
    for number, (key, members) in enumerate(found.items()):
        _, size, dim, tokens, dtype = key
        name = f"{size}-{dim}-{tokens}-{dtype}"
        yield f"{name}-{number}" if several else name, members


def run(chosen: Settings) -> int:
    """Draw bars for each case, and for each size the front of time and memory and a roofline.

    Of capacities, bars for each; of the demo and the classics the figure that they drew.
    """
    if chosen.picture is not None:
        name, draw = chosen.picture
        draw(chosen.out / name)
        print(f"drew {name} in {chosen.out}")
    for name, members in _sets(chosen.groups):
        for group in members:
            draw_bars(group, chosen.out / f"{group.case}-{name}.png")
        # norms have nothing to trade
        traded = [group for group in members if group.load.flops] or members
        draw_pareto(traded, chosen.out / f"pareto-{name}.png")
        draw_roofline(members, chosen.out / f"roofline-{name}.png")
        print(f"drew {len(members)} cases of {name} in {chosen.out}")
    for found in chosen.capacities:
        name = f"capacity-{found.case}-{found.size}-{found.dim}-{found.memory}-{found.dtype}.png"
        capacity_report.draw(found, chosen.out / name)
        print(f"drew {name} in {chosen.out}")
    return 0
