"""Patterns of the nodes of attention, by which recipes of its inputs are found.

A walk from the results of a module finds attention, and the functions that made its inputs, back to
tensors that are saved anyway: once, into a pattern. Later calls compare their nodes with it in one
loop: classes, options, and which node is before which. A pattern holds no node and no tensor.

    slot      a tensor that a node has packed
    recipe    how the tensor in a slot is made: functions of nodes, from tensors in other slots,
              parameters, and the argument of the call
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

from fusedckpt.autograd.private import number_of
from fusedckpt.autograd.private_nodes import (
    ATTENTION_INPUTS,
    Operation,
    PackedArgument,
    is_attention,
    is_leaf,
    is_view,
    operation_of,
    option_reader,
)
from fusedckpt.blocks.reader import operation_of_norm

# nodes of a pattern, and nodes behind a result among which attention is looked for
_MOST_NODES = 256
_MOST_BEHIND = 64

# the options of a layer of this library
_OF_LAYER = attrgetter("call")

Function = Callable[..., Tensor]


class UnknownNode(Exception):
    """A node does not tell its function, or no node has packed a tensor that it reads."""


class FinishedCall(NamedTuple):
    """A call of a module that is over."""

    # the number of its first node
    since: float
    # its argument
    x: Tensor
    # its results that need a gradient
    results: Sequence[Tensor]


class Slot(NamedTuple):
    """A tensor that a node has packed."""

    # its place among the slots
    place: int
    # the place of the node
    node: int
    # which argument of the node it is
    number: int
    packed: PackedArgument


class FunctionStep(NamedTuple):
    """A function of values, which are inputs and, behind these, results of the steps before."""

    # its place in the pattern
    function: int
    arguments: list[int]
    # the arguments that no later step reads
    last: list[int]


class Recipe(NamedTuple):
    """How a tensor is made."""

    # the node's place and the number of the result that fills the memory; None where that is the
    # tensor itself
    whole: tuple[int, int] | None
    # slots, places of the nodes of parameters, and None for the argument of the call
    inputs: list[Slot | int | None]
    steps: list[FunctionStep]


class _Edge(NamedTuple):
    """How a node is reached."""

    # the place of a node behind it, -1 for the results of the call
    behind: int
    # which argument of that node, or which of the results, it made
    number: int
    # the number of that among the node's own results
    result: int
    # the node's place
    place: int
    # whether no edge before reaches it
    is_new: bool
    # the class of the node
    kind: type


class Match(NamedTuple):
    """A call with the nodes of a pattern: the nodes by their places, and the functions."""

    nodes: list[Any]
    functions: Sequence[Function]


class NodePattern:
    """The nodes of a call, and how tensors that they have packed are made."""

    def __init__(self, walk: _NodeWalk):
        self._edges = [*walk.edges.values()]
        # edges to the nodes of the first result's recipe
        self._num_for_result = walk.num_for_result
        self._num_results = len(walk.call.results)
        # by the places of nodes: the readers of their options, and these
        self._readers = [_option_reader_of(node) for node in walk.nodes]
        options: list[Any] = [
            None if read is None else read(node)
            for read, node in zip(self._readers, walk.nodes, strict=True)
        ]
        # by the places of functions: their nodes and the numbers of their results
        self._made_by = [*walk.functions]
        functions = [
            _operation(walk.nodes[node], result).function for node, result in self._made_by
        ]
        # of the last call
        self._last = options, functions
        self.result: Recipe = walk.result
        # in the order in which they can be made
        self.recipes = walk.recipes
        # how many slots there are; and those with a recipe, with its place, in the same order
        self.num_slots = len(walk.slots)
        self.found = [*walk.found.items()]
        # of each recipe, whether it once made all values of a tensor; None before that was tried
        self.compared: list[bool | None] = [None] * len(self.recipes)

    @property
    def functions(self) -> Sequence[Function]:
        """Return the functions of the last call."""
        return self._last[1]

    def match(self, call: FinishedCall) -> Match | None:
        """Return the nodes of a call, None where they are not those of this pattern."""
        if len(call.results) != self._num_results:
            return None
        return self._match([call.x.grad_fn], call.results, self._edges)

    def match_result(self, y: Tensor) -> Match | None:
        """Return the nodes of which the recipe of a call's first result is, as `match`."""
        return self._match([None], (y,), self._edges[: self._num_for_result])

    def _match(
        self, nodes: list[Any], results: Sequence[Tensor], edges: Sequence[_Edge]
    ) -> Match | None:
        changed = []
        options, functions = last = self._last
        for behind, number, result, place, is_new, kind in edges:
            if behind < 0:
                y = results[number]
                node, its_result = y.grad_fn, y.output_nr
            else:
                node, its_result = nodes[behind].next_functions[number]
            if its_result != result:
                return None
            if not is_new:
                if node is not nodes[place]:
                    return None
                continue
            if node.__class__ is not kind:
                return None
            read = self._readers[place]
            if read is not None and (option := read(node)) != options[place]:
                # as with other shapes
                changed.append((place, option))
            nodes.append(node)
        if len({*nodes}) < len(nodes):
            # two nodes of the pattern are one here
            return None
        if changed:
            try:
                functions = self._functions_of(nodes, dict(changed), *map(list, last))
            except UnknownNode:
                # with these options the node tells none
                return None
        return Match(nodes, functions)

    def _functions_of(
        self,
        nodes: list[Any],
        changed: Mapping[int, Any],
        options: list[Any],
        functions: list[Function],
    ) -> Sequence[Function]:
        """Return the functions of nodes, some of which have other options than the last ones.

        options, functions: copies of the last ones, as other threads and recipes hold those.
        """
        for place, option in changed.items():
            options[place] = option
        for i, (place, result) in enumerate(self._made_by):
            if place in changed:
                functions[i] = _operation(nodes[place], result).function
        self._last = options, functions
        return functions


