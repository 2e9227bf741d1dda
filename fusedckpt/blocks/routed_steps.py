"""Ops of steps over rows routed to experts: gather by token, grouped linear, gated layer, sum.

Their values have K rows for each token, sorted by expert: see `kernels/routed.py`. A route is a
value, too, which backward recomputes from the index; it has no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fusedckpt.autograd import private
from fusedckpt.blocks import eager, passes
from fusedckpt.blocks.compiled import grouped_product
from fusedckpt.blocks.late import late_weight_grad
from fusedckpt.blocks.program import Gradient, Op
from fusedckpt.blocks.quantized import EachExpert, QuantizedWeight
from fusedckpt.blocks.writer import Writer
from fusedckpt.kernels import gating, grouped, routed
from fusedckpt.kernels.gating import Gating


@dataclass(frozen=True)
class RouteRows(Op):
    """How the slots of an index are sorted by expert: see `routed.Route`."""

    num_experts: int
    kernel: str | None
    runs_triton: bool = False

    def forward(self, code: Writer, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write the route."""
        return [code.call(routed.route, reads[0], self.num_experts, self.kernel, self.runs_triton)]

    def eager(self, reads: Sequence[Tensor], params: Sequence[Any]) -> Any:
        """Return the route."""
        if not torch.compiler.is_compiling():
            return routed.route(reads[0], self.num_experts, None)
        private.assert_later((reads[0] >= 0).all(), "experts: index must be at least 0")
        return routed.route(reads[0], self.num_experts, "torch")


