"""Plans for a chain: by a rule, the fastest with a peak within a budget, and the least peak.

A dynamic program over Pareto frontiers, from the last unit to the first. A way to run all units
from one on comes down to its need (the peak beyond the bytes that earlier items keep) and its ms.
An item that adds k bytes until its backward and needs n, before a way of a certain need, makes a
way that needs max(n, k + need). Bytes stay exact integers: on a grid, a chain of n equal layers can
be off by n slots.

A Lagrange multiplier, ms per byte, keeps frontiers short: a plan within the limit takes no less
than ms + multiplier * (need - limit) of the rest and ms + multiplier * kept of the items before. A
way that cannot beat the best known plan is dropped. Where nothing else was dropped, the plan is the
optimum; else `lower_bound` tells how far off it can be.

Related: Rotor (Herrmann et al., arXiv 1911.13214) plans chains over memory slots, with segments
nested in segments; Checkmate (Jain et al., arXiv 1910.02653) any graph by an integer program.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusedckpt.checkpointing.offload import KEPT
from fusedckpt.planning.chain import Chain, Item, Outcome, Unit, simulate

# chains of up to so many units may be cut into segments of any length; longer chains into segments
# of at most so many units, or twice the square root of their number
_ANY_LENGTH, _LONG = 128, 64
# of longer chains, a plan this close to the lower bound will do
_NEAR = 1.001
# ways of the rest of the chain, one search after the other: each makes the next one quicker
WIDTHS = (64, 512, 4096)
# halvings of the range of the multiplier, a factor of 10^12
_HALVINGS = 18
# more bytes than there are; a thousand times that still fits into an int64
_NEVER = 1 << 52
# chains that are solved again while a plan is made and printed
_RECENT = 8

Bytes = NDArray[np.int64]
Ms = NDArray[np.float64]
# need and ms of ways, by need
Ways = tuple[Bytes, Ms]


def by_rule(chain: Chain, name: str) -> Outcome:
    """Return the plan of a rule, every unit that is not checkpointed at its fastest level.

    name: "none" (nothing is checkpointed), "all" (every unit on its own), "sqrt" (at most sqrt(n)
    segments, balanced by saved bytes; Chen et al. 2016, arXiv 1604.06174) or "uniform:k" (k
    segments of equal length, but for one unit, or as many as there are units). Units that cannot be
    joined begin a segment anyway.
    """
    free = [i for i, unit in enumerate(chain.units) if not unit.fixed]
    count, starts = len(free), set(free)
    if name == "sqrt" and free:
        sizes = [max(1, chain.saved(chain.units[i], chain.units[i].fastest)) for i in free]
        starts = {free[start] for start in _balanced(sizes)}
    elif name.startswith("uniform:"):
        number = min(int(name.removeprefix("uniform:")), count)
        starts = {free[count * i // number] for i in range(number)}
    elif name not in ("none", "all", "sqrt"):
        raise ValueError(f"by_rule: none, all, sqrt or uniform:k expected, got {name!r}")
    return simulate(chain, _cut(chain, starts, name == "none"))


def _cut(chain: Chain, starts: Collection[int], is_kept: bool) -> list[Item]:
    """Return segments that begin at `starts`, and where units cannot be joined."""
    items: list[Item] = []
    for i, unit in enumerate(chain.units):
        if unit.fixed or is_kept:
            items.append(Item(i, i + 1, unit.fastest.name))
        elif items and items[-1].level is None and i not in starts and unit.joined:
            items[-1] = Item(items[-1].start, i + 1)
        else:
            items.append(Item(i, i + 1))
    return items


def _balanced(sizes: list[int]) -> list[int]:
    """Return where about sqrt(n) segments start so that the largest is as small as can be."""

    def packed(capacity: int) -> list[int]:
        starts, filled = [0], 0
        for i, size in enumerate(sizes):
            if filled + size > capacity:
                starts.append(i)
                filled = 0
            filled += size
        return starts

    few, enough = max(sizes), sum(sizes)
    while few < enough:
        middle = (few + enough) // 2
        is_enough = len(packed(middle)) <= math.isqrt(len(sizes))
        few, enough = (few, middle) if is_enough else (middle + 1, enough)
    return packed(enough)


class _Starts(NamedTuple):
    """The items that may start at a unit: its levels, then segments of 1, 2, ... units.

    The same segments with offloaded inputs follow, where the chain has any.

    stop: where each stops. kept: bytes that it adds until its backward. need: its own peak. ms: its
    extra time.
    """

    stop: NDArray[np.int64]
    kept: Bytes
    need: Bytes
    ms: Ms


def starts_of(chain: Chain, longest: int) -> list[_Starts]:
    """Return the items that may start at each unit, with segments of up to `longest` units."""
    starts: list[_Starts] = []
    # of the segments that start behind the unit, a row each: peaks of forwards behind the first
    # unit, and of recomputes and backwards; live bytes when the gradient arrives; bytes of inputs
    # that are not kept; bytes that live as long as the segment; ms
    ways = none = np.zeros((6, 0))
    after: Unit | None = None
    for i, unit in reversed([*enumerate(chain.units)]):
        ways = none if after is None or not after.joined else _prepended(chain, unit, after, ways)
        if unit.recomputed is None:
            ways, first = none, 0
        else:
            first = unit.recomputed.forward
            lasting, extra = chain.lasting(unit), unit.recomputed.extra
            alone = (
                unit.peak_until_next,
                unit.recomputed.backward,
                unit.live_at_gradient,
                0,
                lasting,
                extra,
            )
            # bytes below 2^53 are exact
            ways = np.column_stack((np.array(alone, float), ways[:, : longest - 1]))
        forward, backward, _, freed, _, ms = ways
        # those of several units keep the argument of the first
        backward = np.concatenate((backward[:1], backward[1:] + unit.unsaved_input))
        levels, count = unit.levels, len(ms)
        own = [max(x.forward, unit.peak_until_next + x.kept, x.backward) for x in levels]
        stop = np.concatenate(([i + 1] * len(levels), i + 1 + np.arange(len(ms))))
        kept = np.concatenate(([x.kept for x in levels], -freed))
        need = np.concatenate((own, np.maximum(np.maximum(forward, backward), first)))
        ms = chain.slower * np.concatenate(([x.extra for x in levels], ms))
        if chain.to_host and unit.movable and count:
            stop, kept, need = (np.concatenate((x, x[-count:])) for x in (stop, kept, need))
            kept[-count:] -= unit.movable
            ms = np.concatenate((ms, ms[-count:] + _exposed(chain, i, ms[-count:])))
        stop, kept, need = (x.astype(np.int64) for x in (stop, kept, need))
        starts.append(_Starts(stop, kept, need, ms))
        after = unit
    return starts[::-1]


def _exposed(chain: Chain, start: int, extra: Ms) -> Ms:
    """Return the ms of copies that segments from a unit on do not hide; extra: their recomputes."""
    units = chain.units[start : start + len(extra)]
    forward = np.cumsum([unit.forward_ms for unit in units])
    backward = np.cumsum([unit.backward_ms for unit in units])
    recompute = extra / chain.slower
    return chain.slower * chain.exposed_ms(units[0].movable, forward, recompute + backward)


def _prepended(chain: Chain, unit: Unit, after: Unit, ways: Any) -> Any:
    """Put a unit before segments; after: the unit that was their first."""
    if after.recomputed is None:
        return ways[:, :0]
    forward, backward, live, freed, lasting, ms = ways
    # the first of them was that unit alone
    backward = np.concatenate(([chain.backward_at_end(after)], backward[1:]))
    first, live = max(unit.peak_until_next, after.recomputed.forward), live - after.freed_in_segment
    runs, saves = unit.in_segment.forward - unit.live_at_begin, chain.saves(unit)
    backward = np.maximum(backward + saves, live + runs)
    lasting = lasting + chain.lasting(unit)
    backward = np.maximum(backward, unit.in_segment.backward + lasting)
    forward, freed = (
        np.maximum(forward - after.freed_in_segment, first),
        freed + after.freed_in_segment,
    )
    return np.stack((forward, backward, live, freed, lasting, ms + unit.forward_ms))


class _Search:
    """Plans of a chain that need no more than a limit."""

    def __init__(self, starts: list[_Starts], limit: int):
        self._starts, self._limit = starts, limit
        # nothing is needed behind the last unit
        self._end = [(np.full(1, -_NEVER), np.zeros(1))]

    def find_multiplier(self) -> float:
        """Choose the multiplier with the largest lower bound, and return that bound."""
        self._free = np.zeros(len(self._starts) + 1)
        self._free = self._bounds(0.0)[0]

        def bound(multiplier: float) -> float:
            return self._bounds(multiplier)[0][0] - multiplier * self._limit

        most = sum(ms.max() for *_, ms in self._starts)
        low, high = -14.0, 14.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            at = math.exp(middle) * most / max(self._limit, 1)
            low, high = (middle, high) if bound(at) < bound(1.0001 * at) else (low, middle)
        self.multiplier = math.exp(low) * most / max(self._limit, 1)
        rest, self.bounds = self._bounds(self.multiplier)
        self.before = np.full(len(rest), np.inf)
        # the fewest bytes that items before a unit keep, which may be below 0
        fewest = np.full(len(rest), _NEVER)
        self.before[0] = fewest[0] = 0
        for i, (stop, kept, _, ms) in enumerate(self._starts):
            np.minimum.at(self.before, stop, self.before[i] + ms + self.multiplier * kept)
            np.minimum.at(fewest, stop, fewest[i] + kept)
        self.rooms = self._limit - fewest
        return max(float(rest[0] - self.multiplier * self._limit), float(self._free[0]))

    def _bounds(self, multiplier: float) -> tuple[Ms, list[Ms]]:
        """Bound ms + multiplier * need of all from each unit on, and of each start there."""
        rest, bounds = np.zeros(len(self._free)), []
        for i in reversed(range(len(self._starts))):
            stop, kept, need, ms = self._starts[i]
            # the need is the larger of two, and each of them gives a bound
            alone = ms + multiplier * need + self._free[stop]
            both = np.maximum(alone, ms + multiplier * kept + rest[stop])
            # at the last unit nothing is behind
            bounds.append(np.where(stop == len(self._starts), alone, both))
            rest[i] = bounds[-1].min()
        return rest, bounds[::-1]

    def run(self, best: float, width: int) -> tuple[list[Ways], bool]:
        """Return the ways from each unit on of plans that take less than `best` ms.

        Keeps at most `width` ways at a unit, and tells whether any was lost for that.
        """
        lost, rest = False, self._end * (len(self._starts) + 1)
        for i in reversed(range(len(self._starts))):
            stop, kept, own, extra = self._starts[i]
            spent, room = self.before[i] - self.multiplier * self._limit, self.rooms[i]
            needs, times = [np.zeros(0, np.int64)], [np.zeros(0)]
            for row in np.flatnonzero((self.bounds[i] + spent < best) & (own <= room)):
                need, ms = rest[stop[row]]
                needs.append(np.maximum(own[row], kept[row] + need))
                times.append(extra[row] + ms)
            need, ms = np.concatenate(needs), np.concatenate(times)
            may = (ms + self.multiplier * need + spent < best) & (need <= room)
            need, ms = _pareto(need[may], ms[may])
            if len(ms) > width:
                # the way of least need, and the best of each of many groups: the best alone may all
                # need too much for units before, to which the multiplier is blind
                lost, value = True, ms + self.multiplier * need
                value[0] = -np.inf
                groups = np.arange(len(value)) * width // len(value)
                order, firsts = np.lexsort((value, groups)), np.unique(groups, return_index=True)[1]
                chosen = np.sort(order[firsts])
                need, ms = need[chosen], ms[chosen]
            rest[i] = need, ms
        return rest, lost

    def least(self) -> list[Ways]:
        """Return the least need from each unit on, as the only way there."""
        rest = self._end * (len(self._starts) + 1)
        for i in reversed(range(len(self._starts))):
            stop, kept, own, extra = self._starts[i]
            needs = np.maximum(own, kept + np.array([rest[k][0][0] for k in stop]))
            row = int(np.argmin(needs))
            rest[i] = needs[row : row + 1], rest[stop[row]][1] + extra[row]
        return rest

    def best(self, chain: Chain, rest: list[Ways]) -> Outcome:
        """Return the plan of the fastest way of all."""
        items: list[Item] = []
        i, room = 0, int(rest[0][0][-1])
        while i < len(self._starts):
            stop, kept, own, extra = self._starts[i]
            ms = [
                e + _at(rest[s], room - k) if n <= room else math.inf
                for s, k, n, e in zip(stop, kept, own, extra, strict=True)
            ]
            row, levels = int(np.argmin(ms)), chain.units[i].levels
            level = levels[row].name if row < len(levels) else None
            # offloaded segments come behind segments of the same stops
            offloads = level is None and int(stop[row]) in stop[len(levels) : row]
            items.append(Item(i, int(stop[row]), level, offloads))
            i, room = int(stop[row]), room - int(kept[row])
        return simulate(chain, items)


def _at(ways: Ways, room: int) -> float:
    """Return the least ms of ways that need no more than `room`."""
    place = ways[0].searchsorted(room, "right") - 1
    return float(ways[1][place]) if place >= 0 else math.inf


def _pareto(need: Bytes, ms: Ms) -> Ways:
    """Return the ways that are faster than all that need no more, by need."""
    order = np.lexsort((ms, need))
    need, ms = need[order], ms[order]
    before = np.concatenate(([np.inf], np.minimum.accumulate(ms)[:-1]))
    return need[ms < before], ms[ms < before]


def solve(chain: Chain, budget: float, widths: tuple[int, ...] = WIDTHS) -> Outcome:
    """Return the fastest plan with a peak of at most `budget` bytes; math.inf sets no limit.

    widths: numbers of ways of the rest of the chain to keep, one search after the other.

    It is never slower than a `by_rule` that fits ("none", "all", "sqrt", "uniform:k" for powers of
    two). Segments of chains of more than 128 units have at most 64 units, or twice the square root
    of their number, and a plan within 0.1 % of the lower bound ends the search. ValueError where no
    plan stays within `budget`.
    """
    least = _lowest(chain)
    if not budget >= least.peak:
        raise ValueError(f"solve: the least feasible budget is {least.peak} bytes, got {budget}")
    return _fastest(chain, int(min(budget, _NEVER)), least, widths)


def least_peak(chain: Chain) -> Outcome:
    """Return the fastest of the plans with the least peak of all."""
    least = _lowest(chain)
    return _fastest(chain, least.peak, least, WIDTHS)


@lru_cache(_RECENT)
def _lowest(chain: Chain) -> Outcome:
    search = _Search(starts_of(chain, len(chain.units)), _NEVER)
    least = search.best(chain, search.least())
    if not chain.to_host:
        return least
    # the inputs that have not left count for nothing in the search
    return min(least, _lowest(replace(chain, to_host=0.0)), key=lambda plan: plan.peak)


@lru_cache(_RECENT)
def _fastest(chain: Chain, budget: int, least: Outcome, widths: tuple[int, ...]) -> Outcome:
    """Return the best plan within a budget, which the one with the least peak keeps."""
    count = len(chain.units)
    longest = count if count <= _ANY_LENGTH else max(_LONG, 2 * math.isqrt(count))
    search = _Search(starts_of(chain, longest), budget)
    bound = search.find_multiplier()
    if chain.to_host:
        # inputs that have not left, or are back, count for nothing in the search
        most = (KEPT + 1) * max(unit.movable for unit in chain.units)
        search = _Search(starts_of(chain, longest), budget - most)
        search.find_multiplier()
    powers = (f"uniform:{1 << i}" for i in range(count.bit_length()))
    rules = [by_rule(chain, name) for name in ("none", "all", "sqrt", *powers)]
    known = [least, *(plan for plan in rules if plan.peak <= budget)]
    best = min(known, key=lambda plan: plan.extra)
    for width in widths:
        rest, lost = search.run(best.extra, width)
        if len(rest[0][1]):
            best = min(best, search.best(chain, rest), key=lambda x: x.extra)
            assert best.peak <= budget, "the search and the simulator disagree"
        if not lost:
            bound = bound if chain.to_host else best.extra
            break
        if count > _ANY_LENGTH and best.extra <= _NEAR * bound:
            break
    return replace(best, lower_bound=min(bound, best.extra))
