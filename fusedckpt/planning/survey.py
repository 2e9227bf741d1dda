"""A forward of the user's own model: the modules that are units, their order, and their inputs."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fusedckpt.autograd.levels import LEVELS
from fusedckpt.autograd.phases import current
from fusedckpt.autograd.private import function_of, pytree, storage_key
from fusedckpt.checkpointing.calls import Options
from fusedckpt.checkpointing.offload import is_movable
from fusedckpt.checkpointing.repeat_check import NOT_THE_SAME, RepeatCheck
from fusedckpt.fusing.recipe_models import has_recipes
from fusedckpt.memory import nbytes_of, storage_ref
from fusedckpt.planning import grouping
from fusedckpt.planning.changed_arguments import ADVICE, CHANGES, ChangedArguments
from fusedckpt.planning.grouping import SurveyedUnit, fewer, grouped
from fusedckpt.planning.roles import NO_RECIPES, OPTIONS, PLAIN, assigned
from fusedckpt.planning.units import levels_of
from fusedckpt.reporting.containers import nested, trimmer
from fusedckpt.reporting.step import Step
from fusedckpt.reporting.trial import tensors_of

WRITES = "modifies its input"


class Survey(NamedTuple):
    """Units in the order in which they run, and by name why other modules are none.

    last: bytes of the model's output, and of leaves that its graph keeps. trained: the parameters
    that the loss reaches.
    """

    units: list[SurveyedUnit]
    left_out: dict[str, str]
    last: int
    trained: set[Tensor]


class _Called(NamedTuple):
    """The first call of a module."""

    # the storages that it gets which require grad, and whether the unit before returned each
    given: list[tuple[StorageWeakRef, bool]]
    # bytes of these, and of the tensors that it returns
    input: int
    output: int
    # whether it modifies an argument in place
    writes: bool
    # whether fused layers ran in it, modules or functions
    is_fused: bool
    # whether a kernel of attention did
    attends: bool
    # whether it saves nothing for backward
    is_empty: bool
    # bytes of the weights that autocast cast, and that it saves
    casts: int
    # why it is no unit, or ""
    why_not: str
    # by storage, the bytes of tensor arguments that can be offloaded
    movable: dict[StorageWeakRef, int]


class _FirstCall(RepeatCheck):
    """The call of a unit in the survey's forward."""

    # the objects among its arguments
    objects: ChangedArguments

    def __init__(self, module: nn.Module, options: Options):
        super().__init__(module, options)
        # by storage the bytes and the kind of device of the weights that autocast cast
        self.casts: dict[int, tuple[int, str]] = {}

    def pack(self, tensor: Tensor) -> Any:
        """Note a tensor that is saved."""
        if _is_cast(tensor):
            storage = tensor.untyped_storage()
            self.casts[storage_key(storage)] = storage.nbytes(), tensor.device.type
        return super().pack(tensor)

    def why_fixed(self) -> str:
        """Return why no segment may hold the unit, or ""."""
        with self.objects.called_again() as changed:
            why = self.why_not_again(tensors_of)
        return f"{CHANGES} {changed[0]}" if changed else why


