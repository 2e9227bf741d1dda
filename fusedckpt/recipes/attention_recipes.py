"""Recipes of attention's inputs: the linears, rotary embeddings and norms before it run again.

    q, k, v = rotated(q_proj(n)), rotated(k_proj(n)), v_proj(n)
    y = o_proj(F.scaled_dot_product_attention(q, k, v))

Autograd saves q, k and v for attention, and n, or its recipe, for the linears. The nodes of q tell
the functions that made it of n, and have packed the other tensors that these read: weights,
cosines, sines. So attention saves recipes of q, k and v, and backward makes them by the same
functions of torch. No code of the model runs twice, so nothing of its state is kept for that.

A module's first call runs in a checkpoint, which tells the tensors that a recompute brings back:
`are_all_found` says whether the recipes replace all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedckpt.autograd import phases, private, tracker
from fusedckpt.autograd.dispatch import cast_by
from fusedckpt.autograd.private_nodes import PackedArgument, meta_of_result, saved_by
from fusedckpt.autograd.recipes import (
    Count,
    Leaf,
    Made,
    View,
    checks_of,
    key_of,
    makes_again,
    view_in,
)
from fusedckpt.autograd.replay import PLAIN_TENSORS
from fusedckpt.recipes.node_patterns import (
    FinishedCall,
    Function,
    FunctionStep,
    Match,
    NodePattern,
    Slot,
    UnknownNode,
    is_of_argument,
    node_pattern,
    nodes_of,
)
from fusedckpt.recipes.node_recipes import CountedLeaf, save_in_place


def may_save_recipes() -> bool:
    """Whether attention may save recipes in this call: no other code sees its tensors or nodes."""
    hooks = private.top_hooks()
    return (
        (hooks is None or phases.only_count(hooks))
        and (not private.num_function_modes() or tracker.sees_alone())
        and not private.num_dispatch_modes()
        and not private.are_transforms_active()
        and private.forward_level() < 0
        and private.why_no_hooks() is None
    )


def are_all_found(call: FinishedCall, dropped: set[Any]) -> bool:
    """Whether recipes would replace all tensors that a checkpoint's recompute brings back.

    dropped: the objects that nodes have packed in place of these.
    """
    try:
        pattern, (nodes, _) = node_pattern(call, lambda _node, _packed: True)
    except UnknownNode:
        return False
    replaced = {slot.packed.of(nodes[slot.node]).data for slot, _ in pattern.found}
    of_argument = set[Any]()
    for recipe in (pattern.result, *pattern.recipes):
        for value in recipe.inputs:
            if isinstance(value, Slot) and is_of_argument(value, nodes, call.since):
                of_argument.add(value.packed.of(nodes[value.node]).data)
    # where a norm reads the result, that is saved if the argument is a part of it
    is_apart = None not in pattern.result.inputs
    return is_apart and dropped <= replaced | of_argument


def save_recipes(
    call: FinishedCall, view: View | None, known: Sequence[NodePattern], count: Count
) -> NodePattern | None:
    """Let attention, and functions before it, save recipes of their inputs.

    view: how to read the call's argument, None where nodes save it; known: patterns of calls of the
    module before; count: see `Count`.

    Returns:
        The pattern of the call, None where a recipe was not found: then nodes have the tensors.
    """
    for pattern, match in _matching(call, known):
        recipes = _Recipes(pattern, match, call.x, view)
        try:
            recipes.find()
        except (UnknownNode, RuntimeError):
            # a tensor was written, or nodes have packed others
            continue
        recipes.save(count)
        return pattern
    return None


def count_saved(call: FinishedCall, count: Callable[[Tensor], Any], held: set[int]) -> None:
    """Count the tensors that the nodes of a call have saved, for a hook that has seen none.

    held: the storages of tensors that other code holds.
    """
    for node in sorted(nodes_of(call), key=private.number_of):
        for saved in saved_by(node):
            # hooks do not see numbers, which nodes save as tensors
            is_tensor = isinstance(saved, Tensor) and (saved.dim() or not saved.is_cpu)
            if is_tensor and key_of(saved) not in held:
                count(saved)


def _matching(
    call: FinishedCall, known: Sequence[NodePattern]
) -> Iterator[tuple[NodePattern, Match]]:
    """Yield patterns that the nodes of a call have, a new one last, with the nodes."""
    for pattern in known:
        match = pattern.match(call)
        if match is not None:
            yield pattern, match
    try:
        yield node_pattern(call, _fills)
    except (UnknownNode, RuntimeError):
        return


def _fills(node: Any, packed: PackedArgument) -> bool:
    """Whether a tensor that a node has packed fills its memory."""
    x = packed.of(node).data
    return x.__class__ not in PLAIN_TENSORS or x.untyped_storage().nbytes() == x.nbytes


class _Sequence:
    """Functions in sequence, as a function of the tensors that they begin with."""

    __slots__ = ("_functions", "_steps")

    def __init__(self, functions: Sequence[Function], steps: Sequence[FunctionStep]):
        self._functions = functions
        self._steps = steps

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the result of the last function."""
        if private.is_any_autocast_on():
            # nodes tell functions of tensors that autocast has cast
            with cast_by(inputs[0].device, None):
                return self._run(inputs)
        return self._run(inputs)

    def _run(self, inputs: Sequence[Tensor]) -> Tensor:
        functions = self._functions
        values: list[Any] = [*inputs]
        for function, arguments, last in self._steps:
            values.append(functions[function](*map(values.__getitem__, arguments)))
            for i in last:
                values[i] = None
        return values[-1]


