"""A lower bound on the extra time of plans within a limit, by putting a price on a byte.

In a plan within the limit, what is kept before the item that runs a given unit and what that item
needs are together at most the limit. So at a price of p ms per byte its time is at least that of
the plan least in ms + p * (kept + need - limit): a shortest path along the chain (Lagrange's
bound). Every unit and every price give one; the largest of them is the bound.
"""

from __future__ import annotations

import math

import numpy as np

from fusedckpt.planning.chain import Chain
from fusedckpt.planning.staircase import Ms, Segments, kept_needs, left_from

__all__ = ["Prices"]

_GOLDEN = (math.sqrt(5) - 1) / 2
# each narrows the price by 0.618, from a range of a factor of 10^9 or so to 10^-5
_ROUNDS = 30


class Prices:
    """What a byte is worth to plans of a chain made of kept units and `optimistic` segments.

    rooms: for each unit, how many bytes there are at most for all from it on; the first is the
        limit.
    price: ms per byte. lower_bound: ms that every plan takes at least.
    before: the least ms + price * kept of the units before each.
    segments: for each first unit the least ms of segments of 1, 2, ... units, inf if none fits.
    kept_needs: what each unit needs at each of its levels.
    """

    def __init__(self, chain: Chain, rooms: list[int], optimistic: Segments):
        self.chain, self.rooms, self.limit = chain, rooms, rooms[0]
        left = left_from(chain)
        self.kept_needs = [kept_needs(chain, left, i) for i in range(len(chain.units))]
        self._need, self._ms = optimistic.need, optimistic.ms
        self.segments = [ms.min(axis=1) for ms in self._ms]
        # ms of all units from one on, were memory free
        fastest = [min(x.extra for x in unit.levels) for unit in reversed(chain.units)]
        self._rest = np.cumsum([0.0, *fastest])[::-1]
        self.price = self._best_price()
        self.before, bound = self._at(self.price)
        self.lower_bound = max(bound, float(self._rest[0]))

    def _best_price(self) -> float:
        """Search the logarithm of the price by golden sections."""
        unit_ms = max(u.again + level.extra for u in self.chain.units for level in u.levels)
        if unit_ms == 0 or self.limit == 0:
            return 0.0
        # from a thousandth of a unit's time for all the memory to the time of a thousand chains
        low = math.log(unit_ms / self.limit) - math.log(1e3)
        high = low + math.log(1e6 * len(self.chain.units))
        a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        at_a, at_b = self._at(math.exp(a))[1], self._at(math.exp(b))[1]
        for _ in range(_ROUNDS):
            if at_a >= at_b:
                high, b, at_b = b, a, at_a
                a = high - _GOLDEN * (high - low)
                at_a = self._at(math.exp(a))[1]
            else:
                low, a, at_a = a, b, at_b
                b = low + _GOLDEN * (high - low)
                at_b = self._at(math.exp(b))[1]
        best, price = max((at_a, math.exp(a)), (at_b, math.exp(b)))
        return price if best > self._rest[0] else 0.0

    def _at(self, price: float) -> tuple[Ms, float]:
        """Return `before` and the lower bound at a price."""
        count = len(self.chain.units)
        before, through = np.full(count + 1, np.inf), np.full(count, np.inf)
        before[0] = 0.0
        for i, unit in enumerate(self.chain.units):
            rows = len(self.segments[i])
            after, run = slice(i + 1, i + 1 + rows), slice(i, i + rows)
            paid = before[i] + price * unit.input + self.segments[i]
            before[after] = np.minimum(before[after], paid)
            whole = (self._ms[i] + price * self._need[i]).min(axis=1) + self._rest[after]
            # a unit is run by every segment that stops after it
            longer = before[i] + np.minimum.accumulate(whole[::-1])[::-1]
            through[run] = np.minimum(through[run], longer)
            for level, need in zip(unit.levels, self.kept_needs[i], strict=True):
                if need <= self.rooms[i]:
                    ms = before[i] + level.extra
                    before[i + 1] = min(before[i + 1], ms + price * level.kept)
                    through[i] = min(through[i], ms + price * need + self._rest[i + 1])
        return before, float(through.max() - price * self.limit)
