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

from fusedckpt._prices import Prices
from fusedckpt._staircase import Bytes, Ms, Segments, kept_needs, left_from, pareto, segment_levels
from fusedckpt.chain import Chain, Item, Keep, Segment

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

    def taken(self, chosen: NDArray) -> Ways:
        """Return some of the ways."""
        need, ms, level, stop, step = (part[chosen] for part in self)
        return Ways(need, ms, level, stop, step)


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
        after, unit = rest[i + 1], self.chain.units[i]
        step = np.arange(len(after.ms))
        return [
            Ways.starting(
                number,
                i + 1,
                np.maximum(need, level.kept + after.need),
                level.extra + after.ms,
                step,
            )
            for number, (level, need) in enumerate(
                zip(unit.levels, self.prices.kept_needs[i], strict=True)
            )
        ]

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
        step = np.maximum(np.searchsorted(need, reach, "right") - 1, 0)
        faster_rest = np.maximum(reach, need[step]), ms[step] + after.ms
        behind = np.searchsorted(reach, need, "right") - 1
        later = np.flatnonzero((behind >= 0) & np.isfinite(ms))
        behind = behind[later]
        return Ways.starting(
            -1,
            stop,
            np.concatenate((faster_rest[0], need[later])),
            np.concatenate((faster_rest[1], ms[later] + after.ms[behind])),
            np.concatenate((np.arange(len(reach)), behind)),
        )

    def _shortened(self, i: int, ways: list[Ways], best: float, width: int) -> tuple[Ways, bool]:
        """Drop what the bounds exclude, then what is dominated, then what is one too many."""
        price, before = self.prices.price, self.prices.before[i]
        all_ways = Ways(*(np.concatenate(parts) for parts in zip(*ways, strict=True)))
        bound = all_ways.ms + price * (all_ways.need - self.limit) + before
        fits = all_ways.need <= self.prices.rooms[i]
        all_ways = all_ways.taken(fits & (bound < best))
        if not len(all_ways.ms):
            return all_ways, False
        all_ways = all_ways._replace(need=np.maximum(all_ways.need, self.floor[i]))
        all_ways = all_ways.taken(pareto(all_ways.need, all_ways.ms))
        if len(all_ways.ms) <= width:
            return all_ways, False
        value = all_ways.ms + price * all_ways.need
        # the one that needs least, so that a plan is found whatever the price
        value[0] = -np.inf
        return all_ways.taken(np.sort(np.argpartition(value, width)[:width])), True

    def _items(self, rest: list[Ways]) -> tuple[Item, ...]:
        """Follow the fastest way, with segments as fast as the bytes that are there allow."""
        items: list[Item] = []
        i, step, room = 0, -1, self.limit
        while i < len(self.chain.units):
            unit, (_, _, level, stop, after) = self.chain.units[i], rest[i].taken(np.array([step]))
            if level[0] >= 0:
                items.append(Keep(i, unit.levels[level[0]].name))
                room -= unit.levels[level[0]].kept
            else:
                names = segment_levels(self.chain, self.segments, i, int(stop[0]), room)
                items.append(Segment(i, names))
                room -= unit.input
            i, step = int(stop[0]), int(after[0])
        return tuple(items)
