"""What the rest of a model takes: what runs before its units, between them, and after them.

A pass over the user's own step in which the units keep nothing, so that what is left is the rest.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fusedckpt.memory import SavedTensors, nbytes_of, storage_ref
from fusedckpt.planning.chain import Chain, Level, Unit
from fusedckpt.planning.plan_record import PLAIN
from fusedckpt.planning.survey import dropping
from fusedckpt.planning.unit_costs import Costs
from fusedckpt.reporting.step import Step
from fusedckpt.reporting.timeline import Watch, live_by_phase
from fusedckpt.reporting.trial import tensors_of

__all__ = ["chain_of"]

# what runs before the first unit and after the last one
_BEFORE, _AFTER = "(before)", "(after)"


class _Walk:
    """What enters and leaves units that keep nothing."""

    def __init__(self, watch: Watch, costs: Sequence[Costs]):
        self._watch, self._costs, count = watch, costs, len(costs)
        # the first one that it gets, which is what units hand on, if there is one
        self._given: list[list[StorageWeakRef]] = [[]] * count
        # by tensor the units that get it
        self._takers: dict[StorageWeakRef, list[int]] = {}
        self._sizes = [0] * count
        # of what each made and returned
        self._outputs: list[list[StorageWeakRef]] = [[]] * count
        # what the last unit returned, as it did
        self._returned: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        # bytes of the gradients with which backward came to each unit, 0 where it never did
        self.gradients = [0] * count
        # the first unit at whose backward the code held what was the input of another
        self._since: dict[int, int] = {}
        # inputs that were alive when backward came last to a unit
        self._alive = {*range(count)}
        # outputs that were when it came to the first one: the model returns them
        self._last: set[StorageWeakRef] | None = None
        # whether a unit gets what the one before returned, as that did
        self.joins = [False] * count
        self.saved: SavedTensors | None = None

    def enter(self, i: int, call: Any, given: list[Tensor]) -> list[Tensor]:
        """Note what a unit gets; return what is for it alone."""
        self._given[i] = [storage_ref(x) for x in given[:1]]
        for x in tensors_of(call):
            self._takers.setdefault(storage_ref(x), []).append(i)
        self._sizes[i] = nbytes_of(given[:1])
        own = [x for x, flows in zip(given, self._costs[i].flows, strict=True) if flows]
        self.joins[i] = bool(own) and all(map(self._is_returned, own))
        self._watch.phase(f"enter {i}")
        return own

    def _is_returned(self, x: Tensor) -> bool:
        known = self._returned.get(id(x))
        return known is not None and known[0]() is x and known[1] == x._version

    def without_gradients(self, i: int) -> None:
        """Nothing to note."""

    def differentiable(self, i: int, made: list[Tensor]) -> list[Tensor]:
        """Return what requires grad of what a unit made."""
        return self._costs[i].differentiable(made)

    def left(self, i: int, output: Any, made: list[Tensor]) -> None:
        """Note what a unit made and returns."""
        self._outputs[i] = [storage_ref(x) for x in made]
        self._returned = {id(x): (weakref.ref(x), x._version) for x in made}
        self._watch.phase(f"left {i}")

    def entered(self, i: int, nbytes: int) -> None:
        """Note what is alive as backward comes to a unit."""
        self.gradients[i] = nbytes
        self._watch.phase(f"entered {i}")
        if self._last is None:
            self._last = {x for made in self._outputs for x in made if not x.expired()}
        self._alive = {k for k in self._alive if k <= i and self._lives(k)}
        self._since |= dict.fromkeys(self._alive, i)

    def _lives(self, k: int) -> bool:
        return any(not storage.expired() for storage in self._given[k])

    def held(self, i: int) -> int:
        """Return the bytes of unit i's input that code holds until its backward is done."""
        return self._sizes[i] if self._since.get(i) == i else 0

    def shared(self, i: int) -> int:
        """Return the bytes of inputs of units before i that code between these and i holds, too."""
        found, last = 0, len(self._costs)
        for k in range(min(i, last)):
            since = self._since.get(
                k, last if any(map(self._is_kept, self._given[k])) else last + 1
            )
            if k < since <= i and self._costs[k].keeps_input(PLAIN):
                found += self._sizes[k]
        return found

    def _is_kept(self, storage: StorageWeakRef) -> bool:
        """Whether code keeps it until backward."""
        is_returned = self._last is not None and storage in self._last
        return is_returned or (self.saved is not None and self.saved.holds(storage))

    def joined(self, i: int) -> bool:
        """Whether unit i may be in one segment with the unit before it."""
        # what code holds anyway is not to be made again within a segment
        return self.joins[i] and not self.held(i)

    def handed_on(self, i: int, level: str) -> list[bool]:
        """Return which outputs of unit i are counted by the unit or code that comes next."""
        return [
            bool(self.held(i + 1)) or self._costs[i + 1].keeps_input(level)
            if self._follows(i, x)
            else self._is_kept(x) and not before
            for x, before in zip(self._outputs[i], self.known_before(i), strict=True)
        ]

    def known_before(self, i: int) -> list[bool]:
        """Return which outputs of unit i are counted as if they were there before it."""
        return [
            not self._follows(i, x) and self._is_kept(x) and self._reaches_joined(i, x)
            for x in self._outputs[i]
        ]

    def _reaches_joined(self, i: int, output: StorageWeakRef) -> bool:
        """Whether all units from unit i to the first that gets it may be in one segment."""
        first = next((k for k in self._takers.get(output, ()) if k > i), None)
        return first is not None and all(map(self.joined, range(i + 1, first + 1)))

    def _follows(self, i: int, output: StorageWeakRef) -> bool:
        """Whether it is what the unit behind unit i gets first."""
        return any(output in given for given in self._given[i + 1 : i + 2])


