"""A dynamic program over Pareto frontiers (`pareto`): what `solver` finds plans with.

From the last unit to the first, the frontier of all that starts at a unit is made of those that
follow each item that may start there. An item that keeps k bytes and needs n, put in front of a
way, makes one that needs max(n, k + need). Segments are made the same way, unit by unit. As they
run again, a unit needs its bytes beside what those before it keep; as they run first, beside their
input alone. So they are made anew for each limit on what units behind the first need to run (up to
16 of them), until it is the second run that needs more anyway.

A Lagrange multiplier, ms per byte, keeps frontiers short. A plan within the limit takes no less
than ms + multiplier * (need - limit) of the rest and ms + multiplier * kept of the items before;
what cannot beat the best plan known is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusedckpt.planning.chain import Chain, Item, Keep, Level, Segment
from fusedckpt.planning.pareto import NEVER, Bytes, Frontier, Ms, pareto, promising, thinned, way

__all__ = ["Search"]

# halvings of the range of the multiplier, a factor of 10^12
_HALVINGS = 18
# so many limits of what a unit needs to run are tried at most
_LIMITS = 16


class _Starts(NamedTuple):
    """The items that may start at a unit, a row each: its levels, then segments of 1, 2, ... units.

    stop, kept: where each stops, and the bytes that it keeps. ways: of these alone.
    """

    stop: NDArray[np.int64]
    kept: Bytes
    ways: Frontier


class _Ends(NamedTuple):
    """Ends of segments that began earlier, whose units run at levels that need little to run.

    levels: of each unit. runs: what it needs at most as it runs for the first time. ways: from each
    unit on; row r covers the unit and r more.
    """

    levels: list[list[Level]]
    runs: list[int]
    ways: list[Frontier]


# no rows
_NOTHING = Frontier(np.zeros((0, 1), np.int64), np.zeros((0, 1)))


class Search:
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

    def _made(self, optimistic: bool = False) -> tuple[list[_Starts], list[_Ends]]:
        """Return what may start at each unit, and how segments may end."""
        limits, ends = self._limits(), list[_Ends]()
        starts = [self._starts(i, limits, ends, optimistic) for i in range(len(self.chain.units))]
        return starts, ends

    def _limits(self) -> list[int]:
        """Return what units may need to run in a segment, where they have levels to choose from."""
        needs = (self._running(i) for i in range(1, len(self.chain.units)))
        found = sorted({x for levels in needs if len({*levels}) > 1 for x in levels}) or [NEVER]
        count = min(len(found), _LIMITS)
        return [found[len(found) * i // count - 1] for i in range(count, 0, -1)]

    def _running(self, i: int) -> list[int]:
        """Return what unit i needs at each level as it runs in a segment, not as its first one."""
        units = self.chain.units
        return [units[i].running_at(level) + units[i - 1].output for level in units[i].levels]

    def _ends(self, limit: int, optimistic: bool) -> _Ends:
        """Return ends whose units need so much to run, or as little as they can."""
        units, found = self.chain.units, _Ends([], [], [_NOTHING] * (len(self.chain.units) + 1))
        for i, unit in enumerate(units):
            needs = self._running(i)
            most = max(limit, min(needs))
            found.levels.append([x for x, n in zip(unit.levels, needs, strict=True) if n <= most])
            found.runs.append(max(n for n in needs if n <= most))
        for i in reversed(range(1, len(units))):
            stops, need, ms = self._behind(i, found)
            need, ms = self._extended(i, found.levels[i], stops, need, ms)
            found.ways[i] = self._frontier(need, ms, optimistic)
        return found

    def _behind(self, i: int, ends: _Ends) -> tuple[NDArray[np.int64], Bytes, Ms]:
        """Return where segments that hold unit i stop, and how they end behind it."""
        stops = np.arange(i + 1, min(i + self.longest, len(self.chain.units)) + 1)
        need, ms = ends.ways[i + 1]
        # nothing comes behind where a segment stops right here
        need = np.vstack((np.zeros((1, need.shape[1]), np.int64), need))[: len(stops)]
        tail = np.full((1, ms.shape[1]), -self.chain.units[i].tail)
        return stops, need, np.vstack((tail, ms))[: len(stops)]

    def _segments(self, i: int, ends: _Ends) -> tuple[Bytes, Ms, bool]:
        """Return segments that start at unit i, in no order.

        And whether some need more, as units behind the first run for the first time, than later.
        """
        unit, (stops, need, ms) = self.chain.units[i], self._behind(i, ends)
        need, ms = self._extended(i, unit.levels, stops, need, ms, is_first=True)
        runs = np.maximum.accumulate([0, *(ends.runs[j] for j in stops[:-1])])
        first = unit.input + runs[:, None]
        return np.maximum(need, first), ms, bool(((need < first) & np.isfinite(ms)).any())

    def _starts(self, i: int, limits: list[int], ends: list[_Ends], optimistic: bool) -> _Starts:
        """Return what may start at unit i, with ends of more limits where these make it less."""
        unit, levels, after = self.chain.units[i], self.chain.units[i].levels, int(self.left[i + 1])
        needs, times, may_be_less = list[Bytes](), list[Ms](), True
        for number, limit in enumerate(limits):
            if may_be_less:
                if number == len(ends):
                    ends.append(self._ends(limit, optimistic))
                need, ms, may_be_less = self._segments(i, ends[number])
                needs.append(need)
                times.append(ms)
        need, ms = np.hstack(needs), np.hstack(times)
        stops, wide = i + 1 + np.arange(len(need)), (len(levels), need.shape[1])
        kept = [level.kept for level in levels]
        own = [x.kept + max(unit.forward_at(x), x.transient + after) for x in levels]
        extra = [level.extra for level in levels]
        need = np.vstack((np.broadcast_to(np.array([own], np.int64).T, wide), need))
        ms = np.vstack((np.broadcast_to(np.array([extra], np.float64).T, wide), ms))
        stop = np.concatenate((np.full(len(levels), i + 1), stops))
        kept = np.concatenate((kept, np.full(len(stops), unit.input)))
        return _Starts(stop, kept, self._frontier(need, ms, optimistic))

    def _extended(
        self,
        i: int,
        levels: Sequence[Level],
        stops: NDArray[np.int64],
        need: Bytes,
        ms: Ms,
        is_first: bool = False,
    ) -> tuple[Bytes, Ms]:
        """Put unit i in front of ends of segments, one level after the other; in no order."""
        unit, needs, times = self.chain.units[i], [], []
        for level in levels:
            running = unit.running_at(level)
            own = np.maximum(running + self.beside[stops], level.transient + self.left[i + 1])
            if level.ending is not None:
                own[stops == i + 1] = level.ending + self.left[i + 1]
            extra = math.inf if unit.fixed or level.nested else level.extra
            total = self._held(i, level, is_first) + np.maximum(own[:, None], need)
            needs.append(np.maximum(total, unit.input + running) if is_first else total)
            times.append(ms + (unit.again + extra))
        return np.hstack(needs), np.hstack(times)

    def _held(self, i: int, level: Level, is_first: bool) -> int:
        """Return what unit i keeps once it has run again; a segment's first has its input, too."""
        return max(level.held, self.chain.units[i].input) if is_first else level.held

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
        names, row = [], stop - start - 1
        found = [self._segments(start, ends)[:2] for ends in self.ends]
        fastest = [np.where(need[row] <= room, ms[row], np.inf).min() for need, ms in found]
        ends = self.ends[int(np.argmin(fastest))]
        for i in range(start, stop):
            is_first = i == start
            levels = self.chain.units[i].levels if is_first else ends.levels[i]
            stops, need, ms = self._behind(i, ends)
            row, width = slice(stop - i - 1, stop - i), ms.shape[1]
            need, ms = self._extended(i, levels, stops[row], need[row], ms[row], is_first=is_first)
            column = int(np.argmin(np.where(need[0] <= room, ms[0], np.inf)))
            level = levels[column // width]
            room -= self._held(i, level, is_first)
            names.append(level.name)
        return tuple(names)
