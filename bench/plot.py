"""`python -m bench plot FILE`: the figures of a results file; nothing is measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import capacity_report
from bench.capacity_report import Capacity, capacities
from bench.figures import draw_bars, draw_pareto, draw_roofline, timed
from bench.records import lines
from bench.results import Group, groups

__all__ = ["Settings", "run", "settings"]


@dataclass(frozen=True)
class Settings:
    """What to draw, and the folder for it."""

    groups: tuple[Group, ...]
    out: Path
    capacities: tuple[Capacity, ...] = ()


def settings(file: Path, out: Path | None) -> Settings:
    """Read the file. Raises ValueError where it has nothing to draw, OSError as read does."""
    found = lines(file)
    shown = tuple(group for group in groups(found) if timed(group))
    fits = tuple(one for one in capacities(found) if any(row.both_ms for row in one.rows))
    if not shown and not fits:
        raise ValueError(f"{file}: nothing was measured")
    out = out or file.parent
    out.mkdir(parents=True, exist_ok=True)
    return Settings(shown, out, fits)


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

    Of capacities, bars for each.
    """
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
