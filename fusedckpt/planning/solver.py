"""Plans for a chain: the fastest with a peak within a budget, and the least peak there is.

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
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusedckpt.planning.chain import Chain, Item, Keep, Outcome, Segment, Unit, simulate
from fusedckpt.planning.policies import by_rule

__all__ = ["least_peak", "may_go_lower", "solve"]

# chains of up to so many units may be cut into segments of any length; longer chains into segments
# of at most so many units, or twice the square root of their number
_ANY_LENGTH, _LONG = 128, 64
# of longer chains, a plan this close to the lower bound will do
_NEAR = 1.001
# ways of the rest of the chain, one search after the other: each makes the next one quicker
_WIDTHS = (64, 512, 4096)
# halvings of the range of the multiplier, a factor of 10^12
_HALVINGS = 18
# more bytes than there are; a thousand times that still fits into an int64
_NEVER = 1 << 52
_NONE: list[Any] = [np.zeros(0, np.int64)] * 4 + [np.zeros(0)]
# chains that are solved again while a plan is made and printed
_RECENT = 8

Bytes = NDArray[np.int64]
Ms = NDArray[np.float64]


class _Starts(NamedTuple):
    """The items that may start at a unit: its levels, then segments of 1, 2, ... units.

    stop: where each stops. kept: bytes that it adds until its backward. need: its own peak. ms: its
    extra time.
    """

    stop: NDArray[np.int64]
    kept: Bytes
    need: Bytes
    ms: Ms


def _starts_of(chain: Chain, longest: int) -> list[_Starts]:
    """Return the items that may start at each unit, with segments of up to `longest` units."""
    found: list[_Starts] = []
    # of the segments that start behind the unit, by their ends: peaks of forwards behind the first
    # unit, of recomputes and backwards; live bytes when the gradient arrives; bytes of inputs that
    # are not kept; ms
    ways = _NONE
    for i, unit in reversed([*enumerate(chain.units)]):
        after = chain.units[i + 1] if i + 1 < len(chain.units) else None
        ways = _NONE if after is None or not after.joined else _prepended(chain, unit, after, ways)
        if unit.again is None:
            ways = _NONE
        else:
            alone = [unit.between], [unit.again.backward], [unit.arrives], [0], [unit.again.extra]
            pairs = zip(alone, ways, strict=True)
            ways = [np.concatenate((a, b[: longest - 1])) for a, b in pairs]
        forward, backward, _, freed, ms = ways
        first = 0 if unit.again is None else unit.again.forward
        levels = unit.levels
        own = [max(x.forward, unit.between + x.kept, x.backward) for x in levels]
        stop = np.concatenate(([i + 1] * len(levels), i + 1 + np.arange(len(ms))))
        kept = np.concatenate(([x.kept for x in levels], -freed))
        need = np.concatenate((own, np.maximum(np.maximum(forward, backward), first)))
        ms = np.concatenate(([x.extra for x in levels], ms))
        stop, kept, need = (x.astype(np.int64) for x in (stop, kept, need))
        found.append(_Starts(stop, kept, need, ms))
    return found[::-1]


def _prepended(chain: Chain, unit: Unit, after: Unit, ways: list[Any]) -> list[Any]:
    """Put a unit before segments; after: the unit that was their first."""
    forward, backward, live, freed, ms = ways
    assert after.again is not None
    first, live = max(unit.between, after.again.forward), live - after.freed
    runs, saves = unit.inside.forward - unit.begin, chain.saves(unit)
    backward = np.maximum(np.maximum(backward + saves, live + runs), unit.inside.backward)
    return [
        np.maximum(forward - after.freed, first), backward, live, freed + after.freed,
        ms + unit.rerun_ms,
    ]  # fmt: skip


class _Search:
    """Plans of a chain that need no more than a limit."""

    def __init__(self, starts: list[_Starts], limit: int):
        self._starts, self._limit = starts, limit

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
        self.before[0] = 0.0
        # the fewest bytes that items before a unit keep, which may be below 0
        fewest = np.full(len(rest), _NEVER)
        fewest[0] = 0
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
            bounds.append(np.maximum(alone, ms + multiplier * kept + rest[stop]))
            # at the last unit nothing is behind
            bounds[-1] = np.where(stop == len(self._starts), alone, bounds[-1])
            rest[i] = bounds[-1].min()
        return rest, bounds[::-1]

    def run(self, best: float, width: int) -> tuple[list[tuple[Bytes, Ms]], bool]:
        """Return the ways from each unit on of plans that take less than `best` ms: need and ms.

        Keeps at most `width` ways at a unit, and tells whether any was lost for that.
        """
        lost, rest = False, [(np.full(1, -_NEVER), np.zeros(1))] * (len(self._starts) + 1)
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
                order = np.lexsort((value, np.arange(len(value)) * width // len(value)))
                chosen = np.unique(np.arange(len(value)) * width // len(value), return_index=True)[
                    1
                ]
                need, ms = need[np.sort(order[chosen])], ms[np.sort(order[chosen])]
            rest[i] = need, ms
        return rest, lost

    def least(self) -> list[tuple[Bytes, Ms]]:
        """Return the least need from each unit on, as the only way there."""
        rest = [(np.full(1, -_NEVER), np.zeros(1))] * (len(self._starts) + 1)
        for i in reversed(range(len(self._starts))):
            stop, kept, own, extra = self._starts[i]
            needs = np.maximum(own, kept + np.array([rest[k][0][0] for k in stop]))
            row = int(np.argmin(needs))
            rest[i] = needs[row : row + 1], rest[stop[row]][1] + extra[row]
        return rest

    def items(self, chain: Chain, rest: list[tuple[Bytes, Ms]]) -> tuple[Item, ...]:
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
            is_level = row < len(levels)
            items.append(Keep(i, levels[row].name) if is_level else Segment(i, int(stop[row])))
            i, room = int(stop[row]), room - int(kept[row])
        return tuple(items)


def _at(ways: tuple[Bytes, Ms], room: int) -> float:
    """Return the least ms of ways that need no more than `room`."""
    found = ways[0].searchsorted(room, "right") - 1
    return float(ways[1][found]) if found >= 0 else math.inf


def _pareto(need: Bytes, ms: Ms) -> tuple[Bytes, Ms]:
    """Return the ways that are faster than all that need no more, by need."""
    order = np.lexsort((ms, need))
    need, ms = need[order], ms[order]
    before = np.concatenate(([np.inf], np.minimum.accumulate(ms)[:-1]))
    return need[ms < before], ms[ms < before]


def solve(chain: Chain, budget: float) -> Outcome:
    """Return the fastest plan with a peak of at most `budget` bytes; math.inf sets no limit.

    It is never slower than a `policy` that fits ("none", "all", "sqrt", "uniform:k" for powers of
    two). Segments of chains of more than 128 units have at most 64 units, or twice the square root
    of their number, and a plan within 0.1 % of the lower bound ends the search.

    Raises:
        ValueError: no plan stays within `budget` (the message names the least that would do), or
            the chain holds 4 PiB or more.
    """
    least = _lowest(chain)
    if not budget >= least.peak:
        raise ValueError(f"solve: the least feasible budget is {least.peak} bytes, got {budget}")
    return _fastest(chain, int(min(budget, _NEVER)), least)


def least_peak(chain: Chain) -> Outcome:
    """Return the fastest of the plans with the least peak of all."""
    least = _lowest(chain)
    return _fastest(chain, least.peak, least)


@lru_cache(_RECENT)
def _lowest(chain: Chain) -> Outcome:
    """Return a plan with the least peak."""
    sizes = [
        x for unit in chain.units for level in unit.levels for x in (level.forward, level.kept)
    ]
    if sum(map(abs, sizes)) >= _NEVER:
        raise ValueError(f"solve: a chain of less than {_NEVER} bytes was expected")
    search = _Search(_starts_of(chain, len(chain.units)), _NEVER)
    return simulate(chain, search.items(chain, search.least()))


@lru_cache(_RECENT)
def _fastest(chain: Chain, budget: int, least: Outcome) -> Outcome:
    """Return the best plan within a budget, which the one with the least peak keeps."""
    count = len(chain.units)
    longest = count if count <= _ANY_LENGTH else max(_LONG, 2 * math.isqrt(count))
    search = _Search(_starts_of(chain, longest), budget)
    rules = [simulate(chain, items) for items in by_rule(chain)]
    known = [least, *(plan for plan in rules if plan.peak <= budget)]
    best = min(known, key=lambda plan: plan.extra)
    bound = search.find_multiplier()
    for width in _WIDTHS:
        rest, lost = search.run(best.extra, width)
        if len(rest[0][1]):
            best = min(best, simulate(chain, search.items(chain, rest)), key=lambda x: x.extra)
            assert best.peak <= budget, "the search and the simulator disagree"
        if not lost:
            bound = best.extra
            break
        if count > _ANY_LENGTH and best.extra <= _NEAR * bound:
            break
    return replace(best, lower_bound=min(bound, best.extra))


def may_go_lower(chain: Chain, least: Outcome) -> str:
    """Return advice where the unit of the peak could be cut up, nothing where it could not."""
    unit = next((u for u in chain.units if least.where.endswith(f" of {u.name}")), None)
    if unit is None or not unit.composed:
        return ""
    return (
        f"units= of modules inside {unit.name} may go lower, as the peak is in its "
        + (least.where.split(" of ")[0])
    )
