"""The fastest plan for a chain with a peak within a budget, and the plan of the least peak.

A dynamic program over Pareto frontiers, from the last unit to the first. A way to run all units
from a unit on comes down to its need (the peak beyond the bytes that earlier items add) and its ms.
An item that adds k bytes until its backward and needs n, before a way of a certain need, makes a
way that needs max(n, k + need). Bytes stay exact integers: on a grid, a chain of n equal layers can
be off by n slots.

A Lagrange multiplier, ms per byte, keeps frontiers short: a plan within the limit takes no less
than ms + multiplier * (need - limit) of the way and ms + multiplier * added of the items before. A
way that cannot beat the best known plan is dropped. Where no other way was dropped, the plan is the
optimum; else `lower_bound_ms` tells how far off it can be.

Related: Rotor (Herrmann et al., arXiv 1911.13214) plans chains over memory slots, with segments
nested in segments; Checkmate (Jain et al., arXiv 1910.02653) any graph by an integer program.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fusedckpt.checkpointing.offload import KEPT
from fusedckpt.planning.chain import Chain, Item, Outcome, simulate
from fusedckpt.planning.rules import by_rule
from fusedckpt.planning.starts import Bytes, Ms, Starts, starts_of

# chains of up to this many units may be cut into segments of any length
_ANY_LENGTH = 128
# longer chains into segments of at most this many units, or twice the square root of their number
_LONG = 64
# for longer chains, a plan this close to the lower bound is good enough
_NEAR = 1.001
# ways that are kept at each unit, one search after the other: each makes the next one quicker
WIDTHS = (64, 512, 4096)
# halvings of the range of the multiplier, a factor of 10^12
_HALVINGS = 18
# stands for infinity, in bytes; the sum of a thousand of these fits into an int64
_NEVER = 1 << 52
# chains that are solved again while a plan is made and printed
_RECENT = 8

# need and ms of ways, by need
Ways = tuple[Bytes, Ms]


class _Search:
    """Plans of a chain that need no more than a limit."""

    def __init__(self, starts: list[Starts], limit: int):
        self._starts = starts
        self._limit = limit
        # behind the last unit: one way, which needs nothing
        self._end = [(np.full(1, -_NEVER), np.zeros(1))]

    def find_multiplier(self) -> float:
        """Choose the multiplier with the largest lower bound, and return that bound."""
        self._least_ms = np.zeros(len(self._starts) + 1)
        self._least_ms = self._bounds(0.0)[0]

        def bound(multiplier: float) -> float:
            return self._bounds(multiplier)[0][0] - multiplier * self._limit

        # halve the range of the multiplier's logarithm, towards the side where the bound rises
        most = sum(start.ms.max() for start in self._starts)
        scale = most / max(self._limit, 1)
        low = -14.0
        high = 14.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            multiplier = math.exp(middle) * scale
            if bound(multiplier) < bound(1.0001 * multiplier):
                low = middle
            else:
                high = middle
        self.multiplier = math.exp(low) * scale
        behind, self.bounds = self._bounds(self.multiplier)
        # the least ms + multiplier * added of items before each unit
        self.before = np.full(len(behind), np.inf)
        # the fewest bytes that items before a unit add, which may be below 0
        fewest = np.full(len(behind), _NEVER)
        self.before[0] = fewest[0] = 0
        for i, (stop, added, _, ms, _) in enumerate(self._starts):
            np.minimum.at(self.before, stop, self.before[i] + ms + self.multiplier * added)
            np.minimum.at(fewest, stop, fewest[i] + added)
        # the most that a way from each unit on may need
        self.rooms = self._limit - fewest
        return max(float(behind[0] - self.multiplier * self._limit), float(self._least_ms[0]))

    def _bounds(self, multiplier: float) -> tuple[Ms, list[Ms]]:
        """Bound ms + multiplier * need of all ways from each unit on, and of each start there."""
        behind = np.zeros(len(self._least_ms))
        bounds = list[Ms]()
        for i in reversed(range(len(self._starts))):
            stop, added, need, ms, _ = self._starts[i]
            # the need is the larger of two, and each of them gives a bound
            by_item = ms + multiplier * need + self._least_ms[stop]
            by_way = ms + multiplier * added + behind[stop]
            # at the last unit nothing is behind
            is_last = stop == len(self._starts)
            bounds.append(np.where(is_last, by_item, np.maximum(by_item, by_way)))
            behind[i] = bounds[-1].min()
        return behind, bounds[::-1]

    def run(self, best_ms: float, width: int) -> tuple[list[Ways], bool]:
        """Return the ways from each unit on of plans that take less than `best_ms`.

        Keeps at most `width` ways at a unit, and tells whether any was lost for that.
        """
        is_lost = False
        ways = self._end * (len(self._starts) + 1)
        for i in reversed(range(len(self._starts))):
            stop, added, own_need, extra, _ = self._starts[i]
            spent = self.before[i] - self.multiplier * self._limit
            room = self.rooms[i]
            needs = [np.zeros(0, np.int64)]
            times = [np.zeros(0)]
            for row in np.flatnonzero((self.bounds[i] + spent < best_ms) & (own_need <= room)):
                need, ms = ways[stop[row]]
                needs.append(np.maximum(own_need[row], added[row] + need))
                times.append(extra[row] + ms)
            need = np.concatenate(needs)
            ms = np.concatenate(times)
            may_win = (ms + self.multiplier * need + spent < best_ms) & (need <= room)
            need, ms = _pareto(need[may_win], ms[may_win])
            if len(ms) > width:
                is_lost = True
                chosen = _spread(ms + self.multiplier * need, width)
                ways[i] = need[chosen], ms[chosen]
            else:
                ways[i] = need, ms
        return ways, is_lost

    def least(self) -> list[Ways]:
        """Return the least need from each unit on, as the only way there."""
        ways = self._end * (len(self._starts) + 1)
        for i in reversed(range(len(self._starts))):
            stop, added, own_need, extra, _ = self._starts[i]
            needs = np.maximum(own_need, added + np.array([ways[k][0][0] for k in stop]))
            row = int(np.argmin(needs))
            ways[i] = needs[row : row + 1], ways[stop[row]][1] + extra[row]
        return ways

    def best(self, chain: Chain, ways: list[Ways]) -> Outcome:
        """Return the plan of the fastest way of all."""
        items: list[Item] = []
        units = [*(start.unit for start in self._starts), len(chain.units)]
        i = 0
        room = int(ways[0][0][-1])
        while i < len(self._starts):
            stop, added, own_need, extra, unit = self._starts[i]
            ms = [
                e + _at(ways[s], room - k) if n <= room else math.inf
                for s, k, n, e in zip(stop, added, own_need, extra, strict=True)
            ]
            row = int(np.argmin(ms))
            levels = chain.units[unit].levels
            level = levels[row].name if row < len(levels) else None
            # offloaded segments come behind segments of the same stops
            offloads = level is None and int(stop[row]) in stop[len(levels) : row]
            items.append(Item(unit, units[stop[row]], level, offloads))
            i = int(stop[row])
            room -= int(added[row])
        return simulate(chain, items)


def _spread(value: Ms, width: int) -> NDArray[np.int64]:
    """Return the places of `width` ways: that of least need, and the best of each of many groups.

    The best of all alone may need too much for units before, to which the multiplier is blind.
    """
    value[0] = -np.inf
    groups = np.arange(len(value)) * width // len(value)
    order = np.lexsort((value, groups))
    _, firsts = np.unique(groups, return_index=True)
    return np.sort(order[firsts])


def _at(ways: Ways, room: int) -> float:
    """Return the least ms of ways that need no more than `room`."""
    place = ways[0].searchsorted(room, "right") - 1
    return float(ways[1][place]) if place >= 0 else math.inf


def _pareto(need: Bytes, ms: Ms) -> Ways:
    """Return the ways that are faster than all that need no more, by need."""
    order = np.lexsort((ms, need))
    need = need[order]
    ms = ms[order]
    before = np.concatenate(([np.inf], np.minimum.accumulate(ms)[:-1]))
    return need[ms < before], ms[ms < before]


def solve(chain: Chain, budget: float, widths: tuple[int, ...] = WIDTHS) -> Outcome:
    """Return the fastest plan with a peak of at most `budget` bytes; math.inf sets no limit.

    widths: numbers of ways to keep at each unit, one search after the other.

    It is never slower than a `by_rule` that fits ("none", "all", "sqrt", "uniform:k" for powers of
    two). Segments of chains of more than 128 units have at most 64 units, or twice the square root
    of their number, and a plan within 0.1 % of the lower bound ends the search. ValueError where no
    plan stays within `budget`.
    """
    least = _lowest(chain)
    if not budget >= least.peak_bytes:
        needed = least.peak_bytes
        raise ValueError(f"solve: the least feasible budget is {needed} bytes, got {budget}")
    return _fastest(chain, int(min(budget, _NEVER)), least, widths)


def least_peak(chain: Chain) -> Outcome:
    """Return the fastest of the plans with the least peak of all."""
    least = _lowest(chain)
    return _fastest(chain, least.peak_bytes, least, WIDTHS)


@lru_cache(_RECENT)
def _lowest(chain: Chain) -> Outcome:
    """Return a plan with the least peak of all."""
    search = _Search(starts_of(chain, len(chain.units)), _NEVER)
    least = search.best(chain, search.least())
    if not chain.to_host:
        return least
    # inputs that have not left the device yet count for nothing in the search
    return min(least, _lowest(replace(chain, to_host=0.0)), key=lambda plan: plan.peak_bytes)


@lru_cache(_RECENT)
def _fastest(chain: Chain, budget: int, least: Outcome, widths: tuple[int, ...]) -> Outcome:
    """Return the fastest plan within a budget; least: a plan of the least peak, which is within."""
    count = len(chain.units)
    longest = count if count <= _ANY_LENGTH else max(_LONG, 2 * math.isqrt(count))
    search = _Search(starts_of(chain, longest), budget)
    bound = search.find_multiplier()
    if chain.to_host:
        # inputs that have not left the device, or are back, count for nothing in the search
        most = (KEPT + 1) * max(unit.movable_bytes for unit in chain.units)
        search = _Search(starts_of(chain, longest), budget - most)
        search.find_multiplier()
    powers = (f"uniform:{1 << i}" for i in range(count.bit_length()))
    rules = [by_rule(chain, name) for name in ("none", "all", "sqrt", *powers)]
    known = [least, *(plan for plan in rules if plan.peak_bytes <= budget)]
    best = min(known, key=lambda plan: plan.extra_ms)
    for width in widths:
        ways, is_lost = search.run(best.extra_ms, width)
        if len(ways[0][1]):
            best = min(best, search.best(chain, ways), key=lambda x: x.extra_ms)
            assert best.peak_bytes <= budget, "the search and the simulator disagree"
        if not is_lost:
            bound = bound if chain.to_host else best.extra_ms
            break
        if count > _ANY_LENGTH and best.extra_ms <= _NEAR * bound:
            break
    return replace(best, lower_bound_ms=min(bound, best.extra_ms))
