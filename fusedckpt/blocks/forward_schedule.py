"""The forward of a block: steps in order, elementwise results written over what is free."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.fx import Node

from fusedckpt.blocks import passes
from fusedckpt.blocks.program import Program, Step
from fusedckpt.blocks.schedule import Flags, Schedule, Writer, is_last, order_of, write_over
from fusedckpt.blocks.steps import Add, Hidden, Linear, Norm
from fusedckpt.kernels import linear as kernels


@lru_cache(maxsize=4096)
def forward(program: Program, products: Flags, chunked: bool = False) -> Schedule:
    """Derive a forward that returns the results and the products that are flagged.

    chunked: for chunks of rows, which belong in places of all rows.
    """
    writer, steps = Writer(program, chunked), list(program.steps)
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


def _joined(writer: Writer, step: Step, after: Step, keeps: bool) -> list[tuple[Step, Node]]:
    reads, params = writer.reads(step), writer.params(step)
    if isinstance(step.op, Add):
        nodes = after.op.forward(writer.graph, reads, writer.params(after))
    else:
        writer.gemms.append(step.params[0])  # type: ignore[arg-type]  # it has a weight
        nodes = after.op.with_gemm(writer.graph, reads[0], *params, keeps)
    for name, node in zip((after.out, step.out), nodes, strict=True):
        writer.keep(name, node)
    return [(after, nodes[0]), (step, nodes[1])]


def _place(writer: Writer, made: list[tuple[Step, Node]], homes: dict[Node, str]) -> None:
    """Write results over what is free, or, of chunks, into the places of all rows."""
    order, taken = order_of(writer.graph), dict[Node, Node]()
    for step, node in made:
        if isinstance(step.op, Linear) and len(step.reads) > 1:
            read = writer.dtypes[step.reads[1]]
            if step.op.dtype == read and step.op.out in (None, read):
                taken[node] = writer.nodes[step.reads[1]]
            continue
        for read in _candidates(step, writer):
            if read not in homes and is_last(read, node, order):
                write_over(node, read)
                taken[node] = read
                break
    for _, node in reversed(made if writer.chunked else []):
        if node in taken and node in homes:
            # it lies where the tensor does that it is written over
            homes[taken[node]] = homes[node]
        elif node in homes:
            _settle_home(writer, node, homes[node])


def _candidates(step: Step, writer: Writer) -> list[Node]:
    """Return the tensors that a forward result may be written over, the best first."""
    if isinstance(step.op, Add):
        found = step.reads[:1]
    elif isinstance(step.op, Hidden) and not step.op.is_packed and step.op.kernel != "fused":
        found = step.reads[::-1]
    else:
        return []
    return [node for node in (writer.nodes[n] for n in found) if node.op != "placeholder"]


_WRITES = (kernels.linear, kernels.hidden, passes.dequantised, passes.packed, torch.add)


def _settle_home(writer: Writer, node: Node, name: str) -> None:
    """Have the rows of a result belong in the place of all rows."""
    home = writer.given("home", name)
    if node.target in _WRITES:
        write_over(node, home)
        return
    with writer.graph.inserting_after(node):
        copied = writer.graph.call_method("copy_", (home, node))
    node.replace_all_uses_with(copied, lambda user: user is not copied)
    for other, known in writer.nodes.items():
        if known is node:
            writer.nodes[other] = copied
