"""Numbers and tables as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench.env import origin
from bench.results import MIB, Rows, least_ms
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


def source(rows: Rows) -> str:
    """Say where the numbers of a case come from, in a line."""
    text = origin(rows[0])
    if any(row.get("is_graph") for row in rows):
        text += "; CUDA graphs"
    if least_ms(rows[0]) is not None:
        matmul, copy = map(significant, (rows[0]["matmul_tflops"], rows[0]["copy_gbytes"]))
        text += f"; a large matmul {matmul} TFLOP/s, a copy {copy} GB/s"
    return text


def sources(cases: Sequence[Rows]) -> list[str]:
    """Say where cases come from, a line each, with their names where the lines differ."""
    names: dict[str, list[str]] = {}
    for rows in cases:
        names.setdefault(source(rows), []).append(rows[0]["case"])
    if len(names) == 1:
        return list(names)
    return [f"{', '.join(dict.fromkeys(cases))}: {where}" for where, cases in names.items()]
