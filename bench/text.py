"""How numbers are written, and where to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console

__all__ = ["WIDTH", "console", "markdown", "significant"]

# of a table; a pipe would be given 80 columns
WIDTH = 120


def console() -> Console:
    """Return a console wide enough for a table."""
    found = Console()
    return found if found.width >= WIDTH else Console(width=WIDTH)


def significant(value: float) -> str:
    """Write a number with at least three significant digits."""
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else 3}f}"


def markdown(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str]
) -> str:
    """Return a Markdown table of implementations, names first, between its title and notes."""
    lines = [["implementation", *heads], ["---"] + ["---:"] * len(heads), *rows]
    drawn = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join([f"**{title}**", drawn, *notes])
