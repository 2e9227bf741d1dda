"""`python -m bench plot FILE`: the figures of a results file; nothing is measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import capacity_report
from bench.capacity_report import Capacity
from bench.figures import draw_bars, draw_pareto, draw_roofline, timed
from bench.results import Group, read

__all__ = ["Settings", "run", "settings"]


@dataclass(frozen=True)
class Settings:
    """What to draw, and the folder for it."""

    groups: tuple[Group, ...]
    out: Path
    capacities: tuple[Capacity, ...] = ()


def settings(file: Path, out: Path | None) -> Settings:
    """Read the file. Raises ValueError where it has nothing to draw, OSError as read does."""
    groups, found = (), ()
    if capacity_report.is_capacity(file):
        found = tuple(c for c in capacity_report.read(file) if any(r.both_ms for r in c.rows))
    else:
        groups = tuple(group for group in read(file) if timed(group))
    if not groups and not found:
        raise ValueError(f"{file}: nothing was measured")
    out = out or file.parent
    out.mkdir(parents=True, exist_ok=True)
    return Settings(groups, out, found)


def _sets(groups: tuple[Group, ...]) -> Iterator[tuple[str, list[Group]]]:
    """Groups of one device, size and dtype, which share a figure, by a name for its file."""
    found: dict[Any, list[Group]] = {}
    for group in groups:
        device = group.device
        key = (device, group.size, group.dim, group.tokens, group.dtype)
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
    for name, groups in _sets(chosen.groups):
        for group in groups:
            draw_bars(group, chosen.out / f"{group.case}-{name}.png")
        # norms have nothing to trade
        traded = [group for group in groups if group.load.flops] or groups
        draw_pareto(traded, chosen.out / f"pareto-{name}.png")
        draw_roofline(groups, chosen.out / f"roofline-{name}.png")
        print(f"drew {len(groups)} cases of {name} in {chosen.out}")
    for found in chosen.capacities:
        name = f"capacity-{found.case}-{found.size}-{found.dim}-{found.memory}-{found.dtype}.png"
        capacity_report.draw(found, chosen.out / name)
        print(f"drew {name} in {chosen.out}")
    return 0
