"""A memory report as text: a Rich table where rich is installed, else aligned columns."""

from __future__ import annotations

import importlib
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusedckpt.reporting import MemoryReport

__all__ = ["size", "text"]

Row = tuple[str, ...]

# modules shown; the rest is summed
_MOST = 24
_HEAD = ("module", "saved", "share", "storages", "largest", "shared with")


def size(nbytes: float) -> str:
    """Write a number of bytes in the unit that suits it."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} GiB"


def text(report: MemoryReport) -> str:
    """Return what holds memory, when it peaks, and what every module keeps for backward."""
    title = f"Memory of one training step of {report.model} on {report.device}"
    rows = module_rows(report)
    try:
        table = _rich(_HEAD, rows)
    except ImportError:
        table = _plain(_HEAD, rows)
    return "\n".join([title, *summary(report), "", table])


def summary(report: MemoryReport) -> list[str]:
    """Return one line for each kind of memory, and one for the peak."""
    peak = report.peak
    kinds = {
        "parameters": report.parameter_bytes,
        "gradients": report.gradient_bytes,
        "optimizer state": report.optimizer_bytes,
        "buffers": report.buffer_bytes,
        "inputs": report.input_bytes,
        "saved for backward": report.saved_bytes,
    }
    lines = [f"  {kind:20}{size(n):>12}" for kind, n in kinds.items() if n is not None]
    where = f"in {peak.phase}, in {peak.module}"
    return [*lines, f"  {'peak':20}{size(peak.live_bytes):>12}  {where}"]


def module_rows(report: MemoryReport) -> list[Row]:
    """Return a row of `_HEAD` for every module that keeps something, the largest first."""
    total = max(report.saved_bytes, 1)
    modules = report.saved_by_module
    rows = []
    for name in list(modules)[:_MOST]:
        kept = [storage for storage in report.saved if storage.owner == name]
        largest = max(kept, key=lambda storage: storage.nbytes)
        tensor = f"{largest.dtype} {list(largest.shape)}"
        sharers = list(dict.fromkeys(other for storage in kept for other in storage.sharers))
        shared = ", ".join(sharers[:2]) + (f" +{len(sharers) - 2}" if len(sharers) > 2 else "")
        share = f"{modules[name] / total:.1%}"
        rows.append((name, size(modules[name]), share, str(len(kept)), tensor, shared))
    rest = list(modules)[_MOST:]
    if rest:
        nbytes = sum(modules[name] for name in rest)
        count = sum(storage.owner in rest for storage in report.saved)
        share = f"{nbytes / total:.1%}"
        rows.append((f"{len(rest)} more", size(nbytes), share, str(count), "", ""))
    return rows


def _right(column: int) -> bool:
    return 1 <= column <= 3


def _plain(head: Row, rows: list[Row]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if _right(column) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, tuple("-" * width for width in widths), *rows]
    ]
    return "\n".join(lines)


def _rich(head: Row, rows: list[Row]) -> str:
    names = ("rich.console", "rich.table", "rich.text")
    console, tables, texts = (importlib.import_module(name) for name in names)
    table = tables.Table()
    for column, name in enumerate(head):
        table.add_column(name, justify="right" if _right(column) else "left", no_wrap=True)
    for row in rows:
        # as text: brackets of shapes are no markup
        table.add_row(*map(texts.Text, row))
    # as wide as it needs, wherever it is printed
    width = sum(max(map(len, column)) + 3 for column in zip(head, *rows, strict=True)) + 1
    page = console.Console(file=io.StringIO(), width=width, color_system=None)
    page.print(table)
    return page.file.getvalue().rstrip()
