"""The items of a plan that may start at each unit of a chain, with their bytes and ms.

The solver chooses between these. They are made from the last unit to the first: the segments that
start at a unit are the unit alone, and the unit before each segment that starts behind it.

A constant that several units get lives until the backward of the first that saves it, so the needs
of items depend on the items before them. Such a chain has several places for each unit: one for
each set of these constants that items before it may save.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusedckpt.planning.chain import Chain, Item, Unit

Bytes = NDArray[np.int64]
Ms = NDArray[np.float64]


# negated, less than any peak: of code that an item does not run
_NO_PEAK = 1 << 50


class Starts(NamedTuple):
    """The items that may start at a place: levels of its unit, then segments of 1, 2, ... units.

    The same segments with offloaded inputs follow, where the chain has any.
    """

    # the place at which each stops; behind the last one there is nothing
    stop: NDArray[np.int64]
    # bytes that it adds until its backward
    added: Bytes
    # its own peak, in bytes
    need: Bytes
    # its extra ms
    ms: Ms
    # the unit of the place
    unit: int


class _UnitStarts(NamedTuple):
    """The items that may start at a unit, after any items."""

    # the unit at which each stops
    stop: NDArray[np.int64]
    # bytes that it adds until its backward
    added: Bytes
    # the peak of its forward
    forward: Bytes
    # the peak of its recompute and backward
    backward: Bytes
    # the peak from the model's return on, of an item that ends with the last unit
    returned: Bytes
    # its extra ms
    ms: Ms


class _Segments(NamedTuple):
    """The segments that start at a unit, an element each: of 1, 2, ... units.

    Bytes below 2^53 are exact in these floats.
    """

    # the peak of its forwards behind the first unit's
    forward_peak: Ms
    # the peak of its recomputes and backwards
    backward_peak: Ms
    # live bytes when its gradient arrives
    live_at_gradient: Ms
    # bytes of the inputs of its units that it does not save
    freed: Ms
    # bytes of its units that live as long as the segment
    lasting: Ms
    # the peak from the model's return on; below 0 where other units follow
    returned: Ms
    # its extra ms
    ms: Ms


_NO_SEGMENTS = _Segments(*np.zeros((7, 0)))


def starts_of(chain: Chain, longest: int) -> list[Starts]:
    """Return the items that may start at each place, with segments of up to `longest` units."""
    units = _unit_starts(chain, longest)
    # by unit and the shared constants that items before it save: those that each item there saves
    rows: list[dict[frozenset[int], list[frozenset[int]]]] = [{} for _ in units]
    rows[0][frozenset()] = []
    for i, start in enumerate(units):
        for saved in rows[i]:
            after = [saved] * len(start.stop)
            if chain.shared:
                items = _items_at(chain, i, start.stop)
                after = [chain.saved_after(saved, item) for item in items]
            rows[i][saved] = after
            for stop, numbers in zip(start.stop, after, strict=True):
                if stop < len(units):
                    rows[stop].setdefault(numbers, [])
    keys = [(i, saved) for i, row in enumerate(rows) for saved in row]
    places = {key: place for place, key in enumerate(keys)}
    end = len(keys)
    return [_placed(chain, i, units[i], rows[i][saved], places, end) for i, saved in keys]


def _items_at(chain: Chain, i: int, stops: Sequence[int] | NDArray[np.int64]) -> Iterator[Item]:
    """Yield the items that may start at a unit."""
    levels = chain.units[i].levels
    for row, stop in enumerate(stops):
        yield Item(i, int(stop), levels[row].name if row < len(levels) else None)


def _placed(
    chain: Chain,
    i: int,
    start: _UnitStarts,
    after: Sequence[frozenset[int]],
    places: dict[tuple[int, frozenset[int]], int],
    end: int,
) -> Starts:
    """Return the items that may start at a place of unit i.

    after: by item, the shared constants that are saved after it. places: by unit and these
    constants. end: the place behind all units.
    """
    stop = [
        places.get((int(k), numbers), end) for k, numbers in zip(start.stop, after, strict=True)
    ]
    gone = np.array([chain.gone_shared(numbers, i) for numbers in after], np.int64)
    last = len(chain.units) - 1
    gone_at_end = np.array([chain.gone_shared(numbers, last) for numbers in after], np.int64)
    late = np.maximum(start.backward - gone, start.returned - gone_at_end)
    need = np.maximum(start.forward, late)
    return Starts(np.array(stop, np.int64), start.added, need, start.ms, i)


def _unit_starts(chain: Chain, longest: int) -> list[_UnitStarts]:
    starts: list[_UnitStarts] = []
    segments = _NO_SEGMENTS
    follower: Unit | None = None
    for i, unit in reversed([*enumerate(chain.units)]):
        longer = _NO_SEGMENTS
        if follower is not None and follower.joined:
            longer = _prepended(chain, unit, follower, segments)
        segments = _with_shortest(chain, unit, longer, longest)
        starts.append(_starts_at(chain, i, segments))
        follower = unit
    return starts[::-1]


def _with_shortest(chain: Chain, unit: Unit, longer: _Segments, longest: int) -> _Segments:
    """Return the segments that start at a unit: of the unit alone, then longer ones."""
    if unit.recomputed is None:
        return _NO_SEGMENTS
    shortest = (
        unit.peak_until_next,
        unit.recomputed.backward_peak,
        unit.live_at_gradient,
        0,
        chain.lasting_bytes(unit),
        chain.peak_returned if unit is chain.units[-1] else -_NO_PEAK,
        unit.recomputed.extra_ms,
    )
    columns = np.column_stack((np.array(shortest, float), np.stack(longer)[:, : longest - 1]))
    return _Segments(*columns)


def _starts_at(chain: Chain, start: int, segments: _Segments) -> _UnitStarts:
    """Return the items that may start at a unit, given its segments."""
    unit = chain.units[start]
    levels = unit.levels
    count = len(segments.ms)
    first_peak = 0 if unit.recomputed is None else unit.recomputed.forward_peak
    backward_peak = segments.backward_peak.copy()
    # segments of several units save the argument of the first
    backward_peak[1:] += unit.unsaved_input
    returned_peak = chain.peak_returned if unit is chain.units[-1] else -_NO_PEAK
    forward = [max(x.forward_peak, unit.peak_until_next + x.added_bytes) for x in levels]
    backward = [x.backward_peak for x in levels]
    returned = [returned_peak + x.added_bytes for x in levels]
    stop = np.concatenate(([start + 1] * len(levels), start + 1 + np.arange(count)))
    added = np.concatenate(([x.added_bytes for x in levels], -segments.freed))
    forward = np.concatenate((forward, np.maximum(segments.forward_peak, first_peak)))
    backward = np.concatenate((backward, backward_peak))
    returned = np.concatenate((returned, segments.returned))
    ms = chain.slowdown * np.concatenate(([x.extra_ms for x in levels], segments.ms))
    if chain.to_host and unit.movable_bytes and count:
        repeated = stop, added, forward, backward, returned
        stop, added, forward, backward, returned = (
            np.concatenate((x, x[-count:])) for x in repeated
        )
        added[-count:] -= unit.movable_bytes
        ms = np.concatenate((ms, ms[-count:] + _exposed(chain, start, ms[-count:])))
    return _UnitStarts(
        stop=stop.astype(np.int64),
        added=added.astype(np.int64),
        forward=forward.astype(np.int64),
        backward=backward.astype(np.int64),
        returned=returned.astype(np.int64),
        ms=ms,
    )


def _exposed(chain: Chain, start: int, extra: Ms) -> Ms:
    """Return the ms of copies that segments from a unit on do not hide; extra: their recomputes."""
    units = chain.units[start : start + len(extra)]
    forward = np.cumsum([unit.forward_ms for unit in units])
    backward = np.cumsum([unit.backward_ms for unit in units])
    recompute = extra / chain.slowdown
    return chain.slowdown * chain.exposed_ms(units[0].movable_bytes, forward, recompute + backward)


def _prepended(chain: Chain, unit: Unit, follower: Unit, segments: _Segments) -> _Segments:
    """Put a unit before the segments that start at the unit behind it."""
    if follower.recomputed is None:
        return _NO_SEGMENTS
    backward = segments.backward_peak.copy()
    # the first segment was that unit alone
    backward[:1] = chain.backward_peak_at_end(follower)
    live = segments.live_at_gradient - follower.freed_in_segment
    lasting = segments.lasting + chain.lasting_bytes(unit) + follower.first_saved
    recompute = live + unit.in_segment.forward_peak - unit.live_at_begin
    backward = np.maximum(backward + chain.saved_in_segment(unit), recompute)
    first_forward = max(unit.peak_until_next, follower.recomputed.forward_peak)
    return _Segments(
        np.maximum(segments.forward_peak - follower.freed_in_segment, first_forward),
        np.maximum(backward, unit.in_segment.backward_peak + lasting),
        live,
        segments.freed + follower.freed_in_segment,
        lasting,
        segments.returned - follower.freed_in_segment,
        segments.ms + unit.forward_ms,
    )
