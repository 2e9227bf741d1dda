"""The order of a block's work: derived once from its program, what is wanted and what was saved.

A schedule is a graph of kernel calls, compiled to a Python function that frees each tensor after
its last reader; printed, it is the list of these calls. Backward walks the steps back; what it is
given decides what it recomputes. Rules that no step sees alone stand here:

- A weight gradient that reads a recomputed value waits for the pass that makes the value anyway.
- The gradient of a bias comes from the pass that makes the gradient it sums, where that can.
- A gradient that passes a step unchanged, such as a residual's, is not copied; it is added when the
  value's other gradients are complete.
- Elementwise results are written over tensors that nothing reads later.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from fusedckpt.blocks import passes
from fusedckpt.blocks.steps import (
    Add,
    Dropout,
    Gradient,
    Hidden,
    Linear,
    Norm,
    Pass,
    Program,
    Step,
    cast,
)
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


class _Writer:
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
                self.last = self.graph.placeholder(_label(kind, label))
            self.there[kind, key] = self.last
        return self.there[kind, key]

    def params(self, step: Step) -> list[Node | None]:
        """Return the nodes of a step's parameters."""
        return [None if p is None else self.given("param", p) for p in step.params]

    def reads(self, step: Step) -> list[Node]:
        """Return the nodes of a step's values, in the dtype that it reads."""
        nodes = [self.nodes[name] for name in step.reads]
        if isinstance(step.op, Linear):
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
            node._rename(_label("", name))
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


def _label(kind: str, name: str) -> str:
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


def _order(graph: Graph) -> dict[Node, int]:
    return {node: i for i, node in enumerate(graph.nodes)}


def _write_over(node: Node, over: Node) -> None:
    """Have a forward node write over another, or into a place of its own."""
    if node.target is kernels.hidden:
        node.update_arg(2, over)
    else:
        node.update_kwarg("out", over)


@lru_cache(maxsize=4096)
def forward(program: Program, products: Flags, chunked: bool = False) -> Schedule:
    """Derive a forward that returns the results and the products that are flagged.

    chunked: for chunks of rows, which belong in places of all rows.
    """
    writer, steps = _Writer(program, chunked), list(program.steps)
    kept = [name for name, keep in zip(program.products, products, strict=True) if keep]
    names = (*program.results, *kept)
    for name in program.inputs:
        writer.keep(name, writer.given("value", name))
    made: list[tuple[Step, Node]] = []
    while steps:
        step = steps.pop(0)
        if steps and _joins(step, steps[0]):
            made += _joined(writer, step, steps.pop(0), step.out in names)
        else:
            writer.make(step)
            made.append((step, writer.nodes[step.out]))
    homes = {writer.nodes[name]: name for name in names}
    _place(writer, made, homes)
    outputs = [writer.nodes[name] for name in names]
    return writer.compiled(outputs, names)


def _joins(step: Step, after: Step) -> bool:
    """Whether one kernel computes two steps: x + residual with its norm, or a GEMM with act."""
    if after.reads != (step.out,):
        return False
    if isinstance(step.op, Add):
        return isinstance(after.op, Norm)
    return isinstance(after.op, Hidden) and after.op.kernel == "fused"


def _joined(writer: _Writer, step: Step, after: Step, keeps: bool) -> list[tuple[Step, Node]]:
    reads, params = writer.reads(step), writer.params(step)
    if isinstance(step.op, Add):
        nodes = after.op.forward(writer.graph, reads, writer.params(after))
    else:
        writer.gemms.append(step.params[0])  # type: ignore[arg-type]  # it has a weight
        nodes = after.op.with_gemm(writer.graph, reads[0], *params, keeps)
    for name, node in zip((after.out, step.out), nodes, strict=True):
        writer.keep(name, node)
    return [(after, nodes[0]), (step, nodes[1])]


def _place(writer: _Writer, made: list[tuple[Step, Node]], homes: dict[Node, str]) -> None:
    """Write results over what is free, or, of chunks, into the places of all rows."""
    order, taken = _order(writer.graph), dict[Node, Node]()
    for step, node in made:
        if isinstance(step.op, Linear) and len(step.reads) > 1:
            read = writer.dtypes[step.reads[1]]
            if step.op.dtype == read and step.op.out in (None, read):
                taken[node] = writer.nodes[step.reads[1]]
            continue
        for read in _candidates(step, writer):
            if read not in homes and _is_last(read, node, order):
                _write_over(node, read)
                taken[node] = read
                break
    for step, node in reversed(made if writer.chunked else []):
        if node in taken and node in homes:
            # it lies where the tensor does that it is written over
            homes[taken[node]] = homes[node]
        elif node in homes:
            _settle_home(writer, node, homes[node])


