"""Numbers and tables as text, and the progress of a command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

from fusedckpt.reporting.tables import table

MIB = 2**20
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


@contextmanager
def progress(part: str, total: int) -> Iterator[Callable[..., None]]:
    """Yield a function to be called with the name of each step that begins, of `total`.

    counts=False: it is part of the step that is under way; says=False: it moves the bar alone. The
    bar is there in a terminal, where rich is installed; else each step is a line on stderr.
    """
    done = 0
    is_shown = sys.stdout.isatty() and find_spec("rich") is not None
    with _bar(part, total) if is_shown else nullcontext() as move:

        def begin(what: str, counts: bool = True, says: bool = True) -> None:
            nonlocal done
            done += counts
            if move is not None:
                move(done, what)
            elif says:
                print(f"{part} {done}/{total}: {what}", file=sys.stderr, flush=True)

        yield begin


@contextmanager
def _bar(part: str, total: int) -> Iterator[Callable[[int, str], Any]]:
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description:>6}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeRemainingColumn(elapsed_when_finished=True),
        bars.TextColumn("{task.fields[what]}", markup=False),
    )
    with bars.Progress(*columns, transient=True) as shown:
        task = shown.add_task(part, total=total, what="")
        yield lambda done, what: shown.update(task, completed=done, what=what)
