"""A schedule: kernel calls in order, as a graph that is compiled to a Python function.

The function frees each tensor after its last reader; printed, a schedule is the list of its calls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from fusedckpt.blocks.program import Program, Step
from fusedckpt.blocks.steps import Dropout, Linear, cast
from fusedckpt.kernels import linear as kernels

Flags = tuple[bool, ...]


class Schedule(NamedTuple):
    """A function of the number of the first row, and of what `given` lists.

    given: pairs of a kind and a name or number: ("value", name), ("param", number), ("dy", name),
    ("home", name) for room where rows of a result belong, ("sum", number) for the gradient of a
    parameter so far; results: names of values; for a backward, of which inputs' and parameters'
    gradients there are; gemms: the number of the weight of every GEMM; flows: the values that lead
    to a wanted gradient.
    """

    run: Callable[..., tuple[Any, ...]]
    graph: Graph
    given: tuple[tuple[str, Any], ...]
    results: tuple[Any, ...]
    gemms: tuple[int, ...]
    flows: frozenset[str] = frozenset()

    def names(self, kind: str) -> tuple[Any, ...]:
        """Return what of one kind is given."""
        return tuple([name for key, name in self.given if key == kind])

    def __str__(self) -> str:
        return "\n".join(_lines(self.graph))


class Writer:
    """A graph in the making. nodes: of values; there: of what is given, by kind and name."""

    def __init__(self, program: Program, chunked: bool):
        self.program, self.chunked, self.graph = program, chunked, Graph()
        self.last = self.graph.placeholder("row")
        self.there: dict[tuple[str, Any], Node] = {}
        self.nodes: dict[str, Node] = {}
        self.dtypes = program.dtypes([program.dtype] * len(program.inputs))
        self.gemms: list[int] = []

    def given(self, kind: str, key: Any) -> Node:
        """Return the node of something that is given."""
        if (kind, key) not in self.there:
            label = self.program.params[key] if kind in ("param", "sum") else key
            with self.graph.inserting_after(self.last):
                self.last = self.graph.placeholder(label_of(kind, label))
            self.there[kind, key] = self.last
        return self.there[kind, key]

    def params(self, step: Step) -> list[Node | None]:
        """Return the nodes of a step's parameters."""
        return [None if p is None else self.given("param", p) for p in step.params]

    def reads(self, step: Step) -> list[Node]:
        """Return the nodes of a step's values, in the dtype that it reads."""
        nodes = [self.nodes[name] for name in step.reads]
        if isinstance(step.op, (Linear, Dropout)):
            known = self.dtypes[step.reads[0]]
            nodes[0] = cast(self.graph, nodes[0], known, step.op.dtype)
        return nodes

    def make(self, step: Step) -> None:
        """Write a step's forward."""
        if isinstance(step.op, Linear):
            self.gemms.append(step.params[0])  # type: ignore[arg-type]  # it has a weight
        reads, params = self.reads(step), self.params(step)
        self.keep(step.out, step.op.forward(self.graph, reads, params)[0])

    def keep(self, name: str, node: Node) -> None:
        """Note the node of a value."""
        if node.op != "placeholder":
            node._rename(label_of("", name))
        self.nodes[name] = node

    def compiled(self, outputs: Sequence[Node | None], results: Sequence[Any], **more: Any) -> Any:
        """Return the schedule."""
        self.graph.output(tuple(outputs))
        for node in reversed(self.graph.nodes):
            if node.target is operator.getitem and not node.users:
                self.graph.erase_node(node)
        code = self.graph.python_code("self")
        scope = dict(code.globals)
        exec(compile(code.src, "<fusedckpt schedule>", "exec"), scope)
        given, gemms = tuple(self.there), tuple(self.gemms)
        return Schedule(
            MethodType(scope["forward"], self.graph),
            self.graph,
            given,
            tuple(results),
            gemms,
            **more,
        )


def label_of(kind: str, name: str) -> str:
    """Return the name of a node for a value, a parameter or a gradient."""
    prefix = {"dy": "d_", "home": "all_", "sum": "sum_d_"}.get(kind, "")
    return prefix + "".join([c if c.isalnum() else "_" for c in name])


def _lines(graph: Graph) -> Iterator[str]:
    """Write a graph as one line a call, with what is freed after it."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op == "placeholder" or node.target is operator.getitem:
            continue
        if node.op == "output":
            yield f"return {', '.join(map(str, node.args[0]))}"
            continue
        items = [user for user in node.users if user.target is operator.getitem]
        made = ", ".join(map(str, items)) or str(node)
        name = node.target if isinstance(node.target, str) else node.target.__name__
        args = ", ".join([str(arg) for arg in node.args if isinstance(arg, Node)])
        over = [f"{key}={arg}" for key, arg in node.kwargs.items() if isinstance(arg, Node)]
        frees = [
            str(read)
            for read in node.all_input_nodes
            if read.op != "placeholder" and max(order[user] for user in read.users) == order[node]
        ]
        text = f"{made} = {name}({', '.join([args, *over])})"
        yield f"{text:70} {'frees ' + ', '.join(frees) if frees else ''}".rstrip()


def order_of(graph: Graph) -> dict[Node, int]:
    """Return the place of each node."""
    return {node: i for i, node in enumerate(graph.nodes)}


def write_over(node: Node, over: Node) -> None:
    """Have a forward node write over another, or into a place of its own."""
    if node.target is kernels.hidden:
        node.update_arg(2, over)
    else:
        node.update_kwarg("out", over)


def is_last(read: Node, node: Node, order: dict[Node, int]) -> bool:
    """Whether no node after `node` reads a tensor."""
    return max(order[user] for user in read.users) <= order[node]
