"""A pass over the user's own model: each unit is measured where it is called, once of a kind."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fusedckpt.autograd.phases import current
from fusedckpt.autograd.private import pytree
from fusedckpt.memory import nbytes_of, storage_ref
from fusedckpt.planning import roles
from fusedckpt.planning.calls import (
    NoGraph,
    Unclear,
    flows,
    graph_of,
    kind_of,
    leaf_bytes,
    made_of,
    once,
    seconds,
    step_kind,
)
from fusedckpt.planning.repeats import NOT_THE_SAME, Repeats, cut_off
from fusedckpt.planning.unit_costs import Costs, Ways, measured
from fusedckpt.planning.units import Cut
from fusedckpt.reporting.step import Step
from fusedckpt.reporting.trial import kept, tensors_of

__all__ = ["Kinds", "Survey", "dropping", "ticking"]


_TAKE_AWAY = "take the checkpoint away (of transformers' models, gradient_checkpointing_disable())"


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


class _DropActivations(NamedTuple):
    """A role: run unit i without a graph, and put one node in its place that keeps nothing.

    visitor: its `enter` sees the call, and what it gets that requires grad, and returns what of
    that is for this unit alone; `differentiable` says what requires grad of the tensors that it
    made and returns; `left` sees what it returns, and those; `entered` the beginning of its
    backward, with gradients of so many bytes; `without_gradients` a call in a mode in which nothing
    is kept.
    """

    visitor: Any
    i: int
    module: nn.Module

    def __call__(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            self.visitor.without_gradients(self.i)
            return forward(*args, **kwargs)
        tensors = list(tensors_of([args, kwargs]))
        given = [x for x in tensors if x.requires_grad]
        own = self.visitor.enter(self.i, (forward, args, kwargs), given)
        # such as masks, and what other units get, too
        held = [x for x in tensors if all(x is not y for y in own)]
        with torch.no_grad():
            output = forward(*args, **kwargs)
        given += [p for p in self.module.parameters() if p.requires_grad][:1]
        leaves, spec = pytree.tree_flatten(output)
        # what it hands on as it is goes by it
        known, made = {*map(id, tensors)}, made_of(leaves, tensors)
        outputs = {id(x): x for x in self.visitor.differentiable(self.i, made)}
        # and what it wrote into a container that it was given
        written = [(at, key) for at, key in _places([args, kwargs]) if id(at[key]) not in known]
        outputs |= {id(at[key]): at[key] for at, key in written}
        if given and outputs:
            skip = (lambda n: self.visitor.entered(self.i, n)), [*outputs.values()], held
            nodes = dict(zip(outputs, _Skip.apply(*skip, *given), strict=True))
            leaves, made = ([nodes.get(id(x), x) for x in y] for y in (leaves, made))
            for at, key in written:
                at[key] = nodes[id(at[key])]
        self.visitor.left(self.i, output, made)
        return pytree.tree_unflatten(leaves, spec)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield containers that can be written into, and where in them a tensor is that flows."""
    if isinstance(tree, (MutableMapping, MutableSequence, tuple)) and not isinstance(
        tree, bytearray
    ):
        for key in [*tree] if isinstance(tree, MutableMapping) else range(len(tree)):
            if flows(tree[key]) and not isinstance(tree, tuple):
                yield tree, key
            yield from _places(tree[key])


def _is_in_reentrant() -> bool:
    """Whether a checkpoint that is a node of its own, torch's or DeepSpeed's, runs forward."""
    frame = sys._getframe(1)
    while frame is not None:
        if "CheckpointFunction" in type(frame.f_locals.get("ctx")).__name__:
            return True
        frame = frame.f_back
    return False


