"""Lower bounds on the extra time of a plan, by putting a price on a byte.

Within the limit, kept + need of the item that runs a given unit is at most the limit. At a price of
p ms per byte, min over plans of ms + p * (kept + need - limit) is then a lower bound on the time of
each: a shortest path over the chain. The best price is found by golden-section search, the best
unit by trying all.
"""

from __future__ import annotations

import math

import numpy as np

from fusedckpt._staircase import Bytes, Ms, Segments, kept_needs, left_from
from fusedckpt.chain import Chain

__all__ = ["Prices"]

_GOLDEN = (math.sqrt(5) - 1) / 2
_ROUNDS = 36


class Prices:
    """What a byte is worth to a plan within `limit` bytes beyond the base of its chain.

    price: ms per byte. lower_bound: ms that every plan takes at least.
    before: the least ms + price * kept of the units before each.
    segments: per first unit, the least ms of segments of 1, 2, ... units, inf for what cannot fit.
    least_kept: the least bytes that a plan keeps before each unit.
    kept_needs: per unit what it needs at each of its levels.
    """

    def __init__(self, chain: Chain, limit: int, optimistic: Segments):
        self.chain, self.limit = chain, limit
        left, count = left_from(chain), len(chain.units)
        self.kept_needs = [kept_needs(chain, left, i) for i in range(count)]
        self.least_kept = _least_kept(chain, [len(need) for need in optimistic.need])
        self._need = optimistic.need
        self._ms = [
            np.where(need <= limit - least, ms, np.inf)
            for need, ms, least in zip(optimistic.need, optimistic.ms, self.least_kept, strict=False)
        ]
        self.segments = [ms.min(axis=1) for ms in self._ms]
        # ms of the units from each on if memory were free
        fastest = [unit.fastest.extra for unit in reversed(chain.units)]
        self._rest = np.cumsum([0.0, *fastest])[::-1]
        self.price = self._best_price()
        self.before, bound = self._bound(self.price)
        self.lower_bound = max(bound, float(self._rest[0]))

    def _bound(self, price: float) -> tuple[Ms, float]:
        """Return `before` and the lower bound at a price."""
        count = len(self.chain.units)
        before, through = np.full(count + 1, np.inf), np.full(count, np.inf)
        before[0] = 0.0
        for i, unit in enumerate(self.chain.units):
            rows = len(self.segments[i])
            after = slice(i + 1, i + 1 + rows)
            paid = before[i] + price * unit.input + self.segments[i]
            before[after] = np.minimum(before[after], paid)
            # of the segments that run a unit, those that stop after it
            whole = (self._ms[i] + price * self._need[i]).min(axis=1) + self._rest[after]
            whole = before[i] + np.minimum.accumulate(whole[::-1])[::-1]
            through[i : i + rows] = np.minimum(through[i : i + rows], whole)
            for level, need in zip(unit.levels, self.kept_needs[i], strict=True):
                if need <= self.limit - self.least_kept[i]:
                    ms = before[i] + level.extra
                    before[i + 1] = min(before[i + 1], ms + price * level.kept)
                    through[i] = min(through[i], ms + price * need + self._rest[i + 1])
        return before, float(through.max() - price * self.limit)

    def _best_price(self) -> float:
        slopes = [
            level.extra + unit.forward
            for unit in self.chain.units
            for level in unit.levels
        ]
        ms = max(slopes)
        if ms == 0 or self.limit == 0:
            return 0.0
        # from nothing gained by keeping all to a millisecond's worth of layers for a byte
        low, high = math.log(ms / self.limit) - 7, math.log(ms / self.limit) + 7 + math.log(len(slopes))
        def at(x: float) -> float:
            return self._bound(math.exp(x))[1]
        a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        at_a, at_b = at(a), at(b)
        for _ in range(_ROUNDS):
            if at_a >= at_b:
                high, b, at_b = b, a, at_a
                a = high - _GOLDEN * (high - low)
                at_a = at(a)
            else:
                low, a, at_a = a, b, at_b
                b = low + _GOLDEN * (high - low)
                at_b = at(b)
        best, x = max((at_a, a), (at_b, b))
        return math.exp(x) if best > 0 else 0.0


def _least_kept(chain: Chain, longest: list[int]) -> list[int]:
    least = [0] + [np.iinfo(np.int64).max] * len(chain.units)
    for i, unit in enumerate(chain.units):
        least[i + 1] = min(least[i + 1], *(least[i] + level.kept for level in unit.levels))
        for stop in range(i + 1, i + 1 + longest[i]):
            least[stop] = min(least[stop], least[i] + unit.input)
    return least