class _Visits:
    """The calls of modules in one forward."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.counts: Counter[str] = Counter()
        self.trimmers: list[Callable[[], None]] = []
        # the last call of each
        self.segments: dict[str, _FirstCall] = {}
        self.takers: Counter[int] = Counter()
        self.calls: dict[str, _Called] = {}
        # the storages of casts of weights, which live as long as autocast's cache
        self._casts = set[int]()
        # the tensors that the last unit returned
        self._returned: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def visit(self, name: str, forward: Any, args: Any, kwargs: Any) -> Any:
        """Call a module: a role."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        tensors = [*tensors_of([args, kwargs])]
        _refuse(name, tensors)
        self.counts[name] += 1
        given = [x for x in tensors if x.requires_grad]
        leaves, versions = _leaf_ids([args, kwargs]), [x._version for x in tensors]
        # a segment of several units would hold an object, and the graph of the tensors in it
        returned = [id(x) in leaves and self._is_returned(x) for x in given]
        self.trimmers += trimmers_of(args, kwargs)
        # it keeps nothing: a forward that saves everything may not fit
        segment = self.segments[name] = _FirstCall(self._model.get_submodule(name), OPTIONS)
        segment.objects = ChangedArguments(args, kwargs)
        output = segment.add_call(forward, args, kwargs)
        returned_tensors = [*tensors_of([output])]
        segment.finish(returned_tensors)
        segment.objects.note()
        writes = versions != [x._version for x in tensors]
        made = [x for x in returned_tensors if x.requires_grad]
        visible = _leaf_ids(output)
        self._returned = {id(x): (weakref.ref(x), x._version) for x in made if id(x) in visible}
        if self.counts[name] == 1:
            known = [*zip(map(storage_ref, given), returned, strict=True)]
            self.takers.update({storage.cdata for storage, _ in known})
            nodes = [*graph_of(made, {x.grad_fn for x in given})]
            is_fused, attends = (any(map(holds, nodes)) for holds in (_is_fused, _attends))
            why_not = "" if made else "returns no tensor that requires a gradient"
            direct = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            self.calls[name] = _Called(
                known,
                input=nbytes_of(given),
                output=nbytes_of(made),
                writes=writes,
                is_fused=is_fused,
                attends=attends,
                is_empty=not segment.saved,
                casts=self._new_casts(segment),
                why_not=why_not,
                movable={storage_ref(x): x.nbytes for x in direct if is_movable(x)},
            )
        return output

    def _new_casts(self, segment: _FirstCall) -> int:
        """Return the bytes of casts of weights that autocast's cache holds, new in this unit."""
        new = {
            key: nbytes
            for key, (nbytes, kind) in segment.casts.items()
            # the end of an autocast in the unit's own forward empties the cache
            if key not in self._casts and torch.is_autocast_enabled(kind)
        }
        self._casts |= new.keys()
        return sum(new.values())

    def _is_returned(self, x: Tensor) -> bool:
        known = self._returned.get(id(x))
        return known is not None and known[0]() is x and known[1] == x._version

    def find_fixed(self) -> dict[str, str]:
        """Call units again, as a recompute would; return by name why none may hold a unit."""
        fixed = {}
        while self.segments:
            name, segment = self.segments.popitem()
            if self.calls[name].writes:
                fixed[name] = WRITES
            elif self.counts[name] == 1 and (why := segment.why_fixed()):
                fixed[name] = why
        return fixed

    def units(self, fixed: Mapping[str, str]) -> Iterator[SurveyedUnit]:
        """Yield the units in the order in which they run; fixed: by name why no segment may."""
        is_open = False
        for name, call in self.calls.items():
            if call.why_not or self.counts[name] > 1:
                continue
            # a tensor that several units get does not tell, but the first argument
            own = [
                is_returned
                for i, (storage, is_returned) in enumerate(call.given)
                if not i or self.takers[storage.cdata] == 1
            ]
            joined, is_open = is_open and bool(own) and all(own), name not in fixed
            module, why = self._model.get_submodule(name), fixed.get(name, "")
            offered = levels_of(module) or (LEVELS[::-1] if call.is_fused else ())
            recipes = (NO_RECIPES,) if has_recipes(self._model) else ()
            yield SurveyedUnit(
                name,
                module,
                fixed=why,
                joined=joined and is_open,
                levels=(*recipes, *(offered or (PLAIN,))),
                attends=call.attends,
                input=call.input,
                output=call.output,
                is_empty=call.is_empty and not (why or offered),
                casts=call.casts,
                members=((name, module),),
                # a tensor of several units stays
                movable=sum(
                    nbytes
                    for storage, nbytes in call.movable.items()
                    if self.takers[storage.cdata] == 1
                ),
            )

    def why_not(self, name: str) -> str:
        """Return why a module is no unit, nothing for a unit."""
        if not (count := self.counts[name]):
            return "is not called in a step with gradients"
        return f"is called {count} times in a step" if count > 1 else self.calls[name].why_not


def surveyed(step: Step, names: Sequence[str]) -> Survey:
    """Run a forward, and call its units again; raise ValueError where it has no unit."""
    survey = _surveyed(step, names)
    # a unit may do more in its first call, such as make a tensor that it keeps
    is_same = NOT_THE_SAME not in survey.left_out.values()
    return survey if is_same else _surveyed(step, names)


