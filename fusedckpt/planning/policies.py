"""Plans by rule, which look at no budget."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from fusedckpt.planning.chain import Chain, Item, Keep, Segment

__all__ = ["balanced", "by_rule", "policy"]


def policy(chain: Chain, name: str) -> tuple[Item, ...]:
    """Return the plan of a rule, every unit that is not checkpointed at its fastest level.

    Args:
        chain: the units.
        name: "none" (nothing is checkpointed), "all" (every unit on its own), "sqrt" (at most
            sqrt(n) segments, balanced by saved bytes; Chen et al. 2016, arXiv 1604.06174) or
            "uniform:k" (k segments of equal length, but for one unit).

    Units that cannot be joined begin a segment anyway.

    Raises:
        ValueError: `name` is none of these, or k is not between 1 and the number of units.
    """
    free = [i for i, unit in enumerate(chain.units) if not unit.fixed]
    count = len(free)
    if name == "none" or not free:
        return tuple(Keep(i, unit.fastest.name) for i, unit in enumerate(chain.units))
    if name == "all":
        return _cut(chain, free)
    if name == "sqrt":
        sizes = [max(1, chain.units[i].saved(chain.units[i].fastest)) for i in free]
        return _cut(chain, [free[start] for start in balanced(sizes)])
    rule, _, number = name.partition(":")
    if rule != "uniform" or not number.isdecimal() or not 1 <= int(number) <= count:
        raise ValueError(f"policy: none, all, sqrt or uniform:1 to {count} expected, got {name!r}")
    return _cut(chain, [free[count * i // int(number)] for i in range(int(number))])


def by_rule(chain: Chain) -> Iterator[tuple[Item, ...]]:
    """Yield the plans of all rules, "uniform:k" for powers of two."""
    count = sum(not unit.fixed for unit in chain.units)
    powers = (1 << i for i in range(count.bit_length()))
    for name in ("none", "all", "sqrt", *(f"uniform:{k}" for k in powers)):
        yield policy(chain, name)


def _cut(chain: Chain, starts: Collection[int]) -> tuple[Item, ...]:
    """Return segments that begin at `starts`, and where units cannot be joined."""
    items: list[Item] = []
    for i, unit in enumerate(chain.units):
        last = items[-1] if items else None
        if unit.fixed:
            items.append(Keep(i, unit.fastest.name))
        elif isinstance(last, Segment) and i not in starts and unit.joined:
            items[-1] = Segment(last.start, i + 1)
        else:
            items.append(Segment(i, i + 1))
    return tuple(items)


def balanced(sizes: list[int]) -> list[int]:
    """Return where about sqrt(n) segments start so that the largest is as small as can be."""
    few, enough = max(sizes), sum(sizes)
    while few < enough:
        middle = (few + enough) // 2
        if len(_packed(sizes, middle)) <= math.isqrt(len(sizes)):
            enough = middle
        else:
            few = middle + 1
    return _packed(sizes, enough)


def _packed(sizes: list[int], capacity: int) -> list[int]:
    starts, filled = [0], 0
    for i, size in enumerate(sizes):
        if filled + size > capacity:
            starts.append(i)
            filled = 0
        filled += size
    return starts
