"""Plans for a chain: the fastest whose peak stays within a budget, and the least peak there is.

A dynamic program over Pareto frontiers (`pareto`): from the last unit to the first, the frontier of
all that starts at a unit is made of those that follow each item that may start there. An item that
keeps k bytes and needs n, put in front of a way, makes one that needs max(n, k + need). Segments
are made the same way, unit by unit. Needs are exact, and `simulate` confirms what is found.

A Lagrange multiplier, ms per byte, keeps frontiers short. A plan within the limit takes no less
than ms + multiplier * (need - limit) of the rest and ms + multiplier * kept of the items before;
what cannot beat the best plan known is dropped. Where nothing else was dropped, the plan found is
the optimum, and `lower_bound` equal to it; else `lower_bound` tells how far off it can be.

Related: Rotor (Herrmann et al., arXiv 1911.13214) plans chains by a dynamic program over memory
slots, with segments nested in segments; Checkmate (Jain et al., arXiv 1910.02653) any graph by an
integer program. Segments here are not nested: nothing runs more than twice, its levels aside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusedckpt.planning.chain import Chain, Item, Keep, Outcome, Segment, forward_of, simulate
from fusedckpt.planning.pareto import NEVER, Bytes, Frontier, Ms, pareto, promising, thinned, way
from fusedckpt.planning.policies import policy

__all__ = ["least_outcome", "least_peak", "may_go_lower", "solve"]

# chains of up to so many units may be cut into segments of any length; longer chains into
# segments of at most so many units or twice the square root of their number
_ANY_LENGTH, _LONG = 128, 64
# of longer chains, a plan this close to the lower bound will do
_NEAR = 1.001
# ways of a segment: so many over the number of units, and no fewer than these; with 16 in a chain
# of 1000 the gap to the lower bound stays below 0.1 %
_STEPS, _FEWEST = 16384, 16
# ways of the rest of the chain, search after search: each makes the next one quicker
_WIDTHS = (64, 512, 4096)
# halvings of the range of the multiplier, a factor of 10^12
_HALVINGS = 18


def solve(chain: Chain, budget: float) -> Outcome:
    """Return the fastest plan whose peak is at most `budget` bytes; math.inf sets no limit.

    Its `lower_bound` is of all plans whose segments are no longer than are tried here.
    Never slower than a `policy` that fits ("none", "all", "sqrt", "uniform:k" for powers of two).
    Chains of more than 128 units are cut into segments of at most 64 units, or twice the square
    root of their number if that is more, and a plan within 0.1 % of the lower bound ends the
    search. Takes about 0.1 s for 32 units, 0.6 s for 100 and 5 s for 1000.

    Raises:
        ValueError: no plan stays within `budget` (the message names the least that would do), or
            the chain holds 4 PiB or more.
    """
    least = least_outcome(chain)
    if not budget >= least.peak:
        raise ValueError(f"solve: the least feasible budget is {least.peak} bytes, got {budget}")
    return _fastest(chain, budget, least)


def least_peak(chain: Chain) -> Outcome:
    """Return the fastest of the plans with the least peak that any plan reaches."""
    least = least_outcome(chain)
    return _fastest(chain, least.peak, least)


def least_outcome(chain: Chain) -> Outcome:
    """Return a plan with the least peak: of each item alone, the least need is enough."""
    total = chain.base + sum(
        sum((unit.input, unit.output, unit.forward_transient, unit.left))
        + sum((level.kept, level.transient, level.ending or 0))
        for unit in chain.units
        for level in unit.levels
    )
    if total >= NEVER:
        raise ValueError(f"solve: a chain of less than {NEVER} bytes was expected, got {total}")
    search = _Search(chain, NEVER, len(chain.units), steps=1)
    return simulate(chain, search.items(search.least()))


def may_go_lower(chain: Chain, least: Outcome) -> str:
    """Return what to do where the unit that peaks could be cut up, nothing where it could not."""
    unit = next((u for u in chain.units if least.where.endswith(f" of {u.name}")), None)
    if unit is None or not unit.composed:
        return ""
    return (
        f"units= of modules inside {unit.name} may go lower, as the peak is in its "
        + (least.where.split(" of ")[0])
    )


def _by_rule(chain: Chain) -> Iterator[Outcome]:
    count = sum(not unit.fixed for unit in chain.units)
    powers = (1 << i for i in range(count.bit_length()))
    for name in ("none", "all", "sqrt", *(f"uniform:{k}" for k in powers)):
        yield simulate(chain, policy(chain, name))


def _fastest(chain: Chain, budget: float, least: Outcome) -> Outcome:
    """Return the best plan within the budget, which the one with the least peak keeps."""
    known = [least, *(plan for plan in _by_rule(chain) if plan.peak <= budget)]
    best = min(known, key=lambda plan: plan.extra)
    count, limit = len(chain.units), int(min(budget, NEVER)) - chain.base
    longest = count if count <= _ANY_LENGTH else max(_LONG, 2 * math.isqrt(count))
    search = _Search(chain, limit, longest, max(_FEWEST, _STEPS // count))
    bound = search.find_multiplier()
    for width in _WIDTHS:
        rest, lost = search.run(best.extra, width)
        if np.isfinite(rest[0].ms[-1]):
            best = min(best, simulate(chain, search.items(rest)), key=lambda plan: plan.extra)
            assert best.peak <= budget, "the search and the simulator disagree"
        if not lost:
            bound = bound if search.thinned else best.extra
            break
        if count > _ANY_LENGTH and best.extra <= _NEAR * bound:
            break
    return replace(best, lower_bound=min(bound, best.extra))


class _Starts(NamedTuple):
    """The items that may start at a unit, a row each: its levels, then segments of 1, 2, ... units.

    stop, kept: where each stops, and the bytes that it keeps. ways: of these alone.
    """

    stop: NDArray[np.int64]
    kept: Bytes
    ways: Frontier


class _Search:
    """Plans of a chain that need no more than a limit, its base aside.

    longest: how many units a segment has at most. steps: how many ways of an item are known.
    thinned: whether any has more.
    """

    def __init__(self, chain: Chain, limit: int, longest: int, steps: int):
        self.chain, self.limit, self.longest, self.steps = chain, limit, longest, steps
        left = [0, *(unit.left for unit in reversed(chain.units))]
        self.left = np.cumsum(left, dtype=np.int64)[::-1]
        # with a segment that stops there and is run again, the gradient of its output is live
        self.beside = self.left + [0, *(unit.output for unit in chain.units)]
        self.thinned = False
        self.starts, self.ends = self._made()

    def _made(self, optimistic: bool = False) -> tuple[list[_Starts], list[Frontier]]:
        """Return what may start at each unit, and how segments that began earlier may end.

        Row r of the latter covers the unit and r more.
        """
        units, starts, ends = self.chain.units, [], []
        need, ms = np.zeros((0, 1), np.int64), np.zeros((0, 1))
        for i in reversed(range(len(units))):
            unit, stops = units[i], np.arange(i + 1, min(i + self.longest, len(units)) + 1)
            # nothing comes behind where a segment stops right here
            need = np.vstack((np.zeros((1, need.shape[1]), np.int64), need))[: len(stops)]
            ms = np.vstack((np.full((1, ms.shape[1]), -unit.tail), ms))[: len(stops)]
            starts.append(self._starts(i, stops, need, ms, optimistic))
            ends.append(self._frontier(*self._extended(i, stops, need, ms, 0), optimistic))
            need, ms = ends[-1]
        return starts[::-1], ends[::-1]

    def _starts(
        self, i: int, stops: NDArray[np.int64], need: Bytes, ms: Ms, optimistic: bool
    ) -> _Starts:
        units, levels, after = self.chain.units, self.chain.units[i].levels, int(self.left[i + 1])
        need, ms = self._extended(i, stops, need, ms, units[i].input)
        # while a segment runs forward, the output of the unit before is live
        flow = [units[j].forward_transient + units[j - 1].output for j in stops[:-1]]
        running = np.maximum.accumulate([units[i].forward_transient, *flow])
        need = np.maximum(need, units[i].input + running[:, None])
        kept = [level.kept for level in levels]
        own = [x.kept + max(forward_of(units[i], x), x.transient + after) for x in levels]
        wide = len(levels), need.shape[1]
        extra = [level.extra for level in levels]
        need = np.vstack((np.broadcast_to(np.array([own], np.int64).T, wide), need))
        ms = np.vstack((np.broadcast_to(np.array([extra], np.float64).T, wide), ms))
        stop = np.concatenate((np.full(len(levels), i + 1), stops))
        kept = np.concatenate((kept, np.full(len(stops), units[i].input)))
        return _Starts(stop, kept, self._frontier(need, ms, optimistic))

    def _extended(
        self, i: int, stops: NDArray[np.int64], need: Bytes, ms: Ms, at_least: int
    ) -> tuple[Bytes, Ms]:
        """Put unit i in front of ends of segments, one level after the other; in no order."""
        unit, needs, times = self.chain.units[i], [], []
        for level in unit.levels:
            own = np.maximum(
                unit.forward_transient + self.beside[stops], level.transient + self.left[i + 1]
            )
            if level.ending is not None:
                own[stops == i + 1] = level.ending + self.left[i + 1]
            extra = math.inf if unit.fixed or level.nested else level.extra
            needs.append(max(level.held, at_least) + np.maximum(own[:, None], need))
            times.append(ms + (unit.again + extra))
        return np.hstack(needs), np.hstack(times)

    def _frontier(self, need: Bytes, ms: Ms, optimistic: bool) -> Frontier:
        ways = pareto(need, ms, self.limit)
        if ways.ms.shape[1] <= self.steps + 1:
            return ways
        self.thinned = True
        return thinned(ways, self.steps, optimistic)

    def find_multiplier(self) -> float:
        """Choose the multiplier with the largest lower bound, and return that bound."""
        starts = self._made(optimistic=True)[0] if self.thinned else self.starts
        # the least ms of all from a unit on, were memory free
        free = self._bounds(starts, 0.0, np.zeros(len(self.left)))[0]

        def bound(multiplier: float) -> float:
            return self._bounds(starts, multiplier, free)[0][0] - multiplier * self.limit

        most = sum(u.again + max(level.extra for level in u.levels) for u in self.chain.units)
        low, high = -14.0, 14.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            at = math.exp(middle) * most / max(self.limit, 1)
            low, high = (middle, high) if bound(at) < bound(1.0001 * at) else (low, middle)
        self.multiplier = math.exp(low) * most / max(self.limit, 1)
        rest, self.bounds = self._bounds(starts, self.multiplier, free)
        self.before = np.full(len(free), np.inf)
        self.before[0] = 0.0
        for i, (stop, kept, ways) in enumerate(starts):
            ms = self.before[i] + ways.ms[:, -1] + self.multiplier * kept
            np.minimum.at(self.before, stop, ms)
        return max(float(rest[0] - self.multiplier * self.limit), float(free[0]))

    def _bounds(self, starts: list[_Starts], multiplier: float, free: Ms) -> tuple[Ms, list[Ms]]:
        """Bound ms + multiplier * need of all from each unit on, and of each start there."""
        rest, bounds = np.zeros(len(free)), []
        for i in reversed(range(len(starts))):
            stop, kept, (need, ms) = starts[i]
            # need is the larger of two, and each of them gives a bound
            alone = (ms + multiplier * need).min(axis=1) + free[stop]
            bounds.append(np.maximum(alone, ms[:, -1] + multiplier * kept + rest[stop]))
            rest[i] = bounds[-1].min()
        return rest, bounds[::-1]

    def least(self) -> list[Frontier]:
        """Return the least need of all from each unit on, as a way of no ms."""
        rest = np.zeros(len(self.starts) + 1, np.int64)
        for i in reversed(range(len(self.starts))):
            stop, kept, (need, ms) = self.starts[i]
            need = np.where(np.isfinite(ms[:, -1]), need[:, -1], NEVER)
            rest[i] = np.maximum(need, kept + rest[stop]).min()
        return [way(int(need)) for need in rest]

    def run(self, best: float, width: int) -> tuple[list[Frontier], bool]:
        """Return the frontier of all from each unit on, in plans that take less than `best` ms.

        Holds at most `width` ways at a unit, and tells whether any was lost for that.
        """
        count, lost = len(self.starts), False
        rest = [way(0)] * (count + 1)
        for i in reversed(range(count)):
            stop, kept, ways = self.starts[i]
            spent = self.before[i] - self.multiplier * self.limit
            rooms, times = [np.zeros(0, np.int64)], [np.zeros(0)]
            for row in np.flatnonzero(self.bounds[i] + spent < best):
                first, after = ways.row(int(row)), rest[stop[row]]
                # more bytes buy a faster item or a faster rest
                rooms.append(np.concatenate((first.need, kept[row] + after.need)))
                times.append(first.at(rooms[-1]) + after.at(rooms[-1] - kept[row]))
            need, ms = np.concatenate(rooms), np.concatenate(times)
            may = ms + self.multiplier * need + spent < best
            need, ms = pareto(need[None, may], ms[None, may], self.limit).row(0)
            if len(ms) > width + 1:
                lost, chosen = True, promising(ms + self.multiplier * need, width)
                need, ms = need[chosen], ms[chosen]
            rest[i] = Frontier(need, ms)
        return rest, lost

    def items(self, rest: list[Frontier]) -> tuple[Item, ...]:
        """Return the plan that is the fastest way of all."""
        items: list[Item] = []
        i, room = 0, int(rest[0].need[-1])
        while i < len(self.starts):
            stop, kept, ways = self.starts[i]
            rows = range(len(stop))
            ms = [ways.row(r).at(room) + rest[stop[r]].at(room - kept[r]) for r in rows]
            row, levels = int(np.argmin(ms)), self.chain.units[i].levels
            if row < len(levels):
                items.append(Keep(i, levels[row].name))
            else:
                items.append(Segment(i, self._levels(i, int(stop[row]), room)))
            i, room = int(stop[row]), room - int(kept[row])
        return tuple(items)

    def _levels(self, start: int, stop: int, room: int) -> tuple[str, ...]:
        """Return the level of each unit of a segment that may use `room` bytes."""
        names = []
        for i in range(start, stop):
            unit, end = self.chain.units[i], Frontier(np.zeros(1, np.int64), np.zeros(1))
            if i + 1 < stop:
                end = self.ends[i + 1].row(stop - i - 2)
            at_least = unit.input if i == start else 0
            need, ms = self._extended(i, np.array([stop]), end.need[None], end.ms[None], at_least)
            column = int(np.argmin(np.where(need[0] <= room, ms[0], np.inf)))
            level = unit.levels[column // len(end.ms)]
            room -= max(level.held, at_least)
            names.append(level.name)
        return tuple(names)
