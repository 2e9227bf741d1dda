"""Staircases: the least extra time of a stretch of a chain, as a function of the bytes it may use.

What is kept earlier adds the same bytes to every moment of what comes later. So a way to run a
stretch comes down to its need (its peak beyond all that was kept before it) and its time, and the
ways worth knowing are the points where more bytes begin to buy a shorter time. A unit that keeps k
bytes and needs n, put in front of a stretch, makes one that needs k + max(n, need). Everything
here and in `solver` follows from that one step.

Bytes stay exact integers: on a grid, a chain of n equal layers can be off by n slots. A staircase
with too many steps is thinned instead, and as each that is left is a real way to run the stretch,
no error adds up along the chain.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusedckpt.planning.chain import Chain, Unit, forward_of

__all__ = ["NEVER", "Bytes", "Ms", "Segments", "kept_needs", "left_from", "pareto", "segments"]

Bytes = NDArray[np.int64]
Ms = NDArray[np.float64]

# more bytes than there are; a thousand times that still fits into an int64
NEVER = 1 << 52


class Segments(NamedTuple):
    """Staircases of checkpointed segments, a list by first unit; row r holds that of r + 1 units.

    need, ms: [rows, steps]; within a row need rises and ms falls, then come NEVER and inf.
    inner_need, inner_ms: the same for units that end a segment which began earlier.
    thinned: whether any row lost steps.
    """

    need: list[Bytes]
    ms: list[Ms]
    inner_need: list[Bytes]
    inner_ms: list[Ms]
    thinned: bool


def segments(
    chain: Chain, longest: int, rooms: list[int], steps: int, optimistic: bool = False
) -> Segments:
    """Build the staircases of all segments of at most `longest` units.

    Args:
        chain: the units.
        longest: how many units a segment has at most.
        rooms: for each unit, how many bytes there are at most for all from it on.
        steps: rows of more are thinned to that many of their steps, always with the least need.
        optimistic: thin to steps on or below the row instead, which bound the time from below.
    """
    count, left = len(chain.units), left_from(chain)
    out: list[tuple[Bytes, Ms, Bytes, Ms]] = []
    need, ms, flowing = np.zeros((0, 1), np.int64), np.zeros((0, 1)), np.zeros(0, np.int64)
    thinned = False
    for i in reversed(range(count)):
        unit, stops = chain.units[i], np.arange(i + 1, min(i + longest, count) + 1)
        need = _with_row(need, 0, NEVER)[: len(stops)]
        ms = _with_row(ms, -unit.tail, np.inf)[: len(stops)]
        flowing = _flowing_needs(chain, i, flowing)[: len(stops)]
        floors = _again_needs(chain, left, i, stops)
        first_need, first_ms = _extended(unit, floors, unit.input, need, ms)
        running = unit.input + np.maximum(unit.forward_transient, flowing)
        first_need = np.maximum(first_need, running[:, None])
        first_ms = np.where(first_need <= rooms[i], first_ms, np.inf)
        first_need, first_ms, cut = _thinned(first_need, first_ms, steps, optimistic)
        need, ms = _extended(unit, floors, 0, need, ms)
        ms = np.where(need <= rooms[i], ms, np.inf)
        need, ms, cut_inner = _thinned(need, ms, steps, optimistic)
        out.append((first_need, first_ms, need, ms))
        thinned |= cut or cut_inner
    first_needs, first_times, needs, times = map(list, zip(*reversed(out), strict=True))
    return Segments(first_needs, first_times, needs, times, thinned)


def segment_levels(chain: Chain, of: Segments, start: int, stop: int, room: int) -> tuple[str, ...]:
    """Return the level of each unit of a segment that may use `room` bytes beyond what is kept."""
    left, names = left_from(chain), []
    for i in range(start, stop):
        unit = chain.units[i]
        floors = _again_needs(chain, left, i, np.array([stop]))
        found = (np.inf, 0, "")
        for level, floor in zip(unit.levels, floors, strict=True):
            after = room - (max(level.held, unit.input) if i == start else level.held)
            if floor[0] <= after:
                ms = level.extra
                if i + 1 < stop:
                    row = stop - i - 2
                    ms += lookup(of.inner_need[i + 1][row], of.inner_ms[i + 1][row], after)
                found = min(found, (ms, -after, level.name))
        assert found[0] < np.inf, "a segment was given less room than it needs"
        room = -found[1]
        names.append(found[2])
    return tuple(names)


def lookup(need: Bytes, ms: Ms, room: int) -> float:
    """Return the time of a staircase at `room` bytes, inf where that is too little."""
    step = int(np.searchsorted(need, room, "right")) - 1
    return float(ms[step]) if step >= 0 else np.inf


def left_from(chain: Chain) -> Bytes:
    """Return the bytes that units i and later leave behind, for i up to their number."""
    left = [0, *(unit.left for unit in reversed(chain.units))]
    return np.cumsum(left, dtype=np.int64)[::-1]


def kept_needs(chain: Chain, left: Bytes, i: int) -> list[int]:
    """Return what keeping unit i at each of its levels needs."""
    unit = chain.units[i]
    after = int(left[i + 1])
    return [
        level.kept + max(forward_of(unit, level), level.transient + after) for level in unit.levels
    ]


def _again_needs(chain: Chain, left: Bytes, i: int, stops: NDArray[np.int64]) -> list[Bytes]:
    """Return what unit i of segments with these stops needs beyond what they hold, per level."""
    unit = chain.units[i]
    if unit.fixed:
        # no bytes suffice
        return [np.full(len(stops), NEVER) for _ in unit.levels]
    dy = np.array([chain.units[stop - 1].output for stop in stops], np.int64)
    again = unit.forward_transient + dy + left[stops]
    floors = [np.maximum(again, level.transient + left[i + 1]) for level in unit.levels]
    for floor, level in zip(floors, unit.levels, strict=True):
        if level.nested:
            floor[:] = NEVER
        elif level.ending is not None:
            floor[stops == i + 1] = level.ending + left[i + 1]
    return floors


def _flowing_needs(chain: Chain, i: int, later: Bytes) -> Bytes:
    """Return what the forward of segments from unit i needs beyond their input, but for unit i.

    `later` is that of segments from unit i + 1; the output of the unit before is live.
    """
    if len(later) == 0:
        return np.zeros(1, np.int64)
    second = chain.units[i].output + chain.units[i + 1].forward_transient
    return np.concatenate(([0], np.maximum(later, second)))


def _with_row(rows: NDArray, value: float, padding: float) -> NDArray:
    """Put a row in front, for the segment that ends with the unit that is being added."""
    row = np.full((1, rows.shape[1]), padding, rows.dtype)
    row[0, 0] = value
    return np.vstack((row, rows))


def _extended(
    unit: Unit, floors: list[Bytes], at_least: int, need: Bytes, ms: Ms
) -> tuple[Bytes, Ms]:
    """Put a unit, at each of its levels, in front of stretches; steps come in no order."""
    needs = [
        max(level.held, at_least) + np.maximum(floor[:, None], need)
        for level, floor in zip(unit.levels, floors, strict=True)
    ]
    times = [ms + (unit.again + level.extra) for level in unit.levels]
    return np.hstack(needs), np.hstack(times)


def _thinned(need: Bytes, ms: Ms, steps: int, optimistic: bool) -> tuple[Bytes, Ms, bool]:
    """Sort points into staircases, row by row, of at most `steps` steps; tell if any were lost."""
    # the fastest of those that need no more; where two need the same, both may stay
    need, ms = _taken(need, ms, np.argsort(need, axis=1, kind="stable"))
    before = np.minimum.accumulate(ms, axis=1)[:, :-1]
    step = np.hstack((np.isfinite(ms[:, :1]), ms[:, 1:] < before))
    counts = step.sum(axis=1, keepdims=True)
    width = max(1, int(counts.max()))
    need, ms = _taken(need, ms, np.argsort(~step, axis=1, kind="stable")[:, :width])
    columns = np.arange(need.shape[1])
    need, ms = np.where(columns < counts, need, NEVER), np.where(columns < counts, ms, np.inf)
    if len(columns) <= steps:
        return need, ms, False
    # evenly, both ends among them
    spread = columns[:steps] * (counts - 1) // max(steps - 1, 1)
    chosen = np.where(counts > steps, spread, columns[:steps])
    if optimistic:
        # as fast as the last of those that are left out
        until = np.hstack((chosen[:, 1:] - 1, np.full_like(counts, len(columns) - 1)))
        until = np.where(counts > steps, np.minimum(until, counts - 1), chosen)
        return _taken(need, ms, chosen)[0], np.take_along_axis(ms, until, axis=1), True
    return *_taken(need, ms, chosen), True


def _taken(need: Bytes, ms: Ms, order: NDArray[np.intp]) -> tuple[Bytes, Ms]:
    return np.take_along_axis(need, order, axis=1), np.take_along_axis(ms, order, axis=1)


def pareto(need: Bytes, ms: Ms) -> NDArray[np.intp]:
    """Return the steps of one staircase, by rising need, as indices of points in any order."""
    order = np.lexsort((ms, need))
    falling = ms[order]
    fastest = np.minimum.accumulate(falling)
    return order[np.concatenate(([True], falling[1:] < fastest[:-1]))]
