"""Plans for a chain: the fastest whose peak stays within a budget, and the least peak there is.

The fastest plan is found by dynamic programming over staircases (`_staircase`), cut short by
bounds (`_prices`, `_search`). Staircases hold exact bytes, so that what is found is right as it is:
`simulate` confirms it. The answer is the optimum, and `lower_bound` equal to it, unless staircases
were too long to keep; then `lower_bound` tells how far off it can be.

Related: Rotor (Herrmann et al., arXiv 1911.13214) plans chains by a dynamic program over memory
slots, with segments nested in segments; Checkmate (Jain et al., arXiv 1910.02653) any graph by an
integer program. Segments here are not nested: nothing runs more than twice, its levels aside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fusedckpt.planning.chain import Chain, Item, Keep, Outcome, Segment, simulate
from fusedckpt.planning.policies import policy
from fusedckpt.planning.prices import Prices
from fusedckpt.planning.search import Search
from fusedckpt.planning.staircase import NEVER, kept_needs, left_from, segment_levels, segments

__all__ = [
    "Solution",
    "least_bytes",
    "least_outcome",
    "least_peak",
    "may_go_lower",
    "simulated",
    "solve",
]

# chains of up to so many units may be cut into segments of any length; longer chains into
# segments of at most so many units or twice the square root of their number
_ANY_LENGTH, _LONG = 128, 64
# of longer chains, a plan this close to the lower bound will do
_NEAR = 1.001
# steps of a segment's staircase: so many over the number of units, between the two; with 16 in a
# chain of 1000 the gap to the lower bound stays below 0.1 %
_STEPS, _FEWEST, _MOST = 16384, 16, 256


@dataclass(frozen=True)
class Solution:
    """A plan, its peak in bytes and its extra ms as simulated, and ms that no plan is below.

    lower_bound: of all plans whose segments are no longer than `solve` tries.
    """

    items: tuple[Item, ...]
    peak: int
    extra: float
    lower_bound: float


def solve(chain: Chain, budget: float) -> Solution:
    """Return the fastest plan whose peak is at most `budget` bytes; math.inf sets no limit.

    Never slower than a `policy` that fits ("none", "all", "sqrt", "uniform:k" for powers of two).
    Chains of more than 128 units are cut into segments of at most 64 units, or twice the square
    root of their number if that is more, and a plan within 0.1 % of the lower bound ends the
    search. Takes about 0.1 s for 32 units, 0.6 s for 100 and 5 s for 1000.

    Raises:
        ValueError: no plan stays within `budget` (the message names the least that would do), or
            the chain holds 4 PiB or more.
    """
    _check_size(chain)
    least = simulated(chain, _least_items(chain))
    if not budget >= least.peak:
        raise ValueError(f"solve: the least feasible budget is {least.peak} bytes, got {budget}")
    return _improved(chain, budget, [least, *_by_rule(chain)])


def least_peak(chain: Chain) -> Solution:
    """Return the fastest of the plans with the least peak that any plan reaches."""
    _check_size(chain)
    least = simulated(chain, _least_items(chain))
    return _improved(chain, least.peak, [least, *_by_rule(chain)])


def least_outcome(chain: Chain) -> Outcome:
    """Return the least peak that any plan reaches, and where one is."""
    _check_size(chain)
    return simulate(chain, _least_items(chain))


def least_bytes(chain: Chain) -> int:
    """Return the least peak that any plan reaches."""
    return least_outcome(chain).peak


def may_go_lower(chain: Chain, least: Outcome) -> str:
    """Return what to do where the unit that peaks could be cut up, nothing where it could not."""
    unit = next((u for u in chain.units if least.where.endswith(f" of {u.name}")), None)
    if unit is None or not unit.composed:
        return ""
    return (
        f"units= of modules inside {unit.name} may go lower, as the peak is in its "
        + (least.where.split(" of ")[0])
    )


def _check_size(chain: Chain) -> None:
    total = chain.base + sum(
        sum((unit.input, unit.output, unit.forward_transient, unit.left))
        + sum((level.kept, level.transient, level.ending or 0))
        for unit in chain.units
        for level in unit.levels
    )
    if total >= NEVER:
        raise ValueError(f"solve: a chain of less than {NEVER} bytes was expected, got {total}")


def simulated(chain: Chain, items: tuple[Item, ...]) -> Solution:
    """Return a plan that was made otherwise, which says nothing of others."""
    outcome = simulate(chain, items)
    return Solution(items, outcome.peak, outcome.extra, 0.0)


def _by_rule(chain: Chain) -> Iterator[Solution]:
    count = sum(not unit.fixed for unit in chain.units)
    powers = (1 << i for i in range(count.bit_length()))
    for name in ("none", "all", "sqrt", *(f"uniform:{k}" for k in powers)):
        yield simulated(chain, policy(chain, name))


def _improved(chain: Chain, budget: float, known: list[Solution]) -> Solution:
    """Return the best plan within the budget, which some of the known ones keep."""
    best = min((plan for plan in known if plan.peak <= budget), key=lambda plan: plan.extra)
    search = _search(chain, int(min(budget, NEVER)) - chain.base)
    bound = min(search.prices.lower_bound, best.extra)
    near, far = bound * (1 + 1 / len(chain.units)), math.inf
    # first for a plan near the bound, which makes it quick to look for all that are better
    for target, width in ((near, 512), (far, 64), (far, 512), (far, 4096)):
        items, lost = search.run(min(target, best.extra), width)
        if items is not None:
            best = min(best, simulated(chain, items), key=lambda plan: plan.extra)
            assert best.peak <= budget, "the search and the simulator disagree"
        if target == far and not lost:
            bound = bound if search.segments.thinned else best.extra
            break
        if len(chain.units) > _ANY_LENGTH and best.extra <= _NEAR * bound:
            break
    return Solution(best.items, best.peak, best.extra, min(bound, best.extra))


def _search(chain: Chain, limit: int) -> Search:
    count = len(chain.units)
    longest = count if count <= _ANY_LENGTH else max(_LONG, 2 * math.isqrt(count))
    steps = min(_MOST, max(_FEWEST, _STEPS // count))
    rooms = _rooms(chain, limit, longest)
    made = segments(chain, longest, rooms, steps)
    below = segments(chain, longest, rooms, steps, optimistic=True) if made.thinned else made
    return Search(chain, made, Prices(chain, rooms, below))


def _rooms(chain: Chain, limit: int, longest: int) -> list[int]:
    """Return, for each unit, the limit less the least that any plan keeps before it."""
    room = np.full(len(chain.units) + 1, -1, np.int64)
    room[0] = limit
    for i, unit in enumerate(chain.units):
        after = room[i + 1 : i + 1 + longest]
        np.maximum(after, room[i] - unit.input, out=after)
        room[i + 1] = max(room[i + 1], room[i] - min(level.kept for level in unit.levels))
    return room.tolist()


def _least_items(chain: Chain) -> tuple[Item, ...]:
    """Return a plan with the least peak: first steps alone, segments of any length."""
    count, left = len(chain.units), left_from(chain)
    made = segments(chain, count, [NEVER] * count, steps=1)
    need = np.zeros(count + 1, np.int64)
    # what the best rest starts with: where that stops, and its level or -1 for a segment
    first = [(0, 0)] * count
    for i in reversed(range(count)):
        unit = chain.units[i]
        through = np.maximum(made.need[i][:, 0], unit.input + need[i + 1 :])
        row = int(through.argmin())
        ways = [(int(through[row]), i + row + 1, -1)]
        for number, own in enumerate(kept_needs(chain, left, i)):
            after = unit.levels[number].kept + int(need[i + 1])
            ways.append((max(own, after), i + 1, number))
        need[i], *choice = min(ways)
        first[i] = (choice[0], choice[1])
    items: list[Item] = []
    while (i := items[-1].stop if items else 0) < count:
        stop, number = first[i]
        if number < 0:
            room = int(made.need[i][stop - i - 1, 0])
            items.append(Segment(i, segment_levels(chain, made, i, stop, room)))
        else:
            items.append(Keep(i, chain.units[i].levels[number].name))
    return tuple(items)
