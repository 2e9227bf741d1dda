"""The bytes and ms of units, measured where they run, in a few steps of the user's own model.

Markers where a unit's forward begins and ends, and where its gradient arrives, cut a step into
phases. In one step every unit is in a checkpoint of its own, which is about the least memory that
there is; in one step for each save level none is. The differences are the bytes that a unit saves.
A forward with units joined into segments as long as can be shows the bytes that these do not keep.
No unit is called alone, no argument is copied, and phases between the markers of two units
show the code between these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch

from fusedckpt.autograd.levels import LEVELS
from fusedckpt.planning.budget import spare_bytes
from fusedckpt.planning.chain import Chain, Level, Unit
from fusedckpt.planning.marks import Reading
from fusedckpt.planning.meter import Differs, Meter
from fusedckpt.planning.roles import INSIDE, PLAIN, PRODUCTS, run_at
from fusedckpt.planning.survey import WRITES, Found
from fusedckpt.planning.timing import Times, once, step_kind
from fusedckpt.planning.units import shares_norms
from fusedckpt.reporting.step import Step

__all__ = ["Measured", "measured"]

# a unit that saves less takes more than that by so much of its forward at least: less is noise
_NOT_FREE = 0.01
# a recompute takes so much of a forward at least and, beside some ms, at most: the rest is noise
_RERUN, _OVERHEAD = (0.05, 1.5), 1.0


class Measured(NamedTuple):
    """The chain; by unit why it is never recomputed; the times of a step that saves everything."""

    chain: Chain
    left_out: dict[str, str]
    plain: Times | None


def measured(step: Step, found: Sequence[Found], selective: bool, chunks: int = 1) -> Measured:
    """Measure units; selective: at PRODUCTS, too; chunks: into which their MLPs are cut."""
    reasons: dict[str, str] = {}
    while True:
        meter = Meter(step, found, chunks)
        try:
            alone = meter.alone()
            break
        except Differs as error:
            reasons |= {found[i].name: why for i, why in error.reasons.items()}
            found = [u._replace(fixed=reasons.get(u.name, u.fixed)) for u in found]
            after = [True, *(bool(u.fixed) for u in found)]
            found = [
                u._replace(joined=u.joined and not (u.fixed or is_fixed))
                for u, is_fixed in zip(found, after, strict=False)
            ]
    freed = meter.freed() if any(unit.joined for unit in found) else [0] * len(found)
    costs = _Costs(meter, found, alone, step.parameters()[0].device)
    costs.measure(selective)
    kind = step_kind(step), chunks, tuple(unit.name for unit in found), selective
    plain, times = once(kind, costs.times)
    units = (costs.unit(i, freed[i], times[i]) for i in range(len(found)))
    head = alone.live["backward"] - alone.live["returned"]
    ends = alone.base, alone.before, alone.after
    chain = Chain(tuple(units), *ends, costs.states, max(0, head))
    return Measured(chain, reasons, plain)


class _Ms(NamedTuple):
    """The ms that a unit takes: its forward, more at each level, and a recompute of it alone."""

    forward: float
    extra: Mapping[str, float]
    rerun: float


class _Costs:
    """Readings of units at levels, beside the one in which every unit is checkpointed."""

    def __init__(self, meter: Meter, found: Sequence[Found], alone: Reading, device: torch.device):
        self._meter, self._found, self._alone = meter, found, alone
        self._device = device
        # of random numbers, which only a CPU has in its own memory
        self.states = torch.get_rng_state().nbytes if device.type == "cpu" else 0
        # by unit and level
        self._readings: list[dict[str, Reading]] = [{} for _ in found]
        self._inside: list[dict[str, Reading]] = [{} for _ in found]
        self._groups = [*self._fitting()]

    def _fitting(self) -> Iterator[list[int]]:
        """Yield groups of units that can be measured at once."""
        alone, numbers = self._alone, range(len(self._found))
        # a recompute and its backward take no less than is saved
        sizes = [max(0, alone.peak("back", i) - alone.live.get(f"back {i}", 0)) for i in numbers]
        spare, group = spare_bytes(self._device) - (alone.most - alone.base), list[int]()
        for i in numbers:
            if group and sum(sizes[k] for k in (*group, i)) > spare:
                yield group
                group = []
            group.append(i)
        yield group

    def measure(self, selective: bool) -> None:
        """Measure units at the levels that they offer, and at PRODUCTS."""
        offered = [unit.levels for unit in self._found]
        names = [x for x in (*reversed(LEVELS), PLAIN) if any(x in levels for levels in offered)]
        rounds = [[x if x in levels else levels[0] for levels in offered] for x in names]
        if rounds[1:] and PLAIN in names:
            # measured with each of the others
            rounds.pop()
        if selective:
            writes = [unit.fixed == WRITES for unit in (*self._found[1:], self._found[0])]
            pairs = zip(self._found, writes, rounds[0], strict=True)
            rounds.append([x if u.fixed or after else PRODUCTS for u, after, x in pairs])
        shares = [shares_norms(unit.module) for unit in self._found]
        if any(shares) and any(unit.joined for unit in self._found):
            pairs = zip(rounds[0], shares, strict=True)
            rounds.append([INSIDE if is_inside else x for x, is_inside in pairs])
        for levels in rounds:
            for group in self._groups:
                reading = self._meter.saving(levels, group)
                for i in group:
                    known = self._inside if levels[i] == INSIDE else self._readings
                    known[i].setdefault(levels[i], reading)

    def times(self) -> tuple[Times | None, list[_Ms]]:
        """Return the times of a step that saves everything, and of units, alike ones averaged."""
        kinds = [self._kind(i) for i in range(len(self._found))]
        fastest = [next(iter(readings)) for readings in self._readings]
        plain, forward = None, [x[n].ms("enter", i) for i, (x, n) in self._pairs(fastest)]
        profiled = sum(forward)
        if len(self._groups) == 1:
            plain, forward = self._meter.times([run_at(name) for name in fastest])
        scale = sum(forward) / profiled if profiled else 1.0
        alike: dict[Any, list[int]] = {}
        for i, kind in enumerate(kinds):
            alike.setdefault(kind, []).append(i)
        found = {kind: self._ms(units, scale, forward) for kind, units in alike.items()}
        return plain, [found[kind] for kind in kinds]

    def _pairs(self, fastest: Sequence[str]) -> Any:
        return enumerate(zip(self._readings, fastest, strict=True))

    def _kind(self, i: int) -> Any:
        """Return a key that units which cost the same share."""
        module = self._found[i].module
        shapes = tuple((p.shape, p.requires_grad) for p in module.parameters())
        kept = tuple((name, self._kept(i, x)) for name, x in self._readings[i].items())
        return type(module), shapes, self._found[i].input, kept

    def _ms(self, alike: Sequence[int], scale: float, forward: Sequence[float]) -> _Ms:
        """Return the average of units that are alike."""
        readings = self._readings[alike[0]]
        names = [*readings]

        def mean(kind: str, name: str) -> float:
            return fmean(self._readings[i][name].ms(kind, i) for i in alike)

        both = {name: mean("enter", name) + mean("back", name) for name in names}
        ms = fmean(forward[i] for i in alike)
        extra, least = {names[0]: 0.0}, 0.0
        for name in sorted(names[1:], key=lambda name: -self._kept(alike[0], readings[name])):
            least = max(scale * (both[name] - both[names[0]]), least + _NOT_FREE * ms)
            extra[name] = least
        again = fmean(self._alone.ms("back", i) for i in alike) - mean("back", names[0])
        low, high = (share * ms for share in _RERUN)
        return _Ms(ms, extra, min(max(scale * again, low), high + _OVERHEAD))

    def _kept(self, i: int, reading: Reading) -> int:
        before, after = (reading.kept(k) - self._alone.kept(k) for k in (i, i + 1))
        return after - before

    def _level(self, i: int, name: str, reading: Reading, extra: float = 0.0) -> Level:
        alone = self._alone
        # beyond the bytes that units before this one save
        forward = reading.peak("enter", i) - (reading.begin(i) - alone.begin(i))
        backward = reading.peak("back", i) - (reading.kept(i) - alone.kept(i))
        return Level(name, self._kept(i, reading), extra, max(0, forward), max(0, backward))

    def unit(self, i: int, freed: int, ms: _Ms) -> Unit:
        """Return a unit with its costs."""
        found, alone = self._found[i], self._alone
        levels = [self._level(i, name, x, ms.extra[name]) for name, x in self._readings[i].items()]
        inside = next(iter((self._inside[i] or self._readings[i]).values()))
        # a level that keeps no less than a faster one is of no use
        levels = [
            x for x in levels if all(x is y or x.kept < y.kept or x.extra < y.extra for y in levels)
        ]
        again = Level("again", 0, ms.rerun, alone.peak("enter", i), alone.peak("back", i))
        return Unit(
            found.name,
            tuple(levels),
            again=None if found.fixed else again,
            inside=self._level(i, INSIDE, inside),
            forward_ms=ms.forward,
            rerun_ms=ms.forward,
            input=found.input,
            freed=freed if found.joined else 0,
            begin=alone.begin(i),
            between=alone.peak("leave", i),
            arrives=alone.live.get(f"back {i}", alone.begin(i)),
            # code may hold the input anyway
            joined=found.joined and 2 * freed > found.input,
            composed=any(True for _ in found.module.children()),
            fixed=found.fixed,
        )
