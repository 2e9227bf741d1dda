"""What the rest of a model takes: what runs before its units, between them, and after them.

A pass over the user's own step in which the units keep nothing, so that what is left is the rest.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fusedckpt.memory import SavedTensors, profiled
from fusedckpt.planning import roles
from fusedckpt.planning.chain import Chain, Level, Unit, forward_of
from fusedckpt.planning.costs import Skipping
from fusedckpt.planning.unit_costs import PLAIN, Costs
from fusedckpt.reporting.step import Step
from fusedckpt.reporting.timeline import Moment, Watch, timeline

__all__ = ["AFTER", "BEFORE", "chain_of"]

# what runs before the first unit and after the last one
BEFORE, AFTER = "(before)", "(after)"


class _Walk:
    """The second pass: what enters and leaves units that keep nothing."""

    def __init__(self, watch: Watch, costs: Sequence[Costs]):
        self._watch, self._costs, count = watch, costs, len(costs)
        self._inputs: list[StorageWeakRef | None] = [None] * count
        self._outputs: list[StorageWeakRef | None] = [None] * count
        # what the last unit returned, as it did
        self._returned: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._sizes = [0] * count
        # bytes of the gradients with which backward came to each unit, 0 where it never did
        self.gradients = [0] * count
        # inputs that were alive when backward came last to a unit
        self._alive: set[int] | None = None
        # the first unit at whose backward the code held what was the input of another
        self._since: dict[int, int] = {}
        # whether a unit gets what the one before returned, as that did
        self.joins = [False] * count
        self.saved: SavedTensors | None = None

    def role(self, i: int, module: nn.Module) -> Skipping:
        """Return the role of unit i."""
        return Skipping(
            module, partial(self._enter, i), partial(self._leave, i), partial(self._entered, i)
        )

    def _enter(self, i: int, given: list[Tensor]) -> list[Tensor]:
        # the first one is what units hand on
        if given:
            self._inputs[i] = StorageWeakRef(given[0].untyped_storage())
            self._sizes[i] = given[0].numel() * given[0].element_size()
        own = [x for x, flows in zip(given, self._costs[i].flows, strict=False) if flows]
        self.joins[i] = bool(own) and all(map(self._is_returned, own))
        self._watch.phase(f"enter {i}")
        return own

    def _is_returned(self, x: Tensor) -> bool:
        known = self._returned.get(id(x))
        return known is not None and known[0]() is x and known[1] == x._version

    def _leave(self, i: int, outputs: list[Tensor]) -> None:
        if len(outputs) == 1:
            self._outputs[i] = StorageWeakRef(outputs[0].untyped_storage())
        self._returned = {id(x): (weakref.ref(x), x._version) for x in outputs}
        self._watch.phase(f"left {i}")

    def _entered(self, i: int, nbytes: int) -> None:
        self.gradients[i] = nbytes
        self._watch.phase(f"entered {i}")
        known = range(i + 1) if self._alive is None else self._alive
        self._alive = {k for k in known if k <= i and self._lives(k)}
        for k in self._alive:
            self._since[k] = i

    def _lives(self, k: int) -> bool:
        storage = self._inputs[k]
        return storage is not None and not storage.expired()

    def held(self, i: int) -> int:
        """Return the bytes of unit i's input that code holds until its backward is done."""
        return self._sizes[i] if self._since.get(i) == i else 0

    def shared(self, i: int) -> int:
        """Return the bytes of inputs of units before i that code between these and i holds, too."""
        assert self.saved is not None
        count = len(self._costs)
        found = 0
        for k in range(min(i, count)):
            storage = self._inputs[k]
            last = count if storage is not None and self.saved.holds(storage) else count + 1
            since = self._since.get(k, last)
            if k < since <= i and self._costs[k].keeps_input(PLAIN):
                found += self._sizes[k]
        return found

    def handed_on(self, i: int, level: str) -> bool:
        """Whether unit i's output is counted by the unit, or the code, that comes next."""
        output = self._outputs[i]
        if output is None or self.saved is None:
            return False
        if i + 1 < len(self._costs) and self._inputs[i + 1] == output:
            return bool(self.held(i + 1)) or self._costs[i + 1].keeps_input(level)
        return self.saved.holds(output)


def chain_of(step: Step, costs: dict[str, Costs], stepping: int, forward_ms: float) -> Chain:
    """Run the step with units that keep nothing; return the chain with what is around them.

    stepping: bytes that the optimizer's step takes for a moment. forward_ms: of the whole model.
    """
    step, held = step.fresh()
    watch, device = Watch(step.model), held[0].device
    resident = step.resident(held)
    modules = [step.model.get_submodule(name) for name in costs]
    walk = _Walk(watch, [*costs.values()])

    def run() -> None:
        walk.saved = step.take(watch, held)

    with roles.assigned({module: walk.role(i, module) for i, module in enumerate(modules)}):
        moments = timeline(profiled(run, device), device, resident)
    units = [
        one.unit(name, partial(walk.handed_on, i), walk.held(i))
        for i, (name, one) in enumerate(costs.items())
    ]
    parameters = [x for x in step.parameters() if x.requires_grad and x not in step.gradients]
    gradients = sum(x.numel() * x.element_size() for x in parameters)
    replays = [one.replay for one in costs.values()]
    rest = _Rest(_Phases(moments), units, replays, walk, resident)
    found = rest.chain(gradients + stepping)
    # what is not in units, wherever it is
    before = replace(found.units[0], forward=max(0.0, forward_ms - found.forward))
    return replace(found, units=(before, *found.units[1:]))


