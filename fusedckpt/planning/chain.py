"""A model as a chain of units, what a plan does to it, and what that costs in bytes and time.

A plan covers the chain, in order, with items: a unit that keeps a level of its intermediates, or a
checkpointed segment that keeps only its input and is run again in backward. Bytes live at a moment:

    forward of unit i, kept         base + kept(<= i) + forward_transient_i (its level's)
    forward of unit i, segment s    base + kept(< s) + input_s + output_(i-1) + running_i
                                    (no output_(i-1) for the first, whose input is input_s)
    run again of unit i of s        base + kept(< s) + held(s, i) + running_i
                                    + output_last + left(> last)
    backward of unit i              base + kept(< s) + held(s, i) + transient_i + left(> i)
    both, of the last unit of s     base + kept(< s) + held(s, last) + ending_last + left(> last)
                                    (where its level says; else as above)

where kept(...) sums what items keep, left(...) the gradients that units left behind, and
held(s, i) is what units of item s up to i hold for their backward: the sum of their levels' kept
bytes, or of those of `again` in a segment, the first one's being at least input_s. A kept unit is
its own item. running_i is the unit's forward_transient, or what its level says. The peak is the
largest of these. Extra time is the sum of the levels' extra, and for each segment what its units
take to run again less the tail of the last.

`simulate` walks through a step and adds this up, one moment after the other; it knows nothing of
`solver`, whose plans it checks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

__all__ = [
    "Chain",
    "Item",
    "Keep",
    "Level",
    "Outcome",
    "Segment",
    "Unit",
    "moments",
    "simulate",
]


_AMOUNTS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "int | None": (int, type(None)),
}


def _check_amounts(record: Level | Unit | Chain) -> None:
    for field in fields(record):
        value = getattr(record, field.name)
        wanted = _AMOUNTS.get(str(field.type))
        if wanted is None or (value is None and type(None) in wanted):
            continue
        # True is an int, too
        least = -math.inf if field.name == "tail" else 0
        if value is None or type(value) not in wanted or not least <= value < math.inf:
            kind = type(record).__name__
            raise ValueError(
                f"{kind}: {field.name} is {field.type}, finite and not negative, got {value!r}"
            )


@dataclass(frozen=True)
class Level:
    """What a unit may keep from its forward until its backward.

    kept: bytes, its own input included where autograd keeps that; a tensor between two units is
        counted by the one that reads it.
    extra: ms by which backward is slower than at the level that keeps most.
    transient: bytes that its backward holds at its worst moment beyond all that is kept: dy, dx,
        temporaries, the gradients that it leaves.
    ending: bytes that being run again and its backward hold at the worst moment beyond all that is
        kept, where the unit ends a segment: a recompute that stops early brings back less. None:
        as anywhere else.
    nested: it takes checkpoints inside the unit, which no segment may hold.
    forward_transient: as that of the unit, where it is kept at this level. None: that of the unit.
    again: bytes that it keeps where it was run again in a segment. None: as many as ever.
    running: as forward_transient of the unit, where it is in a segment. None: that of the unit.
    chunks: into how many chunks MLPs inside cut their tokens, beyond what they do by themselves.
    """

    name: str
    kept: int
    extra: float
    transient: int
    ending: int | None = None
    nested: bool = False
    forward_transient: int | None = None
    again: int | None = None
    running: int | None = None
    chunks: int = 1

    def __post_init__(self):
        _check_amounts(self)
        if not self.chunks:
            raise ValueError(f"Level: {self.name} needs at least one chunk, got 0")

    @property
    def held(self) -> int:
        """Bytes that it keeps where it was run again."""
        return self.kept if self.again is None else self.again


@dataclass(frozen=True)
class Unit:
    """A fused layer, a block, or any other module that runs as a whole.

    levels: in any order, at least one, names distinct.
    forward: ms. rerun: ms that it takes to run it again in a segment; None: as long as its forward.
    tail: ms that a segment takes less than that for all of its units, where this one is the last:
        its last GEMM is not run again; below 0 where what a segment itself does costs more.
    input, output: bytes; `input` is what a segment that starts here keeps.
    forward_transient: bytes that its forward holds at its worst moment beyond what is kept, its
        output included, and its input where no level keeps that.
    left: bytes that stay after its backward, such as gradients of parameters.
    fixed: it cannot be run again, so that no segment may hold it.
    code: it is no module, but what the model's own code does around units.
    composed: it has modules inside, which could be units themselves.
    """

    name: str
    levels: tuple[Level, ...]
    forward: float
    input: int
    output: int
    tail: float = 0.0
    forward_transient: int = 0
    left: int = 0
    fixed: bool = False
    code: bool = False
    composed: bool = False
    rerun: float | None = None

    def __post_init__(self):
        _check_amounts(self)
        names = [level.name for level in self.levels]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"Unit: {self.name} needs levels of distinct names, got {names}")
        if self.tail > self.again:
            raise ValueError(f"Unit: the tail of {self.name} takes longer than its forward")

    @property
    def again(self) -> float:
        """Ms that it takes to run it again in a segment."""
        return self.forward if self.rerun is None else self.rerun

    @property
    def fastest(self) -> Level:
        """The level of least extra time without checkpoints inside; of those that keeps least."""
        return min(self.levels, key=lambda level: (level.nested, level.extra, level.kept))

    def cut(self, chunks: int) -> Sequence[Level]:
        """Return the levels that cut it into so many chunks at least; all where none does."""
        return [level for level in self.levels if level.chunks >= chunks] or self.levels

    def forward_at(self, level: Level) -> int:
        """Return what its forward holds beyond what is kept, where it is kept at this level."""
        found = level.forward_transient
        return self.forward_transient if found is None else found

    def running_at(self, level: Level) -> int:
        """Return the same of it in a segment, as it runs first or again."""
        return self.forward_transient if level.running is None else level.running

    def has(self, name: str) -> bool:
        """Whether it has a level called `name`."""
        return any(level.name == name for level in self.levels)

    def level(self, name: str) -> Level:
        """Return the level called `name`, or raise ValueError."""
        for level in self.levels:
            if level.name == name:
                return level
        raise ValueError(f"Unit: {self.name} has no level {name!r}")


@dataclass(frozen=True)
class Chain:
    """Units in the order of their forward.

    base: bytes that are there before, during and after: parameters, existing gradients, optimizer.
    """

    units: tuple[Unit, ...]
    base: int = 0

    def __post_init__(self):
        _check_amounts(self)
        if not self.units:
            raise ValueError("Chain: at least one unit is needed, got none")

    @property
    def forward(self) -> float:
        """Ms of one forward pass."""
        return sum(unit.forward for unit in self.units)


@dataclass(frozen=True)
class Keep:
    """An item of a plan: unit number `start` keeps `level`."""

    start: int
    level: str

    @property
    def stop(self) -> int:
        """The number of the next item's first unit."""
        return self.start + 1


