"""A block as a program: steps over named values, and the passes that differentiate them.

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
    """An op of steps; an elementwise one, unless it overrides.

    dtype: of its output, None for that of the first value; casts: whether it reads the first value
    in its dtype; gradients: for each slot with one of its own, the slots that its pass reads;
    is_joint: whether one pass gives all of them; has_gemm: whether it multiplies by its first
    parameter; recomputes: whether its backward recomputes its output on the way; adds: whether its
    backward takes a gradient of any dtype, and adds dx to a gradient of x that exists.
    """

    dtype: Any = None
    casts = False
    gradients: tuple[tuple[str, tuple[str, ...]], ...] = ()
    is_joint = False
    has_gemm = False
    recomputes = False
    adds = False

    @property
    def read_dtype(self) -> torch.dtype | None:
        """Return the dtype in which the first value is read, None for any."""
        return self.dtype if self.casts else None

    def passes(self, wants: tuple[str, ...]) -> list[Pass]:
        """Return the passes that give wanted gradients; a slot that none gives has that of y."""
        found = [Pass((slot,), reads) for slot, reads in self.gradients if slot in wants]
        if not self.is_joint or not found:
            return found
        gives, reads = ([slot for one in found for slot in one[part]] for part in range(2))
        return [Pass(tuple(gives), tuple(dict.fromkeys(reads)))]

    def width(self, read: int, weight: Any) -> int:
        """Return the features of y, from those of the first value and the weight's shape."""
        return read

    def out_dtype(self, reads: Sequence[Any]) -> Any:
        """Return the dtype of y, from those of the values read."""
        return self.dtype or reads[0]


class Pass(NamedTuple):
    """Gradients that one pass gives, by slot, and the slots that it reads besides that of y."""

    gives: tuple[str, ...]
    reads: tuple[str, ...] = ()


class Step(NamedTuple):
    """out = op(*reads, *params): names of values, numbers of parameters, None for an absent one."""

    op: Any
    out: str
    reads: tuple[str, ...]
    params: tuple[int | None, ...] = ()

    def at(self, slot: str) -> Any:
        """Return the name of a slot's value or the number of its parameter, None if absent."""
        if slot == "y":
            return self.out
        places = self.params if slot[0] == "p" else self.reads
        return places[int(slot[1])] if int(slot[1]) < len(places) else None


class Program(NamedTuple):
    """A layer: steps from inputs and parameters to results.

    products: the GEMM outputs that a save level may keep, the gate's first; keeps: results that are
    saved in place of the inputs; num_dims: how many dimensions make one row; dtype: of the inputs,
    where a linear reads them; top_k: how many rows each row has at experts.
    """

    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]
    params: tuple[str, ...] = ()
    products: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    num_dims: int = 1
    dtype: torch.dtype | None = None
    top_k: int = 1

    def macs(self, weight: Sequence[int]) -> int:
        """Return the multiplications of a GEMM for one row, by a weight of this shape."""
        return math.prod(weight) if len(weight) == 2 else self.top_k * math.prod(weight[1:])

    def widths(self, inputs: Sequence[Any], params: Sequence[Any]) -> dict[str, Any]:
        """Return the features of every value, from those of inputs and the parameters' shapes."""
        found = dict(zip(self.inputs, inputs, strict=True))
        for step in self.steps:
            first = None if not step.params or step.params[0] is None else params[step.params[0]]
            found[step.out] = step.op.width(found[step.reads[0]], first)
        return found

    def dtypes(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """Return the dtype of every value, from those of inputs."""
        found = dict(zip(self.inputs, inputs, strict=True))
        for step in self.steps:
            found[step.out] = step.op.out_dtype([found[name] for name in step.reads])
        return found

    def eager(self, values: dict[str, Any], params: Sequence[Any]) -> tuple[Any, ...]:
        """Return the results by torch's own differentiable ops, from inputs or later values."""
        found = dict(values)
        for step in self.steps:
            if step.out not in found:
                reads = [found[name] for name in step.reads]
                given = [None if p is None else params[p] for p in step.params]
                found[step.out] = step.op.eager(reads, given)
        return tuple(found[name] for name in self.results)


class Gradient(NamedTuple):
    """A pass as an op writes it: nodes by slot.

    reads: "sum" among them is the sum over earlier chunks of p0's gradient; total: the gradient of
    the value read that others gave; sums: the values read, "b0" and "b1", with a gradient that is
    also summed over rows; weight: of a GEMM that the pass takes in.
    """

    gives: tuple[str, ...]
    dy: Node
    reads: dict[str, Node]
    total: Node | None = None
    sums: frozenset[str] = frozenset()
    weight: Node | None = None
