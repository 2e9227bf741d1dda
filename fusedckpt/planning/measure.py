"""The bytes and ms of units, measured where they run, in a few steps of the user's own model.

Markers where a unit's forward begins and ends, and where its gradient arrives, cut a step into
phases. In one step every unit is in a checkpoint of its own, which is about the least memory that
there is; in one step for each save level none is. The differences are the bytes that a unit saves.
A forward with units joined into segments as long as can be shows the bytes that these do not keep.
No unit is called alone, no argument is copied, and phases between the markers of two units
show the code between these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import torch

from fusedckpt.autograd.levels import LEVELS
from fusedckpt.planning.budget import spare_bytes
from fusedckpt.planning.chain import Chain, Level, Unit
from fusedckpt.planning.grouping import SurveyedUnit
from fusedckpt.planning.meter import Meter, Reading, Times, once, roles_at, step_kind
from fusedckpt.planning.offloading import CopyRates
from fusedckpt.planning.roles import ATTENTION, INSIDE, NO_RECIPES, PLAIN, PRODUCTS
from fusedckpt.planning.survey import WRITES
from fusedckpt.reporting.step import Step

# a unit that saves less takes more than that by so much of its forward at least: less is noise
_NOT_FREE = 0.01
# a recompute takes so much of a forward at least and, beside some ms, at most: the rest is noise
_RERUN, _OVERHEAD = (0.05, 1.5), 1.0


class Measured(NamedTuple):
    """The chain; the times of a step that saves everything."""

    chain: Chain
    plain: Times | None


def measured(
    step: Step, found: Sequence[SurveyedUnit], selective: bool, rates: CopyRates
) -> Measured:
    """Measure units; selective: at PRODUCTS, too; rates: of copies that offload inputs."""
    meter = Meter(step, found)
    alone = meter.alone()
    freed = meter.freed(alone) if any(unit.joined for unit in found) else [0] * len(found)
    costs = _Costs(meter, found, alone, step.device)
    costs.measure(selective)
    levels = tuple(costs.level_names(i) for i in range(len(found)))
    kind = step_kind(step), tuple(unit.name for unit in found), levels
    plain, times = once(kind, costs.times)
    units = tuple(costs.unit(i, freed[i], times[i]) for i in range(len(found)))
    head = alone.live["backward"] - alone.live["returned"]
    peaks = alone.peaks
    before = max(peaks["begin"], peaks["forward"])
    after = max(peaks["optimizer"], peaks["end"])
    # of random numbers, which only a CPU has in its own memory
    states = torch.get_rng_state().nbytes if costs.device.type == "cpu" else 0
    chain = Chain(
        units,
        base=alone.live["begin"],
        before=before,
        after=after,
        states=states,
        head=max(0, head),
        outlives=costs.outlives,
        to_host=rates.to_host,
        to_device=rates.to_device,
    )
    return Measured(chain, plain)


class _Ms(NamedTuple):
    """The ms that a unit takes: its forward, more at each level, a recompute, and its backward."""

    forward: float
    extra: dict[str, float]
    recomputed: float
    backward: float


class _Costs:
    """Readings of units at levels, beside the one in which every unit is checkpointed."""

    def __init__(
        self, meter: Meter, found: Sequence[SurveyedUnit], alone: Reading, device: torch.device
    ):
        self._meter, self._units, self._alone, self.device = meter, found, alone, device
        # by unit and level, the fastest first
        self._readings: list[dict[str, Reading]] = [{} for _ in found]
        # by unit and level, the casts of weights that units before it save in that reading
        self._cached_before: dict[tuple[int, str], int] = {}
        self.outlives = torch.is_autocast_enabled(device.type)
        self._groups = [*self._fitting()]

    def _fitting(self) -> Iterator[list[int]]:
        """Yield groups of units that can be measured at once."""
        alone, numbers = self._alone, range(len(self._units))
        # a recompute and its backward take no less than is saved
        sizes = [max(0, alone.peak("back", i) - alone.live.get(f"back {i}", 0)) for i in numbers]
        spare = spare_bytes(self.device) - (max(alone.peaks.values()) - alone.live["begin"])
        group = list[int]()
        for i in numbers:
            if group and sum(sizes[k] for k in (*group, i)) > spare:
                yield group
                group = []
            group.append(i)
        yield group

    def measure(self, selective: bool) -> None:
        """Measure units at the levels that they offer, at PRODUCTS or ATTENTION, and INSIDE."""
        offered = [unit.levels for unit in self._units]
        known = [NO_RECIPES, *reversed(LEVELS)]
        names = [x for x in known if any(x in levels for levels in offered)]
        has_fused = bool({*names} - {NO_RECIPES})
        if not names or NO_RECIPES in names:
            names.append(PLAIN)
        rounds = [[x if x in levels else levels[0] for levels in offered] for x in names]
        extra = [PRODUCTS if selective else ATTENTION if u.attends else "" for u in self._units]
        if any(extra):
            # a unit after which one writes its input is left, too
            writes = [unit.fixed == WRITES for unit in (*self._units[1:], self._units[0])]
            rows = zip(self._units, writes, extra, rounds[0], strict=True)
            rounds.append([x if u.fixed or after else own or x for u, after, own, x in rows])
        if any(unit.joined for unit in self._units) and has_fused:
            pairs = zip(rounds[0], offered, strict=True)
            rounds.append([x if PLAIN in levels else INSIDE for x, levels in pairs])
        for levels in rounds:
            for group in self._groups:
                reading = self._meter.saving(levels, group)
                for i in group:
                    if levels[i] not in self._readings[i]:
                        self._readings[i][levels[i]] = reading
                        before = sum(self._cached(k, levels[k]) for k in group if k < i)
                        self._cached_before[i, levels[i]] = before

    def level_names(self, i: int) -> tuple[str, ...]:
        """Return the levels at which a unit was measured."""
        return tuple(self._readings[i])

    def _levels(self, i: int) -> dict[str, Reading]:
        return {name: x for name, x in self._readings[i].items() if name != INSIDE}

    def times(self) -> tuple[Times | None, list[_Ms]]:
        """Return the times of a step that saves everything, and of units, alike ones averaged."""
        fastest = [next(iter(readings)) for readings in self._readings]
        forward = [self._readings[i][name].ms("enter", i) for i, name in enumerate(fastest)]
        plain, profiled = None, sum(forward)
        if len(self._groups) == 1:
            pairs = zip(fastest, self._units, strict=True)
            plain, forward = self._meter.times([roles_at(name, unit) for name, unit in pairs])
        scale = sum(forward) / profiled if profiled else 1.0
        kinds = [self._kind(i) for i in range(len(self._units))]
        alike: dict[Any, list[int]] = {}
        for i, kind in enumerate(kinds):
            alike.setdefault(kind, []).append(i)
        found = {kind: self._ms(units, scale, forward) for kind, units in alike.items()}
        return plain, [found[kind] for kind in kinds]

    def _kind(self, i: int) -> Any:
        """Return a key that units which cost the same share."""
        modules = [module for _, module in self._units[i].members]
        shapes = tuple((p.shape, p.requires_grad) for m in modules for p in m.parameters())
        kept = tuple((name, self._kept(i, name)) for name in self._readings[i])
        return tuple(map(type, modules)), shapes, self._units[i].input, kept

    def _ms(self, alike: Sequence[int], scale: float, forward: Sequence[float]) -> _Ms:
        """Return the average of units that are alike."""
        readings = self._levels(alike[0])
        first, *names = readings

        def mean(kind: str, name: str) -> float:
            return fmean(self._readings[i][name].ms(kind, i) for i in alike)

        both = {name: mean("enter", name) + mean("back", name) for name in readings}
        ms = fmean(forward[i] for i in alike)
        recomputed = fmean(self._alone.ms("back", i) for i in alike) - mean("back", first)
        low, high = (share * ms for share in _RERUN)
        recomputed = min(max(scale * recomputed, low), high + _OVERHEAD)
        extra, least = {first: 0.0}, 0.0
        for name in sorted(names, key=lambda name: -self._kept(alike[0], name)):
            least = max(scale * (both[name] - both[first]), least + _NOT_FREE * ms)
            # a recompute without attention takes no longer than one with it
            extra[name] = min(least, recomputed) if name == ATTENTION else least
        return _Ms(ms, extra, recomputed, scale * mean("back", first))

    def _kept(self, i: int, name: str) -> int:
        """Return the bytes that a unit saves at a level beyond a checkpoint of its own."""
        reading, cached = self._readings[i][name], self._cached(i, name)
        before, after = (reading.kept(k) - self._alone.kept(k) for k in (i, i + 1))
        if i == len(self._units) - 1 and not self.outlives:
            # the model has returned, and the cache of an autocast in its forward is empty
            return after - before - self._cached_before[i, name]
        return after - before + cached

    def _released(self, i: int, name: str) -> int:
        """Return the bytes of its input that a checkpoint keeps, and the unit itself does not."""
        sizes, alone = self._alone.inputs[i], self._alone.kept_inputs[i]
        kept = self._readings[i][name].kept_inputs[i]
        rows = zip(sizes, alone, kept, strict=False)
        return sum(nbytes for nbytes, was_kept, is_kept in rows if was_kept and not is_kept)

    def _constants(self, i: int, name: str) -> int:
        """Return the bytes of its constants that a checkpoint keeps, and the unit itself does not.

        The difference of the bytes that it saves in both has them; so does a segment of several.
        """
        kept, alone = (x.kept_constants[i] for x in (self._readings[i][name], self._alone))
        return sum(there for there, here in zip(alone, kept, strict=False) if not here)

    def _cached(self, i: int, name: str) -> int:
        """Return the bytes of casts of weights that a unit saves, and autocast's cache holds."""
        is_recomputed = name in (PRODUCTS, ATTENTION)
        return 0 if is_recomputed or self._units[i].fixed else self._units[i].casts

    def _backward_phase(self, i: int) -> str:
        """Return the kind of the phase that has a unit's backward.

        It is the code behind the last unit if no gradient arrives at that: a head that is computed
        with the loss.
        """
        is_last = i == len(self._units) - 1
        return "leave" if is_last and f"back {i}" not in self._alone.live else "back"

    def _level(self, i: int, name: str, extra: float = 0.0) -> Level:
        alone, reading = self._alone, self._readings[i][name]
        # beyond the bytes that units before this one save
        forward = reading.peak("enter", i) - (reading.begin(i) - alone.begin(i))
        before = reading.kept(i) - alone.kept(i) + self._cached_before[i, name]
        backward = reading.peak(self._backward_phase(i), i) - before
        return Level(
            name,
            self._kept(i, name),
            extra,
            forward=max(0, forward),
            backward=max(0, backward),
            cached=self._cached(i, name),
        )

    def unit(self, i: int, freed: int, ms: _Ms) -> Unit:
        """Return a unit with its costs."""
        found, alone, readings = self._units[i], self._alone, self._readings[i]
        levels = [self._level(i, name, ms.extra[name]) for name in self._levels(i)]
        useful = list[Level]()
        for level in sorted(levels, key=lambda level: (level.extra, level.kept)):
            # one that keeps no less than a faster one is of no use
            if not useful or level.kept < useful[-1].kept:
                useful.append(level)
        inside = INSIDE if INSIDE in readings else next(iter(readings))
        phase = self._backward_phase(i)
        peaks = alone.peak("enter", i), alone.peak(phase, i)
        recomputed = Level("recomputed", 0, ms.recomputed, *peaks)
        # a phase counts once
        behind = alone.peak("leave", i) if phase == "back" else alone.begin(i)
        return Unit(
            found.name,
            tuple(useful),
            recomputed=None if found.fixed else recomputed,
            in_segment=replace(self._level(i, inside), name=INSIDE),
            forward_ms=ms.forward,
            input_bytes=found.input,
            freed_in_segment=freed if found.joined else 0,
            unsaved_input=self._released(i, inside),
            unsaved_constants=self._constants(i, inside),
            live_at_begin=alone.begin(i),
            peak_until_next=behind,
            live_at_gradient=alone.live.get(f"back {i}", alone.begin(i)),
            # code may hold the input anyway
            joined=found.joined and 2 * freed > found.input,
            fixed=found.fixed,
            members=tuple(name for name, _ in found.members),
            movable=found.movable,
            backward_ms=ms.backward,
        )
