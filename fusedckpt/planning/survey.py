"""A forward of the user's own model: the modules that are units, their order, and their inputs."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fusedckpt.autograd.levels import LEVELS
from fusedckpt.autograd.phases import current
from fusedckpt.autograd.private import function_of
from fusedckpt.memory import nbytes_of, storage_ref
from fusedckpt.planning.roles import PLAIN, Segmented, assigned
from fusedckpt.planning.units import levels_of
from fusedckpt.reporting.step import Step
from fusedckpt.reporting.trial import tensors_of

__all__ = ["Found", "Survey", "surveyed"]

WRITES = "modifies its input"
_TAKE_AWAY = "take the checkpoint away (of transformers' models, gradient_checkpointing_disable())"


class Found(NamedTuple):
    """A unit.

    fixed: why no segment may hold it. joined: it gets the output of the unit before. levels: those
    that it offers, from the most that is saved. input: bytes that it gets which require grad.
    """

    name: str
    module: nn.Module
    fixed: str
    joined: bool
    levels: tuple[str, ...]
    input: int


class _Called(NamedTuple):
    """The first call of a module.

    given: the storages that it gets which require grad, and whether the unit before returned each.
    is_fused: fused layers ran in it, modules or functions.
    """

    unit: int
    given: list[tuple[StorageWeakRef, bool]]
    input: int
    writes: bool
    differentiable: bool
    is_fused: bool
    hidden: str


class Survey:
    """One forward. last: bytes of the model's output, and of leaves that its graph keeps. trained:
    the parameters that the loss reaches.
    """

    def __init__(self, step: Step, names: Sequence[str]):
        self.names = names
        self._modules = [step.model.get_submodule(name) for name in names]
        self._counts: Counter[int] = Counter()
        self._takers: Counter[int] = Counter()
        self._calls: list[_Called] = []
        # the tensors that the last unit returned
        self._returned: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        step, held = step.fresh()
        with assigned({m: partial(self._visit, i) for i, m in enumerate(self._modules)}):
            output = step.model(*step.args, **step.kwargs)
        outputs = [*tensors_of([output])]
        self.last = nbytes_of([*outputs, *held]) - nbytes_of(held) + _leaf_bytes(outputs, held)
        losses = [*tensors_of([step.loss(output)])]
        leaves = {node.variable for node in _graph_of(losses) if hasattr(node, "variable")}
        self.trained = leaves.intersection(step.parameters())

    def _visit(self, i: int, forward: Any, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            self._refuse_reentrant(i)
            return forward(*args, **kwargs)
        self._refuse(i, (args, kwargs))
        self._counts[i] += 1
        tensors = [*tensors_of([args, kwargs])]
        given = [x for x in tensors if x.requires_grad]
        returned = [self._is_returned(x) for x in given]
        before, states = [(id(x), x._version) for x in tensors], _states(args, kwargs)
        # it keeps nothing: a forward that saves everything may not fit
        output = Segmented(1).roles()[0](forward, args, kwargs)
        _refuse_cache(states, _states(args, kwargs))
        after = [(id(x), x._version) for x in tensors_of([args, kwargs])]
        made = [x for x in tensors_of([output]) if x.requires_grad]
        self._returned = {id(x): (weakref.ref(x), x._version) for x in made}
        if self._counts[i] == 1:
            storages = [storage_ref(x) for x in given]
            self._takers.update({storage.cdata for storage in storages})
            known = [*zip(storages, returned, strict=True)]
            is_fused = any(map(_is_fused, _graph_of(made, {x.grad_fn for x in given})))
            ways = before != after, len(made) > 0, is_fused, _hidden(output)
            self._calls.append(_Called(i, known, nbytes_of(given), *ways))
        return output

    def _is_returned(self, x: Tensor) -> bool:
        known = self._returned.get(id(x))
        return known is not None and known[0]() is x and known[1] == x._version

    def _refuse(self, i: int, call: Any) -> None:
        if current() is not None:
            raise ValueError(
                f"plan: unit {self.names[i]} runs inside a checkpoint: a plan chooses what is "
                f"recomputed; {_TAKE_AWAY}, or name the module that it is around in units="
            )
        if any(x.is_nested for x in tensors_of(call)):
            raise ValueError(
                f"plan: unit {self.names[i]} expects dense or sparse tensors to be measured with, "
                "got a nested one: plan with padded tensors of that many elements"
            )

    def _refuse_reentrant(self, i: int) -> None:
        """Refuse a call in a checkpoint that runs its forward without a graph."""
        frame = sys._getframe(1)
        while frame is not None:
            # torch's, DeepSpeed's, ...
            if "CheckpointFunction" in type(frame.f_locals.get("ctx")).__name__:
                raise ValueError(
                    f"plan: unit {self.names[i]} runs inside a reentrant checkpoint, whose forward "
                    f"runs without gradients: a plan chooses what is recomputed; {_TAKE_AWAY}, or, "
                    "with use_reentrant=False, name the module that it is around in units="
                )
            frame = frame.f_back

    def units(self) -> list[Found]:
        """Return the units in the order in which they run."""
        found: list[Found] = []
        for call in (call for call in self._calls if self._why_not(call.unit) is None):
            # a tensor that several units get does not tell, but the first argument
            own = [
                is_returned
                for i, (storage, is_returned) in enumerate(call.given)
                if not i or self._takers[storage.cdata] == 1
            ]
            fixed = WRITES if call.writes else ""
            is_open = bool(found) and not found[-1].fixed and not fixed
            joined = is_open and bool(own) and all(own)
            name, module = self.names[call.unit], self._modules[call.unit]
            levels = levels_of(module) or (LEVELS[::-1] if call.is_fused else (PLAIN,))
            found.append(Found(name, module, fixed, joined, levels, call.input))
        return found

    def left_out(self) -> dict[str, str]:
        """Return why other modules are no units, by name."""
        reasons = ((name, self._why_not(i)) for i, name in enumerate(self.names))
        return {name: reason for name, reason in reasons if reason is not None}

    def _why_not(self, i: int) -> str | None:
        if not (count := self._counts[i]):
            return "is not called in a step with gradients"
        if count > 1:
            return f"is called {count} times in a step"
        call = next(call for call in self._calls if call.unit == i)
        if call.hidden:
            return (
                f"returns a dataclass, {call.hidden}, whose tensors are not seen: let it return a "
                "tensor, tuple or dict"
            )
        return None if call.differentiable else "returns nothing that requires a gradient"


def surveyed(step: Step, names: Sequence[str]) -> Survey:
    """Run a forward; raise ValueError where it has no unit."""
    survey = Survey(step, names)
    if survey.units():
        return survey
    reasons = survey.left_out()
    why = [f"{name} {reason}" for name, reason in reasons.items()]
    told = "; ".join([*why[:3], f"{len(why) - 3} more"] if len(why) > 4 else why)
    others = [name for name in _run_once(step) if name not in reasons]
    advice = f", name some with units=, such as {', '.join(others[:3])}" if others else ""
    raise ValueError(
        f"plan: expected a unit of {type(step.model).__name__} that runs exactly once{advice}: "
        f"{told or 'it has no parts'}"
    )


def _run_once(step: Step) -> list[str]:
    """Return the names of modules with trained parameters that the forward calls exactly once."""
    modules = {
        name: module
        for name, module in step.model.named_modules()
        if name and any(p.requires_grad for p in module.parameters())
    }
    calls: Counter[str] = Counter()

    def counted(name: str, forward: Any, args: Any, kwargs: Any) -> Any:
        calls[name] += 1
        return forward(*args, **kwargs)

    step, _ = step.fresh()
    with torch.no_grad(), assigned({x: partial(counted, name) for name, x in modules.items()}):
        step.model(*step.args, **step.kwargs)
    return [name for name, count in calls.items() if count == 1]


def _hidden(output: Any) -> str:
    """Return the name of a dataclass in the output that hides its tensors, if any."""
    for part in output if isinstance(output, (tuple, list)) else [output]:
        if is_dataclass(part) and next(tensors_of(part), None) is None:
            return type(part).__name__
    return ""


def _is_fused(node: Any) -> bool:
    """Whether a node is a fused layer's."""
    function = function_of(node)
    return function is not None and function.__module__ == "fusedckpt.blocks.block"


