"""Ops of steps: their methods write calls of kernels into a schedule.

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
from fusedckpt.kernels import norm as norm_triton
from fusedckpt.kernels import norm_aten
from fusedckpt.kernels.norm import NormRule
from fusedckpt.kernels.products import add_product, wide_product
from fusedckpt.kernels.runtime import HALF, column_sums


@dataclass(frozen=True)
class Norm(Op):
    """y = norm(x), or norm(x + residual) and the sum: see NormRule. Statistics are recomputed."""

    # which norm
    rule: NormRule
    # of y, None for that of x
    dtype: torch.dtype | None = None
    # the dtype of the gradients of weight and bias
    sums: torch.dtype | None = None
    # "aten" or "triton"
    kernel: str = "aten"
    # how many dimensions are normalized together
    num_dims: int = 1
    adds = is_joint = True
    gradients = (("r0", ("r0", "p0")), ("p0", ("r0",)), ("p1", ()))

    def forward(self, code: Writer, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write y, and the sum where a residual is read."""
        x, residual = reads if len(reads) > 1 else (*reads, None)
        fn = norm_aten.norm if self.kernel == "aten" else norm_triton.norm
        return code.items(code.call(fn, x, residual, *params, self.rule, self.dtype), len(reads))

    def backward(self, code: Writer, grad: Gradient) -> dict[str, Node]:
        """Write dx, added to a gradient of x that exists, and the parameters' gradients."""
        if grad.gives == ("p1",):
            return {"p1": code.call(column_sums, grad.dy)}
        slots = ("r0", "p0", "p1")
        needs = tuple([slot in grad.gives for slot in slots])
        fn = norm_aten.norm_grad if self.kernel == "aten" else norm_triton.norm_grad
        x = grad.reads["r0"]
        weight = grad.reads.get("p0")
        sums = None if code.adds else self.sums
        node = code.call(fn, grad.dy, grad.total, x, weight, self.rule, needs, sums)
        nodes = zip(slots, code.items(node, 3), strict=True)
        return {slot: part for slot, part in nodes if slot in grad.gives}

    def eager(self, reads: Sequence[Tensor], params: Sequence[Any]) -> Tensor:
        """Return norm(x) in torch's ops."""
        y = eager.norm(self.rule, reads[0], reads[0].shape[-self.num_dims :], *params)
        return y if self.dtype is None else y.to(self.dtype)


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
class Hidden(Op):
    """h = act(z), times u where gated; or of the two halves of z where packed."""

    # a name in ACTIVATIONS
    activation: str
    # "aten", "split", "hybrid" (its backward takes in the GEMM that gives dh) or "fused" (the GEMM
    # that gives z takes in act)
    kernel: str = "split"
    # whether z has the columns of gate and up
    is_packed: bool = False
    recomputes = is_joint = True
    gradients = (("r0", ("r0", "r1")), ("r1", ("r0", "r1")))

    def width(self, read: int, weight: Any) -> int:
        """Return the features of h."""
        return read // 2 if self.is_packed else read

    def forward(self, code: Writer, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write h, over the tensors that it reads; not over half a row.

        A GEMM that reads rows that lie apart may round otherwise.
        """
        if self.is_packed:
            over = {"out": ()}
            fn = passes.packed
            return [code.call(fn, *reads, self.activation, self.kernel, over=over)]
        z, u = reads if len(reads) > 1 else (*reads, None)
        args = (z, u, self.activation, self.kernel)
        return [code.call(kernels.hidden, *args, over={"out": reads[::-1]})]

    def with_gemm(self, code: Writer, x: Node, linear: Sequence[Any], keeps: bool) -> list[Node]:
        """Write h = act(x W' + b), and z if `keeps`, by one kernel."""
        return code.items(code.call(kernels.linear_then_act, x, *linear, self.activation, keeps), 2)

    def backward(self, code: Writer, grad: Gradient) -> dict[str, Node]:
        """Write dz, du and h, and the sums over the columns of dz and du."""
        reads = grad.reads
        sums = ("b0" in grad.sums, "b1" in grad.sums)
        if "x" in reads:
            args = (grad.dy, reads["x"], grad.weight, reads.get("b"), self.activation, sums[0])
            slots = ("r0", "b0")
            node = code.call(kernels.linear_act_dz, *args)
        else:
            args = (
                grad.dy,
                grad.weight,
                reads["r0"],
                reads.get("r1"),
                self.activation,
                self.kernel,
            )
            args = (*args, self.is_packed, sums, "y" in grad.gives)
            slots = ("y", "r0", "r1", "b0", "b1")
            node = code.call(passes.hidden_grads, *args, over=self._places(grad))
        nodes = zip(slots, code.items(node, len(slots)), strict=True)
        return {slot: part for slot, part in nodes if slot in {*grad.gives, *grad.sums}}

    def _places(self, grad: Gradient) -> dict[str, tuple[Node, ...]]:
        """Return the tensors that h, dz and du may be written over, the best first."""
        if self.is_packed:
            wishes = {"y": ("dy",), "r0": ("r0",)}
        elif "r1" in grad.gives:
            wishes = {"y": ("dy", "r1", "r0"), "r1": ("dy", "r1"), "r0": ("r0", "r1")}
        else:
            wishes = {"y": ("r0", "dy"), "r0": ("dy", "r0")}
        nodes = dict(grad.reads)
        if grad.weight is None:
            nodes["dy"] = grad.dy
        keys = {"y": "h", "r1": "du", "r0": "dz"}
        return {
            keys[slot]: tuple([nodes[name] for name in names if name in nodes])
            for slot, names in wishes.items()
            if slot in grad.gives
        }

    def eager(self, reads: Sequence[Tensor], params: Sequence[Any]) -> Tensor:
        """Return h in torch's ops."""
        pair = reads[0].chunk(2, -1) if self.is_packed else reads
        return eager.hidden(pair, self.activation)


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
