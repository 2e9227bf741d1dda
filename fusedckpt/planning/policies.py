"""Plans by rule: what one can do without looking at a budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from fusedckpt.checkpointing.sequential import Span, halves
from fusedckpt.planning.chain import Chain, Item, Keep, Segment

__all__ = ["balanced", "by_rule", "policy"]


def policy(chain: Chain, name: str) -> tuple[Item, ...]:
    """Return the plan of a rule that looks at no budget, every unit at its fastest level.

    Args:
        chain: what is planned.
        name: "none" (nothing is checkpointed), "all" (every unit on its own), "sqrt" (at most
            sqrt(n) segments, balanced by kept bytes; Chen et al. 2016, arXiv 1604.06174),
            "recursive" (the first half, the first half of the rest and so on, and the same within
            each) or "uniform:k" (k segments of equal length, but for one unit).

    Fixed units cut the chain: what is between two of them is halved on its own. As
    `checkpoint_sequential` does, "recursive" checkpoints the last unit of such a stretch, too: what
    it keeps would add to all that comes behind it, the head and the loss at the very least.

    Raises:
        ValueError: `name` is none of these, or k is not between 1 and the number of units.
    """
    free = [i for i, unit in enumerate(chain.units) if not unit.fixed]
    count = len(free)
    if name == "none" or not free:
        return _cut(chain, None)
    if name == "all":
        return _cut(chain, free)
    if name == "sqrt":
        starts = balanced([chain.units[i].fastest.kept for i in free])
        return _cut(chain, [free[start] for start in starts])
    if name == "recursive":
        return tuple(_halved(chain))
    rule, _, number = name.partition(":")
    if rule != "uniform" or not number.isdecimal() or not 1 <= int(number) <= count:
        raise ValueError(
            f"policy: none, all, sqrt, recursive or uniform:1 to {count} expected, got {name!r}"
        )
    return _cut(chain, [free[count * i // int(number)] for i in range(int(number))])


def by_rule(chain: Chain) -> Iterator[tuple[Item, ...]]:
    """Yield the plans of all rules, "uniform:k" for powers of two."""
    count = sum(not unit.fixed for unit in chain.units)
    powers = (1 << i for i in range(count.bit_length()))
    for name in ("none", "all", "sqrt", "recursive", *(f"uniform:{k}" for k in powers)):
        yield policy(chain, name)


def _cut(chain: Chain, starts: Sequence[int] | None) -> tuple[Item, ...]:
    """Return segments that start there, cut by fixed units; None for none."""
    begins = set(starts or ())
    items: list[Item] = []
    for i, unit in enumerate(chain.units):
        level, last = unit.fastest.name, items[-1] if items else None
        if unit.fixed or starts is None:
            items.append(Keep(i, level))
        elif isinstance(last, Segment) and i not in begins:
            items[-1] = Segment(last.start, (*last.levels, level))
        else:
            items.append(Segment(i, (level,)))
    return tuple(items)


def _halved(chain: Chain) -> Iterator[Item]:
    """Yield nested segments of the units between fixed ones, and these as they are."""
    for is_fixed, group in groupby(range(len(chain.units)), lambda i: chain.units[i].fixed):
        numbers = [*group]
        if is_fixed:
            yield from (Keep(i, chain.units[i].fastest.name) for i in numbers)
        else:
            yield from _nested(chain, numbers[0], halves(len(numbers)))


def _nested(chain: Chain, first: int, spans: Sequence[Span]) -> Iterator[Item]:
    for start, stop, within in ((first + a, first + b, within) for a, b, within in spans):
        levels = tuple(unit.fastest.name for unit in chain.units[start:stop])
        if within is None:
            yield Segment(start, levels)
        elif isinstance(within, list):
            yield Segment(start, levels, tuple(_nested(chain, start, within)))
        else:
            yield Keep(start, *levels)


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
