"""Records of `python -m bench capacity`, their table and their figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.markup import escape
from rich.table import Table

from bench import records, text
from bench.env import complete, origin
from bench.picture import family, save
from bench.records import Line, blamed, build
from bench.results import MIB, Timing
from bench.text import significant
from fusedckpt.reporting.figure import INK

__all__ = ["Capacity", "Fit", "append", "capacities", "draw", "markdown", "table"]

HEADS = ("tokens", "peak MiB", "both ms", "tokens/s")


@dataclass(frozen=True)
class Fit:
    """The most tokens of an implementation that fit, what they add to memory, and their time."""

    name: str
    failure: str | None
    tokens: int
    peak_bytes: int
    both_ms: Timing | None

    @property
    def tokens_per_second(self) -> float:
        """Of forward with backward, at the most tokens; 0 where there is no time."""
        return self.tokens / self.both_ms.median * 1e3 if self.both_ms else 0.0

    @property
    def is_interrupted(self) -> bool:
        """Whether it was stopped before it was timed."""
        return self.failure == "interrupted"


@dataclass(frozen=True)
class Capacity:
    """All implementations of a case in the same memory, in MiB."""

    case: str
    size: str
    dim: int
    hidden: int
    dtype: str
    memory: int
    environment: dict[str, Any]
    rows: tuple[Fit, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """What two results have in common of which the later counts."""
        sizes = self.dim, self.hidden, self.dtype, self.memory
        return self.case, self.size, *sizes, self.environment["device"]

    @property
    def title(self) -> str:
        """The case, its sizes and the memory, in a line."""
        sizes = f"D = {self.dim}, F = {self.hidden}, {self.dtype}"
        return f"{self.case}, {self.size}: {sizes}, in {self.memory:,} MiB"


def append(found: Capacity, path: Path) -> None:
    """Add a line to a file."""
    records.append([asdict(found)], path)


def capacities(found: Iterable[Line]) -> list[Capacity]:
    """Make what `append` wrote, in order; of a case measured twice on one device the last counts.

    Lines of `bench run` are left out. Raises ValueError, naming file and line, for any others.
    """
    made: dict[Any, Capacity] = {}
    for where, record in (line for line in found if line.is_capacity):
        with blamed(where):
            one = build(Capacity, record)
            complete(one.environment)
        made[one.key] = one
    return list(made.values())


def _cells(row: Fit) -> list[str]:
    fits = [row.name, f"{row.tokens:,}", significant(row.peak_bytes / MIB)]
    if row.both_ms is None:
        return [*fits, "-", "-"]
    return [*fits, significant(row.both_ms.median), significant(row.tokens_per_second)]


def _lost(found: Capacity) -> list[str]:
    return [f"{row.name}: {row.failure}" for row in found.rows if row.failure]


def table(found: Capacity) -> Table:
    """One line per implementation; below, why others are not there."""
    out = Table(box=box.SIMPLE_HEAD, title=found.title, title_style="bold", title_justify="left")
    out.add_column("implementation", style="bold", no_wrap=True)
    for head in HEADS:
        out.add_column(head, justify="right")
    for row in _fitted(found):
        out.add_row(*_cells(row))
    if lost := _lost(found):
        out.caption, out.caption_justify = escape("\n".join(lost)), "left"
    return out


def markdown(found: Capacity) -> str:
    """The same as a Markdown table."""
    return text.markdown(found.title, HEADS, map(_cells, _fitted(found)), _lost(found))


def _fitted(found: Capacity) -> list[Fit]:
    """Return whose tokens are known, timed or interrupted before that."""
    return [row for row in found.rows if row.both_ms or (row.tokens and row.is_interrupted)]


def _timed(found: Capacity) -> list[Fit]:
    return [row for row in found.rows if row.both_ms is not None]


def _bars(axes: Axes, rows: Sequence[Fit], values: Sequence[float], title: str) -> None:
    colours = [family(row.name).colour for row in rows]
    bars = axes.barh(range(len(rows)), values, 0.72, color=colours)
    axes.bar_label(bars, [f"{value:,.0f}" for value in values], padding=4, fontsize=8.5)
    axes.set_title(title)
    axes.margins(x=0.18)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.xaxis.set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)


def draw(found: Capacity, path: Path) -> None:
    """Write how many tokens fit, beside how fast they are."""
    rows = _timed(found)

    def fill(figure: Figure) -> None:
        tokens, speed = figure.subplots(1, 2, sharey=True)
        _bars(tokens, rows, [float(row.tokens) for row in rows], "Tokens that fit")
        tokens.set_yticks(range(len(rows)), [row.name for row in rows], color=INK)
        _bars(speed, rows, [row.tokens_per_second for row in rows], "Tokens per second, there")

    save(path, 1.4 + 0.27 * len(rows), found.title, [origin(found.environment)], fill)
