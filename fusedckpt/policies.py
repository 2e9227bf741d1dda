"""Plans by rule: what one can do without looking at a budget."""

from __future__ import annotations

import math


def balanced(sizes: list[int]) -> list[int]:
    """Return where about sqrt(n) segments start so that the largest is as small as can be."""
    few, enough = max(sizes), sum(sizes)
    while few < enough:
        middle = (few + enough) // 2
        if len(_packed(sizes, middle)) <= math.isqrt(len(sizes)):
            enough = middle
        else:
            few = middle + 1
    return _packed(sizes, enough)


def _packed(sizes: list[int], capacity: int) -> list[int]:
    starts, filled = [0], 0
    for i, size in enumerate(sizes):
        if filled + size > capacity:
            starts.append(i)
            filled = 0
        filled += size
    return starts