def node_pattern(
    call: FinishedCall, fills: Callable[[Any, PackedArgument], bool]
) -> tuple[NodePattern, Match]:
    """Return the pattern of a call, and its nodes.

    fills: whether a tensor that a node has packed fills its memory.

    Raises:
        UnknownNode: nodes do not tell how inputs of attention are made.
    """
    try:
        walk = _NodeWalk(call, fills)
        pattern = NodePattern(walk)
    except AttributeError as error:
        # a node of this torch has other options
        raise UnknownNode from error
    return pattern, Match(walk.nodes, pattern.functions)


def nodes_of(call: FinishedCall) -> Iterator[Any]:
    """Yield the nodes of a call, those behind others first."""
    nodes: list[Any] = [result.grad_fn for result in call.results]
    seen = set[Any]()
    while nodes:
        node = nodes.pop()
        if _is_since(call.since, node) and node not in seen:
            seen.add(node)
            yield node
            nodes += [parent for parent, _ in node.next_functions]


def is_of_argument(slot: Slot, nodes: Sequence[Any], since: float) -> bool:
    """Whether the tensor in a slot is a view of one that was there before the call."""
    node, result = nodes[slot.node].next_functions[slot.number]
    node, _ = _viewed(node, result)
    return node is not None and not is_leaf(node) and not _is_since(since, node)


def _is_since(since: float, node: Any) -> bool:
    """Whether a node is one of a call, given the number of the call's first node."""
    return node is not None and not is_leaf(node) and number_of(node) >= since


def _viewed(node: Any, result: int) -> tuple[Any, int]:
    """Return the node, and the number of its result, that another node's result is a view of."""
    while is_view(type(node)):
        ((node, result),) = node.next_functions
    return node, result


def _operation(node: Any, result: int) -> Operation:
    operation = operation_of(node, result) or operation_of_norm(node)
    if operation is None:
        raise UnknownNode
    return operation


def _option_reader_of(node: Any) -> Callable[[Any], Any] | None:
    """Return the reader of a node's options, None for a node without."""
    return option_reader(type(node)) or (_OF_LAYER if hasattr(node, "call") else None)


