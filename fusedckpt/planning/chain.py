"""A model as a chain of units, plans for it, and the bytes and the time that a plan takes.

All peaks of a chain are those of one step in which every unit is in a checkpoint of its own. A plan
changes them by sums: a unit that saves a level adds the bytes of that level until its backward is
done; a unit inside a segment, behind another one, subtracts its input, which nothing keeps then.

A step under a plan that saves all of unit 0 and has 1 and 2 in one segment, a phase a line, with
the field that has the phase's peak, and the bytes that the plan adds to those of the baseline:

    phase                its peak                 bytes that the plan adds
    code before          before
    forward of 0         0.levels[].forward
    code between         0.peak_until_next        + 0.levels[].kept, until its backward
    forward of 1         1.recomputed.forward
    code between         1.peak_until_next
    forward of 2         2.recomputed.forward
    code and loss        2.peak_until_next        - 2.freed_in_segment, the output of 1
    recompute of 1       2.live_at_gradient       + 1.in_segment.forward - 1.live_at_begin
    recompute, backward  2.recomputed.backward    + 1.in_segment.kept; the output of 1 exists
    backward of 1        1.in_segment.backward    - 1.in_segment.kept
    backward of 0        0.levels[].backward      - 0.levels[].kept
    optimizer            after

`moments` goes through a step under a plan. It checks plans of `solver`, and is independent of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusedckpt.checkpointing.offload import KEPT


@dataclass(frozen=True)
class Level:
    """A unit that saves something from its forward until its backward."""

    name: str
    # bytes beyond those that it saves in a checkpoint of its own, below 0 where it saves less
    kept: int
    # ms that a step takes more than at the fastest level
    extra: float
    # the peak of the step while the unit runs, in bytes
    forward: int
    # the peak from the arrival of its gradient to that of the unit before
    backward: int
    # bytes among `kept` that autocast's cache of cast weights holds in any forward
    cached: int = 0


@dataclass(frozen=True)
class Unit:
    """A module, or several in a row, that runs as a whole. Bytes and peaks are of a whole step."""

    name: str
    # the ways in which it saves something, of distinct names
    levels: tuple[Level, ...]
    # the unit in a segment of its own, `extra` is the time of its recompute; None where it is fixed
    recomputed: Level | None
    # the unit between its recompute and its backward in a segment
    in_segment: Level
    forward_ms: float
    # bytes of the arguments that a segment keeps which starts here
    input_bytes: int
    # bytes of the arguments that a segment does not keep which starts earlier
    freed_in_segment: int
    # live bytes when its forward begins
    live_at_begin: int
    # the peak from its end to the beginning of the next unit
    peak_until_next: int
    # live bytes when its gradient arrives
    live_at_gradient: int
    # whether it may be in one segment with the unit before
    joined: bool = False
    # why no segment may hold it, or ""
    fixed: str = ""
    # the names of its modules, where these are several
    members: tuple[str, ...] = ()
    # bytes of its arguments that it does not save, but a segment keeps which starts here
    unsaved_input: int = 0
    # bytes of its arguments without gradients that it does not save, but any segment keeps
    unsaved_constants: int = 0
    # bytes of its arguments that a segment which starts here can offload
    movable: int = 0
    # ms of its backward, without a recompute
    backward_ms: float = 0.0

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of its modules, in the order in which they run."""
        return self.members or (self.name,)

    @property
    def fastest(self) -> Level:
        """The level of least extra time; of several the one that keeps least."""
        return min(self.levels, key=lambda level: (level.extra, level.kept))

    def level(self, name: str) -> Level:
        """Return the level called `name`, or raise ValueError."""
        for level in self.levels:
            if level.name == name:
                return level
        raise ValueError(f"Unit: {self.name} has no level {name!r}")


