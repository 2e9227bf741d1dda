"""The ops of steps that layers share: a GEMM, a dropout and a sum.

`forward` and `backward` write calls on matrices of rows; `eager` is the same in torch's own
differentiable ops.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from fusedckpt.blocks import eager, passes
from fusedckpt.blocks.late import late_product
from fusedckpt.blocks.program import Gradient, Op
from fusedckpt.blocks.quantized import QuantizedWeight
from fusedckpt.blocks.writer import Writer
from fusedckpt.kernels import linear as kernels
from fusedckpt.kernels.products import add_product, wide_product
from fusedckpt.kernels.runtime import HALF, column_sums


@dataclass(frozen=True)
class Gemm(Op):
    """y = x W' + b; or, of an adapter, y = total + scale x W', written over the total."""

    # the dtype that it multiplies in, and of y
    dtype: torch.dtype
    # the factor of the product
    scale: float = 1.0
    # of the gradient of x, None for `dtype`
    grad_dtype: torch.dtype | None = None
    # the dtype of the weight's gradient
    sums: torch.dtype | None = None
    # whether the weight is dense only while a GEMM reads it
    is_quantized: bool = False
    # the dtype of a sum, None for the one that torch promotes to
    out: torch.dtype | None = None
    # whether the weight's gradient is computed after that of the last weight, see `late`
    is_late: bool = False
    has_gemm = casts = True
    gradients = (("p1", ()), ("r0", ("p0",)), ("p0", ("r0",)))

    def width(self, read: int, weight: Any) -> int:
        """Return the weight's rows."""
        return weight[0]

    def out_dtype(self, reads: Sequence[Any]) -> Any:
        """Return the dtype of y, or of the sum."""
        if len(reads) == 1:
            return self.dtype
        return self.out or torch.promote_types(reads[1], self.dtype)

    def forward(self, code: Writer, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write y."""
        if len(reads) == 1:
            fn = passes.dequantized if self.is_quantized else kernels.linear
            return [code.call(fn, reads[0], *params, over={"out": ()})]
        low, total = reads
        node = code.call(passes.added, total, low, params[0], self.scale, self.out)
        known = code.dtype_of(total)
        if self.dtype == known and self.out in (None, known):
            node.meta["alias"] = total
        return [node]

    def backward(self, code: Writer, grad: Gradient) -> dict[str, Node]:
        """Write the gradient of x, the weight or the bias."""
        (slot,) = grad.gives
        if slot == "p1":
            return {slot: code.call(column_sums, grad.dy)}
        dy = code.cast(grad.dy, self.dtype)
        if slot == "r0":
            return {slot: self._input_grad(code, dy, grad)}
        x = grad.reads["r0"]
        if "sum" in grad.reads:
            return {slot: code.call(passes.scaled_weight_sum, grad.reads["sum"], dy, x, self.scale)}
        if self.is_late:
            return {slot: code.call(late_product, dy, x, self.sums)}
        if self.scale == 1 and (self.dtype == self.sums or self.dtype not in HALF):
            return {slot: code.call(torch.mm, code.call("t", dy), x)}
        return {slot: code.call(passes.scaled_weight_grad, dy, x, self.scale, self.sums)}

    def _input_grad(self, code: Writer, dy: Node, grad: Gradient) -> Node:
        weight = grad.reads["p0"]
        total = grad.total
        wide = self.grad_dtype or self.dtype
        known = code.dtype_of(total)
        of_sum = self.dtype if known is None else torch.promote_types(known, self.dtype)
        if self.is_quantized or self.scale != 1:
            return code.call(passes.input_grad, dy, weight, self.scale, total, dtype=of_sum)
        if total is None:
            fn = torch.mm if wide == self.dtype else wide_product
            return code.call(fn, dy, weight, dtype=wide)
        if known == self.dtype:
            return code.call(torch.addmm, total, dy, weight, dtype=known, out=total)
        if known == wide:
            code.call(add_product, total, dy, weight)
            return total
        return _summed(code, total, code.call(torch.mm, dy, weight), of_sum)

    def eager(self, reads: Sequence[Tensor], params: Sequence[Any]) -> Tensor:
        """Return y in torch's ops."""
        x = reads[0].to(self.dtype)
        weight = params[0]
        if isinstance(weight, QuantizedWeight):
            weight = weight.dense(None)
        bias = None if params[1] is None else params[1].to(self.dtype)
        y = F.linear(x, weight.to(self.dtype), bias)
        if len(reads) == 1:
            return y
        total = reads[1] + y * self.scale
        return total if self.out is None else total.to(self.out)


def _summed(code: Writer, total: Node, part: Node, dtype: torch.dtype | None) -> Node:
    """Write the sum of two gradients, which `passes.summed` writes over a total of its dtype."""
    node = code.call(passes.summed, total, part, dtype=dtype)
    if dtype is not None and code.dtype_of(total) == dtype:
        node.meta["alias"] = total
    return node


@dataclass(frozen=True)
class Dropout(Op):
    """y = dropout(x, p), drawn from a seed that is saved: its gradient draws the same again."""

    # the probability of a zero
    p: float
    # the number of its seed among those of the call
    seed: int
    # the dtype that it reads x in, None for that of x
    dtype: torch.dtype | None = None
    casts = True
    gradients = (("r0", ("p0",)),)

    def forward(self, code: Writer, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write dropout(x)."""
        seed = code.call(operator.getitem, params[0], self.seed)
        return [code.call(eager.seeded_dropout, reads[0], self.p, seed, code.first_row)]

    def backward(self, code: Writer, grad: Gradient) -> dict[str, Node]:
        """Write the gradient of x, added to one that exists."""
        (dx,) = self.forward(code, [grad.dy], [grad.reads["p0"]])
        total = code.dtype_of(grad.total)
        known = code.dtype_of(grad.dy)
        dx.meta["dtype"] = known
        if grad.total is None:
            return {"r0": dx}
        of_sum = None if None in (total, known) else torch.promote_types(total, known)
        return {"r0": _summed(code, grad.total, dx, of_sum)}

    def eager(self, reads: Sequence[Tensor], params: Sequence[Any]) -> Tensor:
        """Return dropout(x) in torch's ops."""
        seed = None if params[0] is None else params[0][self.seed]
        x = reads[0] if self.dtype is None else reads[0].to(self.dtype)
        return eager.dropout(x, self.p, seed)


@dataclass(frozen=True)
class Add(Op):
    """y = a + b, written over a where nothing else reads that."""

    def out_dtype(self, reads: Sequence[Any]) -> Any:
        """Return the dtype that torch promotes to."""
        return None if None in reads else torch.promote_types(*reads)

    def forward(self, code: Writer, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write a + b."""
        return [code.call(torch.add, *reads, over={"out": reads[:1]})]

    def eager(self, reads: Sequence[Tensor], params: Sequence[Any]) -> Tensor:
        """Return the sum."""
        return reads[0] + reads[1]
