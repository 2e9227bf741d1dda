"""The schedules of a layer, derived from its program, the wanted gradients and the saved tensors.

For the backward the steps are walked back, each by its passes over memory (program.py, which also
explains slots); values that are not saved are recomputed. Rules that involve more than one step
stand here:

- A weight gradient that reads a recomputed value waits for the pass that makes the value anyway:
  of x -> gate, up -> h -> y, the gradient of the down weight reads h, which the pass of the hidden
  layer makes beside the gradients of gate and up. So it comes after that pass, though y is the last
  step, and h is not made twice.
- The gradient of a bias comes from the pass that makes the gradient it sums, where that can.
- A gradient that passes a step unchanged, such as a residual's, is not copied; it is added when the
  value's other gradients are complete.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

from fusedckpt.blocks import passes
from fusedckpt.blocks.program import Gradient, Pass, Program, ProgramStep
from fusedckpt.blocks.steps import Add
from fusedckpt.blocks.writer import Flags, Schedule, Writer, label_of


class BackwardWriter(Writer):
    """Writes the backward of a program: walks its steps back, one pass after the other."""

    def __init__(
        self, program: Program, wanted: Flags, saved: frozenset[str], dys: Flags, adds: bool
    ):
        super().__init__(program, adds)
        self.saved = saved
        self.wanted = wanted[len(program.inputs) :]
        self.makers = {step.out: step for step in program.steps}
        # the gradients of values that passes gave
        self.grads: dict[str, Node] = {}
        # the gradients of values that passed a step unchanged
        self.totals: dict[str, Node] = {}
        for name, has_dy in zip(program.results, dys, strict=True):
            if has_dy:
                self.totals[name] = self.argument("dy", name)
        # values with a gradient that is wanted, or leads to one that is
        self.flows = {n for n, want in zip(program.inputs, wanted, strict=False) if want}
        for step in program.steps:
            if self.flows & set(step.reads) or any(map(self.wants_param, step.params)):
                self.flows.add(step.out)
        # the gradients of parameters, by number
        self.param_grads: dict[int, Node] = {}

    def wants_param(self, number: int | None) -> bool:
        """Whether the gradient of a parameter is wanted."""
        return number is not None and self.wanted[number]

    def wanted_slots(self, step: ProgramStep) -> tuple[str, ...]:
        """Return the slots of a step with wanted gradients."""
        reads = [f"r{i}" for i, name in enumerate(step.reads) if name in self.flows]
        params = [f"p{i}" for i, p in enumerate(step.params) if self.wants_param(p)]
        return (*reads, *params)

    def run(self) -> None:
        """Walk back and write each pass; a weight gradient waits for its input to be made."""
        waiting: list[tuple[ProgramStep, Pass, Node]] = []
        for step in reversed(self.program.steps):
            if step.out not in self.flows or not self.has_gradient(step.out):
                continue
            wants = self.wanted_slots(step)
            dy = self.gradient(step.out)
            passes_of_step = step.op.passes(wants)
            for slot in set(wants).difference(*[step_pass.gives for step_pass in passes_of_step]):
                # no pass gives it: it is the gradient of y
                self.totals[step.at(slot)] = dy
            # weight gradients that waited for the value that this step's pass recomputes
            due: list[tuple[ProgramStep, Pass, Node]] = []
            for step_pass in passes_of_step:
                if step_pass.gives[0][0] == "p":
                    # a bias's gradient that another pass has summed
                    if self.param_grads.keys() >= set(map(step.at, step_pass.gives)):
                        continue
                    if any(self.is_made_later(step.at(slot)) for slot in step_pass.reads):
                        waiting.append((step, step_pass, dy))
                        continue
                if step.op.recomputes:
                    due = waiting
                    waiting = []
                    if due:
                        step_pass = step_pass._replace(gives=(*step_pass.gives, "y"))
                self.write_pass(step, step_pass, dy)
            for entry in due:
                self.write_pass(*entry)
        for entry in waiting:
            self.write_pass(*entry)

    def is_made_later(self, value: Any) -> bool:
        """Whether a pass yet to run makes a value, or the values that it is recomputed from."""
        step = self.makers.get(value)
        if step is None or value in self.nodes or value in self.saved:
            return False
        if step.op.recomputes and any(slot[0] == "r" for slot in self.wanted_slots(step)):
            return True
        return any(map(self.is_made_later, step.reads))

    def has_gradient(self, value: str) -> bool:
        """Whether a result's gradient led here."""
        return value in self.grads or value in self.totals

    def gradient(self, value: str) -> Node:
        """Return a value's whole gradient."""
        grad = self.grads.get(value)
        total = self.totals.pop(value, None)
        if grad is not None and total is not None:
            grad = self.call("add_", grad, total, dtype=self.dtype_of(grad))
        elif grad is None:
            assert total is not None
            grad = total
        maker = self.makers.get(value)
        if maker is not None and not maker.op.adds:
            # adapters of another dtype add up in the wider one
            grad = self.cast(grad, self.dtypes[value])
        self.grads[value] = grad
        return grad

    def value_of(self, value: str) -> Node:
        """Return the node of a value: a saved one, or one that is recomputed here."""
        if value in self.nodes:
            return self.nodes[value]
        if value not in self.makers or value in self.saved:
            self.note_value(value, self.argument("value", value))
            return self.nodes[value]
        step = self.makers[value]
        for name in step.reads:
            self.value_of(name)
        self.write_forward(step)
        return self.nodes[value]

    def write_pass(self, step: ProgramStep, step_pass: Pass, dy: Node) -> None:
        """Write a pass."""
        if step_pass.gives[0] in ("r0", "p0"):
            self.count_gemm(step)
        for slot, node in step.op.backward(self, self.operands_of(step, step_pass, dy)).items():
            if slot == "y":
                self.note_value(step.out, node)
            elif slot[0] == "r":
                value = step.at(slot)
                if node.meta["dtype"] is None:
                    node.meta["dtype"] = self.dtypes[value]
                node._rename(label_of("dy", value))
                self.grads[value] = node
            else:
                bias = self.bias_of(step.at(f"r{slot[1]}")) if slot[0] == "b" else None
                self.note_param_grad(step.at(slot) if bias is None else bias, node)

    def operands_of(self, step: ProgramStep, step_pass: Pass, dy: Node) -> Gradient:
        """Return the nodes that a pass reads."""
        op = step.op
        reads = dict[str, Node]()
        weight: Any = None
        kernel = getattr(op, "kernel", "") if op.recomputes else ""
        if kernel == "fused" and not (step.reads[0] in self.nodes or step.reads[0] in self.saved):
            maker = self.makers[step.reads[0]]
            reads["x"] = self.value_of(maker.reads[0])
            (weight, bias) = self.params(maker)
            self.count_gemm(maker)
            if bias is not None:
                reads["b"] = bias
        else:
            for slot in step_pass.reads:
                at = step.at(slot)
                if at is not None:
                    reads[slot] = (
                        self.argument("param", at) if slot[0] == "p" else self.value_of(at)
                    )
        if "r0" in reads:
            reads["r0"] = self.cast(reads["r0"], op.read_dtype)
        if self.adds and step_pass.gives == ("p0",):
            reads["sum"] = self.argument("sum", step.params[0])
        if kernel == "hybrid" and dy.target is torch.mm:
            # the kernel multiplies itself
            gemm = dy
            dy, weight = gemm.args  # type: ignore[assignment]  # nodes
            self.graph.erase_node(gemm)
        value = next((step.at(slot) for slot in step_pass.gives if slot[0] == "r"), None)
        total = self.grads.get(value)  # type: ignore[arg-type]  # None is no value
        if op.adds and value in self.totals:
            total = self.gradient(value)
        biases = map(self.bias_of, step.reads) if op.recomputes else ()
        sums = [f"b{i}" for i, bias in enumerate(biases) if self.wants_param(bias)]
        return Gradient(step_pass.gives, dy, reads, total, frozenset(sums), weight)

    def bias_of(self, value: str) -> int | None:
        """Return the bias that a value's gradient is summed for."""
        maker = self.makers.get(value)
        while maker is not None and maker.op.has_gemm and len(maker.reads) > 1:
            # an adapter's output, which was added to that of its linear
            maker = self.makers.get(maker.reads[1])
        return maker.params[1] if maker is not None and maker.op.has_gemm else None

    def note_param_grad(self, number: Any, node: Node) -> None:
        """Note a parameter's gradient, added to an earlier one."""
        label = label_of("dy", self.program.params[number])
        if self.adds and node.target not in passes.SUMS:
            node._rename(f"{label}_part")
            node = self.call(passes.sum_of, self.argument("sum", number), node)
        node._rename(label)
        self.param_grads[number] = node


