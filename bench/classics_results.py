"""Records of `python -m bench classics`, and the tables drawn from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from bench.results import MIB, Timing
from bench.text import difference, significant

__all__ = [
    "Curve", "Depth", "Depths", "Part", "Result", "Row", "depth_table", "part_table",
]  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """Memory through a step: its ms, those of its forward, the highest rise of each equal part."""

    ms: float
    forward_ms: float
    mib: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """What one way of training cost.

    saved: kept for backward; rise: peak of forward and backward, beside parameters and gradients,
    which are there already; asked, predicted: that peak, as a plan's activation budget and by the
    plan; recomputed: FLOPs that backward repeats, of the forward's; ms: of forward and backward.
    """

    name: str
    saved_bytes: int
    rise_bytes: int
    asked_bytes: int | None
    predicted_bytes: int | None
    recomputed: float
    ms: Timing
    losses: tuple[float, ...]
    loss_difference: float
    curve: Curve | None = None

    def slowdown(self, reference: Row) -> float:
        """Return the median of the ratios within turns, where load that comes and goes cancels."""
        return median(a / b for a, b in zip(self.ms.samples, reference.ms.samples, strict=True))

    def mib_per_ms(self, reference: Row) -> float | None:
        """Return what of the rise a millisecond more buys; None where none is added."""
        pairs = zip(self.ms.samples, reference.ms.samples, strict=True)
        added = median(a - b for a, b in pairs)
        return (reference.rise_bytes - self.rise_bytes) / MIB / added if added > 0 else None


@dataclass(frozen=True)
class Part:
    """One workload trained in several ways; others are held to the first."""

    title: str
    notes: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Depth:
    """The deepest stack of one kind that fits; losses are those of the plain stack's depth."""

    name: str
    layers: int
    peak_bytes: int
    ms: Timing
    losses: tuple[float, ...]
    loss_difference: float

    def slowdown(self, reference: Depth) -> float:
        """Return the time per layer, relative to the reference's."""
        pairs = zip(self.ms.samples, reference.ms.samples, strict=True)
        return median(a / b for a, b in pairs) * reference.layers / self.layers


@dataclass(frozen=True)
class Depths:
    """How deep each way goes within a budget; others are held to the first."""

    title: str
    notes: tuple[str, ...]
    budget_bytes: int
    rows: tuple[Depth, ...]


@dataclass(frozen=True)
class Result:
    """What was measured, None for parts that were not, with what is needed to repeat it."""

    subtitle: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    conv: Part | None = None
    mlp: Part | None = None
    depth: Depths | None = None
    own: Part | None = None

    def worst_difference(self) -> float:
        """Return the largest difference of losses; NaN if there is one."""
        parts = (self.conv, self.mlp, self.depth, self.own)
        found = [row.loss_difference for part in parts if part for row in part.rows]
        # Python's max may drop a NaN
        return max(found, key=lambda x: (math.isnan(x), x))


NOTES = (
    "saved: kept for backward; peak: of a step, beside parameters and gradients, which are there",
    "already; asked, predicted: that peak, as a plan's activation budget and by the plan;",
    "again: FLOPs that backward repeats, of the forward's; ms: of forward and backward;",
    "MiB per ms: what the peak loses for each millisecond more; last loss: of the last step;",
    "diff.: the largest of all steps to the first row's",
)


def _empty(title: str, heads: tuple[str, ...]) -> Table:
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    out.title, out.title_style, out.title_justify = escape(title), "bold", "left"
    out.add_column("way", style="bold", no_wrap=True)
    for head in heads:
        out.add_column(head, justify="right", no_wrap=True)
    return out


def part_table(part: Part) -> Table:
    """One line per way."""
    heads = ("saved\nMiB", "asked\nMiB", "predicted\nMiB", "peak\nMiB", "again\n%", "MiB\nper ms")
    reference = part.rows[0]
    out = _empty(part.title, (*heads, "ms", f"of\n{reference.name}", "last\nloss", "diff."))
    for row in part.rows:
        out.add_row(
            row.name,
            _mib(row.saved_bytes),
            *(
                "-" if size is None else _mib(size)
                for size in (row.asked_bytes, row.predicted_bytes)
            ),
            _mib(row.rise_bytes),
            f"{100 * row.recomputed:.0f}",
            _trade(row, reference),
            significant(row.ms.median),
            f"{row.slowdown(reference):.2f}x",
            f"{row.losses[-1]:.4f}",
            difference(row.loss_difference),
        )
    return out


def _trade(row: Row, reference: Row) -> str:
    rate = None if row is reference else row.mib_per_ms(reference)
    # a zero loses its sign
    return "-" if rate is None else f"{round(rate, 2) + 0.0:.2f}"


def depth_table(depths: Depths) -> Table:
    """One line per way: how deep it goes, and what a layer costs."""
    heads = ("layers", "of\nplain", "peak\nMiB", "ms", "ms per\nlayer", "of\nplain")
    out = _empty(depths.title, (*heads, "last\nloss", "diff."))
    reference = depths.rows[0]
    for row in depths.rows:
        out.add_row(
            row.name,
            str(row.layers),
            f"{row.layers / reference.layers:.1f}x",
            _mib(row.peak_bytes),
            significant(row.ms.median),
            f"{row.ms.median / row.layers:.2f}",
            f"{row.slowdown(reference):.2f}x",
            f"{row.losses[-1]:.4f}",
            difference(row.loss_difference),
        )
    return out


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:,.{0 if size >= 1000 * MIB else 1}f}"
