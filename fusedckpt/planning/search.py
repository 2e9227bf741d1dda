"""The search behind `solver`: staircases of the rest of a chain, kept short by bounds.

From the last unit to the first, the staircase of all that starts at a unit is made of those of
what follows each item that may start there. Three bounds, all exact, keep it short:

- bytes below `floor` are worth as much as `floor`, as no plan within the limit keeps more earlier;
- bytes above `rooms`, the limit less the least that is kept earlier, do not fit;
- at any price of a byte, a plan within the limit takes no less than ms + price * (need - limit) of
  the rest plus the least ms + price * kept of the units before (Lagrange's bound). What cannot
  beat the best plan known is dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusedckpt.planning.chain import Chain, Item, Keep, Segment
from fusedckpt.planning.prices import Prices
from fusedckpt.planning.staircase import (
    Bytes,
    Ms,
    Segments,
    kept_needs,
    left_from,
    pareto,
    segment_levels,
)

__all__ = ["Search"]


class Ways(NamedTuple):
    """Ways to run all units from one on, a staircase, and what each is made of.

    level: the level at which the first unit is kept, by number, or -1 for a segment.
    stop: where that first item stops. step: which way goes on from there.
    """

    need: Bytes
    ms: Ms
    level: NDArray[np.int64]
    stop: NDArray[np.int64]
    step: NDArray[np.int64]

    @classmethod
    def starting(cls, level: int, stop: int, need: Bytes, ms: Ms, step: NDArray[np.int64]) -> Ways:
        """Return ways that start with the same item."""
        return cls(need, ms, np.full(len(ms), level), np.full(len(ms), stop), step)

    @classmethod
    def joined(cls, ways: list[Ways]) -> Ways:
        """Return all of several ways, in no order."""
        need, ms, level, stop, step = map(np.concatenate, zip(*ways, strict=True))
        return cls(need, ms, level, stop, step)

    def taken(self, chosen: NDArray) -> Ways:
        """Return some of the ways."""
        rest = (self.level[chosen], self.stop[chosen], self.step[chosen])
        return Ways(self.need[chosen], self.ms[chosen], *rest)


class Search:
    """Plans of a chain within the limit of `prices`, made of kept units and these segments."""

    def __init__(self, chain: Chain, segments: Segments, prices: Prices):
        self.chain, self.segments, self.prices = chain, segments, prices
        self.limit = prices.limit
        self.floor = self._floor()

    def _floor(self) -> Bytes:
        """Return, for each unit, the limit less the most that a plan within it keeps before."""
        left, most = left_from(self.chain), 0
        floor = np.full(len(self.chain.units) + 1, self.limit, np.int64)
        for i, unit in enumerate(self.chain.units):
            # after an item that needs n and keeps k, at most limit - n + k are kept
            need = self.segments.need[i][:, 0]
            after = slice(i + 1, i + 1 + len(need))
            floor[after] = np.minimum(floor[after], need - unit.input)
            kept = [level.kept for level in unit.levels]
            spare = np.subtract(kept_needs(self.chain, left, i), kept)
            most += max(unit.input, *kept)
            floor[i + 1] = max(self.limit - most, min(floor[i + 1], spare.min()))
        return floor

    def run(self, best: float, width: int) -> tuple[tuple[Item, ...] | None, bool]:
        """Look for a plan that takes less than `best` ms, holding at most `width` ways at a unit.

        Returns the plan, None if there is none to be found, and whether any way was lost for want
        of width.
        """
        count, lost = len(self.chain.units), False
        zero = np.zeros(1, np.int64)
        rest = [Ways(zero, np.zeros(1), zero, zero, zero)] * (count + 1)
        # the least ms + price * need of the rest from each unit on
        value = np.full(count + 1, np.inf)
        value[count] = 0.0
        for i in reversed(range(count)):
            ways = self._kept(i, rest)
            ways += [self._segment(i, stop, rest[stop]) for stop in self._stops(i, value, best)]
            rest[i], cut = self._shortened(i, ways, best, width)
            lost |= cut
            value[i] = np.min(rest[i].ms + self.prices.price * rest[i].need, initial=np.inf)
        return (self._items(rest) if len(rest[0].ms) else None), lost

    def _kept(self, i: int, rest: list[Ways]) -> list[Ways]:
        """Keep the unit in front, at each of its levels."""
        after, needs = rest[i + 1], self.prices.kept_needs[i]
        step = np.arange(len(after.ms))
        ways = []
        for number, level in enumerate(self.chain.units[i].levels):
            need = np.maximum(needs[number], level.kept + after.need)
            ways.append(Ways.starting(number, i + 1, need, level.extra + after.ms, step))
        return ways

    def _stops(self, i: int, value: Ms, best: float) -> list[int]:
        """Return where a segment from unit i may stop in a plan that beats `best`."""
        ms = self.prices.segments[i]
        after = slice(i + 1, i + 1 + len(ms))
        kept = self.chain.units[i].input - self.limit
        bound = self.prices.before[i] + ms + value[after] + self.prices.price * kept
        return (np.flatnonzero(bound < best) + i + 1).tolist()

    def _segment(self, i: int, stop: int, after: Ways) -> Ways:
        """Put a segment in front: more bytes buy a faster rest, or a faster segment."""
        row = stop - i - 1
        need, ms = self.segments.need[i][row], self.segments.ms[i][row]
        reach = self.chain.units[i].input + after.need
        # at the bytes that a rest needs, or the segment if that needs more
        step = np.maximum(np.searchsorted(need, reach, "right") - 1, 0)
        # at the bytes that a segment needs, with what rest these allow
        behind = np.searchsorted(reach, need, "right") - 1
        later = np.flatnonzero((behind >= 0) & np.isfinite(ms))
        behind = behind[later]
        return Ways.starting(
            -1,
            stop,
            np.concatenate((np.maximum(reach, need[step]), need[later])),
            np.concatenate((ms[step] + after.ms, ms[later] + after.ms[behind])),
            np.concatenate((np.arange(len(reach)), behind)),
        )

    def _shortened(self, i: int, ways: list[Ways], best: float, width: int) -> tuple[Ways, bool]:
        """Drop what the bounds exclude, then what is dominated, then what is one too many."""
        price, before = self.prices.price, self.prices.before[i]
        found = Ways.joined(ways)
        bound = found.ms + price * (found.need - self.limit) + before
        found = found.taken((found.need <= self.prices.rooms[i]) & (bound < best))
        if not len(found.ms):
            return found, False
        found = found._replace(need=np.maximum(found.need, self.floor[i]))
        found = found.taken(pareto(found.need, found.ms))
        if len(found.ms) <= width:
            return found, False
        value = found.ms + price * found.need
        # the one that needs least, so that a plan is found whatever the price
        value[0] = -np.inf
        return found.taken(np.sort(np.argpartition(value, width)[:width])), True

    def _items(self, rest: list[Ways]) -> tuple[Item, ...]:
        """Follow the fastest way, with segments as fast as the bytes that are there allow."""
        items: list[Item] = []
        i, step, room = 0, -1, self.limit
        while i < len(self.chain.units):
            unit, ways = self.chain.units[i], rest[i]
            number, stop = int(ways.level[step]), int(ways.stop[step])
            if number >= 0:
                items.append(Keep(i, unit.levels[number].name))
                room -= unit.levels[number].kept
            else:
                names = segment_levels(self.chain, self.segments, i, stop, room)
                items.append(Segment(i, names))
                room -= unit.input
            i, step = stop, int(ways.step[step])
        return tuple(items)