class _Phases:
    """Live bytes through a step, by the phase that the moments are in."""

    def __init__(self, moments: list[Moment]):
        self._live: dict[str, list[int]] = {}
        for moment in moments:
            self._live.setdefault(moment.phase, []).append(moment.live_bytes)

    def begin(self, phase: str) -> int | None:
        """Return the bytes live when it began, None where it never did."""
        return self._live.get(phase, [None])[0]

    def most(self, phase: str) -> int:
        """Return the most bytes live in it, 0 where it was never entered."""
        return max(self._live.get(phase, [0]))


class _Rest:
    """What the code around units holds, from live bytes where these begin, forward and backward.

    kept: of the code before each unit, and at last after all, what it keeps until its backward, but
    for what units count. left: what lives on after the backward of the code behind each unit.
    """

    def __init__(
        self, live: _Phases, units: list[Unit], replays: list[int], walk: _Walk, resident: int
    ):
        self._live, self._units, self._resident = live, units, resident
        self._inputs = [unit.input - x for unit, x in zip(units, replays, strict=True)]
        # what code holds anyway is not to be made again within a segment
        self._joins = [joins and not walk.held(i) for i, joins in enumerate(walk.joins)]
        # what is counted elsewhere: by parameters and the like, and by units
        self._counted = [resident + walk.shared(i) for i in range(len(units) + 1)]
        end = live.begin("backward")
        assert end is not None
        forward = [self._begin(f"enter {i}", i, x) for i, x in enumerate(self._inputs)]
        backward = [self._begin(f"entered {i}", i, x) for i, x in enumerate(walk.gradients)]
        both = [*map(min, forward, backward), end - self._counted[-1]]
        # what is kept before a unit is kept before all that follow
        kept = [max(0, x) for x in [*accumulate(reversed(both), min)][::-1]]
        # where units may be joined, as if it were before all of them
        steps = zip(pairwise(kept), [*self._joins[1:], False], strict=True)
        joined = [b - a if joins else 0 for (a, b), joins in steps]
        later = [*accumulate(reversed(joined))][::-1]
        self.kept = [x + more for x, more in zip(kept, [*later, 0], strict=True)]
        self.forward = [max(0, x - y) for x, y in zip(forward, self.kept, strict=False)]
        self.backward = [max(0, x - y) for x, y in zip(backward, self.kept, strict=False)]
        self.left = [*accumulate(self.backward, min)]

    def _begin(self, phase: str, i: int, of_unit: int) -> int:
        found = self._live.begin(phase)
        if found is None:
            # a unit that no gradient reaches
            return self._begin(f"enter {i}", i, self._inputs[i])
        return found - self._counted[i] - of_unit

    def chain(self, stepping: int) -> Chain:
        """Return the units with what is before, between and after them."""
        units = []
        for i, unit in enumerate(self._units):
            if i and not self._joins[i]:
                units.append(self._between(i))
            units.append(self._unit(i, unit))
        left = self.left[0] + sum(unit.left for unit in self._units)
        before = self._before(stepping - left)
        return Chain((before, *units, self._after()), self._resident)

    def _unit(self, i: int, unit: Unit) -> Unit:
        """Count with a unit what is there for a moment only, and the code where it is joined."""
        backward, forward, left = self.backward[i] - self.left[i], unit.forward_transient, unit.left
        before = behind = 0
        if i and self._joins[i]:
            before = self._most(f"left {i - 1}", i) - self._inputs[i]
            forward, left = max(forward, before), left + self.left[i - 1] - self.left[i]
        if self._joins[i + 1 : i + 2] == [True]:
            behind = self._most(f"entered {i + 1}", i + 1) - self.left[i]
        levels = (
            replace(
                level,
                transient=max(level.transient + backward, behind),
                ending=None if level.ending is None else max(level.ending + backward, behind),
                forward_transient=max(forward_of(unit, level), before) + self.forward[i],
            )
            for level in unit.levels
        )
        forward += self.forward[i]
        return replace(unit, levels=tuple(levels), forward_transient=forward, left=left)

    def _between(self, i: int) -> Unit:
        kept = self.kept[i] - self.kept[i - 1]
        transient = self._most(f"entered {i}", i) - self.left[i]
        forward = self._most(f"left {i - 1}", i)
        name, left = f"(after {self._units[i - 1].name})", self.left[i - 1] - self.left[i]
        return _code(name, kept, transient, forward, left=left)

    def _before(self, stepping: int) -> Unit:
        transient = max(self._most("entered 0", 0) - self.left[0], stepping - self.kept[0])
        kept, forward = self.kept[0], self._most("forward", 0)
        # and what a segment keeps of units behind its first, as if all that may be joined were
        replays = [unit.input - x for unit, x in zip(self._units, self._inputs, strict=True)]
        kept += sum(x for x, joins in zip(replays, self._joins, strict=True) if joins)
        return replace(_code(BEFORE, kept, transient, forward), output=self._inputs[0])

    def _after(self) -> Unit:
        last = len(self._units)
        kept = self.kept[last] - self.kept[last - 1]
        transient, forward = self._most("backward", last), self._most(f"left {last - 1}", last)
        made = _code(AFTER, kept, transient, forward, left=self.left[-1])
        return replace(made, input=self._units[-1].output)

    def _most(self, phase: str, i: int) -> int:
        return self._live.most(phase) - self._counted[i] - self.kept[i]


def _code(name: str, kept: int, transient: int, forward: int, left: int = 0) -> Unit:
    levels = (Level(PLAIN, kept, 0.0, max(0, transient)),)
    return Unit(
        name, levels, 0.0, 0, 0, forward_transient=max(0, forward), left=left, fixed=True, code=True
    )
