"""Records of `python -m bench capacity`, their table and their figure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.markup import escape
from rich.table import Table

from bench.env import summary
from bench.figures import family
from bench.results import MIB, Timing
from bench.table import significant
from fusedckpt._figure import FAINT, INK, STYLE

__all__ = ["Capacity", "Fit", "append", "draw", "is_capacity", "read", "table"]


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
    def title(self) -> str:
        """The case, its sizes and the memory, in a line."""
        sizes = f"D = {self.dim}, F = {self.hidden}, {self.dtype}"
        return f"{self.case}, {self.size}: {sizes}, in {self.memory:,} MiB"


def append(found: Capacity, path: Path) -> None:
    """Add a line to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(found)) + "\n")


def is_capacity(path: Path) -> bool:
    """Whether a file holds capacities. Raises OSError where it cannot be read."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return '"memory":' in file.readline()


def read(path: Path) -> list[Capacity]:
    """Read what `append` wrote. Raises ValueError for anything else."""
    found = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(text)
            record["rows"] = tuple(map(_fit, record["rows"]))
            found.append(Capacity(**record))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}:{number}: no result of bench capacity ({error})") from error
    return found


def _fit(record: dict[str, Any]) -> Fit:
    time = record["both_ms"]
    if time is not None:
        record["both_ms"] = Timing(**time | {"samples": tuple(time["samples"])})
    return Fit(**record)


def table(found: Capacity) -> Table:
    """One line per implementation; below, why others are not there."""
    out = Table(box=box.SIMPLE_HEAD, title=found.title, title_style="bold", title_justify="left")
    out.add_column("implementation", style="bold", no_wrap=True)
    for head in ("tokens", "peak MiB", "both ms", "tokens/s"):
        out.add_column(head, justify="right")
    for row in found.rows:
        if row.tokens and (row.both_ms or row.failure == "interrupted"):
            time = significant(row.both_ms.median) if row.both_ms else "-"
            speed = significant(row.tokens_per_second) if row.both_ms else "-"
            peak = significant(row.peak_bytes / MIB)
            out.add_row(row.name, f"{row.tokens:,}", peak, time, speed)
    lost = [f"{row.name}: {row.failure}" for row in found.rows if row.failure]
    if lost:
        out.caption, out.caption_justify = escape("\n".join(lost)), "left"
    return out


def _bars(axes: Axes, rows: Sequence[Fit], values: Sequence[float], title: str) -> None:
    colours = [family(row.name)[1] for row in rows]
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
    rows = [row for row in found.rows if row.both_ms is not None]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 1.5 + 0.27 * len(rows)), dpi=160, layout="constrained")
        tokens, speed = figure.subplots(1, 2, sharey=True)
        _bars(tokens, rows, [float(row.tokens) for row in rows], "Tokens that fit")
        tokens.set_yticks(range(len(rows)), [row.name for row in rows], color=INK)
        _bars(speed, rows, [row.tokens_per_second for row in rows], "Tokens per second, there")
        figure.suptitle(found.title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        facts = found.environment
        text = f"{summary(facts)}; {facts['date'][:10]}, commit {str(facts['commit'])[:12]}"
        figure.supxlabel(text, x=0.01, ha="left", fontsize=7.5, color=FAINT)
        figure.savefig(path)
