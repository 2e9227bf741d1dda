"""The bytes and ms of units, measured where they run, in a few steps of the user's own model.

The baseline is a step with every unit in a checkpoint of its own, which takes about the least
memory. In one more step for each save level no unit is in a checkpoint. The differences to the
baseline are the bytes that a unit saves. A forward with units joined into segments, as long as
possible, shows the bytes that these free. No unit is called outside of the step, no argument is
copied, and phases between the markers of two units show the code between these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import torch

from fusedckpt.autograd.levels import LEVELS
from fusedckpt.planning.budget import spare_bytes
from fusedckpt.planning.chain import Chain, Level, SharedConstant, Unit
from fusedckpt.planning.grouping import SurveyedUnit
from fusedckpt.planning.lifetimes import ConstantLife, Places
from fusedckpt.planning.meter import Meter, Reading, roles_at
from fusedckpt.planning.offloading import CopyRates
from fusedckpt.planning.roles import ATTENTION, INSIDE, NO_RECIPES, PRODUCTS, ROUNDED, UNCHANGED
from fusedckpt.planning.survey import WRITES_INPUT
from fusedckpt.planning.whole_steps import Times, once, step_kind
from fusedckpt.reporting.step import Step
from fusedckpt.state import rng

# a unit that saves less takes more than that by this share of its forward at least: less is noise
_NOT_FREE = 0.01
# a recompute takes this share of a forward at least: less is noise
_FASTEST_RECOMPUTE = 0.05
# a recompute takes this share of a forward, and _OVERHEAD_MS, at most: more is noise
_SLOWEST_RECOMPUTE = 1.5
_OVERHEAD_MS = 1.0
# kinds of constants that the solver tells apart: each one may double its work
_MOST_SHARED = 2


class MeasuredChain(NamedTuple):
    """The chain of units, and its steps."""

    chain: Chain
    # the times of a step that saves everything, None where that may not fit
    plain: Times | None
    # a step without a plan
    step: Step
    # the units that write the output of a product in place, with policy "speed"
    writing: Sequence[str]


def measure_chain(
    step: Step, units: Sequence[SurveyedUnit], with_products: bool, rates: CopyRates
) -> MeasuredChain:
    """Measure units where they run.

    with_products: whether at the level PRODUCTS, too. rates: of copies that offload inputs.
    """
    meter = Meter(step, units)
    baseline = meter.baseline()
    freed = [0] * len(units)
    if any(unit.joined for unit in units):
        freed = meter.freed_by_segments(baseline)
    costs = _Costs(meter, units, baseline, step.device)
    writing = meter.writing_products() if with_products else []
    costs.measure([with_products and unit.name not in writing for unit in units])
    costs.find_shared()
    levels = tuple(costs.level_names(i) for i in range(len(units)))
    key = step_kind(step), tuple(unit.name for unit in units), levels
    plain, times = once(key, costs.times)
    peaks = baseline.peaks
    kept = meter.step.kept_bytes
    chain = Chain(
        tuple(costs.unit(i, freed[i], times[i]) for i in range(len(units))),
        resident_bytes=baseline.live["begin"],
        peak_before=max(peaks["begin"], peaks["forward"]),
        peak_after=max(peaks["optimizer"], peaks["end"]),
        # only a CPU's random states are in its own memory
        random_state_bytes=rng.CPU.read().nbytes if step.device.type == "cpu" else 0,
        saved_behind=max(0, baseline.live["backward"] + kept - baseline.live["returned"]),
        casts_outlive_model=costs.casts_outlive_model,
        shared=tuple(costs.shared),
        peak_returned=costs.peak_returned(),
        to_host=rates.to_host,
        to_device=rates.to_device,
    )
    return MeasuredChain(chain, plain, meter.step, writing)


class _UnitTimes(NamedTuple):
    """The ms that a unit takes."""

    # ms of its forward at its fastest level
    forward: float
    # by level, ms more than at the fastest one
    extra: dict[str, float]
    # ms of its recompute in a checkpoint of its own
    recompute: float
    # ms of its backward
    backward: float


class _Costs:
    """Readings of units at levels, beside the baseline."""

    def __init__(
        self, meter: Meter, units: Sequence[SurveyedUnit], baseline: Reading, device: torch.device
    ):
        self._meter = meter
        self._units = units
        self._baseline = baseline
        self._device = device
        # by unit and level, the fastest first
        self._readings: list[dict[str, Reading]] = [{} for _ in units]
        # by unit and level, the bytes of casts of weights that units before it save in that reading
        self._cached_before: dict[tuple[int, str], int] = {}
        self.casts_outlive_model = torch.is_autocast_enabled(device.type)
        # by its places, the life in the baseline of each constant that several units get
        self._constants: dict[Places, ConstantLife] = {}
        # these among them that not every plan saves, by their places, largest first
        self.shared: list[SharedConstant] = []
        self._shared_places: list[list[Places]] = []
        self._groups = [*self._fitting_groups()]

    def _fitting_groups(self) -> Iterator[list[int]]:
        """Yield groups of units that can save everything in one step."""
        baseline = self._baseline
        numbers = range(len(self._units))
        # a recompute and its backward take no less than a unit saves
        sizes = [
            max(0, baseline.peak("back", i) - baseline.live.get(f"back {i}", 0)) for i in numbers
        ]
        taken = max(baseline.peaks.values()) - baseline.live["begin"]
        spare = spare_bytes(self._device) - taken
        group = list[int]()
        for i in numbers:
            if group and sum(sizes[k] for k in (*group, i)) > spare:
                yield group
                group = []
            group.append(i)
        yield group

    def measure(self, with_products: Sequence[bool]) -> None:
        """Measure units at the levels that they offer, at PRODUCTS or ATTENTION, and INSIDE.

        with_products: by unit, whether at PRODUCTS.
        """
        for levels in self._rounds(with_products):
            for group in self._groups:
                reading = self._meter.at_levels(levels, group)
                for i in group:
                    if levels[i] not in self._readings[i]:
                        self._readings[i][levels[i]] = reading
                        before = sum(self._cached_bytes(k, levels[k]) for k in group if k < i)
                        self._cached_before[i, levels[i]] = before

    def find_shared(self) -> None:
        """Find the constants of several units that not every level saves; alike ones are one.

        The caller of the units holds them until the model returns.
        """
        self._constants = {
            places: life
            for places, life in self._baseline.constants.items()
            if len({i for i, _ in places}) > 1 and self._is_held(places)
        }
        alike: dict[Any, list[Places]] = {}
        for places, life in self._constants.items():
            takers = tuple(sorted({i for i, _ in places}))
            unsaved = tuple(name for i in takers for name in self._levels_without(i, places))
            if unsaved:
                alike.setdefault((takers, life.kept_from, unsaved), []).append(places)

        def nbytes(group: list[Places]) -> int:
            return sum(self._constants[places].nbytes for places in group)

        # others count as if each plan saved them
        self._shared_places = sorted(alike.values(), key=nbytes, reverse=True)[:_MOST_SHARED]
        self.shared = [
            SharedConstant(nbytes(group), self._constants[group[0]].kept_from)
            for group in self._shared_places
        ]

    def _is_held(self, places: Places) -> bool:
        """Whether a constant lives until the model returns, for all levels of the units."""
        readings = {id(x): x for row in self._readings for x in row.values()}
        lives = [x.constants.get(places) for x in readings.values()]
        return all(life is not None and life.gone >= len(self._units) for life in lives)

    def _levels_without(self, i: int, places: Places) -> list[str]:
        """Return the levels at which unit i does not save a constant.

        All units after the first that saves it in a reading count as if they saved it.
        """
        lives = {name: reading.constants.get(places) for name, reading in self._readings[i].items()}
        return [name for name, life in lives.items() if life is not None and i < life.kept_from]

    def _unsaved_shared(self, i: int, name: str) -> tuple[int, ...]:
        """Return the numbers of the shared constants that a unit does not save at a level."""
        numbers = self._shared_of(i)
        return tuple(
            k for k in numbers if name in self._levels_without(i, self._shared_places[k][0])
        )

    def _shared_of(self, i: int) -> tuple[int, ...]:
        """Return the numbers of the shared constants that a unit gets."""
        rows = enumerate(self._shared_places)
        return tuple(k for k, (places, *_) in rows if any(taker == i for taker, _ in places))

    def _first_saved(self, i: int) -> int:
        """Return the bytes of constants of several units that a unit is the first to save."""
        lives = self._constants.values()
        return sum(life.nbytes for life in lives if life.kept_from == i)

    def _missing_at(self, reading: Reading, marker: int) -> int:
        """Return the bytes of constants that live at a marker of the baseline, and not here."""
        pairs = self._lives_in(reading)
        return sum(life.nbytes for life, here in pairs if here.gone <= marker < life.gone)

    def _missing_in_backward(self, reading: Reading, i: int) -> int:
        """Return the same bytes for a unit's backward."""
        pairs = self._lives_in(reading)
        return sum(life.nbytes for life, here in pairs if life.kept_from <= i < here.kept_from)

    def _lives_in(self, reading: Reading) -> list[tuple[ConstantLife, ConstantLife]]:
        """Return the lives of constants of several units, in the baseline and in a reading."""
        pairs = ((life, reading.constants.get(places)) for places, life in self._constants.items())
        return [(life, here) for life, here in pairs if here is not None]

    def _saved_before(self, reading: Reading, i: int) -> int:
        """Return the bytes that a reading has more than the baseline when unit i begins.

        These are of tensors that live until backward. Constants of several units count in both.
        """
        more = reading.saved_before(i) - self._baseline.saved_before(i)
        return more + self._missing_at(reading, i)

    def peak_returned(self) -> int:
        """Return the peak from the model's return to the first gradient that arrives at a unit."""
        is_counted = self._backward_phase(len(self._units) - 1) == "leave"
        return 0 if is_counted else self._baseline.peak_returned

    def level_names(self, i: int) -> tuple[str, ...]:
        """Return the levels at which a unit was measured."""
        return tuple(self._readings[i])

    def _rounds(self, with_products: Sequence[bool]) -> list[list[str]]:
        """Return the steps to measure: in each, a level for every unit."""
        offered = [unit.levels for unit in self._units]
        known = [NO_RECIPES, *reversed(LEVELS)]
        names = [name for name in known if any(name in levels for levels in offered)]
        has_fused = bool({*names} - {NO_RECIPES})
        if not names or NO_RECIPES in names:
            names.append(UNCHANGED)
        if any(ROUNDED in levels for levels in offered):
            names.append(ROUNDED)
        rounds = [[name if name in levels else levels[0] for levels in offered] for name in names]
        pairs = zip(self._units, with_products, strict=True)
        extra = [self._checkpointed_level(unit, products) for unit, products in pairs]
        if any(extra):
            # a unit after which another one writes its input is left, too
            is_written = [unit.fixed == WRITES_INPUT for unit in (*self._units[1:], self._units[0])]
            rows = zip(self._units, is_written, extra, rounds[0], strict=True)
            rounds.append(
                [
                    plain if unit.fixed or is_followed else level or plain
                    for unit, is_followed, level, plain in rows
                ]
            )
        if any(unit.joined for unit in self._units) and has_fused:
            pairs = zip(rounds[0], offered, strict=True)
            rounds.append([name if UNCHANGED in levels else INSIDE for name, levels in pairs])
        return rounds

    def _checkpointed_level(self, unit: SurveyedUnit, with_products: bool) -> str:
        if with_products:
            return PRODUCTS
        return ATTENTION if unit.attends else ""

    def _levels(self, i: int) -> dict[str, Reading]:
        return {name: x for name, x in self._readings[i].items() if name != INSIDE}

    def times(self) -> tuple[Times | None, list[_UnitTimes]]:
        """Return the times of a step that saves everything, and of units, alike ones averaged."""
        fastest = [next(iter(readings)) for readings in self._readings]
        forward = [self._readings[i][name].ms("enter", i) for i, name in enumerate(fastest)]
        profiled = sum(forward)
        plain = None
        if len(self._groups) == 1:
            pairs = zip(fastest, self._units, strict=True)
            plain, forward = self._meter.times([roles_at(name, unit) for name, unit in pairs])
        # the profiler slows readings down
        scale = sum(forward) / profiled if profiled else 1.0
        kinds = [self._kind(i) for i in range(len(self._units))]
        alike: dict[Any, list[int]] = {}
        for i, kind in enumerate(kinds):
            alike.setdefault(kind, []).append(i)
        means = {kind: self._mean_times(units, scale, forward) for kind, units in alike.items()}
        return plain, [means[kind] for kind in kinds]

    def _kind(self, i: int) -> Any:
        """Return a key that units which cost the same share."""
        modules = [module for _, module in self._units[i].members]
        shapes = tuple((p.shape, p.requires_grad) for m in modules for p in m.parameters())
        added = tuple((name, self._added_bytes(i, name)) for name in self._readings[i])
        return tuple(map(type, modules)), shapes, self._units[i].input_bytes, added

    def _mean_times(
        self, alike: Sequence[int], scale: float, forward: Sequence[float]
    ) -> _UnitTimes:
        """Return the average of units that are alike.

        scale: of the ms of readings. forward: by unit, the ms of its forward.
        """
        readings = self._levels(alike[0])
        first, *names = readings

        def mean(kind: str, name: str) -> float:
            return fmean(self._readings[i][name].ms(kind, i) for i in alike)

        totals = {name: mean("enter", name) + mean("back", name) for name in readings}
        forward_ms = fmean(forward[i] for i in alike)
        recompute = fmean(self._baseline.ms("back", i) for i in alike) - mean("back", first)
        least_recompute = _FASTEST_RECOMPUTE * forward_ms
        most_recompute = _SLOWEST_RECOMPUTE * forward_ms + _OVERHEAD_MS
        recompute = min(max(scale * recompute, least_recompute), most_recompute)
        extra = {first: 0.0}
        least = 0.0
        for name in sorted(names, key=lambda name: -self._added_bytes(alike[0], name)):
            least = max(scale * (totals[name] - totals[first]), least + _NOT_FREE * forward_ms)
            # a recompute without attention takes no longer than one with it
            extra[name] = min(least, recompute) if name == ATTENTION else least
        return _UnitTimes(forward_ms, extra, recompute, scale * mean("back", first))

    def _added_bytes(self, i: int, name: str) -> int:
        """Return the bytes that a unit saves at a level beyond a checkpoint of its own."""
        reading = self._readings[i][name]
        before, after = (self._saved_before(reading, k) for k in (i, i + 1))
        if i == len(self._units) - 1 and not self.casts_outlive_model:
            # the model has returned, and the cache of an autocast in its forward is empty
            return after - before - self._cached_before[i, name]
        return after - before + self._cached_bytes(i, name)

    def _unsaved_input(self, i: int, name: str) -> int:
        """Return the bytes of its input that a checkpoint saves, and the unit itself does not."""
        baseline = self._baseline
        is_saved = self._readings[i][name].saved_inputs[i]
        rows = zip(baseline.inputs[i], baseline.saved_inputs[i], is_saved, strict=False)
        return sum(nbytes for nbytes, in_baseline, here in rows if in_baseline and not here)

    def _unsaved_constants(self, i: int, name: str) -> int:
        """Return the bytes of its constants that a checkpoint saves, and the unit itself does not.

        The difference of the bytes that it saves in both has them; so does a segment of several.
        """
        in_baseline = self._baseline.saved_constants[i]
        here = self._readings[i][name].saved_constants[i]
        # constants of several units count in the baseline
        shared = {place for places in self._constants for place in places}
        pairs = enumerate(zip(in_baseline, here, strict=False))
        return sum(nbytes for k, (nbytes, saved) in pairs if not saved and (i, k) not in shared)

    def _cached_bytes(self, i: int, name: str) -> int:
        """Return the bytes of casts of weights that a unit saves, and autocast's cache has."""
        is_recomputed = name in (PRODUCTS, ATTENTION)
        return 0 if is_recomputed or self._units[i].fixed else self._units[i].cast_bytes

    def _backward_phase(self, i: int) -> str:
        """Return the kind of the phase that has a unit's backward.

        It is the code behind the last unit if no gradient arrives at that: a head that is computed
        with the loss.
        """
        is_last = i == len(self._units) - 1
        return "leave" if is_last and f"back {i}" not in self._baseline.live else "back"

    def _forward_peak(self, reading: Reading, i: int) -> int:
        """Return the peak of a unit's forward; behind a head until the model returns."""
        is_head = self._backward_phase(i) == "leave"
        return max(reading.peak("enter", i), reading.peak_in_model if is_head else 0)

    def _backward_peak(self, reading: Reading, i: int) -> int:
        """Return the peak of a unit's backward."""
        is_head = self._backward_phase(i) == "leave"
        return reading.peak_returned if is_head else reading.peak("back", i)

    def _level(self, i: int, name: str, extra_ms: float = 0.0) -> Level:
        reading = self._readings[i][name]
        baseline = self._baseline
        # bytes that units before this one add to the baseline, live and saved
        live_before = reading.live_at_begin(i) - baseline.live_at_begin(i)
        saved_before = self._saved_before(reading, i) + self._cached_before[i, name]
        backward_peak = self._backward_peak(reading, i) + self._missing_in_backward(reading, i)
        return Level(
            name,
            self._added_bytes(i, name),
            extra_ms,
            forward_peak=max(0, self._forward_peak(reading, i) - live_before),
            backward_peak=max(0, backward_peak - saved_before),
            cached_bytes=self._cached_bytes(i, name),
            unsaved_shared=self._unsaved_shared(i, name),
        )

    def unit(self, i: int, freed: int, times: _UnitTimes) -> Unit:
        """Return a unit with its costs; freed: bytes of its input that a longer segment frees."""
        unit = self._units[i]
        baseline = self._baseline
        readings = self._readings[i]
        inside = INSIDE if INSIDE in readings else next(iter(readings))
        recomputed = Level(
            "recomputed",
            added_bytes=0,
            extra_ms=times.recompute,
            forward_peak=self._forward_peak(baseline, i),
            backward_peak=self._backward_peak(baseline, i),
        )
        live_at_begin = baseline.live_at_begin(i)
        return Unit(
            unit.name,
            self._useful_levels(i, times),
            recomputed=None if unit.fixed else recomputed,
            in_segment=replace(self._level(i, inside), name=INSIDE),
            forward_ms=times.forward,
            input_bytes=unit.input_bytes,
            freed_in_segment=freed if unit.joined else 0,
            unsaved_input=self._unsaved_input(i, inside),
            unsaved_constants=self._unsaved_constants(i, inside),
            live_at_begin=live_at_begin,
            peak_until_next=self._peak_until_next(i),
            live_at_gradient=baseline.live.get(f"back {i}", live_at_begin),
            # code between may have the input anyway
            joined=unit.joined and 2 * freed > unit.input_bytes,
            fixed=unit.fixed,
            members=tuple(name for name, _ in unit.members),
            movable_bytes=unit.movable_bytes,
            backward_ms=times.backward,
            shared=self._shared_of(i),
            first_saved=self._first_saved(i),
        )

    def _peak_until_next(self, i: int) -> int:
        """Return the peak from a unit's end to the next one, or until the model returns."""
        if self._backward_phase(i) == "leave":
            # the phase behind the last unit counts once
            return self._baseline.live_at_begin(i)
        is_last = i == len(self._units) - 1
        return self._baseline.peak_in_model if is_last else self._baseline.peak("leave", i)

    def _useful_levels(self, i: int, times: _UnitTimes) -> tuple[Level, ...]:
        """Return the levels of a unit but those that save no less than a faster one."""
        levels = [self._level(i, name, times.extra[name]) for name in self._levels(i)]
        useful = list[Level]()
        for level in sorted(levels, key=lambda level: (level.extra_ms, level.added_bytes)):
            if not useful or level.added_bytes < useful[-1].added_bytes:
                useful.append(level)
        return tuple(useful)
