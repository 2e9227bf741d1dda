"""Records of `python -m bench run`, and the tables drawn from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table

__all__ = ["MIB", "Group", "Results", "Row", "Timing", "table"]

MIB = 2**20


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the median, and what a fifth of the samples lies below or above."""

    median: float
    p20: float
    p80: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Sum samples up."""
        p20, p50, p80 = np.quantile(samples, (0.2, 0.5, 0.8)).tolist()
        return cls(p50, p20, p80, tuple(samples))


@dataclass(frozen=True)
class Row:
    """What one implementation cost.

    failure: why there is no speed; is_wrong: that its numbers are; peaks: above the start, of
    forward with backward and of backward alone; errors: RMS against float64 of outputs, then
    gradients.
    """

    name: str
    failure: str | None
    is_wrong: bool
    forward_ms: Timing | None
    backward_ms: Timing | None
    both_ms: Timing | None
    saved_bytes: int | None
    peak_bytes: int | None
    backward_peak_bytes: int | None
    errors: tuple[float, ...]


@dataclass(frozen=True)
class Group:
    """All implementations of one case at one size; ratios refer to the first."""

    case: str
    size: str
    tokens: int
    dim: int
    hidden: int
    kv: int
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Results:
    """All groups of one command with what is needed to repeat them."""

    settings: dict[str, Any]
    environment: dict[str, Any]
    groups: tuple[Group, ...]


def _ratio(row: Row, reference: Row) -> str:
    """The median of the ratios within each round, where load that comes and goes cancels."""
    if row.both_ms is None or reference.both_ms is None:
        return "-"
    # an interrupt leaves some a round short
    rounds = zip(row.both_ms.samples, reference.both_ms.samples, strict=False)
    return f"{median(mine / other for mine, other in rounds):.2f}x"


def _cells(row: Row, reference: Row, tokens: int) -> list[str]:
    times = [row.forward_ms, row.backward_ms, row.both_ms]
    peaks = [row.peak_bytes, row.backward_peak_bytes]
    saved = "-" if row.saved_bytes is None else f"{row.saved_bytes / tokens:,.0f}"
    return [
        *("-" if time is None else _significant(time.median) for time in times),
        _ratio(row, reference),
        saved,
        *("-" if peak is None else _significant(peak / MIB) for peak in peaks),
    ]


def _significant(value: float) -> str:
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else 3}f}"


def table(group: Group) -> Table:
    """One line per implementation that was measured; below, why the others were not."""
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    out.title_style, out.title_justify = "bold", "left"
    out.title = (
        f"{group.case}, {group.size}: {group.tokens} tokens, D = {group.dim}, F = {group.hidden}"
    )
    out.add_column("implementation", style="bold", no_wrap=True)
    heads = ("forward\nms", "backward\nms", "both\nms", "of\neager", "saved\nB/token")
    for head in (*heads, "peak\nMiB", "backward\nMiB"):
        out.add_column(head, justify="right", no_wrap=True)
    for row in group.rows:
        if row.failure is None:
            out.add_row(row.name, *_cells(row, group.rows[0], group.tokens))
    failures = [f"{row.name}: {row.failure}" for row in group.rows if row.failure is not None]
    if failures:
        out.caption, out.caption_justify = escape("\n".join(failures)), "left"
    return out
