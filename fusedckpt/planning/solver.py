"""Plans for a chain: the fastest whose peak stays within a budget, and the least peak there is.

`search` finds them, and `simulate` confirms what is found. Where nothing was dropped on the way
but what cannot beat the best plan, the plan found is the optimum, and `lower_bound` equal to it;
else `lower_bound` tells how far off it can be.

Related: Rotor (Herrmann et al., arXiv 1911.13214) plans chains by a dynamic program over memory
slots, with segments nested in segments; Checkmate (Jain et al., arXiv 1910.02653) any graph by an
integer program. The search nests no segments: nothing runs more than twice, its levels aside. The
rule "recursive" does, and goes below.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from fusedckpt.planning.chain import Chain, Outcome, simulate
from fusedckpt.planning.pareto import NEVER
from fusedckpt.planning.policies import by_rule, policy
from fusedckpt.planning.search import Search

__all__ = ["least_outcome", "least_peak", "may_go_lower", "solve"]

# chains of up to so many units may be cut into segments of any length; longer chains into
# segments of at most so many units or twice the square root of their number
_ANY_LENGTH, _LONG = 128, 64
# of longer chains, a plan this close to the lower bound will do
_NEAR = 1.001
# ways of a segment: so many over the number of units, and no fewer than these; with 16 in a chain
# of 1000 the gap to the lower bound stays below 0.1 %
_STEPS, _FEWEST = 16384, 16
# what is asked again while a plan is made and printed
_RECENT = 8
# ways of the rest of the chain, search after search: each makes the next one quicker
_WIDTHS = (64, 512, 4096)


@lru_cache(_RECENT)
def solve(chain: Chain, budget: float) -> Outcome:
    """Return the fastest plan whose peak is at most `budget` bytes; math.inf sets no limit.

    Its `lower_bound` is of all plans whose segments are no longer than are tried here and do not
    nest; where units need more than 16 different amounts to run, a plan may lie below it all the
    same. The plan is never slower than a `policy` that fits ("none", "all", "sqrt", "recursive",
    "uniform:k" for powers of two).

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


@lru_cache(_RECENT)
def least_outcome(chain: Chain) -> Outcome:
    """Return a plan with the least peak: of each item alone, the least need is enough.

    Of plans with nested segments, that of the rule alone.
    """
    total = chain.base + sum(
        sum((unit.input, unit.output, unit.forward_transient, unit.left))
        + sum((level.kept, level.transient, level.ending or 0))
        for unit in chain.units
        for level in unit.levels
    )
    if total >= NEVER:
        raise ValueError(f"solve: a chain of less than {NEVER} bytes was expected, got {total}")
    search = Search(chain, NEVER, len(chain.units), steps=1)
    found = simulate(chain, search.items(search.least()))
    return min(found, simulate(chain, policy(chain, "recursive")), key=lambda plan: plan.peak)


def may_go_lower(chain: Chain, least: Outcome) -> str:
    """Return what to do where the unit that peaks could be cut up, nothing where it could not."""
    unit = next((u for u in chain.units if least.where.endswith(f" of {u.name}")), None)
    if unit is None or not unit.composed:
        return ""
    return (
        f"units= of modules inside {unit.name} may go lower, as the peak is in its "
        + (least.where.split(" of ")[0])
    )


def _fastest(chain: Chain, budget: float, least: Outcome) -> Outcome:
    """Return the best plan within the budget, which the one with the least peak keeps."""
    rules = (simulate(chain, items) for items in by_rule(chain))
    known = [least, *(plan for plan in rules if plan.peak <= budget)]
    best = min(known, key=lambda plan: plan.extra)
    count, limit = len(chain.units), int(min(budget, NEVER)) - chain.base
    longest = count if count <= _ANY_LENGTH else max(_LONG, 2 * math.isqrt(count))
    search = Search(chain, limit, longest, max(_FEWEST, _STEPS // count))
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