def _surveyed(step: Step, names: Sequence[str]) -> Survey:
    visits, (step, held) = _Visits(step.model), step.fresh()
    modules = {name: step.model.get_submodule(name) for name in names}
    with assigned({module: partial(visits.visit, name) for name, module in modules.items()}):
        output = step.model(*step.args, **step.kwargs)
    outputs = [*tensors_of([output])]
    last = nbytes_of([*outputs, *held]) - nbytes_of(held) + _leaf_bytes(outputs, held)
    trained = {*_leaves_of(tensors_of([step.loss(output)]))}.intersection(step.parameters())
    # behind the loss, which may read tensors that units leave in attributes
    fixed = visits.find_fixed()
    for trim in visits.trimmers:
        trim()
    left_out = {name: why for name in names if (why := visits.why_not(name))}
    left_out |= {name: why for name, why in fixed.items() if why != WRITES}
    units = fewer(grouped([*visits.units(fixed)], left_out), grouping.MOST_UNITS)
    changing = [unit.fixed for unit in units if unit.fixed.startswith(CHANGES)]
    if changing and all(unit.fixed for unit in units):
        raise ValueError(
            "plan: expected units that do the same each time they are called, each one "
            f"{changing[0]}: {ADVICE}"
        )
    if not units:
        told = [f"{name} {why}" for name, why in left_out.items()]
        told = [*told[:3], f"{len(told) - 3} more"] if len(told) > 4 else told
        raise ValueError(
            f"plan: expected a unit of {type(step.model).__name__} that runs exactly once, outside "
            f"of reentrant checkpoints: {'; '.join(told) or 'it has no parts'}; units= names others"
        )
    return Survey(units, left_out, last, trained)


def _refuse(name: str, tensors: Iterable[Tensor]) -> None:
    if current() is not None:
        raise ValueError(
            f"plan: unit {name} runs inside a checkpoint: a plan chooses what is recomputed; take "
            "the checkpoint away (of transformers' models, activation_checkpointing_disable()), or "
            "name the module that it is around in units="
        )
    if any(x.is_nested for x in tensors):
        raise ValueError(
            f"plan: unit {name} expects dense or sparse tensors to be measured with, got a nested "
            "one: plan with padded tensors of that many elements"
        )


def _leaf_ids(tree: Any) -> set[int]:
    """Return the ids of the leaves that a segment of several units sees."""
    return set(map(id, pytree.tree_leaves(tree)))


def _is_cast(tensor: Tensor) -> bool:
    """Whether a tensor is a weight as autocast casts it and keeps it, or a view of that."""
    owner = tensor if tensor._base is None else tensor._base
    node: Any = owner.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    # below autocast, where a tensor is saved, nothing tells whether that is enabled
    return torch.is_autocast_cache_enabled() and hasattr(node.next_functions[0][0], "variable")


def _is_fused(node: Any) -> bool:
    """Whether a node is a fused layer's."""
    function = function_of(node)
    return function is not None and function.__module__ == "fusedckpt.blocks.block"


def _attends(node: Any) -> bool:
    """Whether a node is that of torch's attention or flash_attn's, which are regions."""
    return any(kernel in node.name() for kernel in ("ScaledDotProduct", "FlashAttn"))


def graph_of(tensors: Iterable[Tensor], ends: Iterable[Any] = ()) -> Iterator[Any]:
    """Yield the nodes of the graph that made tensors, from nodes at `ends` on."""
    seen: set[Any] = {None, *ends}
    todo: list[Any] = [tensor.grad_fn for tensor in tensors]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            todo += [before for before, _ in node.next_functions]


def _leaves_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [node.variable for node in graph_of(tensors) if hasattr(node, "variable")]


def _leaf_bytes(outputs: Iterable[Tensor], held: list[Tensor]) -> int:
    """Return the bytes of leaves that a forward made, and of their gradients.

    The graph of the outputs keeps them. held: leaves that live anyway.
    """
    ids = {*map(id, held)}
    made = [x for x in _leaves_of(outputs) if id(x) not in ids and not isinstance(x, nn.Parameter)]
    gradients = sum(x.numel() * x.element_size() for x in made)
    return nbytes_of([*made, *held]) - nbytes_of(held) + gradients


def trimmers_of(args: Any, kwargs: Any) -> list[Callable[[], None]]:
    """Return functions that take from containers among arguments the items added from now on.

    A unit may add tensors of its own graph to a dict, which its segment holds: where no backward
    comes, they would hold each other.
    """
    return [trimmer(x) for value in (*args, *kwargs.values()) for x in nested(value)]
