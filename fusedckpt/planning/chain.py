"""A model as a chain of units, plans for it, and the bytes and the time that a plan takes.

All peaks of a chain are those of the baseline: one step in which every unit is in a checkpoint of
its own. A plan changes them by sums. A unit that saves a level adds the bytes of that level until
its backward is done. A unit inside a segment, behind another one, subtracts its input, which the
segment frees.

A step under a plan that saves all of unit 0 and has 1 and 2 in one segment, a phase a line, with
the field that has the phase's peak, and the bytes that the plan adds to those of the baseline:

    phase                its peak                 bytes that the plan adds
    code before          peak_before
    forward of 0         0.levels[].forward_peak
    code between         0.peak_until_next           + 0.levels[].added_bytes, until its backward
    forward of 1         1.recomputed.forward_peak
    code between         1.peak_until_next
    forward of 2         2.recomputed.forward_peak
    code and loss        2.peak_until_next           - 2.freed_in_segment, the output of 1
    recompute of 1       2.live_at_gradient          + 1.in_segment.forward_peak - 1.live_at_begin
    recompute, backward  2.recomputed.backward_peak  + 1.in_segment.added_bytes; 1's output exists
    backward of 1        1.in_segment.backward_peak  - 1.in_segment.added_bytes
    backward of 0        0.levels[].backward_peak    - 0.levels[].added_bytes
    optimizer            peak_after

Constants of several units, such as a mask, count in all phases of the baseline from the backward of
the first unit that saves them on (`SharedConstant`).

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
    """A unit that saves some of its tensors from its forward until its backward."""

    # "inputs", "gate" or "preact" of fused layers, or one of `roles.OWN_LEVELS`
    name: str
    # bytes saved beyond those of a checkpoint of its own, below 0 where it saves less
    added_bytes: int
    # ms that a step takes more than at the unit's fastest level
    extra_ms: float
    # the peak of the step while the unit's forward runs, in bytes
    forward_peak: int
    # the peak from the arrival of its gradient to that of the unit before, in bytes
    backward_peak: int
    # bytes among `added_bytes` that autocast's cache of cast weights has in any forward
    cached_bytes: int = 0
    # the numbers of the shared constants that the unit gets, and does not save at this level
    unsaved_shared: tuple[int, ...] = ()


@dataclass(frozen=True)
class SharedConstant:
    """A tensor without gradients that several units get, such as a mask.

    It lives from the forward until the backward of the first unit that saves it, and so in all
    peaks of the baseline from the backward of unit `since` on. A plan in which no unit up to some
    unit saves it has none of it in the backward of that unit.
    """

    # its bytes
    nbytes: int
    # the first unit that saves it in the baseline
    since: int


@dataclass(frozen=True)
class Unit:
    """A module, or several in a row, that runs as a whole. Bytes and peaks are of a whole step."""

    # the name of its module, or of the first of its modules
    name: str
    # the ways in which it may save its tensors, of distinct names
    levels: tuple[Level, ...]
    # the unit in a segment of its own, `extra_ms` of its recompute; None where it is fixed
    recomputed: Level | None
    # the unit between its recompute and its backward in a segment
    in_segment: Level
    # ms of its forward
    forward_ms: float
    # bytes of its arguments, which a segment saves that starts here
    input_bytes: int
    # bytes of its arguments that a segment does not save which starts earlier
    freed_in_segment: int
    # live bytes when its forward begins
    live_at_begin: int
    # the peak from its end to the beginning of the next unit, in bytes
    peak_until_next: int
    # live bytes when its gradient arrives
    live_at_gradient: int
    # whether it may be in one segment with the unit before
    joined: bool = False
    # why no segment may contain it, or ""
    fixed: str = ""
    # the names of its modules, where these are several
    members: tuple[str, ...] = ()
    # bytes of its arguments that it does not save itself, but a segment does which starts here
    unsaved_input: int = 0
    # bytes of its arguments without gradients that it does not save itself, but any segment does
    unsaved_constants: int = 0
    # bytes of its arguments that a segment which starts here can offload
    movable_bytes: int = 0
    # ms of its backward, without a recompute
    backward_ms: float = 0.0
    # the numbers of the shared constants that it gets
    shared: tuple[int, ...] = ()
    # bytes of constants of several units that it is the first to save in the baseline
    first_saved: int = 0

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of its modules, in the order in which they run."""
        return self.members or (self.name,)

    @property
    def fastest(self) -> Level:
        """The level of least extra time; of several the one that saves least."""
        return min(self.levels, key=lambda level: (level.extra_ms, level.added_bytes))

    def level(self, name: str) -> Level:
        """Return the level called `name`, or raise ValueError."""
        for level in self.levels:
            if level.name == name:
                return level
        raise ValueError(f"Unit: {self.name} has no level {name!r}")


