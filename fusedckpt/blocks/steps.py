"""What a step computes: an op, whose methods write calls of kernels into a schedule's graph.

`forward` and `backward` write calls on matrices of rows; `eager` is the same in torch's own
differentiable ops.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from fusedckpt import reference
from fusedckpt.autograd.dropout import dropout
from fusedckpt.autograd.quantised import QuantisedWeight
from fusedckpt.blocks import passes
from fusedckpt.blocks.program import Gradient, Pass
from fusedckpt.kernels import aten
from fusedckpt.kernels import linear as kernels
from fusedckpt.kernels import norm as triton_norm
from fusedckpt.kernels.norm import NormRule
from fusedckpt.kernels.products import add_product, wide_product
from fusedckpt.kernels.runtime import column_sums

HALF = (torch.bfloat16, torch.float16)


def parts_of(graph: Graph, node: Node, count: int) -> list[Node]:
    """Return the nodes of a tuple's items."""
    return [graph.call_function(operator.getitem, (node, i)) for i in range(count)]


def cast(graph: Graph, node: Node, known: Any, dtype: torch.dtype | None) -> Node:
    """Return a node in a dtype, where it is known to have another."""
    if dtype is None or known in (None, dtype):
        return node
    return graph.call_method("to", (node, dtype))


class Norm(NamedTuple):
    """y = norm(x): see NormRule. Statistics are recomputed from x.

    dtype: of y; sums: of the gradients of weight and bias; kernel: "aten" or "triton"; num_dims:
    how many dimensions are normalised together.
    """

    rule: NormRule
    dtype: torch.dtype | None = None
    sums: torch.dtype | None = None
    kernel: str = "aten"
    num_dims: int = 1

    @property
    def body(self) -> Any:
        """Return the module whose `norm` and `norm_grad` run."""
        return aten if self.kernel == "aten" else triton_norm

    def width(self, read: int, weight: Any) -> int:
        """Return the features of y."""
        return read

    def out_dtype(self, reads: Sequence[Any]) -> Any:
        """Return the dtype of y."""
        return self.dtype or reads[0]

    def passes(self, wants: tuple[str, ...]) -> list[Pass]:
        """Give all by one pass; the bias's gradient alone reads neither x nor the weight."""
        if wants == ("p1",):
            return [Pass(wants)]
        return [Pass(wants, ("r0", "p0") if "r0" in wants else ("r0",))]

    def forward(self, graph: Graph, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write norm(x), or norm(x + residual), and the sum."""
        x, residual = reads if len(reads) > 1 else (*reads, None)
        args = (x, residual, *params, self.rule, self.dtype)
        return parts_of(graph, graph.call_function(self.body.norm, args), len(reads))

    def backward(self, graph: Graph, one: Gradient, dtype: Any) -> dict[str, Node]:
        """Write dx, to which a gradient of x that exists is added, and those of the parameters."""
        if one.gives == ("p1",):
            return {"p1": graph.call_function(column_sums, (one.dy,))}
        needs = tuple([slot in one.gives for slot in ("r0", "p0", "p1")])
        args = (one.dy, one.total, one.reads["r0"], one.reads.get("p0"))
        node = graph.call_function(self.body.norm_grad, (*args, self.rule, needs, self.sums))
        found = parts_of(graph, node, 3)
        return {slot: found[("r0", "p0", "p1").index(slot)] for slot in one.gives}

    def eager(self, reads: Sequence[Tensor], params: Sequence[Any]) -> Tensor:
        """Return norm(x) in torch's ops."""
        (x,), (weight, bias), (kind, eps, offset, casts) = reads, params, self.rule
        shape = x.shape[-self.num_dims :]
        if kind == "layer":
            y = reference.layer_norm(x, shape, weight, bias, eps)
        else:
            y = reference.rms_norm(x, shape, weight, eps, offset=offset, cast=casts)
        return y if self.dtype is None else y.to(self.dtype)


class Linear(NamedTuple):
    """y = scale x W' + b, added to a second value in place where one is read.

    dtype: of the GEMM; grad_dtype: of the gradient of x, which several linears add to; sums: of the
    weight; is_quantised: whether the weight is dense only while a GEMM reads it; out: of a sum, by
    default the dtype that torch promotes to.
    """

    dtype: torch.dtype
    scale: float = 1.0
    grad_dtype: torch.dtype | None = None
    sums: torch.dtype | None = None
    is_quantised: bool = False
    out: torch.dtype | None = None

    def width(self, read: int, weight: Any) -> int:
        """Return the features of y."""
        return weight[0]

    def out_dtype(self, reads: Sequence[Any]) -> Any:
        """Return the dtype of y."""
        if len(reads) == 1:
            return self.dtype
        return self.out or torch.promote_types(reads[1], self.dtype)

    def passes(self, wants: tuple[str, ...]) -> list[Pass]:
        """Give each by a pass of its own; the gradient of a second value is that of y itself."""
        reads = {"p1": (), "r0": ("p0",), "p0": ("r0",)}
        return [Pass((slot,), reads[slot]) for slot in reads if slot in wants]

    def forward(self, graph: Graph, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write y."""
        if len(reads) > 1:
            args = (*reads[::-1], params[0], self.scale, self.out)
            return [graph.call_function(passes.added, args)]
        fn = passes.dequantised if self.is_quantised else kernels.linear
        return [graph.call_function(fn, (reads[0], *params))]

    def backward(self, graph: Graph, one: Gradient, dtype: Any) -> dict[str, Node]:
        """Write the gradient of x, the weight or the bias."""
        (slot,) = one.gives
        if slot == "p1":
            return {slot: graph.call_function(column_sums, (one.dy,))}
        dy = cast(graph, one.dy, dtype, self.dtype)
        if slot == "r0":
            return {slot: self._input_grad(graph, dy, one)}
        x = one.reads["r0"]
        if self.scale == 1 and (self.dtype == self.sums or self.dtype not in HALF):
            dy = graph.call_method("t", (dy,))
            return {slot: graph.call_function(torch.mm, (dy, x))}
        return {slot: graph.call_function(passes.weight_grad, (dy, x, self.scale, self.sums))}

    def _input_grad(self, graph: Graph, dy: Node, one: Gradient) -> Node:
        weight, total, wide = one.reads["p0"], one.total, self.grad_dtype
        if self.is_quantised or self.scale != 1:
            args = (dy, weight, self.scale, total)
            return graph.call_function(passes.input_grad, args)
        if total is None:
            fn = torch.mm if wide in (None, self.dtype) else wide_product
            return graph.call_function(fn, (dy, weight))
        if one.total_dtype == self.dtype:
            return graph.call_function(torch.addmm, (total, dy, weight), {"out": total})
        if one.total_dtype == wide:
            graph.call_function(add_product, (total, dy, weight))
            return total
        product = graph.call_function(torch.mm, (dy, weight))
        return graph.call_function(passes.summed, (total, product))

    def grad_of_x(self, total: Any) -> Any:
        """Return the dtype of the gradient of x, beside one of dtype `total` so far."""
        own = self.grad_dtype or self.dtype
        return own if total is None else torch.promote_types(total, own)

    def eager(self, reads: Sequence[Tensor], params: Sequence[Any]) -> Tensor:
        """Return y in torch's ops."""
        x, weight = reads[0].to(self.dtype), params[0]
        if isinstance(weight, QuantisedWeight):
            weight = weight.dense(None)
        bias = None if params[1] is None else params[1].to(self.dtype)
        y = F.linear(x, weight.to(self.dtype), bias)
        if len(reads) == 1:
            return y
        total = reads[1] + y * self.scale
        return total if self.out is None else total.to(self.out)


class Hidden(NamedTuple):
    """h = act(z), times u where gated; or of the two halves of z where packed.

    kernel: "aten", "split", "hybrid" (its backward takes the GEMM that gives dh into its kernel) or
    "fused" (the GEMM that gives z takes act into its own).
    """

    activation: str
    kernel: str = "split"
    is_packed: bool = False

    def width(self, read: int, weight: Any) -> int:
        """Return the features of h."""
        return read // 2 if self.is_packed else read

    def out_dtype(self, reads: Sequence[Any]) -> Any:
        """Return the dtype of h."""
        return reads[0]

    def passes(self, wants: tuple[str, ...]) -> list[Pass]:
        """Give all by one pass, which recomputes h on the way."""
        return [Pass(wants, ("r0", "r1"))]

    def forward(self, graph: Graph, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write h."""
        if self.is_packed:
            return [graph.call_function(passes.packed, (*reads, self.activation, self.kernel))]
        z, u = reads if len(reads) > 1 else (*reads, None)
        args = (z, u, None, self.activation, self.kernel)
        return [graph.call_function(kernels.hidden, args)]

    def with_gemm(self, graph: Graph, x: Node, weight: Node, bias: Any, keeps: bool) -> list[Node]:
        """Write h = act(x W' + b), and z where it is kept, by one kernel."""
        args = (x, weight, bias, self.activation, keeps)
        return parts_of(graph, graph.call_function(kernels.linear_act, args), 2)

    def backward(self, graph: Graph, one: Gradient, dtype: Any) -> dict[str, Node]:
        """Write dz, du and h, and the sums over the columns of dz and du."""
        if "x" in one.reads:
            args = (one.dy, one.reads["x"], one.weight, one.reads.get("b"))
            node = graph.call_function(
                kernels.linear_act_dz, (*args, self.activation, "b0" in one.sums)
            )
            dz, db = parts_of(graph, node, 2)
            return {"r0": dz} | ({"b0": db} if "b0" in one.sums else {})
        reads = one.reads["r0"], one.reads.get("r1")
        sums = "b0" in one.sums, "b1" in one.sums
        how = (self.activation, self.kernel, self.is_packed, sums, "y" in one.gives)
        fn, args = passes.hidden_grads, (one.dy, one.weight, *reads, *how)
        node = graph.call_function(fn, args, {"h": None, "dz": None, "du": None})
        slots = ("y", "r0", "r1", "b0", "b1")
        found = dict(zip(slots, parts_of(graph, node, 5), strict=True))
        given = {*one.gives, *one.sums}
        return {slot: part for slot, part in found.items() if slot in given}

    def places(self, gives: tuple[str, ...], made: set[str], free: set[str]) -> dict[str, str]:
        """Return what the results are written over: slots by slots, "dy" for the gradient of h.

        free: slots that nothing reads later; made: those of them that were made in this backward.
        h is done with before dz and du are, and so takes no saved buffer, which is in memory until
        the end anyway. Nor is it written over half a row: a GEMM that reads rows that lie apart may
        round otherwise.
        """
        if self.is_packed:
            wishes = {"y": ["dy"], "r0": ["r0"]}
        elif "r1" in gives:
            wishes = {"y": ["dy", "r1", "r0"], "r1": ["dy", "r1"], "r0": ["r0", "r1"]}
        else:
            wishes = {"y": ["r0", "dy"], "r0": ["dy", "r0"]}
        found: dict[str, str] = {}
        for slot, wished in wishes.items():
            left = [w for w in wished if w in (made if slot == "y" else free)]
            left = [w for w in left if w not in found.values()]
            if slot in gives and left:
                found[slot] = left[0]
        return found

    def eager(self, reads: Sequence[Tensor], params: Sequence[Any]) -> Tensor:
        """Return h in torch's ops."""
        pair = reads[0].chunk(2, -1) if self.is_packed else reads
        return reference.hidden(pair, self.activation)


class Dropout(NamedTuple):
    """y = dropout(x, p), drawn from a seed that is saved: its gradient draws the same again.

    row: the number of the first row, of a chunk of rows.
    """

    p: float
    seed: int
    dtype: torch.dtype | None = None

    def width(self, read: int, weight: Any) -> int:
        """Return the features of y."""
        return read

    def out_dtype(self, reads: Sequence[Any]) -> Any:
        """Return the dtype of y."""
        return self.dtype or reads[0]

    def passes(self, wants: tuple[str, ...]) -> list[Pass]:
        """Give the gradient of x."""
        return [Pass(wants, ("p0",))]

    def forward(self, graph: Graph, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write dropout(x)."""
        return [self._call(graph, reads[0], params[0])]

    def _call(self, graph: Graph, x: Node, seeds: Node) -> Node:
        (row,) = graph.find_nodes(op="placeholder", target="row")
        seed = graph.call_function(operator.getitem, (seeds, self.seed))
        return graph.call_function(dropout, (x, self.p, seed, row))

    def backward(self, graph: Graph, one: Gradient, dtype: Any) -> dict[str, Node]:
        """Write the gradient of x, added to one that exists."""
        dx = self._call(graph, one.dy, one.reads["p0"])
        if one.total is None:
            return {"r0": dx}
        return {"r0": graph.call_function(passes.summed, (one.total, dx))}

    def grad_of_x(self, total: Any) -> Any:
        """Return the dtype of the gradient of x, beside one of dtype `total` so far."""
        if total is None or self.dtype is None:
            return total
        return torch.promote_types(total, self.dtype)

    def eager(self, reads: Sequence[Tensor], params: Sequence[Any]) -> Tensor:
        """Return dropout(x) in torch's ops."""
        seed = None if params[0] is None else params[0][self.seed]
        x = reads[0] if self.dtype is None else reads[0].to(self.dtype)
        return reference.dropout(x, self.p, seed)


class Add(NamedTuple):
    """y = a + b, written over a where nothing else reads that."""

    def width(self, read: int, weight: Any) -> int:
        """Return the features of y."""
        return read

    def out_dtype(self, reads: Sequence[Any]) -> Any:
        """Return the dtype of y."""
        return None if None in reads else torch.promote_types(*reads)

    def passes(self, wants: tuple[str, ...]) -> list[Pass]:
        """Give nothing: both gradients are that of y itself."""
        return []

    def forward(self, graph: Graph, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write a + b."""
        return [graph.call_function(torch.add, tuple(reads))]

    def eager(self, reads: Sequence[Tensor], params: Sequence[Any]) -> Tensor:
        """Return the sum."""
        return reads[0] + reads[1]
