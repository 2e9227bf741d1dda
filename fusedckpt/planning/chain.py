"""A model as a chain of units, what a plan does to it, and what that costs in bytes and time.

A plan covers the chain, in order, with items: a unit that keeps a level of its intermediates, or a
checkpointed segment that keeps only its input and is run again in backward; as a chain of its own,
where segments are nested in it. `simulate` walks
through a step and adds up the bytes that live, one moment after the other: what items before keep,
what the units of this one hold for their backward, what those behind left, and what is there for a
moment only. It knows nothing of `solver`, whose plans it checks.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
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


_AMOUNTS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float)}


def _check_amounts(record: Level | Unit | Chain) -> None:
    for field in fields(record):
        value, (wanted, _, optional) = getattr(record, field.name), str(field.type).partition(" | ")
        if wanted not in _AMOUNTS or (value is None and optional):
            continue
        # True is an int, too
        least = -math.inf if field.name == "tail" else 0
        if value is None or type(value) not in _AMOUNTS[wanted] or not least <= value < math.inf:
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

    def units_of(self, item: Item) -> tuple[Unit, ...]:
        """Return the units of an item of a plan."""
        return self.units[item.start : item.stop]

    def levels_of(self, item: Item) -> list[tuple[Unit, Level]]:
        """Return the units of an item with their levels."""
        return [(u, u.level(x)) for u, x in zip(self.units_of(item), item.levels, strict=True)]

    def kept_by(self, item: Item, again: bool = False) -> int:
        """Return the bytes that an item keeps from where it runs, or runs again, until backward."""
        unit, level = self.levels_of(item)[0]
        if isinstance(item, Segment):
            return unit.input
        return level.held if again else level.kept

    def extra_of(self, item: Item) -> float:
        """Return the ms that an item adds to a step."""
        units = self.units_of(item)
        if isinstance(item, Keep):
            return units[0].level(item.level).extra
        extra = sum(map(self.extra_of, item.items)) + sum(unit.again for unit in units)
        last = item.items[-1]
        if isinstance(last, Keep):
            return extra - units[-1].tail
        # the recompute ends where it has the input of that
        return extra - sum(unit.again for unit in self.units_of(last))


@dataclass(frozen=True)
class Keep:
    """An item of a plan: unit number `start` keeps `level`."""

    start: int
    level: str

    @property
    def levels(self) -> tuple[str, ...]:
        """That level, as a segment has those of its units."""
        return (self.level,)

    @property
    def stop(self) -> int:
        """The number of the next item's first unit."""
        return self.start + 1


@dataclass(frozen=True)
class Segment:
    """An item of a plan: units from `start` on are checkpointed as one.

    levels: for each of its units what that keeps between being run again and its backward.
    inner: how its units run when they run again, as segments of their own; () where all are kept.
    """

    start: int
    levels: tuple[str, ...]
    inner: tuple[Item, ...] = ()

    @property
    def items(self) -> tuple[Item, ...]:
        """How its units run when they run again."""
        return self.inner or tuple(Keep(i, x) for i, x in enumerate(self.levels, self.start))

    @property
    def stop(self) -> int:
        """The number of the next item's first unit."""
        return self.start + len(self.levels)


Item: TypeAlias = Keep | Segment


@dataclass(frozen=True)
class Outcome:
    """What a plan costs: the peak in bytes, extra ms per step, and the moment of the peak.

    lower_bound: ms that no plan within the same budget is below, as far as is known.
    """

    items: tuple[Item, ...]
    peak: int
    extra: float
    where: str
    lower_bound: float = 0.0


def simulate(chain: Chain, items: Sequence[Item]) -> Outcome:
    """Walk through one step under a plan; raise ValueError if that does not cover the chain."""
    _check_cover(chain, items, 0, len(chain.units))
    peak, where = max(moments(chain, items), key=lambda moment: moment[0])
    return Outcome(tuple(items), peak, sum(map(chain.extra_of, items)), where)


def _check_cover(chain: Chain, items: Sequence[Item], at: int, stop: int) -> None:
    for item in items:
        if item.start != at or not at < item.stop <= stop:
            raise ValueError(f"simulate: an item that starts at unit {at} was expected, got {item}")
        at, inner = item.stop, item.items if isinstance(item, Segment) else ()
        held = chain.levels_of(item) if inner else ()
        if any(unit.fixed or level.nested for unit, level in held):
            raise ValueError(
                f"simulate: a segment without fixed units or nested levels expected, got {item}"
            )
        _check_cover(chain, inner, item.start, item.stop if inner else item.start)
        if inner and item.levels != tuple(level for x in inner for level in x.levels):
            raise ValueError(f"simulate: a segment with levels as in those inside, got {item}")
    if at != stop:
        raise ValueError(f"simulate: the plan covers {at} of {len(chain.units)} units")


def moments(chain: Chain, items: Sequence[Item]) -> Iterator[tuple[int, str]]:
    """Yield live bytes and what is going on, from the first forward to the last backward."""
    kept = [chain.kept_by(item) for item in items]
    live = chain.base
    for item, nbytes in zip(items, kept, strict=True):
        live += nbytes
        yield from _forward(chain, item, live)
    yield from _backward(chain, items, kept, live)


def _forward(chain: Chain, item: Item, live: int, again: bool = False) -> Iterator[tuple[int, str]]:
    """Yield what is live as an item runs, for the first time or again within a segment."""
    for i, (unit, level) in enumerate(chain.levels_of(item), item.start):
        transient = unit.running_at(level)
        if isinstance(item, Segment):
            transient += chain.units[i - 1].output if i > item.start else 0
        elif not again:
            transient = unit.forward_at(level)
        yield live + transient, f"{'recompute' if again else 'forward'} of {unit.name}"


def _backward(
    chain: Chain, items: Sequence[Item], kept: Sequence[int], live: int, again: bool = False
) -> Generator[tuple[int, str], None, int]:
    """Yield what is live in the backward of items, last to first; return what is afterwards.

    live: what is when it begins, what the items keep included. again: they are of a segment that
    has just run again.
    """
    for item, nbytes in zip(reversed(items), reversed(kept), strict=True):
        if isinstance(item, Segment):
            held = [chain.kept_by(inner, again=True) for inner in item.items]
            held[0] = max(held[0], nbytes)
            live -= nbytes
            yield from _recompute(chain, item, held, live)
            live = yield from _backward(chain, item.items, held, live + sum(held), again=True)
            continue
        unit, level = chain.levels_of(item)[0]
        # of the last unit of a segment, `ending` was both
        if not again or item is not items[-1] or level.ending is None:
            yield live + level.transient, f"backward of {unit.name}"
        live += unit.left - nbytes
    return live


def _recompute(
    chain: Chain, item: Segment, held: Sequence[int], live: int
) -> Iterator[tuple[int, str]]:
    """Yield what is live as a segment runs again, of whose items each holds so much then."""
    *before, last = item.items
    dy = chain.units[item.stop - 1].output
    for inner, nbytes in zip(before, held, strict=False):
        live += nbytes
        yield from _forward(chain, inner, live + dy, again=True)
    # it ends where it has the input of a segment within
    if isinstance(last, Keep):
        unit, level = chain.levels_of(last)[0]
        again = unit.running_at(level) + dy if level.ending is None else level.ending
        yield live + held[-1] + again, f"recompute of {unit.name}"
