"""A schedule: kernel calls in order, as a graph that is compiled to a Python function.

The function frees each tensor after its last reader. Printed, a schedule is one line a call, with
the tensors that nothing reads after it:

    d_down_weight = mm(d_y.t(), h)                                         frees h

A view, such as a transpose or one of the seeds, has no memory and no line of its own. A keyword is
a tensor that a result is written over: its memory goes on as the result's, so it is not freed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MethodType
from typing import Any

import torch
from torch.fx import Graph, Node

from fusedckpt.blocks.program import Program, ProgramStep

Flags = tuple[bool, ...]
_VIEW_METHODS = ("t", "transpose")
# columns before the tensors that are freed
_WIDTH = 70


@dataclass(frozen=True, eq=False)
class Schedule:
    """A function of the number of the first row, and of the tensors that `arguments` lists."""

    # the calls, in order
    graph: Graph
    # pairs of a kind and a name or number: "value", "param", "dy", "buffer" (a tensor of all rows,
    # into which a chunk's result is written), "sum" (a parameter's earlier gradient)
    arguments: tuple[tuple[str, Any], ...]
    # names of values, or whether each gradient exists
    results: tuple[Any, ...]
    # the number of the weight of every GEMM
    gemms: tuple[int, ...]
    # the values that lead to a wanted gradient
    flows: frozenset[str] = frozenset()

    @cached_property
    def run(self) -> Callable[..., tuple[Any, ...]]:
        """Compile the function when it is first called: most schedules only plan the saved tensors.

        fx writes a function `forward`, one line a node, and the globals that it names. fx's
        GraphModule does not run it, as every call of a module costs more than this plain method.
        """
        code = self.graph.python_code("self")
        scope = dict(code.globals)
        exec(compile(code.src, "<fusedckpt schedule>", "exec"), scope)
        return MethodType(scope["forward"], self.graph)

    def names(self, kind: str) -> tuple[Any, ...]:
        """Return the names or numbers of the arguments of one kind."""
        return tuple([name for key, name in self.arguments if key == kind])

    def __str__(self) -> str:
        return "\n".join(_lines(self.graph))


class Writer:
    """Writes a schedule of a program, call by call.

    The `meta` of a node has its `dtype`, where it is known; `over`, the tensors that its results
    may be written over, the best first, by keyword of the call; and `alias`, the tensor that it is
    written over.
    """

    def __init__(self, program: Program, adds: bool = False):
        self.program = program
        # whether parameters' gradients are at least float32, and added to earlier ones
        self.adds = adds
        self.graph = Graph()
        self.first_row = self._last = self.graph.placeholder("first_row")
        # the nodes of arguments by kind and name, and of values by name
        self.arguments: dict[tuple[str, Any], Node] = {}
        self.nodes: dict[str, Node] = {}
        self.dtypes = program.dtypes([program.dtype] * len(program.inputs))
        self.gemms: list[int] = []

    def argument(self, kind: str, key: Any) -> Node:
        """Return the node of an argument, a new one for its first reader."""
        if (kind, key) not in self.arguments:
            label = self.program.params[key] if kind in ("param", "sum") else key
            with self.graph.inserting_after(self._last):
                self._last = self.graph.placeholder(label_of(kind, label))
                # fx writes placeholders in lower case
                self._last._rename(label_of(kind, label))
            self._last.meta["dtype"] = self.dtypes.get(key)
            self.arguments[kind, key] = self._last
        return self.arguments[kind, key]

    def params(self, step: ProgramStep) -> list[Node | None]:
        """Return the nodes of a step's parameters."""
        return [None if p is None else self.argument("param", p) for p in step.params]

    def call(
        self,
        function: Callable[..., Any] | str,
        *args: Any,
        dtype: torch.dtype | None = None,
        over: Mapping[str, Sequence[Node]] | None = None,
        **kwargs: Any,
    ) -> Node:
        """Write a call of a function, or of a tensor's method; dtype, over: see `Writer`."""
        if isinstance(function, str):
            node = self.graph.call_method(function, args, kwargs)
        else:
            node = self.graph.call_function(function, args, kwargs)
        node.meta.update(dtype=dtype, over=over or {})
        return node

    def items(self, node: Node, count: int) -> list[Node]:
        """Return the nodes of a tuple's items."""
        return [self.call(operator.getitem, node, i) for i in range(count)]

    def dtype_of(self, node: Node | None) -> Any:
        """Return the dtype of a node, None where it is not known."""
        return None if node is None else node.meta["dtype"]

    def cast(self, node: Node, dtype: torch.dtype | None) -> Node:
        """Return a node in a dtype, where it is known to have another."""
        if dtype is None or self.dtype_of(node) in (None, dtype):
            return node
        return self.call("to", node, dtype, dtype=dtype)

    def reads(self, step: ProgramStep) -> list[Node]:
        """Return the nodes of a step's values, in the dtype that it reads."""
        first, *others = [self.nodes[name] for name in step.reads]
        return [self.cast(first, step.op.read_dtype), *others]

    def write_forward(self, step: ProgramStep) -> None:
        """Write a step's forward."""
        self.count_gemm(step)
        self.note_value(step.out, step.op.forward(self, self.reads(step), self.params(step))[0])

    def count_gemm(self, step: ProgramStep) -> None:
        """Note the GEMM of a linear."""
        if step.op.has_gemm:
            self.gemms.append(step.params[0])  # type: ignore[arg-type]  # it has a weight

    def note_value(self, name: str, node: Node) -> None:
        """Note the node of a value."""
        if node.op != "placeholder":
            node._rename(label_of("", name))
        node.meta["dtype"] = self.dtypes[name]
        self.nodes[name] = node

    def reuse_buffers(self, donated: Collection[Node] = ()) -> None:
        """Write results over tensors that nothing reads later.

        donated: the arguments that may be written over, only by gradients. A recomputed hidden
        layer, "h", is freed before the gradients are made, so it gets a buffer of its own: that of
        a saved tensor would stay in memory until the end.
        """
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        for node in order:
            taken: set[Node] = set()
            for key, wished in node.meta.get("over", {}).items():
                for read in wished:
                    is_ours = read.op != "placeholder" or (key != "h" and read in donated)
                    if is_ours and read not in taken and last_reader(read, order) is node:
                        node.update_kwarg(key, read)
                        taken.add(read)
                        break

    def write_into_buffer(self, name: str) -> None:
        """Write the rows of a result into the tensor of all rows.

        The call that made its memory writes there: the last of the results that are written
        over one another. A call that cannot is followed by a copy.
        """
        node: Any = self.nodes[name]
        buffer = self.argument("buffer", name)
        while below := node.kwargs.get("out") or node.meta.get("alias"):
            node = below
        if "out" in node.meta.get("over", {}):
            node.update_kwarg("out", buffer)
            return
        with self.graph.inserting_after(node):
            copied = self.call("copy_", buffer, node)
        node.replace_all_uses_with(copied, lambda user: user is not copied)

    def compiled(
        self,
        outputs: Sequence[Node | None],
        results: Sequence[Any],
        donated: Collection[Node] = (),
        buffers: Sequence[str] = (),
        **more: Any,
    ) -> Schedule:
        """Return the schedule; buffers: the results that are written into tensors of all rows."""
        self.graph.output(tuple(outputs))
        self.reuse_buffers(donated)
        for name in buffers:
            self.write_into_buffer(name)
        for node in reversed(self.graph.nodes):
            if node.target is operator.getitem and not node.users:
                self.graph.erase_node(node)
        gemms = tuple(self.gemms)
        return Schedule(self.graph, tuple(self.arguments), tuple(results), gemms, **more)


