"""How numbers are written, and where to."""

from __future__ import annotations

from rich.console import Console

__all__ = ["WIDTH", "console", "significant"]

# of a table; a pipe would be given 80 columns
WIDTH = 120


def console() -> Console:
    """Return a console wide enough for a table."""
    found = Console()
    return found if found.width >= WIDTH else Console(width=WIDTH)


def significant(value: float) -> str:
    """Write a number with at least three significant digits."""
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else 3}f}"