@lru_cache(maxsize=4096)
def backward_schedule(
    program: Program,
    wanted: Flags,
    products: Flags,
    dys: Flags,
    donates: bool = False,
    adds: bool = False,
    has_beside: bool = False,
) -> Schedule:
    """Derive a backward, which returns gradients of inputs, then of parameters.

    wanted: of these; products: which GEMM outputs it is given; dys: for which results it gets a
    gradient; donates: whether it may write over the products; adds: whether it
    adds to parameters' gradients of earlier chunks or backwards, in at least float32; has_beside:
    whether it is given the results that are saved beside the inputs.
    """
    flagged = zip(program.gemm_outputs, products, strict=True)
    saved_products = [name for name, is_saved in flagged if is_saved]
    beside = program.saved_beside if has_beside else ()
    saved = frozenset((*saved_products, *program.saved_results, *beside))
    walk = BackwardWriter(program, wanted, saved, dys, adds)
    walk.run()
    flags = zip(program.inputs, wanted, strict=False)
    dxs = [
        walk.gradient(name) if want and walk.has_gradient(name) else None for name, want in flags
    ]
    outputs = [*dxs, *[walk.param_grads.get(number) for number in range(len(program.params))]]
    results = [None if node is None else True for node in outputs]
    donated = {walk.nodes[name] for name in saved_products if donates and name in walk.nodes}
    return walk.compiled(outputs, results, donated, flows=frozenset(walk.flows))