@dataclass(frozen=True)
class Chain:
    """Units in the order of their forward, and the code around them."""

    # in the order of their forward
    units: tuple[Unit, ...]
    # live bytes when the step begins: parameters, gradients, optimizer
    resident_bytes: int = 0
    # the peak until the first unit runs
    peak_before: int = 0
    # the peak after all backwards, in the optimizer's step
    peak_after: int = 0
    # bytes of the random states that a segment saves for each module
    random_state_bytes: int = 0
    # bytes that the code behind the last unit saves
    saved_behind: int = 0
    # ms of a step for each extra ms of units alone
    slowdown: float = 1.0
    # whether autocast's cache of cast weights lives until the loss is computed
    casts_outlive_model: bool = True
    # the constants of several units that not every plan saves
    shared: tuple[SharedConstant, ...] = ()
    # the peak from the model's return until the first gradient arrives at a unit
    peak_returned: int = 0
    # bytes per ms of copies to the host; 0 where segments offload nothing
    to_host: float = 0.0
    # bytes per ms of copies back to the device
    to_device: float = 0.0

    @property
    def forward_ms(self) -> float:
        """Ms of the forward of all units."""
        return sum(unit.forward_ms for unit in self.units)

    def level_of(self, item: Item) -> Level | None:
        """Return the level that an item's unit saves, None for a segment."""
        return None if item.level is None else self.units[item.start].level(item.level)

    def saved_by(self, item: Item) -> int:
        """Return the bytes that an item saves on the device until its backward."""
        unit = self.units[item.start]
        level = self.level_of(item)
        if level is None:
            return unit.input_bytes - self.offloaded_by(item)
        return self.saved_at(unit, level)

    def offloaded_by(self, item: Item) -> int:
        """Return the bytes that an item offloads."""
        return self.units[item.start].movable_bytes if item.offloads else 0

    def saved_at(self, unit: Unit, level: Level) -> int:
        """Return the bytes that a unit saves at a level, its input included."""
        # a checkpoint of its own saves its input and the lasting bytes
        return max(0, unit.input_bytes + self.lasting_bytes(unit) + level.added_bytes)

    def extra_ms_of(self, item: Item) -> float:
        """Return the ms that an item adds to a step."""
        *units, last = self.units[item.start : item.stop]
        level = self.level_of(item) or last.recomputed
        assert level is not None
        extra = sum(unit.forward_ms for unit in units) + level.extra_ms
        if item.offloads:
            backward = sum(unit.backward_ms for unit in (*units, last))
            forward = sum(unit.forward_ms for unit in (*units, last))
            extra += float(self.exposed_ms(self.offloaded_by(item), forward, extra + backward))
        return self.slowdown * extra

    def exposed_ms(self, nbytes: int, forward: Any, backward: Any) -> Any:
        """Return the ms of a segment's copies that its forward, and its backward, do not hide.

        forward, backward: ms, as numbers or arrays; backward includes the recompute.
        """
        exposed_in_forward = np.maximum(nbytes / self.to_host - forward, 0.0)
        return exposed_in_forward + np.maximum(nbytes / self.to_device - backward, 0.0)

    def saved_in_segment(self, unit: Unit) -> int:
        """Return the bytes that a unit saves in a segment from its recompute to its backward."""
        return unit.in_segment.added_bytes + self.lasting_bytes(unit)

    def backward_peak_at_end(self, unit: Unit) -> int:
        """Return the peak of a unit's recompute and backward, at the end of a segment of several.

        There an input that it does not save is gone after the recompute. But a recompute may end
        before the unit does, which only the unit in a segment of its own shows.
        """
        assert unit.recomputed is not None
        if not unit.unsaved_input:
            return unit.recomputed.backward_peak
        recompute = unit.live_at_gradient + unit.in_segment.forward_peak - unit.live_at_begin
        backward = unit.in_segment.backward_peak + self.lasting_bytes(unit)
        return min(unit.recomputed.backward_peak, max(recompute, backward))

    def saved_after(self, saved: frozenset[int], item: Item) -> frozenset[int]:
        """Return the shared constants that items so far save, where `saved` were before.

        A segment saves all that its units get.
        """
        level = self.level_of(item)
        skipped = () if level is None else level.unsaved_shared
        for unit in self.units[item.start : item.stop]:
            if len(saved) == len(self.shared):
                break
            saved = saved.union(k for k in unit.shared if k not in skipped)
        return saved

    def gone_shared(self, saved: frozenset[int], start: int) -> int:
        """Return the bytes of the shared constants that do not live in the backward of an item.

        saved: those that items save, up to this one, which starts at unit `start`.
        """
        constants = enumerate(self.shared)
        return sum(x.nbytes for k, x in constants if x.since <= start and k not in saved)

    def lasting_bytes(self, unit: Unit) -> int:
        """Return the bytes that a segment saves of a unit from its forward to the segment's end."""
        return self.random_state_bytes * len(unit.modules) + unit.unsaved_constants


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

    # its levels and segments, in the order of the units
    items: tuple[Item, ...]
    # the peak of a whole step
    peak_bytes: int
    # ms per step beyond one that saves everything
    extra_ms: float
    # the part of the step with the peak
    where: str
    # ms that every plan within the same budget takes at least, as far as is known
    lower_bound_ms: float = 0.0


