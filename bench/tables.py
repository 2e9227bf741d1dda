"""Numbers and tables as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench.results import MIB
from fusedckpt.reporting.tables import table

# functions from a row to a cell, by the heads, which may be of several lines
Columns = Mapping[str, Callable[[Any], str]]


def significant(value: float | None) -> str:
    """Write a number with at least three significant digits, "-" for None."""
    if value is None:
        return "-"
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else 3}f}"


def difference(value: float) -> str:
    """Write a difference, of which there may be none."""
    return f"{value:.1e}" if value else "0"


def mib(nbytes: float | None) -> str:
    """Write bytes in MiB, "-" for None."""
    return significant(None if nbytes is None else nbytes / MIB)


def show(
    title: str,
    columns: Columns,
    rows: Iterable[Any],
    notes: Sequence[str] = (),
    markdown: bool = False,
    words: int = 1,
) -> None:
    """Print a table between its title and notes: `words` columns of words, then numbers."""
    cells = [tuple(write(row) for write in columns.values()) for row in rows]
    numbers = range(words, len(columns))
    if markdown:
        heads = tuple(head.replace("\n", " ") for head in columns)
        rules = ("---",) * words + ("---:",) * len(numbers)
        drawn = "\n".join(f"| {' | '.join(line)} |" for line in (heads, rules, *cells))
        print(f"**{title}**", drawn, *notes, sep="\n\n", end="\n\n")
    else:
        drawn = table(tuple(columns), cells, numbers, compact=True)
        print(title, drawn, *notes, sep="\n", end="\n\n", flush=True)
