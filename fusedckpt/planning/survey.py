"""A forward of the user's own model: the modules that are units, their order, and their inputs."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fusedckpt.autograd.levels import LEVELS
from fusedckpt.autograd.phases import current
from fusedckpt.autograd.private import function_of, pytree, storage_key
from fusedckpt.checkpointing.offload import is_movable
from fusedckpt.checkpointing.repeat_check import NOT_THE_SAME, RepeatCheck
from fusedckpt.fusing.recipe_models import has_recipes
from fusedckpt.memory import nbytes_of, storage_ref
from fusedckpt.planning import grouping
from fusedckpt.planning.changed_arguments import ADVICE, CHANGES, ChangedArguments
from fusedckpt.planning.graph import graph_of, leaves_of
from fusedckpt.planning.grouping import SurveyedUnit, fewer, grouped
from fusedckpt.planning.rewritten import REWRITTEN, rewritten_units
from fusedckpt.planning.roles import NO_OPTIONS, NO_RECIPES, ROUNDED, UNCHANGED, assigned
from fusedckpt.planning.trimming import trimmers_of
from fusedckpt.planning.units import has_levels, levels_of
from fusedckpt.reporting.step import Step
from fusedckpt.reporting.trial import tensors_of

WRITES_INPUT = "modifies its input"


class Survey(NamedTuple):
    """The units of a model, and other facts that one forward shows."""

    # in the order in which they run
    units: list[SurveyedUnit]
    # by name of another module, why it is no unit
    left_out: dict[str, str]
    # bytes of the model's output, and of leaves that its graph keeps
    output_bytes: int
    # the parameters that the loss reaches
    trained: set[Tensor]


class _Input(NamedTuple):
    """A tensor that a module gets and that requires grad."""

    storage: StorageWeakRef
    # whether the unit before returned it
    is_returned: bool


class _Called(NamedTuple):
    """The first call of a module."""

    # the tensors that it gets and that require grad
    inputs: list[_Input]
    # bytes of these
    input_bytes: int
    # bytes of the tensors that it returns and that require grad
    output_bytes: int
    # whether it modifies an argument in place
    writes: bool
    # whether fused layers ran in it, modules or functions
    is_fused: bool
    # whether a kernel of attention did
    attends: bool
    # whether it saves nothing for backward
    is_empty: bool
    # bytes of the weights that autocast cast, and that it saves
    cast_bytes: int
    # why it is no unit, or ""
    why_not: str
    # by storage, the bytes of tensor arguments that can be offloaded
    movable_bytes: dict[StorageWeakRef, int]


class _FirstCall(RepeatCheck):
    """The call of a unit in the survey's forward."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any):
        super().__init__(module, NO_OPTIONS)
        # the objects among its arguments
        self._objects = ChangedArguments(args, kwargs)
        # by storage the bytes and the kind of device of the weights that autocast cast
        self.casts: dict[int, tuple[int, str]] = {}

    def pack(self, tensor: Tensor) -> Any:
        """Note a tensor that is saved."""
        if _is_cast(tensor):
            storage = tensor.untyped_storage()
            self.casts[storage_key(storage)] = storage.nbytes(), tensor.device.type
        return super().pack(tensor)

    def finish(self, tensors: Iterable[Tensor]) -> None:
        """Note the outputs, and the objects among the arguments that the call changed."""
        super().finish(tensors)
        self._objects.note()

    def why_fixed(self) -> str:
        """Return why no segment may contain the unit, or ""."""
        with self._objects.called_again() as changed:
            why = self.why_not_again(tensors_of)
        return f"{CHANGES} {changed[0]}" if changed else why


