"""Pareto frontiers: the least extra time of a stretch of a chain for the bytes that it may use.

What is kept earlier adds the same bytes to every moment of what comes later. So a way to run a
stretch comes down to its need (its peak beyond all that was kept before it) and its ms, and the
ways worth knowing are those where more bytes buy less time. Bytes stay exact integers: on a grid,
a chain of n equal layers can be off by n slots. A frontier that is too long is thinned instead,
and as each way that is left is a real one, no error adds up along the chain.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["NEVER", "Bytes", "Frontier", "Ms", "pareto", "promising", "thinned", "way"]

Bytes = NDArray[np.int64]
Ms = NDArray[np.float64]

# more bytes than there are; a thousand times that still fits into an int64
NEVER = 1 << 52


class Frontier(NamedTuple):
    """Ways to run a stretch, along the last axis: need rises, ms falls.

    The first is none at all, of ms inf, for all that have less than the least need.
    """

    need: Bytes
    ms: Ms

    def row(self, number: int) -> Frontier:
        """Return one of several frontiers."""
        return Frontier(self.need[number], self.ms[number])

    def at(self, room: int | Bytes) -> Ms:
        """Return the least ms within `room` bytes, of a single frontier."""
        return self.ms[self.need.searchsorted(room, "right") - 1]


def way(need: int) -> Frontier:
    """Return the frontier of a single way, which takes no ms."""
    return Frontier(np.array([-NEVER, need]), np.array([np.inf, 0.0]))


def pareto(need: Bytes, ms: Ms, limit: int) -> Frontier:
    """Return the frontier of each row of points in any order that need no more than the limit."""
    order = np.argsort(need, axis=1, kind="stable")
    need, ms = np.take_along_axis(need, order, 1), np.take_along_axis(ms, order, 1)
    # faster than all that need no more; where two need the same, both may stay
    before = np.minimum.accumulate(ms, axis=1)[:, :-1]
    better = np.hstack((np.isfinite(ms[:, :1]), ms[:, 1:] < before)) & (need <= limit)
    start = need.shape[1] - int(better.sum(axis=1).max())
    need = np.sort(np.where(better, need, -NEVER), axis=1)[:, start:]
    ms = np.sort(np.where(better, ms, np.inf), axis=1)[:, ::-1][:, start:]
    none = np.full((len(need), 1), -NEVER)
    return Frontier(np.hstack((none, need)), np.hstack((np.full(none.shape, np.inf), ms)))


def thinned(ways: Frontier, steps: int, optimistic: bool) -> Frontier:
    """Return so many ways of each row, evenly, the least need and the least ms among them.

    Where optimistic, each is as fast as the last of those that are left out behind it.
    """
    counts = np.isfinite(ways.ms).sum(axis=1, keepdims=True)
    columns, width = np.arange(steps), ways.ms.shape[1]
    spread = width - counts + columns * (counts - 1) // max(steps - 1, 1)
    chosen = fastest = np.where(counts > steps, spread, width - steps + columns)
    if optimistic:
        until = np.hstack((chosen[:, 1:] - 1, np.full_like(counts, width - 1)))
        fastest = np.where(counts > steps, until, chosen)
    # after the column of none
    chosen, fastest = (np.pad(columns, ((0, 0), (1, 0))) for columns in (chosen, fastest))
    need = np.take_along_axis(ways.need, chosen, axis=1)
    return Frontier(need, np.take_along_axis(ways.ms, fastest, axis=1))


def promising(value: Ms, width: int) -> NDArray[np.intp]:
    """Choose from a frontier the first way, the best half, and the best of each of many groups.

    The best alone may all need too much for units before, to which the multiplier is blind.
    """
    # none at all, and the least need
    value[:2] = -np.inf
    half = width // 2
    group = np.arange(len(value)) * half // len(value)
    order = np.lexsort((value, group))
    groups = order[np.unique(group, return_index=True)[1]]
    return np.unique(np.concatenate(([0, 1], np.argpartition(value, half)[:half], groups)))