@dataclass(frozen=True)
class Chain:
    """Units in the order of their forward."""

    units: tuple[Unit, ...]
    # live bytes when the step begins: parameters, gradients, optimizer
    base: int = 0
    # the peak until the first unit runs
    before: int = 0
    # the peak after all backwards, in the optimizer's step
    after: int = 0
    # bytes of the random states that a segment keeps of each module
    states: int = 0
    # bytes that the code behind the last unit saves
    head: int = 0
    # ms of a step for each extra ms of units alone
    slower: float = 1.0
    # whether autocast's cache of cast weights lives until the loss is computed
    outlives: bool = True
    # bytes per ms of copies to the host and back; 0 where segments offload nothing
    to_host: float = 0.0
    to_device: float = 0.0

    @property
    def forward_ms(self) -> float:
        """Ms of the forward of all units."""
        return sum(unit.forward_ms for unit in self.units)

    def level_of(self, item: Item) -> Level | None:
        """Return the level that an item's unit saves, None for a segment."""
        return None if item.level is None else self.units[item.start].level(item.level)

    def kept_by(self, item: Item) -> int:
        """Return the bytes that an item saves until its backward."""
        unit, level = self.units[item.start], self.level_of(item)
        return unit.input_bytes - self.moved_by(item) if level is None else self.saved(unit, level)

    def moved_by(self, item: Item) -> int:
        """Return the bytes that an item offloads."""
        return self.units[item.start].movable if item.offloads else 0

    def saved(self, unit: Unit, level: Level) -> int:
        """Return the bytes that a unit saves at a level, its input included."""
        # `kept` is beyond a checkpoint of its own, which saves these beside the input
        return max(0, unit.input_bytes + self.lasting(unit) + level.kept)

    def extra_of(self, item: Item) -> float:
        """Return the ms that an item adds to a step."""
        *units, last = self.units[item.start : item.stop]
        level = self.level_of(item) or last.recomputed
        assert level is not None
        extra = sum(unit.forward_ms for unit in units) + level.extra
        if item.offloads:
            backward = sum(unit.backward_ms for unit in (*units, last))
            forward = sum(unit.forward_ms for unit in (*units, last))
            extra += float(self.exposed_ms(self.moved_by(item), forward, extra + backward))
        return self.slower * extra

    def exposed_ms(self, nbytes: int, forward: Any, backward: Any) -> Any:
        """Return the ms of a segment's copies that its forward, and its backward, do not hide.

        forward and backward: ms, as numbers or arrays; the second with the recompute.
        """
        leaves = np.maximum(nbytes / self.to_host - forward, 0.0)
        return leaves + np.maximum(nbytes / self.to_device - backward, 0.0)

    def saves(self, unit: Unit) -> int:
        """Return the bytes that a unit adds in a segment from its recompute to its backward."""
        return unit.in_segment.kept + self.lasting(unit)

    def backward_at_end(self, unit: Unit) -> int:
        """Return the peak of a unit's recompute and backward, at the end of a segment of several.

        There an input that it does not save is gone after the recompute. But a recompute may end
        before the unit does, which only the unit in a segment of its own shows.
        """
        assert unit.recomputed is not None
        if not unit.unsaved_input:
            return unit.recomputed.backward
        runs = unit.live_at_gradient + unit.in_segment.forward - unit.live_at_begin
        return min(
            unit.recomputed.backward, max(runs, unit.in_segment.backward + self.lasting(unit))
        )

    def lasting(self, unit: Unit) -> int:
        """Return the bytes that a segment keeps of a unit from its forward to the segment's end."""
        return self.states * len(unit.modules) + unit.unsaved_constants


@dataclass(frozen=True)
class Item:
    """A part of a plan: units from `start` to `stop` in one segment, or one that saves `level`."""

    start: int
    stop: int
    level: str | None = None
    # whether the segment's inputs wait for backward in host memory
    offloads: bool = False


@dataclass(frozen=True)
class Outcome:
    """The cost of a plan."""

    items: tuple[Item, ...]
    # in bytes
    peak: int
    # ms per step
    extra: float
    # the part of the step with the peak
    where: str
    # ms that no plan within the same budget is below, as far as is known
    lower_bound: float = 0.0


