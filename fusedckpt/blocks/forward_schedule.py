"""The forward of a block: steps in order, two of them in one kernel where kernels allow."""

from __future__ import annotations

from functools import lru_cache

from fusedckpt.blocks.program import Program, Step
from fusedckpt.blocks.schedule import Flags, Schedule, Writer
from fusedckpt.blocks.steps import Add, Hidden, Norm


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
    while steps:
        step = steps.pop(0)
        if steps and _joins(step, steps[0]):
            _make_joined(writer, step, steps.pop(0), step.out in names)
        elif step.extra in names:
            found = step.op.with_extra(writer, writer.reads(step), writer.params(step))
            for name, node in zip((step.out, step.extra), found, strict=True):
                writer.keep(name, node)
        else:
            writer.make(step)
    outputs = [writer.nodes[name] for name in names]
    return writer.compiled(outputs, names, homes=names if chunked else ())


def _joins(step: Step, after: Step) -> bool:
    """Whether one kernel computes two steps: x + residual with its norm, or a GEMM with act."""
    if after.reads != (step.out,):
        return False
    if isinstance(step.op, Add):
        return isinstance(after.op, Norm)
    return isinstance(after.op, Hidden) and after.op.kernel == "fused"


def _make_joined(writer: Writer, step: Step, after: Step, keeps: bool) -> None:
    reads, params = writer.reads(step), writer.params(step)
    writer.count_gemm(step)
    if isinstance(step.op, Add):
        nodes = after.op.forward(writer, reads, writer.params(after))
    else:
        nodes = after.op.with_gemm(writer, reads[0], params, keeps)
    for name, node in zip((after.out, step.out), nodes, strict=True):
        writer.keep(name, node)