@dataclass(frozen=True)
class Move(Op):
    """Each token's row of x once for every slot, or the sum of each token's rows.

    Each is the other's gradient. Reads x and a route.
    """

    top_k: int
    gathers: bool
    dtype: torch.dtype | None = None
    gradients = (("r0", ("r1",)),)

    def width(self, read: int, weight: Any) -> int:
        """Return the features of K rows, or of one."""
        return self.top_k * read if self.gathers else read // self.top_k

    def forward(self, code: Writer, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write the rows, or the sum."""
        return [code.call(routed.gather if self.gathers else routed.combine, *reads)]

    def backward(self, code: Writer, grad: Gradient) -> dict[str, Node]:
        """Write the gradient of x."""
        fn = routed.combine if self.gathers else routed.gather
        dy = code.cast(grad.dy, self.dtype)
        return {"r0": code.call(fn, dy, grad.reads["r1"], dtype=self.dtype)}

    def eager(self, reads: Sequence[Any], params: Sequence[Any]) -> Tensor:
        """Return the rows, or the sum, by torch's ops."""
        x, route = reads
        if self.gathers:
            return routed.gather(x.to(self.dtype), route)
        return routed.as_rows(x, route)[route.places].sum(1)


@dataclass(frozen=True)
class Grouped(Op):
    """y = x W_e' + b_e for the rows of every expert e; b_e times the score where one is read.

    Reads x, a route and perhaps scores.
    """

    # how many experts each token has
    top_k: int
    # whether the weight is [E, in, out]
    is_transposed: bool
    # of the product
    dtype: torch.dtype | None = None
    # whether an expert's weight is dense only while a GEMM reads it
    is_quantized: bool = False
    # of the product
    scale: float = 1.0
    # whether the weight's gradient is computed after that of the last weight, see `late`
    is_late: bool = False
    has_gemm = casts = True
    # x is freed before its gradient is computed
    gradients = (
        ("p1", ("r1", "r2")),
        ("r2", ("p1", "r1")),
        ("p0", ("r0", "r1")),
        ("r0", ("p0", "r1")),
    )

    def width(self, read: int, weight: Any) -> int:
        """Return the features of K rows."""
        return self.top_k * weight[2 if self.is_transposed else 1]

    def _product(self, code: Writer, weight: Node, turns: bool, x: Node, *args: Any) -> Node:
        """Write the product with a weight, or, where it turns, with its transpose."""
        if self.is_quantized:
            weight = code.call(EachExpert, weight, self.is_transposed == turns, self.dtype)
        elif self.is_transposed == turns:
            weight = code.call("transpose", weight, 1, 2)
        if self.scale != 1:
            # of an adapter: smaller than any product with it
            weight = code.call(torch.mul, weight, self.scale)
        return code.call(grouped.product, x, weight, *args, dtype=self.dtype)

    def forward(self, code: Writer, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write y."""
        weight, bias = params
        return [self._product(code, weight, False, reads[0], bias, *reads[1:])]

    def backward(self, code: Writer, grad: Gradient) -> dict[str, Node]:
        """Write the gradient of x, the weight, the bias or the scores."""
        (slot,) = grad.gives
        dy = code.cast(grad.dy, self.dtype)
        reads = grad.reads
        route = reads["r1"]
        if slot == "r0":
            args = (dy, None, route, None, grad.total)
            return {slot: self._product(code, reads["p0"], True, *args)}
        if slot == "p1":
            return {slot: code.call(grouped.bias_grad, dy, route, reads.get("r2"))}
        if slot == "r2":
            return {slot: code.call(grouped.bias_scores_grad, dy, reads["p1"], route)}
        pair = (reads["r0"], dy) if self.is_transposed else (dy, reads["r0"])
        if self.scale != 1:
            # scaled in float32, so that no factor overflows
            slots_and_nodes = code.call(grouped.weight_sum, None, *pair, route)
            return {slot: code.call("mul_", slots_and_nodes, self.scale)}
        if "sum" in reads:
            return {slot: code.call(grouped.weight_sum, reads["sum"], *pair, route)}
        if self.is_late:
            return {slot: code.call(late_weight_grad, *pair, route)}
        return {slot: code.call(grouped.weight_grad, *pair, route)}

    def eager(self, reads: Sequence[Any], params: Sequence[Any]) -> Tensor:
        """Return y by torch's ops, with zeros for the rows of no expert."""
        x, route, scores = [*reads, None][:3]
        weight, bias = params
        if isinstance(weight, QuantizedWeight):
            weight = weight.dense(None)
        weight, bias = [None if p is None else p.to(self.dtype) for p in (weight, bias)]
        assert weight is not None
        rows = routed.as_rows(x, route)
        y = _products(rows, weight if self.is_transposed else weight.mT, route)
        if bias is not None:
            s = (
                rows.new_ones(len(rows), 1)
                if scores is None
                else routed.scores_by_row(scores, route)
            )
            wide = torch.promote_types(s.dtype, y.dtype)
            y = y + _products(s.to(wide), bias[:, None].to(wide), route).to(y.dtype)
        return routed.per_token(y, route)


@dataclass(frozen=True)
class Adapted(Grouped):
    """y = total + scale x W_e', of an adapter; reads x, a route and the total, written over."""

    gradients = (("p0", ("r0", "r1")), ("r0", ("p0", "r1")))

    def forward(self, code: Writer, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write the sum."""
        x, route, total = reads
        return [self._product(code, params[0], False, x, None, route, None, total)]

    def eager(self, reads: Sequence[Any], params: Sequence[Any]) -> Tensor:
        """Return the sum by torch's ops."""
        return reads[2] + super().eager(reads[:2], params) * self.scale


def _products(rows: Tensor, weight: Tensor, route: routed.Route) -> Tensor:
    """Return rows times the weight [E, K, N] of their expert."""
    if route.pieces is None:
        return grouped_product(rows, weight, route.ends)
    # of no rows, one expert's, so that the result depends on the weight
    pieces = route.pieces or ((0, slice(0, 0)),)
    parts = [rows[part] @ weight[expert] for expert, part in pieces]
    return torch.cat([*parts, rows.new_zeros(len(rows) - route.count, weight.shape[2])])


@dataclass(frozen=True)
class Gated(Op):
    """h = act(gate) * up times the score of each row; reads z, or gate and up, scores, a route.

    is_packed: whether z has both.
    """

    gating: Gating
    is_packed: bool
    recomputes = is_joint = True

    @property
    def gradients(self) -> tuple[tuple[str, tuple[str, ...]], ...]:  # type: ignore[override]  # fixed
        """Read all slots; the scores' gradient comes first, added to that of a bias's scores."""
        slots = [slot for slot in self._slots() if slot is not None]
        return tuple([(slot, tuple(slots)) for slot in (slots[-2], *slots[:-2])])

    def width(self, read: int, weight: Any) -> int:
        """Return the features of K rows of h."""
        return read // 2 if self.is_packed else read

    def _slots(self) -> list[str | None]:
        """Return the slots of z, up, the scores and the route."""
        return ["r0", None, "r1", "r2"] if self.is_packed else ["r0", "r1", "r2", "r3"]

    def forward(self, code: Writer, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write h."""
        z, *others = reads
        up = [None] if self.is_packed else []
        return [code.call(gating.gated, z, *up, *others, self.gating)]

    def backward(self, code: Writer, grad: Gradient) -> dict[str, Node]:
        """Write h, and the gradients of z, up and the scores."""
        slots = self._slots()
        args = [None if slot is None else grad.reads[slot] for slot in slots]
        needs = "y" in grad.gives, slots[2] in grad.gives
        over = {"h": [grad.dy], "dz": [args[0]], "du": [args[1]]}
        if not needs[0]:
            del over["h"]
        if self.is_packed:
            del over["du"]
        node = code.call(gating.gated_grad, grad.dy, *args, self.gating, needs, over=over)
        h, dz, du, ds = code.items(node, 4)
        if grad.total is not None:
            ds = code.call(passes.summed, grad.total, ds)
        slots_and_nodes = zip(["y", *slots[:3]], (h, dz, du, ds), strict=True)
        return {
            slot: part for slot, part in slots_and_nodes if slot is not None and slot in grad.gives
        }

    def eager(self, reads: Sequence[Any], params: Sequence[Any]) -> Tensor:
        """Return h by torch's ops."""
        *zs, scores, route = reads
        rows = [routed.as_rows(z, route) for z in zs]
        gate, up = gating.gate_and_up(rows[0], None if self.is_packed else rows[1], self.gating)
        h = eager.gated(gate, up, self.gating)
        return routed.per_token((h * routed.scores_by_row(scores, route)).to(h.dtype), route)