@lru_cache(maxsize=4096)
def forward_schedule(program: Program, products: Flags, chunked: bool = False) -> Schedule:
    """Derive a forward that returns the results and the products that are flagged.

    chunked: for chunks of rows; their results are written into tensors of all rows.
    """
    writer = Writer(program)
    steps = list(program.steps)
    flagged = zip(program.gemm_outputs, products, strict=True)
    names = (*program.results, *[name for name, is_returned in flagged if is_returned])
    for name in program.inputs:
        writer.note_value(name, writer.argument("value", name))
    while steps:
        step = steps.pop(0)
        after = steps[0] if steps and steps[0].reads == (step.out,) else None
        is_sum = isinstance(step.op, Add)
        # one kernel computes x + residual with its norm, or a GEMM with its activation
        if after and (after.op.is_norm if is_sum else after.op.takes_gemm):
            steps.pop(0)
            reads = writer.reads(step)
            params = writer.params(step)
            writer.count_gemm(step)
            if is_sum:
                nodes = after.op.forward(writer, reads, writer.params(after))
            else:
                nodes = after.op.with_gemm(writer, reads[0], params, step.out in names)
            for name, node in zip((after.out, step.out), nodes, strict=True):
                writer.note_value(name, node)
        else:
            writer.write_forward(step)
    outputs = [writer.nodes[name] for name in names]
    return writer.compiled(outputs, names, buffers=names if chunked else ())
