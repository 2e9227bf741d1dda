"""The backward of a block, derived from its program, what is wanted and what was saved.

The steps are walked back; what backward is given decides what it recomputes. Rules that no step
sees alone stand here:

- A weight gradient that reads a recomputed value waits for the pass that makes the value anyway.
- The gradient of a bias comes from the pass that makes the gradient it sums, where that can.
- A gradient that passes a step unchanged, such as a residual's, is not copied; it is added when the
  value's other gradients are complete.
- Elementwise results are written over tensors that nothing reads later.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

from fusedckpt.blocks import passes
from fusedckpt.blocks.program import Gradient, Pass, Program, Step
from fusedckpt.blocks.schedule import (
    Flags,
    Schedule,
    Writer,
    is_last,
    label_of,
    order_of,
    write_over,
)
from fusedckpt.blocks.steps import Dropout, Hidden, Linear, Norm, cast
from fusedckpt.kernels import linear as kernels


class Walk(Writer):
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
            bias = self.bias_of(step.reads[int(slot[1])]) if slot[0] == "b" else None
            at: Any = step.at(slot) if slot[0] != "b" else bias
            if slot == "y":
                self.keep(step.out, node)
            elif slot[0] == "r":
                self.grads[at] = node
                own = self.dtypes[at]
                if isinstance(step.op, (Linear, Dropout)):
                    own = step.op.grad_of_x(given.total_dtype) or own
                self.grad_dtypes[at] = own
                node._rename(label_of("dy", at))
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
            given: Any = node.args
            if node.target is passes.weight_grad:
                dy, x, scale, _ = given
                fn, args = passes.weight_sum, (total, dy, x, scale)
                self.graph.erase_node(node)
            elif node.target is torch.mm:
                turned, x = given
                fn, args = passes.weight_sum, (total, turned.args[0], x, 1.0)
                self.graph.erase_node(node)
                self.graph.erase_node(turned)
            else:
                fn, args = passes.sum_of, (total, node)
            node = self.graph.call_function(fn, args)
        node._rename(f"d_{label_of('', self.program.params[number])}")
        self.sums[number] = node

    def place(self, donates: bool) -> None:
        """Write hidden layers' results over what is free."""
        order = order_of(self.graph)
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
                if is_ours and not step.op.is_packed and is_last(read, node, order):
                    write_over(node, read)
                    break
        for op, node, given in self.hidden:
            slots = {slot: given.reads[slot] for slot in ("r0", "r1") if slot in given.reads}
            if given.weight is None:
                slots["dy"] = given.dy
            last = {slot for slot, read in slots.items() if is_last(read, node, order)}
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
    walk = Walk(program, wanted, frozenset((*kept, *program.keeps)), dys, chunked)
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
