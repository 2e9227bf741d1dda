"""What each unit of a model costs, measured on the model: time and bytes, level by level.

Two passes over the user's own step. In the first every unit is measured where it is called, on the
arguments that it gets there, one for all that are alike. In the second the units keep nothing, and
what is left is what the rest of the model keeps: embeddings before the units, head and loss after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fusedckpt import _roles
from fusedckpt._step import Step
from fusedckpt._timeline import Moment, Watch, timeline
from fusedckpt._unit_costs import PLAIN, kind_of, measured
from fusedckpt.chain import Chain, Level, Unit
from fusedckpt.memory import nbytes_of, profiled
from fusedckpt.trial import tensors_of

__all__ = ["AFTER", "BEFORE", "Probe", "rest"]

# what runs before the first unit and after the last one
BEFORE, AFTER = "(before)", "(after)"


class _Skip(torch.autograd.Function):
    """Hands on what a unit returned, and as large gradients to what it was given as it would."""

    @staticmethod
    def forward(ctx: Any, entered: Callable[[], None], output: Tensor, *given: Tensor) -> Tensor:
        ctx.entered = entered
        ctx.likes = [(x.shape, x.dtype, x.device) for x in given]
        ctx.stays = [isinstance(x, nn.Parameter) for x in given]
        return output.view_as(output)

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
    enter: Callable[[], None]
    left: Callable[[], None]
    entered: Callable[[], None]

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run it without a graph, and put one node in its place."""
        self.enter()
        with torch.no_grad():
            output = forward(*args, **kwargs)
        given = [x for x in tensors_of([args, kwargs]) if x.requires_grad]
        given += [p for p in self.module.parameters() if p.requires_grad][:1]
        if torch.is_grad_enabled() and given:
            output = pytree.tree_map_only(
                Tensor, lambda x: _Skip.apply(self.entered, x, *given) if _flows(x) else x, output
            )
        self.left()
        return output


class Probe(NamedTuple):
    """A role: measure the module where it is called, then keep nothing for its backward."""

    name: str
    module: nn.Module
    # what was measured, by what units that are alike have in common
    kinds: dict[Any, Unit]
    found: list[Unit]
    tick: Callable[[], None]
    selective: bool = False

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Measure it, once of a kind."""
        if torch.is_grad_enabled():
            key = kind_of(self.module, args, kwargs)
            if key not in self.kinds:
                self.kinds[key] = measured(self.module, forward, args, kwargs, self.selective)
            self.found.append(replace(self.kinds[key], name=self.name))
            self.tick()
        return Skipping(self.module, *[_nothing] * 3).call(forward, args, kwargs)


def _nothing() -> None:
    pass


def _flows(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def rest(step: Step, units: Sequence[Unit]) -> Chain:
    """Run the step with units that keep nothing; return the chain with what is before and after."""
    step, held = step.fresh()
    watch, device = Watch(step.model), held[0].device
    resident = nbytes_of(x for x in held if x.device == device)
    modules = [step.model.get_submodule(unit.name) for unit in units]
    for i, module in enumerate(modules):
        enter, left, entered = (
            partial(watch.phase, f"{kind} {i}") for kind in ("enter", "left", "entered")
        )
        _roles.assign(module, Skipping(module, enter, left, entered))
    try:
        moments = timeline(profiled(lambda: step.take(watch, held)), device, resident)
    finally:
        for module in modules:
            _roles.release(module)
    return _chain(_Phases(moments), units, resident)


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
        """Return the most bytes live in it."""
        return max(self._live[phase])


def _chain(live: _Phases, units: Sequence[Unit], resident: int) -> Chain:
    """Put what runs before the units and after them at the ends of their chain."""
    first, last, final = units[0], units[-1], len(units) - 1
    # the first unit's input is its own
    kept_before = max(0, live.begin("enter 0") - resident - first.input)
    kept = resident + kept_before
    kept_after = max(0, live.begin("backward") - kept)
    left_after = max(0, live.begin(f"entered {final}") - kept - last.output)
    before = Unit(
        BEFORE,
        (Level(PLAIN, kept_before, 0.0, max(0, live.most("entered 0") - kept - left_after)),),
        forward=0.0,
        input=0,
        output=first.input,
        forward_transient=max(0, live.most("forward") - kept),
        fixed=True,
    )
    transient = max(0, live.most("backward") - kept - kept_after)
    after = Unit(
        AFTER,
        (Level(PLAIN, kept_after, 0.0, transient),),
        forward=0.0,
        input=last.output,
        output=0,
        forward_transient=max(0, live.most(f"left {final}") - kept - kept_after),
        left=left_after,
        fixed=True,
    )
    return Chain((before, *units, after), resident)