class _Visits:
    """The calls of modules in one forward.

    rewritten: the names of units that get a tensor which was written since a unit returned it.
    """

    def __init__(self, model: nn.Module, rewritten: Container[str]) -> None:
        self._model = model
        self._rewritten = rewritten
        # by name, how often a module is called
        self.counts: Counter[str] = Counter()
        # the first call of each module
        self.calls: dict[str, _Called] = {}
        # the last call of each module
        self._segments: dict[str, _FirstCall] = {}
        # by storage, the number of modules that get it
        self._num_takers: Counter[int] = Counter()
        # the storages of casts of weights, which live as long as autocast's cache
        self._casts = set[int]()
        # by id, the tensors that the last unit returned, and their versions
        self._returned: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        # see `trimmers_of`
        self._trimmers: list[Callable[[], None]] = []

    def visit(self, name: str, forward: Any, args: Any, kwargs: Any) -> Any:
        """Call a module: a role."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        tensors = [*tensors_of([args, kwargs])]
        _refuse(name, tensors)
        self.counts[name] += 1
        inputs = self._inputs(tensors, _leaf_ids([args, kwargs]))
        versions = [x._version for x in tensors]
        self._trimmers += trimmers_of(args, kwargs)
        # it saves nothing: a forward that saves everything may not fit
        segment = _FirstCall(self._model.get_submodule(name), args, kwargs)
        self._segments[name] = segment
        output = segment.add_call(forward, args, kwargs)
        outputs = [*tensors_of([output])]
        segment.finish(outputs)
        outputs = [x for x in outputs if x.requires_grad]
        self._note_returned(output, outputs)
        if self.counts[name] == 1:
            self._num_takers.update({x.storage.cdata for x in inputs})
            trained = [x for x in tensors if x.requires_grad]
            nodes = [*graph_of(outputs, {x.grad_fn for x in trained})]
            arguments = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            self.calls[name] = _Called(
                inputs,
                input_bytes=nbytes_of(trained),
                output_bytes=nbytes_of(outputs),
                writes=versions != [x._version for x in tensors],
                is_fused=any(map(_is_fused, nodes)),
                attends=any(map(_attends, nodes)),
                is_empty=not segment.saved,
                cast_bytes=self._new_casts(segment),
                why_not="" if outputs else "returns no tensor that requires a gradient",
                movable_bytes={storage_ref(x): x.nbytes for x in arguments if is_movable(x)},
            )
        return output

    def _inputs(self, tensors: Iterable[Tensor], visible: Container[int]) -> list[_Input]:
        """Return the inputs among a call's tensors; visible: ids of those that a segment sees.

        A segment of several units would hold an object, and the graph of the tensors in it.
        """
        return [
            _Input(storage_ref(x), id(x) in visible and self._is_returned(x))
            for x in tensors
            if x.requires_grad
        ]

    def _note_returned(self, output: Any, tensors: Iterable[Tensor]) -> None:
        visible = _leaf_ids(output)
        self._returned = {id(x): (weakref.ref(x), x._version) for x in tensors if id(x) in visible}

    def _is_returned(self, x: Tensor) -> bool:
        if id(x) not in self._returned:
            return False
        reference, version = self._returned[id(x)]
        return reference() is x and version == x._version

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

    def find_fixed(self) -> dict[str, str]:
        """Call units again, as a recompute would; return by name why no segment may contain one."""
        fixed = {}
        while self._segments:
            name, segment = self._segments.popitem()
            if self.calls[name].writes:
                fixed[name] = WRITES_INPUT
            elif self.counts[name] == 1 and (why := segment.why_fixed()):
                fixed[name] = why
        return fixed

    def trim(self) -> None:
        """Remove the items that units added to containers among their arguments."""
        for trim in self._trimmers:
            trim()

    def units(self, fixed: Mapping[str, str]) -> Iterator[SurveyedUnit]:
        """Yield the units in the order in which they run; fixed: by name why no segment may."""
        recipes = (NO_RECIPES,) if has_recipes(self._model) else ()
        is_open = False
        for name, call in self.calls.items():
            if call.why_not or self.counts[name] > 1:
                continue
            gets_output = is_open and self._gets_output(call.inputs)
            gets_output = gets_output and name not in self._rewritten
            is_open = name not in fixed
            module = self._model.get_submodule(name)
            why = fixed.get(name, "")
            offered = levels_of(module) or (LEVELS[::-1] if call.is_fused else ())
            yield SurveyedUnit(
                name,
                module,
                fixed=why,
                joined=gets_output and is_open,
                levels=(*recipes, *(offered or (UNCHANGED,))),
                attends=call.attends,
                input_bytes=call.input_bytes,
                output_bytes=call.output_bytes,
                is_empty=call.is_empty and not (why or offered),
                cast_bytes=call.cast_bytes,
                members=((name, module),),
                movable_bytes=self._movable_bytes(call),
            )

    def _gets_output(self, inputs: Sequence[_Input]) -> bool:
        """Whether a unit gets the output of the unit before."""
        # a tensor of several units does not tell, but the first argument
        telling = [
            x.is_returned
            for i, x in enumerate(inputs)
            if not i or self._num_takers[x.storage.cdata] == 1
        ]
        return bool(telling) and all(telling)

    def _movable_bytes(self, call: _Called) -> int:
        # a tensor of several units stays
        return sum(
            nbytes
            for storage, nbytes in call.movable_bytes.items()
            if self._num_takers[storage.cdata] == 1
        )

    def why_not(self, name: str) -> str:
        """Return why a module is no unit, nothing for a unit."""
        if not (count := self.counts[name]):
            return "is not called in a step with gradients"
        return f"is called {count} times in a step" if count > 1 else self.calls[name].why_not


def survey(step: Step, names: Sequence[str], *, rounds: bool = False) -> Survey:
    """Run a forward, and call its units again; raise ValueError where it has no unit.

    rounds: whether units with fused layers offer to keep the inputs of these in nine bits.
    """
    surveyed = _survey_twice(step, names)
    if not rounds:
        return surveyed
    units = [
        unit._replace(levels=(*unit.levels, ROUNDED)) if has_levels(unit.module) else unit
        for unit in surveyed.units
    ]
    return surveyed._replace(units=units)


def _survey_twice(step: Step, names: Sequence[str]) -> Survey:
    first = _survey(step, names)
    is_joined = any(unit.joined for unit in first.units)
    rewritten = rewritten_units(step, names) if is_joined else []
    # a unit may do more in its first call, such as make a tensor that it keeps
    is_same = NOT_THE_SAME not in first.left_out.values()
    return first if is_same and not rewritten else _survey(step, names, rewritten)


def _survey(step: Step, names: Sequence[str], rewritten: Sequence[str] = ()) -> Survey:
    visits = _Visits(step.model, rewritten)
    step, held = step.fresh()
    modules = {name: step.model.get_submodule(name) for name in names}
    with assigned({module: partial(visits.visit, name) for name, module in modules.items()}):
        output = step.model(*step.args, **step.kwargs)
    outputs = [*tensors_of([output])]
    output_bytes = nbytes_of([*outputs, *held]) - nbytes_of(held) + _leaf_bytes(outputs, held)
    loss = step.checked_loss(output)
    trained = {*leaves_of([loss])}.intersection(step.parameters())
    # behind the loss, which may read tensors that units leave in attributes
    fixed = visits.find_fixed()
    visits.trim()
    left_out = {name: why for name in names if (why := visits.why_not(name))}
    left_out |= dict.fromkeys(rewritten, REWRITTEN)
    left_out |= {name: why for name, why in fixed.items() if why != WRITES_INPUT}
    units = fewer(grouped([*visits.units(fixed)], left_out), grouping.MOST_UNITS)
    _check_units(step.model, units, left_out)
    return Survey(units, left_out, output_bytes, trained)


def _check_units(
    model: nn.Module, units: Sequence[SurveyedUnit], left_out: Mapping[str, str]
) -> None:
    """Refuse a model without a unit that a plan may decide about."""
    changing = [unit.fixed for unit in units if unit.fixed.startswith(CHANGES)]
    if changing and all(unit.fixed for unit in units):
        raise ValueError(
            "plan: expected units that leave their arguments as they are, each one "
            f"{changing[0]}: {ADVICE}"
        )
    if not units:
        kind = type(model).__name__
        if not left_out:
            raise ValueError(
                f"plan: expected a model with modules inside, got a {kind} without any"
            )
        reasons = [f"{name} {why}" for name, why in left_out.items()]
        if len(reasons) > 4:
            reasons = [*reasons[:3], f"{len(reasons) - 3} more"]
        raise ValueError(
            f"plan: expected a unit of {kind} that runs exactly once, outside of reentrant "
            f"checkpoints: {'; '.join(reasons)}: name other modules in units="
        )


def _refuse(name: str, tensors: Iterable[Tensor]) -> None:
    if current() is not None:
        raise ValueError(
            f"plan: unit {name} runs inside a checkpoint, but a plan chooses the segments itself: "
            "remove the checkpoint (of transformers' models, activation_checkpointing_disable()), "
            "or name the module that contains the checkpoint in units="
        )
    if any(x.is_nested for x in tensors):
        raise ValueError(
            f"plan: unit {name} gets a nested tensor, which plan cannot measure: plan with a "
            "padded tensor of as many elements"
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
    return function is not None and function.__module__ == "fusedckpt.blocks.layer_function"


def _attends(node: Any) -> bool:
    """Whether a node is that of torch's attention or flash_attn's, which are regions."""
    return any(kernel in node.name() for kernel in ("ScaledDotProduct", "FlashAttn"))


def _leaf_bytes(outputs: Iterable[Tensor], held: list[Tensor]) -> int:
    """Return the bytes of leaves that a forward made, and of their gradients.

    The graph of the outputs holds them. held: leaves that live anyway.
    """
    ids = {*map(id, held)}
    made = [x for x in leaves_of(outputs) if id(x) not in ids and not isinstance(x, nn.Parameter)]
    gradients = sum(x.numel() * x.element_size() for x in made)
    return nbytes_of([*made, *held]) - nbytes_of(held) + gradients
