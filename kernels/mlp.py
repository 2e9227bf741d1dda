"""An MLP block, plain or gated, with its norm before it and its residual around it, in row chunks.

Forward keeps what its level asks for; backward recomputes the rest, works in the buffers that it
recomputed into, and accumulates weight gradients over chunks in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import aten
from . import norm as norm_kernels
from .hidden import hidden, hidden_grad, hybrid_grad
from .linear import linear
from .norm import NormRule
from .products import add_product, sum_of_products
from .runtime import column_sums

# above this many bytes of F-wide temporaries the rows are cut into chunks, if that pays
CHUNK_BYTES = 512 << 20


class Weights(NamedTuple):
    """The block's tensors; `gate` is fc1 and `up` is None where the block is not gated.

    norm [D], gate and up [F, D], down [D_out, F], biases [out_features]; in the compute dtype,
    but for the norm's.
    """

    norm: Tensor | None
    norm_bias: Tensor | None
    gate: Tensor
    gate_bias: Tensor | None
    up: Tensor | None
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class Block(NamedTuple):
    """What an MLP block computes and how: constants of a call.

    rule: the norm, None for none; kernel: "split", "hybrid" or "aten"; chunks: of rows.
    """

    rule: NormRule | None
    activation: str
    residual: bool
    kernel: str
    chunks: int


class Needs(NamedTuple):
    """Which gradients are wanted: x's, then those of Weights."""

    x: bool
    norm: bool
    norm_bias: bool
    gate: bool
    gate_bias: bool
    up: bool
    up_bias: bool
    down: bool
    down_bias: bool

    @property
    def dn(self) -> bool:
        """Whether the gradient of what the first GEMM read is wanted."""
        return self.x or self.norm or self.norm_bias

    @property
    def dz(self) -> bool:
        """Whether the gradient of any GEMM output before the last is wanted."""
        return self.dn or self.gate or self.gate_bias or self.up or self.up_bias

    @property
    def hidden(self) -> bool:
        """Whether any gradient reads the hidden layer."""
        return self.dz or self.down


def chunks_for(rows: int, d: int, f: int, num_tensors: int, itemsize: int) -> int:
    """Return into how many chunks rows are cut, from shapes alone.

    One, unless `num_tensors` F-wide temporaries pass CHUNK_BYTES and cutting them saves more than
    the float32 accumulators of the weight gradients take: rows (1 - 1 / chunks) > 2 d.
    """
    chunks = max(1, math.ceil(num_tensors * rows * f * itemsize / CHUNK_BYTES))
    return chunks if rows * (1 - 1 / chunks) > 2 * d else 1


def row_chunks(rows: int, chunks: int) -> list[slice]:
    """Cut rows into at most `chunks` slices of nearly equal size."""
    step = max(1, math.ceil(rows / chunks))
    return [slice(start, start + step) for start in range(0, max(rows, 1), step)]


