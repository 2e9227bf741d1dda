"""Passes over the user's own model: each unit is measured where it is called, once of a kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from fusedckpt.memory import nbytes_of
from fusedckpt.planning.calls import NoGraph
from fusedckpt.planning.plan_input import check_unit, unseen_in
from fusedckpt.planning.unit_costs import Costs, kind_of, measured
from fusedckpt.reporting.trial import tensors_of

__all__ = ["Kinds", "Scout", "Skipping", "Survey"]


class _Skip(torch.autograd.Function):
    """Hands on what a unit returned, and as large gradients to what it was given as it would."""

    @staticmethod
    def forward(
        ctx: Any,
        entered: Callable[[int], None],
        outputs: list[Tensor],
        held: list[Tensor],
        *given: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.entered = entered
        ctx.save_for_backward(*held)
        ctx.set_materialize_grads(False)
        ctx.likes = [(x.shape, x.dtype, x.device) for x in given]
        ctx.stays = [isinstance(x, nn.Parameter) for x in given]
        # not a view, which nobody could write into; of the same memory, so that it costs none
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Any, ...]:
        # gradients of several outputs may be one
        ctx.entered(nbytes_of(x for x in given if x is not None))
        grads = (
            None if stays else torch.zeros(s, dtype=d, device=on)
            for (s, d, on), stays in zip(ctx.likes, ctx.stays, strict=True)
        )
        return None, None, None, *grads


class Skipping(NamedTuple):
    """A role: run the module, but keep nothing for its backward."""

    module: nn.Module
    # called where its forward begins and ends, and where its backward begins with gradients of so
    # many bytes; the first returns which of what requires grad the unit counts as its own, None
    # for everything
    enter: Callable[[list[Tensor]], list[Tensor] | None]
    left: Callable[[list[Tensor]], None]
    entered: Callable[[int], None]

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run it without a graph, and put one node in its place."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        tensors = list(tensors_of([args, kwargs]))
        given = [x for x in tensors if x.requires_grad]
        own = self.enter(given)
        # such as masks, and what other units get, too
        held = [x for x in tensors if own is not None and all(x is not y for y in own)]
        with torch.no_grad():
            output = forward(*args, **kwargs)
        given += [p for p in self.module.parameters() if p.requires_grad][:1]
        leaves, spec = pytree.tree_flatten(output)
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and _flows(x)]
        if given and places:
            made = _Skip.apply(self.entered, [leaves[i] for i in places], held, *given)
            for i, x in zip(places, made, strict=True):
                leaves[i] = x
        self.left([leaves[i] for i in places])
        return pytree.tree_unflatten(leaves, spec)


class Scout:
    """A pass before the first: which tensors units give to each other, and which several get."""

    def __init__(self) -> None:
        self._given: dict[str, list[StorageWeakRef]] = {}
        self._counts: Counter[int] = Counter()
        self._calls: Counter[str] = Counter()

    def role(self, name: str, module: nn.Module) -> Skipping:
        """Return the role in which a module is looked at."""
        return Skipping(module, partial(self._see, name), _nothing, _nothing)

    def _see(self, name: str, given: list[Tensor]) -> None:
        check_unit(name)
        self._calls[name] += 1
        self._given[name] = [StorageWeakRef(x.untyped_storage()) for x in given]
        self._counts.update({storage.cdata for storage in self._given[name]})

    def flows(self, name: str) -> list[bool] | None:
        """Return which of a unit's arguments that require grad are for it alone, or come first.

        None for a module that is called more than once.
        """
        if self._calls[name] != 1:
            return None
        given = self._given.get(name, [])
        return [not i or self._counts[x.cdata] == 1 for i, x in enumerate(given)]


# what was measured, by what units that are alike have in common
Kinds = dict[Any, Costs | None]


class Survey:
    """The first pass: every unit measured where it is called, then made to keep nothing."""

    def __init__(
        self,
        scout: Scout,
        kinds: Kinds,
        tick: Callable[[], None],
        selective: bool,
        parts: Mapping[str, Sequence[str]],
    ):
        self.scout, self._tick, self._selective, self._parts = scout, tick, selective, parts
        self._kinds = kinds
        self._found: list[tuple[str, Costs | None]] = []
        # by unit the dataclass that it returns, where that hides tensors
        self.hidden: dict[str, str | None] = {}

    def probe(self, name: str, module: nn.Module) -> Probe:
        """Return the role in which a module is measured."""
        return Probe(self, name, module)

    def see(self, name: str, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> None:
        """Measure a call, once of a kind."""
        flows = self.scout.flows(name)
        if flows is None:
            self._found.append((name, None))
            return
        parts = tuple(self._parts.get(name, ()))
        key = kind_of(module, args, kwargs), tuple(flows), parts
        if key not in self._kinds:
            how = flows, self._selective, parts, key
            try:
                self._kinds[key] = measured(module, forward, args, kwargs, *how)
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
        return {
            name: _why_not(calls[name], self.hidden.get(name))
            for name in names
            if name not in units
        }

    def _calls(self) -> Counter[str]:
        return Counter(name for name, _ in self._found)


def _why_not(calls: int, hidden: str | None) -> str:
    if calls == 1 and hidden:
        return (
            f"returns a dataclass, {hidden}, whose tensors are not seen: let it return a tensor, "
            "tuple or dict"
        )
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
        skipping = Skipping(self.module, _nothing, _nothing, _nothing)
        output = skipping.call(forward, args, kwargs)
        self.survey.hidden[self.name] = unseen_in(output)
        return output


def _nothing(_: Any) -> None:
    return None


def _flows(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
