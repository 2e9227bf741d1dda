"""A model as a chain of units, plans for it, and the bytes and the time that a plan takes.

All peaks of a chain are those of one step in which every unit is in a checkpoint of its own. A plan
changes them by sums: a unit that saves a level adds the bytes of that level until its backward is
done; a unit inside a segment, behind another one, subtracts its input, which nothing keeps then.
`moments` goes through a step under a plan. It checks plans of `solver`, and is independent of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

__all__ = ["Chain", "Item", "Keep", "Level", "Outcome", "Segment", "Unit", "moments", "simulate"]


def _check(record: Level | Unit | Chain, times: Sequence[str], *signed: str) -> None:
    """Refuse a field that is no size in bytes, or no time."""
    for field in fields(record):
        value, is_ms = getattr(record, field.name), field.name in times
        if not is_ms and field.type != "int":
            continue
        known = type(value) is int or (is_ms and type(value) is float and math.isfinite(value))
        if not known or (value < 0 and field.name not in signed):
            expected = "a time" if is_ms else "a size in bytes"
            kind = type(record).__name__
            raise ValueError(f"{kind}: {field.name} is {expected}, got {value!r}")


@dataclass(frozen=True)
class Level:
    """A unit that saves something from its forward until its backward.

    kept: bytes beyond those that it saves in a checkpoint of its own, below 0 where it saves less.
    extra: ms that a step takes more than at the fastest level. forward: the peak of the step while
    the unit runs. backward: the peak from the arrival of its gradient to that of the unit before.
    """

    name: str
    kept: int
    extra: float
    forward: int
    backward: int

    def __post_init__(self):
        _check(self, ("extra",), "kept")


@dataclass(frozen=True)
class Unit:
    """A module that runs as a whole.

    levels: of distinct names, at least one. again: the unit in a segment of its own; its `extra` is
    the time of the recompute; None where `fixed` says why no segment may hold it. inside: the unit
    between its recompute and its backward in a segment. forward_ms: the time of its forward;
    rerun_ms: of its recompute before other units. input: bytes of the arguments that a segment
    keeps which starts here; freed: of those that it does not keep where the unit is behind another
    one. begin: live bytes when its forward begins; arrives: when its gradient arrives. between: the
    peak from its end to the beginning of the next unit. joined: it may be in one segment with the
    unit before. composed: it has modules inside, which could be units.
    """

    name: str
    levels: tuple[Level, ...]
    again: Level | None
    inside: Level
    forward_ms: float
    rerun_ms: float
    input: int
    freed: int
    begin: int
    between: int
    arrives: int
    joined: bool = False
    composed: bool = False
    fixed: str = ""

    def __post_init__(self):
        _check(self, ("forward_ms", "rerun_ms"))
        names = [level.name for level in self.levels]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"Unit: {self.name} needs levels of distinct names, got {names}")
        if (self.again is None) != bool(self.fixed):
            raise ValueError(f"Unit: {self.name} is either fixed or has the cost of a segment")

    @property
    def fastest(self) -> Level:
        """The level of least extra time; of several the one that keeps least."""
        return min(self.levels, key=lambda level: (level.extra, level.kept))

    def has(self, name: str) -> bool:
        """Whether it has a level called `name`."""
        return any(level.name == name for level in self.levels)

    def level(self, name: str) -> Level:
        """Return the level called `name`, or raise ValueError."""
        for level in self.levels:
            if level.name == name:
                return level
        raise ValueError(f"Unit: {self.name} has no level {name!r}")

    def saved(self, level: Level) -> int:
        """Return the bytes that it saves at a level, its input included."""
        return max(0, self.input + level.kept)


@dataclass(frozen=True)
class Chain:
    """Units in the order of their forward.

    base: live bytes when the step begins: parameters, gradients, optimizer. before, after: the
    peaks until the first unit runs, and after all backwards. states: bytes of random states that a
    segment keeps of each unit. head: bytes that the code behind the last unit saves.
    """

    units: tuple[Unit, ...]
    base: int = 0
    before: int = 0
    after: int = 0
    states: int = 0
    head: int = 0

    def __post_init__(self):
        _check(self, ())
        if not self.units:
            raise ValueError("Chain: at least one unit is needed, got none")

    @property
    def forward_ms(self) -> float:
        """Ms of the forward of all units."""
        return sum(unit.forward_ms for unit in self.units)

    def units_of(self, item: Item) -> tuple[Unit, ...]:
        """Return the units of an item of a plan."""
        return self.units[item.start : item.stop]

    def kept_by(self, item: Item) -> int:
        """Return the bytes that an item saves until its backward."""
        unit = self.units[item.start]
        return unit.saved(unit.level(item.level)) if isinstance(item, Keep) else unit.input

    def extra_of(self, item: Item) -> float:
        """Return the ms that an item adds to a step."""
        *units, last = self.units_of(item)
        if isinstance(item, Keep):
            return last.level(item.level).extra
        assert last.again is not None
        return sum(unit.rerun_ms for unit in units) + last.again.extra

    def saves(self, unit: Unit) -> int:
        """Return the bytes that a unit adds in a segment from its recompute to its backward."""
        return unit.inside.kept + self.states


@dataclass(frozen=True)
class Keep:
    """An item of a plan: unit number `start` saves `level`."""

    start: int
    level: str

    @property
    def stop(self) -> int:
        """The number of the next item's first unit."""
        return self.start + 1