def dropping(visitor: Any, modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Let units keep nothing meanwhile, and the visitor see them by number."""
    given = {module: _DropActivations(visitor, i, module) for i, module in enumerate(modules)}
    return roles.assigned(given)


def _optional(module: nn.Module) -> set[str]:
    """Return the names of parameters that other data may reach, such as those of experts."""
    lists = {
        path: child
        for path, child in module.named_modules()
        if path and isinstance(child, (nn.ModuleList, nn.ModuleDict))
    }
    return {f"{path}.{x}" for path, child in lists.items() for x, _ in child.named_parameters()}


# what was measured, by what units that are alike have in common
Kinds = dict[Any, Costs | None]


class Survey:
    """What the units of a cut cost.

    kinds, repeats: what is known. tick: called for every unit. ways: see `measured`.
    forward_ms, last: ms that the forward took beside measuring, and bytes of the model's output and
    of leaves that its graph keeps.
    trained: parameters that the loss reaches, in units as far as the call that was measured did.
    """

    def __init__(
        self, cut: Cut, kinds: Kinds, repeats: Repeats, tick: Callable[[], None], ways: Ways
    ):
        self._cut, self._kinds, self._tick, self._ways = cut, kinds, tick, ways
        self._repeats = repeats
        self._modules: list[nn.Module] = []
        # by unit of several outputs, which the loss depends on; None: not known yet
        self._used: dict[str, tuple[bool, ...]] | None = None
        self._begin()

    def _begin(self) -> None:
        self._calls: Counter[str] = Counter()
        # in the order of the forward
        self._costs: dict[str, Costs | None] = {}
        # what each call got, and how many got the same
        self._given: list[tuple[str, list[StorageWeakRef]]] = []
        self._counts: Counter[int] = Counter()
        # by unit the dataclass that it returns, where that hides tensors
        self._hidden: dict[str, str] = {}
        self.forward_ms, self.last, self._device = 0.0, 0, torch.device("cpu")
        self.trained: set[Tensor] = set()
        # the node and number of tensors that units made and returned
        self._made: dict[str, list[tuple[Any, int]]] = {}
        self._unclear = False

    def run(self, step: Step) -> None:
        """Run the model's forward, twice where units return more than may be used."""
        self._modules = [step.model.get_submodule(name) for name in self._cut.names]
        self._forward(step)
        if self._unclear:
            self._begin()
            self._forward(step)

    def _forward(self, step: Step) -> None:
        step, held = step.fresh()
        self._device = held[0].device
        start = seconds(self._device)
        with dropping(self, self._modules):
            output = step.model(*step.args, **step.kwargs)
        ms = self.forward_ms + 1e3 * (seconds(self._device) - start)
        self.forward_ms = once((step_kind(step), "forward"), lambda: ms)
        self.last = nbytes_of([*tensors_of([output]), *held]) - nbytes_of(held)
        self.last += leaf_bytes(tensors_of([output]), held)
        self.last += sum(costs.leaves for costs in self._costs.values() if costs)
        self._repeats.finish()
        losses = [*tensors_of([step.loss(output)])]
        nodes = [*graph_of(losses)]
        edges = {(x.grad_fn, x.output_nr) for x in losses}
        edges.update(edge for node in nodes for edge in node.next_functions)
        self._used = {name: tuple(x in edges for x in made) for name, made in self._made.items()}
        # which would keep the graph
        self._made.clear()
        leaves = {node.variable for node in nodes if hasattr(node, "variable")}
        for name, module in zip(self._cut.names, self._modules, strict=True):
            parameters = {x: p for x, p in module.named_parameters() if p.requires_grad}
            # in the place of a unit stands a node with the first one
            if next(iter(parameters.values()), None) in leaves:
                costs = self._costs.get(name)
                found = {*parameters} if costs is None else costs.reached | _optional(module)
                leaves.update(p for x, p in parameters.items() if x in found)
        self.trained = leaves.intersection(step.parameters())

    def enter(self, i: int, call: tuple[Any, Any, Any], given: list[Tensor]) -> list[Tensor]:
        """Measure a call, once of a kind."""
        name, (forward, args, kwargs) = self._cut.names[i], call
        if current() is not None:
            raise ValueError(
                f"plan: unit {name} runs inside a checkpoint: a plan chooses what is recomputed; "
                f"{_TAKE_AWAY}, or name the module that it is around in units="
            )
        if any(x.is_nested for x in tensors_of(call)):
            raise ValueError(
                f"plan: unit {name} expects dense or sparse tensors to be measured with, got a "
                "nested one: plan with padded tensors of that many elements"
            )
        storages = [storage_ref(x) for x in given]
        self._given.append((name, storages))
        self._counts.update({storage.cdata for storage in storages})
        self._calls[name] += 1
        if self._calls[name] == 1:
            module, parts = self._modules[i], tuple(self._cut.parts.get(name, ()))
            used = () if self._used is None else self._used.get(name)
            kind = kind_of(module, args, kwargs), used or None
            start = seconds(self._device)
            if (kind, parts) not in self._kinds and not self._unclear:
                try:
                    # its many calls may bring counters and buffers to where they stay
                    with kept(module):
                        cut_off(module)
                        self._kinds[kind, parts] = measured(
                            module, forward, args, kwargs, kind, parts, self._ways, used
                        )
                except NoGraph:
                    self._kinds[kind, parts] = None
                except Unclear:
                    self._unclear = True
            self._costs[name] = costs = self._kinds.get((kind, parts))
            if costs is not None and not costs.writes:
                self._repeats.begin(name, module, *call)
            self.forward_ms -= 1e3 * (seconds(self._device) - start)
        self._tick()
        return list(tensors_of([args, kwargs]))

    def without_gradients(self, i: int) -> None:
        """Refuse a call in a checkpoint that runs its forward without a graph."""
        if _is_in_reentrant():
            raise ValueError(
                f"plan: unit {self._cut.names[i]} runs inside a reentrant checkpoint, whose "
                "forward runs without gradients: a plan chooses what is recomputed; "
                f"{_TAKE_AWAY}, or, with use_reentrant=False, name the module that it is around "
                "in units="
            )

    def differentiable(self, i: int, made: list[Tensor]) -> list[Tensor]:
        """Return what requires grad, as far as is known."""
        costs = self._costs.get(self._cut.names[i])
        return costs.differentiable(made) if costs else made

    def left(self, i: int, output: Any, made: list[Tensor]) -> None:
        """See what it returns, and whether that hides tensors, as a dict does not."""
        self._repeats.end(self._cut.names[i], output)
        if len(made) > 1:
            self._made[self._cut.names[i]] = [(x.grad_fn, x.output_nr) for x in made]
        for part in output if isinstance(output, (tuple, list)) else [output]:
            if is_dataclass(part) and next(tensors_of(part), None) is None:
                self._hidden[self._cut.names[i]] = type(part).__name__

    def units(self) -> dict[str, Costs]:
        """Return what the units cost, in the order in which they run."""
        return {
            name: (costs.not_recomputed() if name in self._repeats.others else costs)._replace(
                # what several units get belongs to none, but what each gets first
                flows=tuple(not i or self._counts[x.cdata] == 1 for i, x in enumerate(given))
            )
            for name, given in self._given
            if self._calls[name] == 1 and (costs := self._costs[name])
        }

    def left_out(self) -> dict[str, str]:
        """Return why other modules of the cut are no units, or are never recomputed."""
        units = {*self.units()} - self._repeats.others
        return {name: self._why_not(name) for name in self._cut.names if name not in units}

    def _why_not(self, name: str) -> str:
        if not (calls := self._calls[name]):
            return "is not called in a step with gradients"
        if calls > 1:
            return f"is called {calls} times in a step"
        if name in self._repeats.others:
            return NOT_THE_SAME
        if hidden := self._hidden.get(name):
            return (
                f"returns a dataclass, {hidden}, whose tensors are not seen: let it return a "
                "tensor, tuple or dict"
            )
        return "returns nothing that requires a gradient"


@contextmanager
def ticking(total: int, progress: bool) -> Iterator[Callable[[], None]]:
    """Yield what is to be called for every unit that is done."""
    if not progress or importlib.util.find_spec("rich") is None:
        yield lambda: None
        return
    console = importlib.import_module("rich.console").Console(stderr=True)
    with importlib.import_module("rich.progress").Progress(console=console, transient=True) as bar:
        task = bar.add_task("measuring units", total=total)
        yield lambda: bar.advance(task)
