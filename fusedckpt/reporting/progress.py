"""`progress`: the step at which a plan or a benchmark is, in one line that changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_CLEAR = "\r\033[K"


@contextmanager
def progress(title: str, total: int, is_wanted: bool = True) -> Iterator[Callable[[str], None]]:
    """Yield a function to be called with the name of each step that begins, of `total`.

    Shown on stderr in a terminal; elsewhere nothing is written.
    """
    done = 0
    is_shown = is_wanted and sys.stderr.isatty()

    def begin(step: str) -> None:
        nonlocal done
        done += 1
        if is_shown:
            text = f"{_CLEAR}{title} {done}/{total}: {step}"
            print(text, end="", file=sys.stderr, flush=True)

    try:
        yield begin
    finally:
        if is_shown:
            print(_CLEAR, end="", file=sys.stderr, flush=True)