def last_reader(node: Node, order: Mapping[Node, int]) -> Node:
    """Return the last node that reads a tensor."""
    return max(node.users, key=order.__getitem__)


def label_of(kind: str, name: str) -> str:
    """Return the name of a node for a value, a parameter or a gradient."""
    prefix = {"dy": "d_", "buffer": "all_", "sum": "sum_d_"}.get(kind, "")
    return prefix + "".join([c if c.isalnum() else "_" for c in name]).strip("_")


def _lines(graph: Graph) -> Iterator[str]:
    """Write a graph as lines, one for each call and one for the results."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    last_reads: dict[Node, int] = {}
    for node, place in order.items():
        if not _is_part(node):
            last_reads |= dict.fromkeys(map(_owner, node.all_input_nodes), place)
    for node, place in order.items():
        if node.op == "output":
            yield f"return {', '.join(map(str, node.args[0]))}"
        elif node.op != "placeholder" and not _is_part(node):
            freed = [owner for owner in _freed_by(node) if last_reads[owner] == place]
            text = _call(node)
            yield f"{text:{_WIDTH}} frees {', '.join(map(str, freed))}" if freed else text


def _is_part(node: Node) -> bool:
    """Whether a node is a view of another one, or one of its results."""
    is_view = node.op == "call_method" and node.target in _VIEW_METHODS
    return is_view or node.target is operator.getitem


def _owner(node: Node) -> Node:
    """Return the node that owns the memory of a node: its own, unless it is a view."""
    while _is_part(node) and not _is_result(node):
        node = node.all_input_nodes[0]
    return node


def _is_result(node: Node) -> bool:
    """Whether a node is one of the results of a call."""
    return node.target is operator.getitem and node.all_input_nodes[0].op != "placeholder"


def _freed_by(node: Node) -> list[Node]:
    """Return the tensors that a call reads and writes no result over."""
    written = {arg for arg in node.kwargs.values() if isinstance(arg, Node)}
    if "alias" in node.meta:
        written.add(node.meta["alias"])
    if node.op == "call_method" and str(node.target).endswith("_"):
        written.add(node.all_input_nodes[0])
    owners = dict.fromkeys(map(_owner, node.all_input_nodes))
    return [owner for owner in owners if owner.op != "placeholder" and owner not in written]


def _call(node: Node) -> str:
    """Write a call and its results."""
    results = [user for user in node.users if _is_result(user)]
    keywords = [f"{key}={_text(arg)}" for key, arg in node.kwargs.items() if isinstance(arg, Node)]
    if node.op == "call_method":
        call = _method(node)
    else:
        args = [_text(arg) for arg in node.args if isinstance(arg, Node)]
        name: Any = node.target
        call = f"{name.__name__}({', '.join([*args, *keywords])})"
    return f"{', '.join(map(str, results)) or node} = {call}" if node.users else call


def _method(node: Node) -> str:
    """Write a call of a tensor's method, with its numbers and dtypes."""
    tensor, *args = node.args
    texts = [_text(arg).removeprefix("torch.") for arg in args]
    return f"{_text(tensor)}.{node.target}({', '.join(texts)})"


def _text(arg: Any) -> str:
    """Write an argument: a view as the expression that makes it."""
    if not isinstance(arg, Node) or not _is_part(arg) or _is_result(arg):
        return str(arg)
    if arg.op == "call_method":
        return _method(arg)
    return f"{arg.args[0]}[{arg.args[1]}]"
