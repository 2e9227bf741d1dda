"""A layer as a program: steps over named values, and the passes that differentiate them.

A step computes one value from values and parameters. Its backward is a list of passes over memory;
a pass gives gradients of slots: "r0", "r1" are the values that the step reads, "p0", "p1" its
parameters, and "y" its own output, which some passes recompute on the way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node


class Op:
    """An op of steps; an elementwise one without gradients of its own, unless it overrides.

    `forward(code, reads, params)` and `backward(code, grad)` write calls of kernels into a
    schedule; `eager(reads, params)` computes the same by torch's differentiable ops.
    """

    # of its output, None for the dtype of the first value
    dtype: Any = None
    # whether it reads the first value in its own dtype
    casts = False
    # for each slot that a pass gives the gradient of: the slots that this pass reads
    gradients: tuple[tuple[str, tuple[str, ...]], ...] = ()
    # whether one pass gives all gradients
    is_joint = False
    # whether it multiplies by its first parameter
    has_gemm = False
    # whether its backward recomputes its output on the way
    recomputes = False
    # whether its backward takes a gradient of any dtype, and adds dx to an existing gradient of x
    adds = False
    # whether it normalizes x: one kernel computes x + residual with it, and what reads its output
    # may save x in its place
    is_norm = False
    # whether one kernel computes it with the GEMM before it
    takes_gemm = False

    @property
    def read_dtype(self) -> torch.dtype | None:
        """Return the dtype in which the first value is read, None for any."""
        return self.dtype if self.casts else None

    def passes(self, wants: tuple[str, ...]) -> list[Pass]:
        """Return the passes that give wanted gradients; a slot that none gives has that of y."""
        singles = [Pass((slot,), reads) for slot, reads in self.gradients if slot in wants]
        if not self.is_joint or not singles:
            return singles
        gives, reads = ([slot for single in singles for slot in single[part]] for part in range(2))
        return [Pass(tuple(gives), tuple(dict.fromkeys(reads)))]

    def width(self, read: int, weight: Any) -> int:
        """Return the features of y, from those of the first value and the weight's shape."""
        return read

    def out_dtype(self, reads: Sequence[Any]) -> Any:
        """Return the dtype of y, from those of the values read."""
        return self.dtype or reads[0]


class Pass(NamedTuple):
    """A pass of a step's backward over memory."""

    # the slots that it gives the gradients of
    gives: tuple[str, ...]
    # the slots that it reads besides the gradient of y
    reads: tuple[str, ...] = ()


class ProgramStep(NamedTuple):
    """out = op(*reads, *params)."""

    op: Any
    # the name of its value
    out: str
    # the names of the values that it reads
    reads: tuple[str, ...]
    # the numbers of its parameters, None for an absent one
    params: tuple[int | None, ...] = ()

    def at(self, slot: str) -> Any:
        """Return the name of a slot's value or the number of its parameter, None if absent."""
        if slot == "y":
            return self.out
        places = self.params if slot[0] == "p" else self.reads
        return places[int(slot[1])] if int(slot[1]) < len(places) else None


class Program(NamedTuple):
    """A layer: steps from inputs and parameters to results."""

    # names of the values that a call is given
    inputs: tuple[str, ...]
    # in the order of the forward
    steps: tuple[ProgramStep, ...]
    # names of the values that it returns
    results: tuple[str, ...]
    # names of the parameters
    params: tuple[str, ...] = ()
    # GEMM outputs that a save level may keep, the gate's first
    gemm_outputs: tuple[str, ...] = ()
    # results that are saved in place of the inputs
    saved_results: tuple[str, ...] = ()
    # results that are saved beside the inputs, but in no checkpoint: it would compute them for that
    saved_beside: tuple[str, ...] = ()
    # how many dimensions make one row
    num_dims: int = 1
    # of the inputs, where a linear reads them
    dtype: torch.dtype | None = None
    # how many rows each row has at experts
    top_k: int = 1

    def macs(self, weight: Sequence[int]) -> int:
        """Return the multiplications of a GEMM for one row, by a weight of this shape."""
        return math.prod(weight) if len(weight) == 2 else self.top_k * math.prod(weight[1:])

    def widths(self, inputs: Sequence[Any], params: Sequence[Any]) -> dict[str, Any]:
        """Return the features of every value, from those of inputs and the parameters' shapes."""
        widths = dict(zip(self.inputs, inputs, strict=True))
        for step in self.steps:
            first = None if not step.params or step.params[0] is None else params[step.params[0]]
            widths[step.out] = step.op.width(widths[step.reads[0]], first)
        return widths

    def dtypes(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """Return the dtype of every value, from those of inputs."""
        dtypes = dict(zip(self.inputs, inputs, strict=True))
        for step in self.steps:
            dtypes[step.out] = step.op.out_dtype([dtypes[name] for name in step.reads])
        return dtypes

    def eager(self, values: dict[str, Any], params: Sequence[Any]) -> tuple[Any, ...]:
        """Return the results by torch's own differentiable ops, from inputs or later values."""
        known = dict(values)
        for step in self.steps:
            if step.out not in known:
                reads = [known[name] for name in step.reads]
                operands = [None if p is None else params[p] for p in step.params]
                known[step.out] = step.op.eager(reads, operands)
        return tuple(known[name] for name in self.results)


class Gradient(NamedTuple):
    """A pass as an op writes it: nodes by slot."""

    # the slots with gradients that the pass gives
    gives: tuple[str, ...]
    # the gradient of the step's output
    dy: Node
    # values and parameters that it reads; "sum" is the gradient of p0 over earlier chunks
    reads: dict[str, Node]
    # the gradient of the value read that other passes gave
    total: Node | None = None
    # the values read, "b0" and "b1", with a gradient that is also summed over rows
    sums: frozenset[str] = frozenset()
    # of a GEMM that the pass takes in
    weight: Node | None = None
