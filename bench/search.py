"""A search for the largest count that fits."""

from __future__ import annotations

from collections.abc import Callable


def most(fits: Callable[[int], bool], guess: int = 1, precision: float = 0.0) -> int:
    """Return the largest count that fits, up to a share of it; 0 where 1 does not.

    Goes up or down from a guess by steps that double, then bisects; asks of no count twice. All
    counts below one that fits are taken to fit too.
    """
    low = high = guess
    step = 1
    if fits(guess):
        while fits(high := low + step):
            low = high
            step *= 2
    else:
        while (low := max(0, high - step)) and not fits(low):
            high = low
            step *= 2
    while high - low > max(1, precision * low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