def _graph_of(tensors: Iterable[Tensor], ends: Iterable[Any] = ()) -> Iterator[Any]:
    """Yield the nodes of the graph that made tensors, from nodes at `ends` on."""
    seen: set[Any] = {None, *ends}
    todo: list[Any] = [tensor.grad_fn for tensor in tensors]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            todo += [before for before, _ in node.next_functions]


def _leaf_bytes(outputs: Iterable[Tensor], held: list[Tensor]) -> int:
    """Return the bytes of leaves that a forward made, and of their gradients.

    The graph of the outputs keeps them. held: leaves that live anyway.
    """
    ids = {*map(id, held)}
    leaves = [node.variable for node in _graph_of(outputs) if hasattr(node, "variable")]
    made = [x for x in leaves if id(x) not in ids and not isinstance(x, nn.Parameter)]
    gradients = sum(x.numel() * x.element_size() for x in made)
    return nbytes_of([*made, *held]) - nbytes_of(held) + gradients


def _states(args: Any, kwargs: Any) -> dict[Any, list[Any]]:
    """Return the state of the objects among arguments, by place and kind."""
    given = [*enumerate(args), *kwargs.items()]
    objects = [(name, x) for name, x in given if hasattr(x, "__dict__")]
    known = (Tensor, nn.Module)
    return {(name, type(x)): [*_state(x)] for name, x in objects if not isinstance(x, known)}


def _state(value: Any, depth: int = 5) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield id(value), value._version
    elif isinstance(value, (bool, int, float, str, type(None))):
        yield value
    elif depth and not isinstance(value, nn.Module):
        is_list = isinstance(value, (list, tuple))
        parts = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        for part in value if is_list else parts.values():
            yield from _state(part, depth - 1)


def _refuse_cache(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> None:
    """Refuse a unit that changes an object among its arguments, such as a cache."""
    for (name, kind), state in before.items():
        if after[name, kind] != state:
            raise ValueError(
                "plan: expected units that do the same each time they are called, one changes its "
                f"argument {name}, a {kind.__name__}: for a cache of keys and values, call plan "
                "and the model with (..., use_cache=False)"
            )