@dataclass(frozen=True)
class Segment:
    """An item of a plan: units from `start` on are checkpointed as one.

    levels: for each of its units what that keeps between being run again and its backward.
    """

    start: int
    levels: tuple[str, ...]

    @property
    def stop(self) -> int:
        """The number of the next item's first unit."""
        return self.start + len(self.levels)


Item: TypeAlias = Keep | Segment


@dataclass(frozen=True)
class Outcome:
    """What a plan costs: the peak in bytes, extra ms per step, and the moment of the peak."""

    peak: int
    extra: float
    where: str


def simulate(chain: Chain, items: Sequence[Item]) -> Outcome:
    """Walk through one step under a plan; raise ValueError if that does not cover the chain."""
    _check_cover(chain, items)
    peak, where = max(moments(chain, items), key=lambda moment: moment[0])
    return Outcome(peak, sum(_extra(chain, item) for item in items), where)


def _check_cover(chain: Chain, items: Sequence[Item]) -> None:
    at = 0
    for item in items:
        if item.start != at or item.stop == at:
            raise ValueError(f"simulate: an item that starts at unit {at} was expected, got {item}")
        held = _levels(chain, item) if isinstance(item, Segment) else ()
        if any(unit.fixed or level.nested for unit, level in held):
            raise ValueError(
                f"simulate: a segment without fixed units or nested levels expected, got {item}"
            )
        at = item.stop
    if at != len(chain.units):
        raise ValueError(f"simulate: the plan covers {at} of {len(chain.units)} units")


def moments(chain: Chain, items: Sequence[Item]) -> Iterator[tuple[int, str]]:
    """Yield live bytes and what is going on, from the first forward to the last backward."""
    units, live = chain.units, chain.base
    for item in items:
        live += _kept(chain, item)
        for i, (unit, level) in enumerate(_levels(chain, item), item.start):
            if isinstance(item, Keep):
                transient = unit.forward_at(level)
            else:
                transient = unit.running_at(level)
                transient += units[i - 1].output if i > item.start else 0
            yield live + transient, f"forward of {unit.name}"
    for item in reversed(items):
        live -= _kept(chain, item)
        held = []
        dy = units[item.stop - 1].output
        for unit, level in _levels(chain, item):
            first = isinstance(item, Segment) and not held
            kept = level.held if isinstance(item, Segment) else level.kept
            held.append(max(kept, unit.input) if first else kept)
            if isinstance(item, Segment):
                again = unit.running_at(level) + dy
                if len(held) == len(item.levels) and level.ending is not None:
                    again = level.ending
                yield live + sum(held) + again, f"recompute of {unit.name}"
        for unit, level in reversed(_levels(chain, item)):
            # of the last unit of a segment, `ending` was both
            ends = isinstance(item, Segment) and len(held) == len(item.levels)
            if not ends or level.ending is None:
                yield live + sum(held) + level.transient, f"backward of {unit.name}"
            held.pop()
            live += unit.left


def _kept(chain: Chain, item: Item) -> int:
    unit = chain.units[item.start]
    return unit.input if isinstance(item, Segment) else unit.level(item.level).kept


def _levels(chain: Chain, item: Item) -> list[tuple[Unit, Level]]:
    names = item.levels if isinstance(item, Segment) else (item.level,)
    units = chain.units[item.start : item.stop]
    return [(unit, unit.level(name)) for unit, name in zip(units, names, strict=True)]


def _extra(chain: Chain, item: Item) -> float:
    extra = sum(level.extra for _, level in _levels(chain, item))
    if isinstance(item, Keep):
        return extra
    units = chain.units[item.start : item.stop]
    return extra + sum(unit.again for unit in units) - units[-1].tail