class _Recipes:
    """The recipes of one call."""

    def __init__(self, pattern: NodePattern, match: Match, x: Tensor, view: View | None):
        self._pattern = pattern
        self._nodes, self._functions = match
        self._x = x
        self._view = view
        # of the argument's storage, where that has a recipe
        self._key = None if view is None else key_of(x)
        # by the places of slots
        self._views: list[View | Leaf | None] = [None] * pattern.num_slots
        # those that nodes are to save
        self._saved: list[tuple[Any, PackedArgument, View]] = []
        # by the places of recipes, each with the whole result; and a view that attention reads
        self._made: list[tuple[Made, Tensor] | None] = [None] * len(pattern.recipes)
        self._read: dict[int, View] = {}

    def find(self) -> None:
        """Find the recipe of each slot.

        Raises:
            UnknownNode: a tensor was written, or is not as it was in the first call.
            RuntimeError: a tensor was written.
        """
        for slot, place in self._pattern.found:
            node, packed = self._nodes[slot.node], slot.packed
            # `_saved_at`, without a call
            raw = packed.of(node)
            data = raw.data
            if data.__class__ is View or data.__class__ is Leaf:
                # attention in a module inside has saved a recipe
                self._views[slot.place] = data
                continue
            if data.__class__ not in PLAIN_TENSORS or private.unpack_hook(raw):
                raise UnknownNode
            x = packed.tensor(node)
            known = self._made[place]
            if known is None:
                whole = self._whole(place, x)
                known = self._made[place] = self._new(place, whole), whole
            elif key_of(x) != key_of(known[1]):
                # it got other memory between the functions that read it
                raise UnknownNode
            # `view_in`, without a call
            view = View(known[0], 0, x.shape, x.stride(), x.storage_offset())
            if packed.is_of_attention:
                self._read[place] = view
            self._views[slot.place] = view
            self._saved.append((node, packed, view))

    def _whole(self, place: int, x: Tensor) -> Tensor:
        """Return the tensor that fills the memory of a slot's tensor; place: of the recipe."""
        nbytes = x.untyped_storage().nbytes()
        whole = self._pattern.recipes[place].whole
        # a version tells a write that no node tells
        if not x._version:
            if whole is None and x.nbytes == nbytes:
                return x
            if whole is not None:
                shape = torch.Size(meta_of_result(self._nodes[whole[0]], whole[1]).shape)
                if shape.numel() * x.itemsize == nbytes:
                    return x.detach().as_strided((shape.numel(),), (1,), 0).view(shape)
        raise UnknownNode

    def _new(self, place: int, whole: Tensor) -> Made:
        """Return a recipe, given the tensor that fills the memory."""
        recipe = self._pattern.recipes[place]
        inputs = [*map(self._input, recipe.inputs)]
        made = Made("linear", _Sequence(self._functions, recipe.steps), inputs, [whole])
        compared = self._pattern.compared
        if compared[place] is None:
            # code may have written to a tensor unseen
            compared[place] = makes_again(made, whole)
        if not compared[place]:
            raise UnknownNode
        return made

    def _input(self, value: Slot | int | None) -> View | Leaf:
        """Return how to read an input of a recipe."""
        if value is None:
            return self._view or Leaf(self._x)
        if isinstance(value, int):
            return CountedLeaf(self._nodes[value].variable)
        view = self._views[value.place]
        if view is not None:
            return view
        node, packed = self._nodes[value.node], value.packed
        saved = _saved_at(node, packed)
        if not isinstance(saved, Tensor):
            return saved
        argument = self._view
        if argument is None or key_of(saved) != self._key:
            return CountedLeaf(saved)
        # linears have saved the argument, or views of it
        view = view_in(argument.source, saved, argument.place)
        view.check = argument.check
        self._views[value.place] = view
        self._saved.append((node, packed, view))
        return view

    def save(self, count: Count) -> None:
        """Let the nodes save the recipes."""
        # other inputs are right where those of attention are, which are made of them
        made = [known for known in map(self._made.__getitem__, self._read) if known is not None]
        is_rounded = any(source.is_rounded for source, _ in made)
        checks = checks_of("linear", [whole for _, whole in made], is_rounded)
        for view, check in zip(self._read.values(), checks, strict=True):
            view.check = check
        for node, packed, view in self._saved:
            save_in_place(packed.of(node), view, count)


def recipe_of_result(pattern: NodePattern, y: Tensor, _: Sequence[Any]) -> Made | None:
    """Return the recipe of a module's result, see `index.Source`."""
    match = pattern.match_result(y)
    if match is None or y._version or y.untyped_storage().nbytes() != y.nbytes:
        return None
    nodes, functions = match
    inputs: list[View | Leaf] = []
    try:
        for value in pattern.result.inputs:
            if value is None:
                return None
            if isinstance(value, int):
                inputs.append(CountedLeaf(nodes[value].variable))
                continue
            saved = _saved_at(nodes[value.node], value.packed)
            inputs.append(CountedLeaf(saved) if isinstance(saved, Tensor) else saved)
    except (UnknownNode, RuntimeError):
        return None
    return Made("module", _Sequence(functions, pattern.result.steps), inputs, [y])


def _saved_at(node: Any, packed: PackedArgument) -> View | Leaf | Tensor:
    """Return a tensor that a node has packed, or its recipe.

    Raises:
        UnknownNode: hooks of other code have it, or it was not packed in this call.
        RuntimeError: it was written.
    """
    raw = packed.of(node)
    data = raw.data
    if data.__class__ in PLAIN_TENSORS and not private.unpack_hook(raw):
        return packed.tensor(node)
    if data.__class__ is View or data.__class__ is Leaf:
        return data
    raise UnknownNode