def chain_of(
    step: Step, costs: dict[str, Costs], trained: Collection[Tensor], stepping: int
) -> Chain:
    """Run the step with units that keep nothing; return the chain with what is around them.

    trained: the parameters that get a gradient. stepping: bytes that the optimizer's step takes for
    a moment.
    """
    step, held = step.fresh()
    modules = [step.model.get_submodule(name) for name in costs]
    made = {x for x in trained if x not in step.gradients}
    lefts = [nbytes_of(x for x in module.parameters() if x in made) for module in modules]
    watch, device, resident = Watch(step.model), held[0].device, step.resident(held)
    walk = _Walk(watch, [*costs.values()])

    def run() -> None:
        walk.saved = step.take(watch, held)

    with dropping(walk, modules):
        live = live_by_phase(run, device, resident)
    units = [
        one.unit(name, partial(walk.handed_on, i), walk.known_before(i), walk.held(i), left)
        for i, ((name, one), left) in enumerate(zip(costs.items(), lefts, strict=True))
    ]
    replays = [one.replay for one in costs.values()]
    return _Rest(live, units, replays, walk, resident).chain(
        stepping + sum(x.numel() * x.element_size() for x in made)
    )


class _Rest:
    """What the code around units holds, from live bytes where these begin, forward and backward.

    live: bytes by phase, one after the other. kept: of the code before each unit, and at last after
    all, what it keeps until its backward, but for what units count. left: what lives on after the
    backward of the code behind each unit.
    """

    def __init__(
        self,
        live: dict[str, list[int]],
        units: list[Unit],
        replays: list[int],
        walk: _Walk,
        resident: int,
    ):
        self._live, self._units, self._resident = live, units, resident
        self._inputs = [unit.input - x for unit, x in zip(units, replays, strict=True)]
        self._joins = [*map(walk.joined, range(len(units)))]
        # what is counted elsewhere: by parameters and the like, and by units
        self._counted = [resident + walk.shared(i) for i in range(len(units) + 1)]
        forward = [self._begin(f"enter {i}", i, x) for i, x in enumerate(self._inputs)]
        backward = [self._begin(f"entered {i}", i, x) for i, x in enumerate(walk.gradients)]
        both = [*map(min, forward, backward), live["backward"][0] - self._counted[-1]]
        # what is kept before a unit is kept before all that follow
        kept = [max(0, x) for x in [*accumulate(reversed(both), min)][::-1]]
        # where units may be joined, as if it were before all of those
        for i in reversed(range(1, len(units))):
            if self._joins[i]:
                kept[i - 1] = kept[i]
        self.kept = kept
        self.forward = [max(0, x - y) for x, y in zip(forward, self.kept, strict=False)]
        self.backward = [max(0, x - y) for x, y in zip(backward, self.kept, strict=False)]
        self.left = [*accumulate(self.backward, min), 0]
        # and what a segment keeps of units behind its first, as if all that may be joined were
        self._replays = sum(x for x, joins in zip(replays, self._joins, strict=True) if joins)

    def _begin(self, phase: str, i: int, of_unit: int) -> int:
        if phase == f"enter {i}" and phase not in self._live:
            # a unit that the forward leaves out at random
            return self._live["backward"][0] - self._counted[-1]
        if phase not in self._live:
            # a unit that no gradient reaches
            return self._begin(f"enter {i}", i, self._inputs[i])
        return self._live[phase][0] - self._counted[i] - of_unit

    def _most(self, phase: str, i: int) -> int:
        live = self._live.get(phase, [0])
        # what callers of the unit still hold as it returns was held in its forward, too
        while phase.startswith("left") and live[1:] and live[1] <= live[0]:
            live = live[1:]
        return max(live) - self._counted[i] - self.kept[i]

    def chain(self, stepping: int) -> Chain:
        """Return the units with what is before, between and after them."""
        units = list[Unit]()
        for i, unit in enumerate(self._units):
            if i and not self._joins[i]:
                units.append(self._code(f"(after {self._units[i - 1].name})", i, f"entered {i}"))
            units.append(self._unit(i, unit))
        last, left = self._units[-1], self.left[0] + sum(unit.left for unit in self._units)
        before = self._before(stepping - left)
        after = replace(self._code(_AFTER, len(self._units), "backward"), input=last.output)
        return Chain((before, *units, after), self._resident)

    def _unit(self, i: int, unit: Unit) -> Unit:
        """Count with a unit what is there for a moment only, and the code where it is joined."""
        backward, left = self.backward[i] - self.left[i], unit.left
        before = behind = 0
        if i and self._joins[i]:
            before = self._most(f"left {i - 1}", i) - self._inputs[i]
            left += self.left[i - 1] - self.left[i]
        if self._joins[i + 1 : i + 2] == [True]:
            behind = self._most(f"entered {i + 1}", i + 1) - self.left[i]
        levels = (
            replace(
                level,
                transient=max(level.transient + backward, behind),
                # a segment has not run again then
                ending=None
                if level.ending is None
                else max(level.ending + backward, behind - max(0, level.held - unit.input)),
                forward_transient=max((level.forward_transient or 0) + self.forward[i], before),
                running=None
                if level.running is None
                else max(level.running + self.forward[i], before),
            )
            for level in unit.levels
        )
        forward = max(unit.forward_transient + self.forward[i], before)
        return replace(unit, levels=tuple(levels), forward_transient=forward, left=left)

    def _before(self, stepping: int) -> Unit:
        transient = max(self._most("entered 0", 0) - self.left[0], stepping - self.kept[0])
        kept, forward = self.kept[0] + self._replays, self._most("forward", 0)
        return replace(_code(_BEFORE, kept, transient, forward), output=self._inputs[0])

    def _code(self, name: str, i: int, backward: str) -> Unit:
        """Return the code between units i - 1 and i, whose backward is in that phase."""
        kept, left = self.kept[i] - self.kept[i - 1], self.left[i - 1] - self.left[i]
        transient = self._most(backward, i) - self.left[i]
        return replace(_code(name, kept, transient, self._most(f"left {i - 1}", i)), left=left)


def _code(name: str, kept: int, transient: int, forward: int) -> Unit:
    levels = (Level(PLAIN, kept, 0.0, max(0, transient)),)
    return Unit(name, levels, 0.0, 0, 0, forward_transient=max(0, forward), fixed=True, code=True)
