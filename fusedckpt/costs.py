"""What each unit of a model costs, measured on the model: time and bytes, level by level.

Two passes over the user's own step. In the first every unit is measured where it is called, on the
arguments that it gets there, one for all that are alike. In the second the units keep nothing, and
what is left is what the rest of the model keeps: embeddings before the units, head and loss after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from fusedckpt import _roles
from fusedckpt._calls import NoGraph
from fusedckpt._step import Step
from fusedckpt._timeline import Moment, Watch, timeline
from fusedckpt._unit_costs import PLAIN, Costs, kind_of, measured
from fusedckpt.chain import Chain, Level, Unit
from fusedckpt.memory import SavedTensors, nbytes_of, profiled
from fusedckpt.trial import tensors_of

__all__ = ["AFTER", "BEFORE", "Survey", "chain_of"]

# what runs before the first unit and after the last one
BEFORE, AFTER = "(before)", "(after)"


class _Skip(torch.autograd.Function):
    """Hands on what a unit returned, and as large gradients to what it was given as it would."""

    @staticmethod
    def forward(ctx: Any, entered: Callable[[], None], output: Tensor, *given: Tensor) -> Tensor:
        ctx.entered = entered
        ctx.likes = [(x.shape, x.dtype, x.device) for x in given]
        ctx.stays = [isinstance(x, nn.Parameter) for x in given]
        # not a view, which nobody could write into; of the same memory, so that it costs none
        return output.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.entered()
        grads = (
            None if stays else torch.zeros(s, dtype=d, device=on)
            for (s, d, on), stays in zip(ctx.likes, ctx.stays, strict=True)
        )
        return None, None, *grads


class Skipping(NamedTuple):
    """A role: run the module, but keep nothing for its backward."""

    module: nn.Module
    # called where its forward begins and ends, and where its backward begins
    enter: Callable[[list[Tensor]], None]
    left: Callable[[list[Tensor]], None]
    entered: Callable[[], None]

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run it without a graph, and put one node in its place."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        given = [x for x in tensors_of([args, kwargs]) if x.requires_grad]
        self.enter(given)
        with torch.no_grad():
            output = forward(*args, **kwargs)
        self.left([x for x in tensors_of([output]) if _flows(x)])
        given += [p for p in self.module.parameters() if p.requires_grad][:1]
        if not given:
            return output
        return pytree.tree_map_only(
            Tensor, lambda x: _Skip.apply(self.entered, x, *given) if _flows(x) else x, output
        )


class Scout:
    """A pass before the first: which tensors units give to each other, and which all of them get."""

    def __init__(self) -> None:
        self._given: dict[str, list[StorageWeakRef]] = {}
        self._counts: Counter[int] = Counter()

    def role(self, name: str, module: nn.Module) -> Skipping:
        """Return the role in which a module is looked at."""
        return Skipping(module, partial(self._see, name), _nothing, lambda: None)

    def _see(self, name: str, given: list[Tensor]) -> None:
        self._given[name] = [StorageWeakRef(x.untyped_storage()) for x in given]
        self._counts.update({storage.cdata for storage in self._given[name]})

    def flows(self, name: str) -> list[bool]:
        """Return which of a unit's arguments that require grad are for it alone, or come first."""
        given = self._given.get(name, [])
        return [not i or self._counts[x.cdata] == 1 for i, x in enumerate(given)]


class Survey:
    """The first pass: every unit measured where it is called, then made to keep nothing."""

    def __init__(self, scout: Scout, tick: Callable[[], None], selective: bool):
        self._scout, self._tick, self._selective = scout, tick, selective
        # what was measured, by what units that are alike have in common
        self._kinds: dict[Any, Costs | None] = {}
        self._found: list[tuple[str, Costs | None]] = []

    def probe(self, name: str, module: nn.Module) -> Probe:
        """Return the role in which a module is measured."""
        return Probe(self, name, module)

    def see(self, name: str, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> None:
        """Measure a call, once of a kind."""
        flows = self._scout.flows(name)
        key = kind_of(module, args, kwargs), tuple(flows)
        if key not in self._kinds:
            try:
                self._kinds[key] = measured(module, forward, args, kwargs, flows, self._selective)
            except NoGraph:
                self._kinds[key] = None
        self._found.append((name, self._kinds[key]))
        self._tick()

    def units(self) -> dict[str, Costs]:
        """Return what the units cost, in the order in which they run."""
        calls = self._calls()
        return {name: costs for name, costs in self._found if costs and calls[name] == 1}

    def left_out(self, names: Sequence[str]) -> dict[str, str]:
        """Return why others of `names` are no units."""
        calls, units = self._calls(), self.units()
        return {name: _why_not(calls[name]) for name in names if name not in units}

    def _calls(self) -> Counter[str]:
        return Counter(name for name, _ in self._found)


def _why_not(calls: int) -> str:
    if calls == 1:
        return "returns nothing that requires a gradient"
    return (
        f"is called {calls} times in a step" if calls else "is not called in a step with gradients"
    )


class Probe(NamedTuple):
    """A role: measure the module where it is called, then keep nothing for its backward."""

    survey: Survey
    name: str
    module: nn.Module

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Measure it."""
        if torch.is_grad_enabled():
            self.survey.see(self.name, self.module, forward, args, kwargs)
        return Skipping(self.module, _nothing, _nothing, lambda: None).call(forward, args, kwargs)


def _nothing(_: list[Tensor]) -> None:
    pass


def _flows(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


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
    resident = nbytes_of(x for x in held if x.device == device)
    modules, walk = [step.model.get_submodule(name) for name in costs], _Walk(watch, len(costs))

    def run() -> None:
        walk.saved = step.take(watch, held)

    with _roles.assigned({module: walk.role(i, module) for i, module in enumerate(modules)}):
        moments = timeline(profiled(run), device, resident)
    followers = [*list(costs.values())[1:], None]
    units = [
        one.unit(name, partial(walk.handed_on, i, followers[i]))
        for i, (name, one) in enumerate(costs.items())
    ]
    # one more while a segment runs again: the states that are put back afterwards
    replays = [one.replay for one in costs.values()]
    replay = sum(replays) + max(replays)
    gradients = sum(x.numel() * x.element_size() for x in step.parameters() if x.requires_grad)
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
