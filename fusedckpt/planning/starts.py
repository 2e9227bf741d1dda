"""The items of a plan that may start at each unit of a chain, with their bytes and ms.

The solver chooses between these. They are made from the last unit to the first: the segments that
start at a unit are the unit alone, and the unit before each segment that starts behind it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusedckpt.planning.chain import Chain, Unit

Bytes = NDArray[np.int64]
Ms = NDArray[np.float64]


class Starts(NamedTuple):
    """The items that may start at a unit: its levels, then segments of 1, 2, ... units.

    The same segments with offloaded inputs follow, where the chain has any.
    """

    # the unit at which each stops
    stop: NDArray[np.int64]
    # bytes that it adds until its backward
    added: Bytes
    # its own peak, in bytes
    need: Bytes
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
    # its extra ms
    ms: Ms


_NO_SEGMENTS = _Segments(*np.zeros((6, 0)))


def starts_of(chain: Chain, longest: int) -> list[Starts]:
    """Return the items that may start at each unit, with segments of up to `longest` units."""
    starts: list[Starts] = []
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
        unit.recomputed.extra_ms,
    )
    columns = np.column_stack((np.array(shortest, float), np.stack(longer)[:, : longest - 1]))
    return _Segments(*columns)


def _starts_at(chain: Chain, start: int, segments: _Segments) -> Starts:
    """Return the items that may start at a unit, given its segments."""
    unit = chain.units[start]
    levels = unit.levels
    count = len(segments.ms)
    first_peak = 0 if unit.recomputed is None else unit.recomputed.forward_peak
    backward_peak = segments.backward_peak.copy()
    # segments of several units save the argument of the first
    backward_peak[1:] += unit.unsaved_input
    level_needs = [
        max(x.forward_peak, unit.peak_until_next + x.added_bytes, x.backward_peak) for x in levels
    ]
    segment_needs = np.maximum(np.maximum(segments.forward_peak, backward_peak), first_peak)
    stop = np.concatenate(([start + 1] * len(levels), start + 1 + np.arange(count)))
    added = np.concatenate(([x.added_bytes for x in levels], -segments.freed))
    need = np.concatenate((level_needs, segment_needs))
    ms = chain.slowdown * np.concatenate(([x.extra_ms for x in levels], segments.ms))
    if chain.to_host and unit.movable_bytes and count:
        stop, added, need = (np.concatenate((x, x[-count:])) for x in (stop, added, need))
        added[-count:] -= unit.movable_bytes
        ms = np.concatenate((ms, ms[-count:] + _exposed(chain, start, ms[-count:])))
    return Starts(stop.astype(np.int64), added.astype(np.int64), need.astype(np.int64), ms)


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
    lasting = segments.lasting + chain.lasting_bytes(unit)
    recompute = live + unit.in_segment.forward_peak - unit.live_at_begin
    backward = np.maximum(backward + chain.saved_in_segment(unit), recompute)
    first_forward = max(unit.peak_until_next, follower.recomputed.forward_peak)
    return _Segments(
        np.maximum(segments.forward_peak - follower.freed_in_segment, first_forward),
        np.maximum(backward, unit.in_segment.backward_peak + lasting),
        live,
        segments.freed + follower.freed_in_segment,
        lasting,
        segments.ms + unit.forward_ms,
    )