class _NodeWalk:
    """A walk along the nodes of a call, which notes the facts that later calls compare."""

    def __init__(self, call: FinishedCall, fills: Callable[[Any, PackedArgument], bool]):
        self.call = call
        self._fills = fills
        # the argument's first; and the place of each
        self.nodes: list[Any] = [call.x.grad_fn]
        self._places: dict[Any, int] = {call.x.grad_fn: 0}
        # by `behind` and `number`
        self.edges: dict[tuple[int, int], _Edge] = {}
        # by a node's place and the number of its result: the place of its function
        self.functions: dict[tuple[int, int], int] = {}
        self.recipes: list[Recipe] = []
        # by the place of the node and how it has packed the tensor
        self.slots: dict[tuple[int, PackedArgument], Slot] = {}
        # of slots with a recipe its place
        self.found: dict[Slot, int] = {}
        # of recipes, by the node and the number of its result
        self._known: dict[tuple[int, int], int] = {}
        self.result = self._recipe(None, *self.reach(-1, 0))
        self.num_for_result = len(self.edges)
        for number in range(1, len(call.results)):
            self._recipe(None, *self.reach(-1, number))
        for place in [*self._attention()]:
            for number, packed in enumerate(ATTENTION_INPUTS):
                self._find(self._slot(place, number, packed))

    def reach(self, behind: int, number: int) -> tuple[int, int]:
        """Return the place of the node before another, and the number of its result."""
        edge = self.edges.get((behind, number))
        if edge is None:
            edge = self.edges[behind, number] = self._edge(behind, number)
        return edge.place, edge.result

    def _edge(self, behind: int, number: int) -> _Edge:
        if behind < 0:
            y = self.call.results[number]
            node, result = y.grad_fn, y.output_nr
        else:
            node, result = self.nodes[behind].next_functions[number]
        if node is None or len(self.nodes) == _MOST_NODES:
            raise UnknownNode
        is_new = node not in self._places
        if is_new:
            self._places[node] = len(self.nodes)
            self.nodes.append(node)
        return _Edge(behind, number, result, self._places[node], is_new, type(node))

    def is_inside(self, node: Any) -> bool:
        """Whether a node is one of the call."""
        return _is_since(self.call.since, node)

    def _attention(self) -> Iterator[int]:
        """Yield the places of nodes of attention behind the results."""
        todo = [self.reach(-1, number)[0] for number in range(len(self.call.results))]
        seen = set[int]()
        while todo and len(seen) < _MOST_BEHIND:
            place = todo.pop()
            node = self.nodes[place]
            if place in seen or not self.is_inside(node):
                continue
            seen.add(place)
            if is_attention(type(node)):
                yield place
                # calls compare no nodes before it but those of recipes
                continue
            for number, (parent, _) in enumerate(node.next_functions):
                if self.is_inside(parent):
                    todo.append(self.reach(place, number)[0])

    def _find(self, slot: Slot) -> None:
        """Find the recipe of the tensor in a slot."""
        place, result = self.reach(slot.node, slot.number)
        is_whole = self._fills(self.nodes[slot.node], slot.packed)
        while not is_whole and is_view(type(self.nodes[place])):
            place, result = self.reach(place, 0)
        key = place, result
        if key not in self._known:
            recipe = self._recipe(None if is_whole else (place, result), place, result)
            self._known[key] = len(self.recipes)
            self.recipes.append(recipe)
        self.found[slot] = self._known[key]

    def _recipe(self, whole: tuple[int, int] | None, place: int, result: int) -> Recipe:
        steps = _RecipeSteps(self)
        steps.value(place, result)
        return Recipe(whole, steps.inputs, steps.with_last_reads())

    def _slot(self, node: int, number: int, packed: PackedArgument) -> Slot:
        slot = Slot(len(self.slots), node, number, packed)
        return self.slots.setdefault((node, packed), slot)

    def read(self, place: int, number: int, packed: PackedArgument) -> Slot:
        """Return the slot of an argument, which gets a recipe if functions of the call made that.

        A parameter, a constant, and a view of attention's result are saved anyway, as is one of the
        argument.
        """
        slot = self._slot(place, number, packed)
        if slot in self.found or packed.is_result:
            return slot
        node, result = self.nodes[place].next_functions[number]
        node, result = _viewed(node, result)
        if self.is_inside(node) and (result or not is_attention(type(node))):
            self._find(slot)
        return slot


class _RecipeSteps:
    """The functions of one recipe, as a walk finds them."""

    def __init__(self, walk: _NodeWalk):
        self._walk = walk
        self.inputs: list[Slot | int | None] = []
        # for each function its place, and its arguments, below 0 for results
        self._steps: list[tuple[int, list[int]]] = []
        # by the place of a node and the number of its result
        self._values: dict[tuple[int, int], int] = {}

    def value(self, place: int, result: int) -> int:
        """Return the place of a node's result among the values, below 0 for that of a step."""
        known = self._values.get((place, result))
        if known is None:
            known = self._values[place, result] = self._new_value(place, result)
        return known

    def _new_value(self, place: int, result: int) -> int:
        walk = self._walk
        node = walk.nodes[place]
        if place == 0 and result == walk.call.x.output_nr:
            return self._input(None)
        if is_leaf(node):
            return self._input(place)
        if not walk.is_inside(node):
            raise UnknownNode
        arguments = []
        for number, packed in enumerate(_operation(node, result).sources):
            if packed is not None and packed.of(node).data is not None:
                arguments.append(self._input(walk.read(place, number, packed)))
            else:
                arguments.append(self.value(*walk.reach(place, number)))
        function = walk.functions.setdefault((place, result), len(walk.functions))
        self._steps.append((function, arguments))
        return -len(self._steps)

    def _input(self, value: Slot | int | None) -> int:
        self.inputs.append(value)
        return len(self.inputs) - 1

    def with_last_reads(self) -> list[FunctionStep]:
        """Return the steps, each with the values that no later one reads."""
        num = len(self.inputs)
        later = set[int]()
        steps = []
        for function, relative in reversed(self._steps):
            arguments = [i if i >= 0 else num - 1 - i for i in relative]
            steps.append(FunctionStep(function, arguments, [*{*arguments} - later]))
            later.update(arguments)
        return steps[::-1]
