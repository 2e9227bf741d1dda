"""Plans for a chain by a rule, such as a segment for each unit."""

from __future__ import annotations

import math
from collections.abc import Collection

from fusedckpt.planning.chain import Chain, Item, Outcome, simulate


def by_rule(chain: Chain, name: str) -> Outcome:
    """Return the plan of a rule, every unit that is not checkpointed at its fastest level.

    name: "none" (nothing is checkpointed), "all" (every unit on its own), "sqrt" (at most sqrt(n)
    segments, balanced by saved bytes; Chen et al. 2016, arXiv 1604.06174) or "uniform:k" (k
    segments of equal length, but for one unit, or as many as there are units). Units that cannot be
    joined begin a segment anyway.
    """
    free = [i for i, unit in enumerate(chain.units) if not unit.fixed]
    count = len(free)
    starts = set(free)
    if name == "sqrt" and free:
        sizes = [max(1, chain.saved_at(chain.units[i], chain.units[i].fastest)) for i in free]
        starts = {free[start] for start in _balanced(sizes)}
    elif name.startswith("uniform:"):
        number = min(int(name.removeprefix("uniform:")), count)
        starts = {free[count * i // number] for i in range(number)}
    elif name not in ("none", "all", "sqrt"):
        raise ValueError(f"by_rule: expected none, all, sqrt or uniform:k, got {name!r}")
    return simulate(chain, _cut(chain, starts, saves_all=name == "none"))


def _cut(chain: Chain, starts: Collection[int], saves_all: bool) -> list[Item]:
    """Return segments that begin at `starts`, and where units cannot be joined."""
    items: list[Item] = []
    for i, unit in enumerate(chain.units):
        if unit.fixed or saves_all:
            items.append(Item(i, i + 1, unit.fastest.name))
        elif items and items[-1].level is None and i not in starts and unit.joined:
            items[-1] = Item(items[-1].start, i + 1)
        else:
            items.append(Item(i, i + 1))
    return items


def _balanced(sizes: list[int]) -> list[int]:
    """Return where about sqrt(n) segments start so that the largest is as small as can be."""

    def packed(capacity: int) -> list[int]:
        starts = [0]
        filled = 0
        for i, size in enumerate(sizes):
            if filled + size > capacity:
                starts.append(i)
                filled = 0
            filled += size
        return starts

    low = max(sizes)
    high = sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(packed(middle)) <= math.isqrt(len(sizes)):
            high = middle
        else:
            low = middle + 1
    return packed(high)