def simulate(chain: Chain, items: Sequence[Item]) -> Outcome:
    """Return peak and time of a plan; raise ValueError if it does not cover the chain."""
    at = 0
    for item in items:
        if item.start != at or not at < item.stop <= len(chain.units):
            raise ValueError(f"simulate: an item that starts at unit {at} was expected, got {item}")
        first, *others = chain.units[item.start : item.stop]
        joins = all(unit.joined for unit in others) and not any(u.fixed for u in (first, *others))
        if others if item.level else not joins:
            raise ValueError(f"simulate: units that may be in one segment expected, got {item}")
        at = item.stop
    if at != len(chain.units):
        raise ValueError(f"simulate: the plan covers {at} of {len(chain.units)} units")
    peak, where = max(moments(chain, items), key=lambda moment: moment[0])
    return Outcome(tuple(items), peak, sum(map(chain.extra_of, items)), where)


def moments(chain: Chain, items: Sequence[Item]) -> Iterator[tuple[int, str]]:
    """Yield peaks of a step, and the part of the step that each is of, in order."""
    yield chain.before, "code before the units"
    offset, cached, offsets = 0, 0, list[int]()
    gone, gone_in_backward = gone_bytes(chain, items)
    for k, item in enumerate(items):
        offsets.append(offset)
        for number, unit in enumerate(chain.units[item.start : item.stop]):
            level = chain.level_of(item) or unit.recomputed
            assert level is not None
            yield level.forward + offset - cached - gone[k], f"forward of {unit.name}"
            # `recomputed` keeps 0
            offset += -unit.freed_in_segment if number else level.kept
            cached += level.cached
            if unit is chain.units[-1] and not chain.outlives:
                cached = 0
            is_last = number == item.stop - item.start - 1
            live = offset - cached - gone[k + is_last]
            yield unit.peak_until_next + live, f"code behind {unit.name}"
    for k, item in reversed([*enumerate(items)]):
        offset = offsets[k] - gone_in_backward[k]
        if level := chain.level_of(item):
            yield level.backward + offset, f"backward of {chain.units[item.start].name}"
        else:
            yield from _backward(chain, item, offset)
    yield chain.after, "the optimizer's step"


def gone_bytes(chain: Chain, items: Sequence[Item]) -> tuple[list[int], list[int]]:
    """Return the offloaded bytes that the device does not hold, by item, in forward and backward.

    In the forward of each item, and after the last: the inputs of the latest KEPT + 1 segments are
    still there. In the backward of each, of the items before it: the input of the next one arrives.
    """
    offloading = [k for k, item in enumerate(items) if item.offloads]
    moved = {k: chain.moved_by(items[k]) for k in offloading}
    left = offloading[: -(KEPT + 1)]
    # by the item that frees them at its end
    frees = dict(zip(offloading[KEPT + 1 :], left, strict=True))
    forward, backward = [0], [0]
    for k in range(len(items)):
        forward.append(forward[k] + (moved[frees[k]] if k in frees else 0))
        backward.append(backward[k] + (moved[k] if k in left else 0))
    following = dict(zip(offloading[1:], offloading, strict=False))
    for k in offloading:
        arrives = following.get(k)
        if arrives is not None and arrives in left:
            backward[k] -= moved[arrives]
    return forward, backward


def _backward(chain: Chain, item: Item, offset: int) -> Iterator[tuple[int, str]]:
    """Yield the peaks of a segment's recompute and backward; offset: bytes of the items before."""
    *units, last = chain.units[item.start : item.stop]
    assert last.recomputed is not None
    behind = chain.units[item.start + 1 : item.stop]
    if units:
        # the segment's own argument
        offset += units[0].unsaved_input
    live = offset + last.live_at_gradient - sum(unit.freed_in_segment for unit in behind)
    for unit, after in zip(units, behind, strict=True):
        yield live + unit.in_segment.forward - unit.live_at_begin, f"recompute of {unit.name}"
        live += chain.saves(unit) + after.freed_in_segment
    offset += sum(map(chain.saves, units))
    peak = chain.backward_at_end(last) if units else last.recomputed.backward
    yield peak + offset, f"recompute of {last.name}"
    for unit, after in zip(reversed(units), reversed(behind), strict=True):
        # they live as long as the segment
        offset += chain.lasting(after) - chain.saves(unit)
        yield unit.in_segment.backward + chain.lasting(unit) + offset, f"backward of {unit.name}"