def forward(
    x: Tensor, w: Weights, block: Block, level: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return y [T, D_out], and gate and up [T, F] where the level keeps them."""
    shape = x.shape[0], w.gate.shape[0]
    y = w.down.new_empty(x.shape[0], w.down.shape[0])
    gate = w.gate.new_empty(shape) if level in ("gate", "preact") else None
    up = w.gate.new_empty(shape) if level == "preact" and w.up is not None else None
    for rows in row_chunks(x.shape[0], block.chunks):
        n = normalised(x[rows], w, block)
        g = linear(n, w.gate, w.gate_bias, None if gate is None else gate[rows])
        u = None
        if w.up is not None:
            u = linear(n, w.up, w.up_bias, None if up is None else up[rows])
        del n
        # over what is not kept
        h = g if gate is None else u if u is not None and up is None else torch.empty_like(g)
        hidden(g, u, h, block.activation, block.kernel)
        del g, u
        linear(h, w.down, w.down_bias, y[rows])
        # before the next chunk asks for as much
        del h
        if block.residual:
            y[rows] += x[rows]
    return y, gate, up


def normalised(x: Tensor, w: Weights, block: Block) -> Tensor:
    """Return what the first GEMM reads, in its dtype."""
    if block.rule is None:
        return x
    kernels = aten if block.kernel == "aten" else norm_kernels
    return kernels.norm(x, None, w.norm, w.norm_bias, block.rule, w.gate.dtype)[0]


class Gradients:
    """Sums of gradients over chunks: as they come from one chunk, in float32 from several."""

    def __init__(self, chunks: int):
        self.chunks = chunks
        self.found: dict[str, Tensor] = {}

    def add(self, name: str, grad: Tensor | None) -> None:
        """Add a chunk's gradient, already in at least float32 or alone."""
        if grad is None:
            return
        self.found[name] = self.found[name] + grad if name in self.found else grad

    def add_product(self, name: str, a: Tensor, b: Tensor) -> None:
        """Add a.T @ b."""
        if self.chunks == 1:
            self.found[name] = torch.mm(a.t(), b)
            return
        if name not in self.found:
            wide = torch.promote_types(a.dtype, torch.float32)
            self.found[name] = a.new_zeros(a.shape[1], b.shape[1], dtype=wide)
        add_product(self.found[name], a.t(), b)


def backward(
    dy: Tensor,
    x: Tensor | None,
    w: Weights,
    gate: Tensor | None,
    up: Tensor | None,
    block: Block,
    needs: Needs,
    spends: bool = False,
) -> dict[str, Tensor]:
    """Return the wanted gradients by the names of Needs; x may be None where nothing reads it.

    spends: gate and up, where given, are written over.
    """
    total = Gradients(block.chunks)
    dx = None
    for rows in row_chunks(dy.shape[0], block.chunks):
        x_rows, dy_rows = None if x is None else x[rows], dy[rows]
        if needs.down_bias:
            total.add("down_bias", column_sums(dy_rows))
        if not needs.hidden:
            continue
        n = None
        if needs.gate or needs.up or gate is None or (up is None and w.up is not None):
            assert x_rows is not None
            n = normalised(x_rows, w, block)
        kept = tuple(None if t is None else t[rows] for t in (gate, up))
        dn = chunk_backward(dy_rows, n, w, kept, block, needs, total, spends)
        del n
        if dn is None:
            continue
        grad = input_grad(dn, dy_rows, x_rows, w, block, needs, total)
        if grad is None or block.chunks == 1:
            dx = grad
            continue
        if dx is None:
            dx = grad.new_empty(dy.shape[0], grad.shape[1])
        dx[rows] = grad
        # before the next chunk asks for as much
        del dn, grad
    return total.found | ({} if dx is None else {"x": dx})


def chunk_backward(
    dy: Tensor,
    n: Tensor | None,
    w: Weights,
    kept: Sequence[Tensor | None],
    block: Block,
    needs: Needs,
    total: Gradients,
    spends: bool,
) -> Tensor | None:
    """Add one chunk's gradients of weights and biases, and return its dn where that is wanted."""
    z, u = kept
    if z is None:
        z = linear(n, w.gate, w.gate_bias)  # type: ignore[arg-type]  # n is there
    if u is None and w.up is not None:
        u = linear(n, w.up, w.up_bias)  # type: ignore[arg-type]  # n is there
    # may be written over: what was made here, and what was kept if it is spent
    free = [
        t for t, was in zip((z, u), kept, strict=True) if t is not None and (spends or was is None)
    ]
    if not needs.dz:
        h = free.pop() if free else torch.empty_like(z)
        hidden(z, u, h, block.activation, block.kernel)
        total.add_product("down", dy, h)
        return None
    dh = None
    if block.kernel != "hybrid":
        free.append(dh := torch.mm(dy, w.down))
    h, dz, dup = places(free, kept, z, u is not None, needs.down)
    outputs = (z, u, h, dz, dup, block.activation, (needs.gate_bias, needs.up_bias))
    if dh is None:
        db, db_up = hybrid_grad(dy, w.down, *outputs)
    else:
        db, db_up = hidden_grad(dh, *outputs, block.kernel)
    del z, u, dh, free, outputs
    total.add("gate_bias", db)
    total.add("up_bias", db_up)
    if h is not None:
        total.add_product("down", dy, h)
    del h
    return first_grads(dz, dup, n, w, needs, total)


def places(
    free: list[Tensor], kept: Sequence[Tensor | None], z: Tensor, gated: bool, needs_h: bool
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Return where h, dz and dup go: over `free`, of z, up and dh in that order, or to new memory.

    h is done with first, so it takes nothing that was kept, as that stays until the end.
    """
    h = dup = None
    if needs_h:
        made = [t for t in free if all(t is not other for other in kept)]
        # dz over what is left: gated z, then up is dup's; plain dh, as z is what h is made of
        h = made[-1 if gated else 0] if made else torch.empty_like(z)
        free = [t for t in free if t is not h]
    if gated:
        dup = free.pop() if free else torch.empty_like(z)
    return h, free.pop() if free else torch.empty_like(z), dup


def first_grads(
    dz: Tensor, dup: Tensor | None, n: Tensor | None, w: Weights, needs: Needs, total: Gradients
) -> Tensor | None:
    """Add the gradients of the first GEMMs' weights and return that of what they read, n.

    In half precision the two products of a gated layer's come unrounded, in float32.
    """
    for name, grad, need in (("gate", dz, needs.gate), ("up", dup, needs.up)):
        if need:
            total.add_product(name, grad, n)  # type: ignore[arg-type]  # both are there
    if not needs.dn:
        return None
    up = () if dup is None or w.up is None else ((dup, w.up),)
    return sum_of_products((dz, w.gate), *up)


def input_grad(
    dn: Tensor,
    dy: Tensor,
    x: Tensor | None,
    w: Weights,
    block: Block,
    needs: Needs,
    total: Gradients,
) -> Tensor | None:
    """Take dn through the norm, add the residual's gradient, and return dx."""
    if block.rule is None:
        return (dn.add_(dy) if block.residual else dn).to(dy.dtype)
    assert x is not None
    kernels = aten if block.kernel == "aten" else norm_kernels
    dx, dw, db = kernels.norm_grad(
        dn, dy if block.residual else None, x, w.norm, block.rule, (needs.x, *needs[1:3])
    )
    total.add("norm", dw)
    total.add("norm_bias", db)
    return dx