@dataclass(frozen=True)
class Segment:
    """An item of a plan: the units from `start` to `stop` are checkpointed as one segment."""

    start: int
    stop: int


Item: TypeAlias = Keep | Segment


@dataclass(frozen=True)
class Outcome:
    """The peak of a plan in bytes and where it is, its extra ms per step, and a bound of these.

    lower_bound: ms that no plan within the same budget is below, as far as is known.
    """

    items: tuple[Item, ...]
    peak: int
    extra: float
    where: str
    lower_bound: float = 0.0


def simulate(chain: Chain, items: Sequence[Item]) -> Outcome:
    """Return peak and time of a plan; raise ValueError if it does not cover the chain."""
    at = 0
    for item in items:
        if item.start != at or not at < item.stop <= len(chain.units):
            raise ValueError(f"simulate: an item that starts at unit {at} was expected, got {item}")
        first, *others = chain.units_of(item)
        units = (first, *others)
        joins = all(unit.joined for unit in others) and not any(unit.fixed for unit in units)
        if isinstance(item, Segment) and not joins:
            raise ValueError(f"simulate: units that may be in one segment expected, got {item}")
        at = item.stop
    if at != len(chain.units):
        raise ValueError(f"simulate: the plan covers {at} of {len(chain.units)} units")
    peak, where = max(moments(chain, items), key=lambda moment: moment[0])
    return Outcome(tuple(items), peak, sum(map(chain.extra_of, items)), where)


def moments(chain: Chain, items: Sequence[Item]) -> Iterator[tuple[int, str]]:
    """Yield peaks of a step, and the part of the step that each is of, in order."""
    yield chain.before, "code before the units"
    offset, offsets = 0, []
    for item in items:
        offsets.append(offset)
        for number, unit in enumerate(chain.units_of(item)):
            level = unit.level(item.level) if isinstance(item, Keep) else unit.again
            assert level is not None
            yield level.forward + offset, f"forward of {unit.name}"
            offset += level.kept if isinstance(item, Keep) else -unit.freed if number else 0
            yield unit.between + offset, f"code behind {unit.name}"
    for item, offset in zip(reversed(items), reversed(offsets), strict=True):
        if isinstance(item, Segment):
            yield from _backward(chain, item, offset)
        else:
            unit = chain.units[item.start]
            yield unit.level(item.level).backward + offset, f"backward of {unit.name}"
    yield chain.after, "the optimizer's step"


def _backward(chain: Chain, item: Segment, offset: int) -> Iterator[tuple[int, str]]:
    """Yield the peaks of a segment's recompute and backward; offset: bytes of the items before."""
    *units, last = chain.units_of(item)
    assert last.again is not None
    behind = chain.units[item.start + 1 : item.stop]
    live = offset + last.arrives - sum(unit.freed for unit in behind)
    for unit, after in zip(units, behind, strict=True):
        yield live + unit.inside.forward - unit.begin, f"recompute of {unit.name}"
        live += chain.saves(unit) + after.freed
    offset += sum(map(chain.saves, units))
    yield last.again.backward + offset, f"recompute of {last.name}"
    for unit in reversed(units):
        offset -= chain.saves(unit)
        yield unit.inside.backward + offset, f"backward of {unit.name}"