def _candidates(step: Step, writer: _Writer) -> list[Node]:
    """Return the tensors that a forward result may be written over, the best first."""
    if isinstance(step.op, Add):
        found = step.reads[:1]
    elif isinstance(step.op, Hidden) and not step.op.is_packed and step.op.kernel != "fused":
        found = step.reads[::-1]
    else:
        return []
    return [node for node in (writer.nodes[n] for n in found) if node.op != "placeholder"]


def _is_last(read: Node, node: Node, order: dict[Node, int]) -> bool:
    return max(order[user] for user in read.users) <= order[node]


_WRITES = (kernels.linear, kernels.hidden, passes.dequantised, passes.packed, torch.add)


def _settle_home(writer: _Writer, node: Node, name: str) -> None:
    """Have the rows of a result belong in the place of all rows."""
    home = writer.given("home", name)
    if node.target in _WRITES:
        _write_over(node, home)
        return
    with writer.graph.inserting_after(node):
        copied = writer.graph.call_method("copy_", (home, node))
    node.replace_all_uses_with(copied, lambda user: user is not copied)
    for other, known in writer.nodes.items():
        if known is node:
            writer.nodes[other] = copied


class _Walk(_Writer):
    """The walk back through a program."""

    def __init__(
        self, program: Program, wanted: Flags, saved: frozenset[str], dys: Flags, chunked: bool
    ):
        super().__init__(program, chunked)
        self.saved, self.wanted = saved, wanted[len(program.inputs) :]
        self.makers = {step.out: step for step in program.steps}
        # gradients of values: those that passes gave, with their dtypes, and those that passed a
        # step unchanged
        self.grads: dict[str, Node] = {}
        self.grad_dtypes: dict[str, Any] = {}
        self.totals: dict[str, Node] = {}
        self.total_dtypes = dict(self.dtypes)
        for name, there in zip(program.results, dys, strict=True):
            if there:
                self.totals[name] = self.given("dy", name)
        # values whose gradient is wanted, or leads to one that is
        self.flows = {n for n, want in zip(program.inputs, wanted, strict=False) if want}
        for step in program.steps:
            if self.flows & set(step.reads) or any(map(self.wants_param, step.params)):
                self.flows.add(step.out)
        self.sums: dict[int, Node] = {}
        # nodes to be written over what is free: of hidden layers, with what their passes read
        self.hidden: list[tuple[Hidden, Node, Gradient]] = []

    def wants_param(self, number: int | None) -> bool:
        """Whether the gradient of a parameter is wanted."""
        return number is not None and self.wanted[number]

    def wants(self, step: Step) -> tuple[str, ...]:
        """Return the slots of a step whose gradients are wanted."""
        reads = [f"r{i}" for i, name in enumerate(step.reads) if name in self.flows]
        params = [f"p{i}" for i, p in enumerate(step.params) if self.wants_param(p)]
        return (*reads, *params)

    def run(self) -> None:
        """Walk back; a weight gradient waits for the pass that makes what it reads."""
        waiting: list[tuple[Step, Pass, Node]] = []
        for step in reversed(self.program.steps):
            if step.out not in self.flows or not self.has_gradient(step.out):
                continue
            wants, dy = self.wants(step), self.gradient(step.out)
            found = step.op.passes(wants)
            for slot in set(wants).difference(*[one.gives for one in found]):
                # it is that of y
                value = str(step.at(slot))
                self.totals[value] = dy
                self.total_dtypes[value] = self.grad_dtypes.get(step.out)
            due: list[tuple[Step, Pass, Node]] = []
            for one in found:
                if one.gives[0][0] == "p":
                    if self.sums.keys() >= set(map(step.at, one.gives)):
                        continue
                    if any(self.comes(step.at(slot)) for slot in one.reads):
                        waiting.append((step, one, dy))
                        continue
                if isinstance(step.op, Hidden):
                    due, waiting = waiting, []
                    if due:
                        one = one._replace(gives=(*one.gives, "y"))
                self.emit(step, one, dy)
            for entry in due:
                self.emit(*entry)
        for entry in waiting:
            self.emit(*entry)

    def comes(self, value: Any) -> bool:
        """Whether a pass yet to run makes a value, or what it would be recomputed from."""
        step = self.makers.get(value)
        if step is None or value in self.nodes or value in self.saved:
            return False
        if isinstance(step.op, Hidden) and any(slot[0] == "r" for slot in self.wants(step)):
            return True
        return any(map(self.comes, step.reads))

    def has_gradient(self, value: str) -> bool:
        """Whether a result's gradient led here."""
        return value in self.grads or value in self.totals

    def gradient(self, value: str) -> Node:
        """Return a value's whole gradient."""
        total = self.totals.pop(value, None)
        if total is not None and value in self.grads:
            self.grads[value] = self.graph.call_method("add_", (self.grads[value], total))
        elif total is not None:
            self.grads[value] = total
            self.grad_dtypes[value] = self.total_dtypes[value]
        maker = self.makers.get(value)
        if maker is not None and not isinstance(maker.op, Norm):
            # adapters of another dtype add up in the wider one
            known, dtype = self.grad_dtypes[value], self.dtypes[value]
            self.grads[value] = cast(self.graph, self.grads[value], known, dtype)
            self.grad_dtypes[value] = dtype
        return self.grads[value]

    def need(self, value: str) -> Node:
        """Return a value that is given, or recompute it."""
        if value in self.nodes:
            return self.nodes[value]
        if value not in self.makers or value in self.saved:
            self.keep(value, self.given("value", value))
            return self.nodes[value]
        step = self.makers[value]
        for name in step.reads:
            self.need(name)
        self.make(step)
        return self.nodes[value]

    def emit(self, step: Step, one: Pass, dy: Node) -> None:
        """Write a pass."""
        given = self.given_to(step, one, dy)
        found = step.op.backward(self.graph, given, self.grad_dtypes.get(step.out))
        if isinstance(step.op, Linear) and "p1" not in one.gives:
            self.gemms.append(step.params[0])  # type: ignore[arg-type]  # it has a weight
        elif given.weight is not None:
            self.gemms.append(self.number_of(given.weight))
        if isinstance(step.op, Hidden) and "x" not in given.reads:
            self.hidden.append((step.op, next(iter(found.values())).args[0], given))
        for slot, node in found.items():
            at = step.at(slot) if slot[0] != "b" else self.bias_of(step.reads[int(slot[1])])
            if slot == "y":
                self.keep(step.out, node)
            elif slot[0] == "r":
                self.grads[at] = node
                own = self.dtypes[at]
                if isinstance(step.op, (Linear, Dropout)):
                    own = step.op.grad_of_x(given.total_dtype) or own
                self.grad_dtypes[at] = own
                node._rename(_label("dy", at))
            else:
                self.add(at, node)

    def number_of(self, weight: Node) -> int:
        """Return the number of a parameter."""
        return next(key for (kind, key), n in self.there.items() if kind == "param" and n is weight)

    def given_to(self, step: Step, one: Pass, dy: Node) -> Gradient:
        """Return what a pass reads."""
        is_hidden, kernel = isinstance(step.op, Hidden), getattr(step.op, "kernel", "")
        weight, reads = None, dict[str, Node]()
        if is_hidden and kernel == "fused" and not self.has(step.reads[0]):
            maker = self.makers[step.reads[0]]
            reads["x"] = self.need(maker.reads[0])
            weight, bias = self.params(maker)
            if bias is not None:
                reads["b"] = bias
        else:
            for slot in one.reads:
                at = step.at(slot)
                if at is not None:
                    reads[slot] = self.given("param", at) if slot[0] == "p" else self.need(at)
        if isinstance(step.op, Linear) and "r0" in reads:
            known = self.dtypes[step.reads[0]]
            reads["r0"] = cast(self.graph, reads["r0"], known, step.op.dtype)
        if is_hidden and kernel == "hybrid":
            dy, weight = self.without_gemm(dy)
        value = next((str(step.at(slot)) for slot in one.gives if slot[0] == "r"), "")
        total, total_dtype = self.grads.get(value), self.grad_dtypes.get(value)
        if isinstance(step.op, Norm) and value in self.totals:
            total = self.gradient(value)
        sums = [f"b{i}" for i, name in enumerate(step.reads) if is_hidden and self.is_due(name)]
        sums = frozenset(sums)
        return Gradient(one.gives, dy, reads, total, total_dtype, sums, weight)

    def has(self, value: str) -> bool:
        """Whether a value is given or recomputed by now."""
        return value in self.nodes or value in self.saved

    def without_gemm(self, dy: Node) -> tuple[Node, Node | None]:
        """Take the GEMM that gives dy out of the graph: return its dy and weight."""
        if dy.target is not torch.mm:
            return dy, None
        before, weight = dy.args
        self.gemms.remove(self.number_of(weight))  # type: ignore[arg-type]  # a node
        self.graph.erase_node(dy)
        return before, weight  # type: ignore[return-value]  # nodes

    def bias_of(self, value: str) -> int | None:
        """Return the bias that a value's gradient is summed for."""
        maker = self.makers.get(value)
        while maker is not None and isinstance(maker.op, Linear) and len(maker.reads) > 1:
            # an adapter's output, which was added to that of its linear
            maker = self.makers.get(maker.reads[1])
        return None if maker is None or not isinstance(maker.op, Linear) else maker.params[1]

    def is_due(self, value: str) -> bool:
        """Whether a pass that gives the gradient of a value sums it for a bias."""
        return self.wants_param(self.bias_of(value))

    def add(self, number: Any, node: Node) -> None:
        """Note a parameter's gradient; of chunks, add it to that so far."""
        if self.chunked:
            total = self.given("sum", number)
            if node.target is passes.weight_grad or node.target is torch.mm:
                dy, x, *how = node.args
                if not how:
                    (turned, dy) = dy, dy.args[0]
                fn, args = passes.weight_sum, (total, dy, x, how[0] if how else 1.0)
                self.graph.erase_node(node)
                if not how:
                    self.graph.erase_node(turned)
            else:
                fn, args = passes.sum_of, (total, node)
            node = self.graph.call_function(fn, args)
        node._rename(f"d_{_label('', self.program.params[number])}")
        self.sums[number] = node

    def place(self, donates: bool) -> None:
        """Write hidden layers' results over what is free."""
        order = _order(self.graph)
        products = {self.nodes[n] for n in self.program.products if n in self.nodes}
        recomputed = [
            (step, self.nodes[step.out])
            for step in self.program.steps
            if step.out in self.nodes and isinstance(step.op, Hidden)
        ]
        for step, node in recomputed:
            if node.target not in (kernels.hidden, passes.packed):
                continue
            for name in step.reads[::-1]:
                read = self.nodes[name]
                is_ours = read.op != "placeholder" or (donates and read in products)
                if is_ours and not step.op.is_packed and _is_last(read, node, order):
                    _write_over(node, read)
                    break
        for op, node, given in self.hidden:
            slots = {slot: given.reads[slot] for slot in ("r0", "r1") if slot in given.reads}
            if given.weight is None:
                slots["dy"] = given.dy
            last = {slot for slot, read in slots.items() if _is_last(read, node, order)}
            made = {slot for slot in last if slots[slot].op != "placeholder"}
            free = made | {slot for slot in last if donates and slots[slot] in products}
            places = op.places(given.gives, made, free)
            for slot, at in places.items():
                node.update_kwarg({"y": "h", "r0": "dz", "r1": "du"}[slot], slots[at])


@lru_cache(maxsize=4096)
def backward(
    program: Program,
    wanted: Flags,
    products: Flags,
    dys: Flags,
    donates: bool = False,
    chunked: bool = False,
) -> Schedule:
    """Derive a backward, which returns gradients of inputs, then of parameters.

    wanted: of inputs, then parameters; products: which GEMM outputs it is given; dys: for which
    results it gets a gradient; donates: whether it may write over the products; chunked: for chunks
    of rows, over which the parameters' gradients are summed.
    """
    kept = [name for name, keep in zip(program.products, products, strict=True) if keep]
    walk = _Walk(program, wanted, frozenset((*kept, *program.keeps)), dys, chunked)
    walk.run()
    flags = zip(program.inputs, wanted, strict=False)
    dxs = [
        walk.gradient(name) if want and walk.has_gradient(name) else None for name, want in flags
    ]
    sums = [walk.sums.get(number) for number in range(len(program.params))]
    walk.place(donates)
    outputs = [*dxs, *sums]
    results = [None if node is None else True for node in outputs]
    return walk.compiled(outputs, results, flows=frozenset(walk.flows))
