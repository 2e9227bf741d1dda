"""Plans: the least extra time whose peak stays within a budget, and the least peak there is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fusedckpt._prices import Prices
from fusedckpt._search import Search
from fusedckpt._staircase import NEVER, kept_needs, left_from, segment_levels, segments
from fusedckpt.chain import Chain, Item, Keep, Segment, simulate
from fusedckpt.policies import policy

__all__ = ["Solution", "least_peak", "solve"]

_WIDTHS = (32, 256, 2048)


@dataclass(frozen=True)
class Solution:
    """A plan, its peak in bytes and extra ms as simulated, and ms that no plan can be below."""

    items: tuple[Item, ...]
    peak: int
    extra: float
    lower_bound: float


def solve(chain: Chain, budget: float) -> Solution:
    """Return the fastest plan whose peak is at most `budget` bytes.
    """
    least = _simulated(chain, _least_items(chain))
    if not budget >= least.peak:
        raise ValueError(f"solve: budget of {budget} bytes is below the least feasible, {least.peak}")
    best = min(
        (plan for plan in (least, *_by_rule(chain)) if plan.peak <= budget),
        key=lambda plan: plan.extra,
    )
    limit = int(min(budget, NEVER)) - chain.base
    count = len(chain.units)
    longest = count if count <= 128 else max(64, 2 * math.isqrt(count))
    steps = min(256, max(16, 8192 // count))
    made = segments(chain, longest, steps)
    prices = Prices(chain, limit, segments(chain, longest, steps, True) if made.thinned else made)
    search = Search(chain, limit, made, prices)
    bound = prices.lower_bound
    for width in _WIDTHS:
        items, lost = search.run(best.extra, width)
        if items is not None:
            best = min(best, _simulated(chain, items), key=lambda plan: plan.extra)
            assert best.peak <= budget
        if not lost:
            if not made.thinned:
                bound = best.extra
            break
    return Solution(best.items, best.peak, best.extra, min(bound, best.extra))


def _simulated(chain: Chain, items: tuple[Item, ...]) -> Solution:
    outcome = simulate(chain, items)
    return Solution(items, outcome.peak, outcome.extra, 0.0)


def _by_rule(chain: Chain) -> Iterator[Solution]:
    count = len(chain.units)
    powers = [1 << i for i in range(count.bit_length()) if 1 << i <= count]
    for name in ("none", "all", "sqrt", *(f"uniform:{k}" for k in powers)):
        yield _simulated(chain, policy(chain, name))


def _least_items(chain: Chain) -> tuple[Item, ...]:
    count = len(chain.units)
    made = segments(chain, count, 1)
    left = left_from(chain)
    need = np.zeros(count + 1, np.int64)
    first: list[tuple[int, int]] = [(0, 0)] * count
    for i in reversed(range(count)):
        unit = chain.units[i]
        ways = np.maximum(made.need[i][:, 0], unit.input + need[i + 1 :])
        row = int(ways.argmin())
        best = (int(ways[row]), i + row + 1, -1)
        for number, (level, own) in enumerate(zip(unit.levels, kept_needs(chain, left, i), strict=True)):
            best = min(best, (max(own, level.kept + int(need[i + 1])), i + 1, number))
        need[i], *first[i] = best
    items, i = [], 0
    while i < count:
        stop, number = first[i]
        if number < 0:
            room = int(made.need[i][stop - i - 1, 0])
            items.append(Segment(i, segment_levels(chain, made, i, stop, room)))
        else:
            items.append(Keep(i, chain.units[i].levels[number].name))
        i = stop
    return tuple(items)
