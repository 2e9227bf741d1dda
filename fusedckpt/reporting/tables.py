"""Tables and sizes as text: Rich tables where rich is installed, else aligned columns."""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from itertools import zip_longest

Row = tuple[str, ...]


def size(nbytes: float) -> str:
    """Write a number of bytes in the unit that suits it."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} GiB"


def enough(nbytes: int) -> str:
    """Write bytes in MiB, KiB below one, so that a budget of that text is no less."""
    unit, name = (2**20, "MiB") if nbytes >= 2**20 else (2**10, "KiB")
    return f"{-(-10 * nbytes // unit) / 10:.1f} {name}"


def table(head: Row, rows: Sequence[Row], numbers: Sequence[int], compact: bool = False) -> str:
    """Return a table; the columns in `numbers` are aligned to the right.

    compact: without rules between columns, and with heads of several lines.
    """
    try:
        return _rich(head, rows, numbers, compact)
    except ImportError:
        return _plain(head, rows, numbers)


def _plain(head: Row, rows: Sequence[Row], numbers: Sequence[int]) -> str:
    heads = [*zip_longest(*(name.split("\n") for name in head), fillvalue="")]
    widths = [max(map(len, column)) for column in zip(*heads, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [*heads, tuple("-" * width for width in widths), *rows]
    ]
    return "\n".join(lines)


def _rich(head: Row, rows: Sequence[Row], numbers: Sequence[int], compact: bool) -> str:
    names = ("rich.console", "rich.table", "rich.text", "rich.box")
    console, tables, texts, boxes = (importlib.import_module(name) for name in names)
    table = tables.Table(box=boxes.HEAVY_HEAD)
    if compact:
        look = {"padding": (0, 1, 0, 0), "pad_edge": False, "show_edge": False}
        table = tables.Table(box=boxes.SIMPLE_HEAD, **look)
    for column, name in enumerate(head):
        table.add_column(name, justify="right" if column in numbers else "left", no_wrap=True)
    for row in rows:
        # as text: brackets of shapes are no markup
        table.add_row(*map(texts.Text, row))
    # as wide as it needs, wherever it is printed
    width = sum(max(map(len, column)) + 3 for column in zip(head, *rows, strict=True)) + 1
    page = console.Console(file=io.StringIO(), width=width, color_system=None)
    page.print(table)
    return "\n".join(line.rstrip() for line in page.file.getvalue().splitlines()).strip("\n")
