"""How numbers are written, and where to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["WIDTH", "console", "difference", "markdown", "significant", "steps"]

# of a table; a pipe would be given 80 columns
WIDTH = 120


def console() -> Console:
    """Return a console wide enough for a table."""
    found = Console()
    return found if found.width >= WIDTH else Console(width=WIDTH)


@contextmanager
def steps(out: Console, totals: Mapping[str, int]) -> Iterator[Callable[..., None]]:
    """Yield what is to be called as (part, what) when a step begins, of so many in each part.

    With counts=False it is a part of the step that is under way. Each part has a bar with an end;
    without a terminal each step is a line on stderr.
    """
    columns = (
        TextColumn("{task.description:>6}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[what]}", markup=False),
    )
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bars:
        tasks = {part: bars.add_task(part, total=totals[part], what="") for part in totals}

        def begin(part: str, what: str, counts: bool = True) -> None:
            bars.update(tasks[part], advance=int(counts), what=what)
            if not out.is_terminal:
                done = int(bars.tasks[tasks[part]].completed)
                print(f"{part} {done}/{totals[part]}: {what}", file=sys.stderr)

        yield begin


def significant(value: float) -> str:
    """Write a number with at least three significant digits."""
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else 3}f}"


def difference(value: float) -> str:
    """Write a difference, of which there may be none."""
    return f"{value:.1e}" if value else "0"


def markdown(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str]
) -> str:
    """Return a Markdown table of implementations, names first, between its title and notes."""
    lines = [["implementation", *heads], ["---"] + ["---:"] * len(heads), *rows]
    drawn = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join([f"**{title}**", drawn, *notes])
