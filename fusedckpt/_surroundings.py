"""What the rest of a model takes: what runs before its units, between them, and after them.

A pass over the user's own step in which the units keep nothing, so that what is left is the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fusedckpt import _roles
from fusedckpt._step import Step
from fusedckpt._timeline import Moment, Watch, timeline
from fusedckpt._unit_costs import PLAIN, Costs
from fusedckpt.chain import Chain, Level, Unit
from fusedckpt.costs import Skipping
from fusedckpt.memory import SavedTensors, profiled

__all__ = ["AFTER", "BEFORE", "chain_of"]

# what runs before the first unit and after the last one
BEFORE, AFTER = "(before)", "(after)"


class _Walk:
    """The second pass: what enters and leaves units that keep nothing."""

    def __init__(self, watch: Watch, count: int):
        self._watch = watch
        self._inputs: list[StorageWeakRef | None] = [None] * count
        self._outputs: list[StorageWeakRef | None] = [None] * count
        self.saved: SavedTensors | None = None

    def role(self, i: int, module: nn.Module) -> Skipping:
        """Return the role of unit i."""
        entered = partial(self._watch.phase, f"entered {i}")
        return Skipping(module, partial(self._enter, i), partial(self._leave, i), entered)

    def _enter(self, i: int, given: list[Tensor]) -> None:
        # the first one is what units hand on
        self._inputs[i] = StorageWeakRef(given[0].untyped_storage()) if given else None
        self._watch.phase(f"enter {i}")

    def _leave(self, i: int, outputs: list[Tensor]) -> None:
        if len(outputs) == 1:
            self._outputs[i] = StorageWeakRef(outputs[0].untyped_storage())
        self._watch.phase(f"left {i}")

    def handed_on(self, i: int, following: Costs | None, level: str) -> bool:
        """Whether unit i's output is counted by the unit, or the code, that comes next."""
        output = self._outputs[i]
        if output is None or self.saved is None:
            return False
        if following is not None and self._inputs[i + 1] == output:
            return following.keeps_input(level)
        return self.saved.holds(output)


def chain_of(step: Step, costs: dict[str, Costs], stepping: int) -> Chain:
    """Run the step with units that keep nothing; return the chain with what is before and after.

    stepping: bytes that the optimizer's step takes for a moment.
    """
    step, held = step.fresh()
    watch, device = Watch(step.model), held[0].device
    resident = step.resident(held)
    modules, walk = [step.model.get_submodule(name) for name in costs], _Walk(watch, len(costs))

    def run() -> None:
        walk.saved = step.take(watch, held)

    with _roles.assigned({module: walk.role(i, module) for i, module in enumerate(modules)}):
        moments = timeline(profiled(run, device), device, resident)
    followers = [*list(costs.values())[1:], None]
    units = [
        one.unit(name, partial(walk.handed_on, i, followers[i]))
        for i, (name, one) in enumerate(costs.items())
    ]
    # one more while a segment runs again: the states that are put back afterwards
    replays = [one.replay for one in costs.values()]
    replay = sum(replays) + max(replays)
    parameters = [x for x in step.parameters() if x.requires_grad and x not in step.gradients]
    gradients = sum(x.numel() * x.element_size() for x in parameters)
    return _chain(_Phases(moments), units, resident, replay, gradients + stepping)


class _Phases:
    """Live bytes through a step, by the phase that the moments are in."""

    def __init__(self, moments: list[Moment]):
        self._live: dict[str, list[int]] = {}
        for moment in moments:
            self._live.setdefault(moment.phase, []).append(moment.live_bytes)

    def begin(self, phase: str) -> int:
        """Return the bytes live when it began."""
        return self._live[phase][0]

    def most(self, phase: str) -> int:
        """Return the most bytes live in it, 0 where it was never entered."""
        return max(self._live.get(phase, [0]))


def _chain(
    live: _Phases, units: Sequence[Unit], resident: int, replay: int, stepping: int
) -> Chain:
    """Put what runs before the units and after them at the ends of their chain."""
    first, last, final = units[0], units[-1], len(units) - 1
    # what the code before each unit keeps, that between units as if it were before all of them; a
    # unit's input is its own
    kept = [live.begin(f"enter {i}") - resident - unit.input for i, unit in enumerate(units)]
    kept_before = max(0, *kept)
    kept_all = resident + kept_before
    kept_after = max(0, live.begin("backward") - kept_all)
    left_after = max(0, live.begin(f"entered {final}") - kept_all - last.output)
    left = left_after + sum(unit.left for unit in units)
    # the optimizer's step comes last
    transient = max(live.most("entered 0") - kept_all - left_after, stepping - left - kept_before)
    before = Unit(
        BEFORE,
        (
            Level(
                PLAIN,
                # and what segments may keep besides inputs, as if all units were in one
                kept_before + replay,
                0.0,
                max(0, transient),
            ),
        ),
        forward=0.0,
        input=0,
        output=first.input,
        forward_transient=max(0, live.most("forward") - kept_all),
        fixed=True,
    )
    after = Unit(
        AFTER,
        (Level(PLAIN, kept_after, 0.0, max(0, live.most("backward") - kept_all - kept_after)),),
        forward=0.0,
        input=last.output,
        output=0,
        forward_transient=max(0, live.most(f"left {final}") - kept_all - kept_after),
        left=left_after,
        fixed=True,
    )
    between = [_between(live, i, unit, kept_all, left_after) for i, unit in enumerate(units)]
    return Chain((before, *between, after), resident)


def _between(live: _Phases, i: int, unit: Unit, kept: int, left: int) -> Unit:
    """Count what code between units holds for a moment to the unit after it, or behind it."""
    forward = live.most(f"left {i - 1}") - kept - unit.input
    backward = live.most(f"entered {i + 1}") - kept - left
    levels = (
        replace(
            level,
            transient=max(level.transient, backward),
            ending=None if level.ending is None else max(level.ending, backward),
        )
        for level in unit.levels
    )
    transient = max(unit.forward_transient, forward)
    return replace(unit, levels=tuple(levels), forward_transient=transient)