def simulate(chain: Chain, items: Sequence[Item]) -> Outcome:
    """Return peak and time of a plan; raise ValueError if it does not cover the chain."""
    covered = 0
    for item in items:
        if item.start != covered or not covered < item.stop <= len(chain.units):
            raise ValueError(
                f"simulate: expected an item that starts at unit {covered}, got {item}"
            )
        first, *others = chain.units[item.start : item.stop]
        joins = all(unit.joined for unit in others) and not any(u.fixed for u in (first, *others))
        if others if item.level else not joins:
            raise ValueError(f"simulate: expected units that may be in one segment, got {item}")
        covered = item.stop
    if covered != len(chain.units):
        raise ValueError(f"simulate: the plan covers {covered} of {len(chain.units)} units")
    peak, where = max(moments(chain, items), key=lambda moment: moment[0])
    return Outcome(tuple(items), peak, sum(map(chain.extra_ms_of, items)), where)


def moments(chain: Chain, items: Sequence[Item]) -> Iterator[tuple[int, str]]:
    """Yield peaks of a step, in bytes, and the part of the step that each is of, in order."""
    yield chain.peak_before, "code before the units"
    # bytes that the items so far add to the baseline; by item, those of the items before it
    added = 0
    added_before = list[int]()
    # bytes among these that autocast's cache also has in the baseline
    cached = 0
    live = 0
    gone, gone_in_backward = gone_bytes(chain, items)
    # after each item, the shared constants that items so far save
    saved = [frozenset[int]()]
    for k, item in enumerate(items):
        saved.append(chain.saved_after(saved[-1], item))
        added_before.append(added)
        for place, unit in enumerate(chain.units[item.start : item.stop]):
            level = chain.level_of(item) or unit.recomputed
            assert level is not None
            yield level.forward_peak + added - cached - gone[k], f"forward of {unit.name}"
            # `recomputed` adds 0 bytes
            added += -unit.freed_in_segment if place else level.added_bytes
            cached += level.cached_bytes
            if unit is chain.units[-1] and not chain.casts_outlive_model:
                cached = 0
            is_last = place == item.stop - item.start - 1
            live = added - cached - gone[k + is_last]
            yield unit.peak_until_next + live, f"code behind {unit.name}"
    behind = f"code behind {chain.units[-1].name}"
    live -= chain.gone_shared(saved[-1], len(chain.units) - 1)
    yield chain.peak_returned + live, behind
    for k, item in reversed([*enumerate(items)]):
        added = added_before[k] - gone_in_backward[k]
        added -= chain.gone_shared(saved[k + 1], item.start)
        if level := chain.level_of(item):
            yield level.backward_peak + added, f"backward of {chain.units[item.start].name}"
        else:
            yield from _backward(chain, item, added)
    yield chain.peak_after, "the optimizer's step"


def gone_bytes(chain: Chain, items: Sequence[Item]) -> tuple[list[int], list[int]]:
    """Return the offloaded bytes that are not on the device, by item, in forward and backward.

    In the forward of each item, and after the last: the inputs of the latest KEPT + 1 segments are
    still on the device. In the backward of each, of the items before it: the input of the next one
    arrives.
    """
    offloading = [k for k, item in enumerate(items) if item.offloads]
    offloaded = {k: chain.offloaded_by(items[k]) for k in offloading}
    left = offloading[: -(KEPT + 1)]
    # by item that frees an input at its end, the item of that input
    frees = dict(zip(offloading[KEPT + 1 :], left, strict=True))
    forward = [0]
    backward = [0]
    for k in range(len(items)):
        forward.append(forward[k] + (offloaded[frees[k]] if k in frees else 0))
        backward.append(backward[k] + (offloaded[k] if k in left else 0))
    following = dict(zip(offloading[1:], offloading, strict=False))
    for k in offloading:
        arriving = following.get(k)
        if arriving is not None and arriving in left:
            backward[k] -= offloaded[arriving]
    return forward, backward


def _backward(chain: Chain, item: Item, added: int) -> Iterator[tuple[int, str]]:
    """Yield the peaks of a segment's recompute and backward; added: bytes of the items before."""
    *units, last = chain.units[item.start : item.stop]
    assert last.recomputed is not None
    followers = chain.units[item.start + 1 : item.stop]
    if units:
        # the segment's own argument
        added += units[0].unsaved_input
    live = added + last.live_at_gradient - sum(unit.freed_in_segment for unit in followers)
    for unit, follower in zip(units, followers, strict=True):
        yield live + unit.in_segment.forward_peak - unit.live_at_begin, f"recompute of {unit.name}"
        live += chain.saved_in_segment(unit) + follower.freed_in_segment
    added += sum(map(chain.saved_in_segment, units))
    peak = chain.backward_peak_at_end(last) if units else last.recomputed.backward_peak
    yield peak + added, f"recompute of {last.name}"
    for unit, follower in zip(reversed(units), reversed(followers), strict=True):
        # lasting bytes live as long as the segment
        added += chain.lasting_bytes(follower) - chain.saved_in_segment(unit)
        added += follower.first_saved
        peak = unit.in_segment.backward_peak + chain.lasting_bytes(unit)
        yield peak + added, f"backward of {unit.name}"
