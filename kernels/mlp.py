"""An MLP block, plain or gated, with its norm before it and its residual around it, in row chunks.

The forward returns what its save level asks for. The backward recomputes the rest, writes over the
buffers that it recomputed into, and accumulates weight gradients over chunks in float32.

Per row, with weights as nn.Linear has them, and primes for transposes:

    n = norm(x)
    plain: z = n gate' + gate_bias                               h = act(z)
    gated: z = n gate' + gate_bias    u = n up' + up_bias        h = act(z) u
    y = h down' + down_bias (+ x)

    dh = dy down
    plain: dz = dh act'(z)
    gated: dz = dh u act'(z)          du = dh act(z)
    dn = dz gate (+ du up)            dx = norm'(dn) (+ dy)

Sums over rows: ddown = dy' h, dgate = dz' n, dup = du' n; of biases: dy, dz, du.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import aten
from . import norm as norm_kernels
from .elementwise import HiddenGrad
from .linear import hidden, hidden_grad, hybrid_grad, linear
from .norm import NormRule
from .products import Product, add_product, sum_of_products, wide_product
from .runtime import column_sums

# above this many bytes of F-wide temporaries the rows are cut into chunks, if that pays
CHUNK_BYTES = 512 << 20
# rows of a GEMM's tile, which a chunk fills
CHUNK_STEP = 128


class Weights(NamedTuple):
    """The block's tensors; `gate` is fc1 and `up` is None where the block is not gated.

    norm [D], gate and up [F, D], down [D_out, F], biases [out_features]; in the compute dtype,
    but for the norm's. Or packed: gate [2 F, D] has the gate's rows, then those of up, and its
    output [T, 2 F] has their columns, as have its bias and their gradients.
    """

    norm: Tensor | None
    norm_bias: Tensor | None
    gate: Tensor
    gate_bias: Tensor | None
    up: Tensor | None
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    @property
    def is_packed(self) -> bool:
        """Whether one GEMM makes the outputs of gate and up."""
        return self.gate.shape[0] != self.down.shape[1]

    def halves(self, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output of `gate` and, where that holds both, views of gate's and of up's.

        No h is written over half a row: a GEMM that reads rows that lie apart may round otherwise,
        and a checkpoint's recompute would not be its forward to the bit.
        """
        gate, up = z.chunk(2, 1) if self.is_packed else (z, None)
        return gate, up


class Block(NamedTuple):
    """What an MLP block computes and how: constants of a call.

    rule: the norm, None for none; kernel: "split", "hybrid" or "aten"; chunks: of rows; product:
    what multiplies for a weight gradient that is no sum over chunks.
    """

    rule: NormRule | None
    activation: str
    residual: bool
    kernel: str
    chunks: int
    product: Product


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
        return any(self[:3])

    @property
    def dz(self) -> bool:
        """Whether the gradient of any GEMM output before the last is wanted."""
        return any(self[:7])

    @property
    def hidden(self) -> bool:
        """Whether any gradient reads the hidden layer."""
        return any(self[:8])


def chunks_for(rows: int, d: int, f: int, num_tensors: int, itemsize: int) -> int:
    """Return into how many chunks rows are cut, from shapes alone.

    One, unless `num_tensors` F-wide temporaries pass CHUNK_BYTES and cutting them saves more than
    the float32 accumulators of the weight gradients take: rows (1 - 1 / chunks) > 2 d.
    """
    chunks = max(1, math.ceil(num_tensors * rows * f * itemsize / CHUNK_BYTES))
    return chunks if rows * (1 - 1 / chunks) > 2 * d else 1


def row_chunks(rows: int, chunks: int) -> list[slice]:
    """Cut rows into at most `chunks` slices of nearly equal size, long ones by CHUNK_STEP."""
    if chunks == 1:
        return [slice(0, rows)]
    step = max(1, math.ceil(rows / chunks))
    if step > CHUNK_STEP:
        step = math.ceil(step / CHUNK_STEP) * CHUNK_STEP
    return [slice(start, start + step) for start in range(0, max(rows, 1), step)]


def forward(
    x: Tensor, w: Weights, block: Block, level: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return y [T, D_out], and the outputs of gate and up [T, F] where the level saves them.

    Packed, they are one, and there is no level that saves a half.
    """
    shape = x.shape[0], w.gate.shape[0]
    y = w.down.new_empty(x.shape[0], w.down.shape[0])
    gate = w.gate.new_empty(shape) if level in ("gate", "preact") else None
    up = w.gate.new_empty(shape) if level == "preact" and w.up is not None else None
    for rows in row_chunks(x.shape[0], block.chunks):
        n = normalised(x[rows], w, block)
        g, u = w.halves(linear(n, w.gate, w.gate_bias, None if gate is None else gate[rows]))
        free = None if gate is not None or w.is_packed else g
        if w.up is not None:
            u = linear(n, w.up, w.up_bias, None if up is None else up[rows])
            free = u if up is None else None
        del n
        # over what is not saved
        h = over(free, like=g)
        hidden(g, u, h, block.activation, kernel=block.kernel)
        del g, u, free
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
    return kernels.norm(x, None, w.norm, w.norm_bias, rule=block.rule, out_dtype=w.gate.dtype)[0]


class Backward:
    """A backward: its gradients by the names of Needs, summed over chunks of rows.

    Results are written over what is not read again: dh, and z and u if they are made here or
    donated. h is done with before dz and du are, and so takes no donated buffer, which is in memory
    until the end anyway.
    """

    def __init__(self, w: Weights, block: Block, needs: Needs, donates: bool):
        self.w, self.block, self.needs, self.donates = w, block, needs, donates
        self.grads: dict[str, Tensor] = {}

    def add(self, **grads: Tensor | None) -> None:
        """Add a chunk's gradients, already in at least float32 or alone."""
        for name, grad in grads.items():
            if grad is not None:
                self.grads[name] = self.grads[name] + grad if name in self.grads else grad

    def add_product(self, name: str, a: Tensor, b: Tensor) -> None:
        """Add a.T @ b, in float32 where there are several chunks."""
        if self.block.chunks == 1:
            self.grads[name] = self.block.product(a.t(), b)
        elif name not in self.grads:
            self.grads[name] = wide_product(a.t(), b)
        else:
            add_product(self.grads[name], a.t(), b)

    def single(self, dy: Tensor, n: Tensor | None, z: Tensor | None) -> Tensor | None:
        """Take one chunk of a layer with one GEMM before the last to its dn, if that is wanted."""
        w, needs, act, kernel = self.w, self.needs, self.block.activation, self.block.kernel
        made = z is None
        if z is None:
            z = linear(n, w.gate, w.gate_bias)  # type: ignore[arg-type]  # n is there
        free_z = z if made or self.donates else None
        gate, up = w.halves(z)
        if not needs.dz:
            h = over(free_z if up is None else None, like=gate)
            self.add_product("down", dy, hidden(gate, up, h, act, kernel=kernel))
            return None
        dh = None if kernel == "hybrid" else torch.mm(dy, w.down)
        if up is None:
            h = over(z if made else dh, like=z) if needs.down else None
            dz = over(None if h is dh else dh, None if h is z else free_z, like=z)
            wanted = needs.gate_bias, False
            db, _ = self._hidden_grad(dy, dh, HiddenGrad(z, None, h, dz, dup=None), wanted)
        else:
            # twice as wide as dh
            h, dz = over(dh, like=gate) if needs.down else None, over(free_z, like=z)
            dgate, dup = dz.chunk(2, 1)
            wanted = needs.gate_bias, needs.gate_bias
            dbs = self._hidden_grad(dy, dh, HiddenGrad(gate, up, h, dgate, dup=dup), wanted)
            db = torch.cat(dbs) if needs.gate_bias else None  # type: ignore[arg-type]  # both are there
        del z, gate, up, free_z, dh
        self.add(gate_bias=db)
        if h is not None:
            self.add_product("down", dy, h)
        del h
        if needs.gate:
            self.add_product("gate", dz, n)  # type: ignore[arg-type]  # n is there
        return torch.mm(dz, w.gate) if needs.dn else None

    def gated(
        self, dy: Tensor, n: Tensor | None, z: Tensor | None, u: Tensor | None
    ) -> Tensor | None:
        """Do so where gate and up are apart; in half precision dn is wide."""
        w, needs, act, kernel = self.w, self.needs, self.block.activation, self.block.kernel
        assert w.up is not None
        made_z, made_u = z is None, u is None
        if z is None:
            z = linear(n, w.gate, w.gate_bias)  # type: ignore[arg-type]  # n is there
        if u is None:
            u = linear(n, w.up, w.up_bias)  # type: ignore[arg-type]  # n is there
        free_z = z if made_z or self.donates else None
        free_u = u if made_u or self.donates else None
        if not needs.dz:
            self.add_product(
                "down", dy, hidden(z, u, over(free_u, free_z, like=z), act, kernel=kernel)
            )
            return None
        dh = None if kernel == "hybrid" else torch.mm(dy, w.down)
        h = None
        if needs.down:
            h = over(dh, u if made_u else None, z if made_z else None, like=z)
        du = over(None if h is dh else dh, None if h is u else free_u, like=z)
        spare_u = None if h is u or du is u else free_u
        dz = over(None if h is z else free_z, spare_u, like=z)
        wanted = needs.gate_bias, needs.up_bias
        db, db_up = self._hidden_grad(dy, dh, HiddenGrad(z, u, h, dz, dup=du), wanted)
        del z, u, free_z, free_u, spare_u, dh
        self.add(gate_bias=db, up_bias=db_up)
        if h is not None:
            self.add_product("down", dy, h)
        del h
        if needs.gate:
            self.add_product("gate", dz, n)  # type: ignore[arg-type]  # n is there
        if needs.up:
            self.add_product("up", du, n)  # type: ignore[arg-type]  # n is there
        return sum_of_products((dz, w.gate), (du, w.up)) if needs.dn else None

    def _hidden_grad(
        self, dy: Tensor, dh: Tensor | None, grads: HiddenGrad, needs_db: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        act = self.block.activation
        if dh is None:
            return hybrid_grad(dy, self.w.down, grads, act, needs_db=needs_db)
        return hidden_grad(dh, grads, act, needs_db, kernel=self.block.kernel)

    def input(self, dn: Tensor, dy: Tensor, x: Tensor | None) -> Tensor | None:
        """Take dn through the norm, add the residual's gradient, and return dx."""
        w, block, needs = self.w, self.block, self.needs
        if block.rule is None:
            return (dn.add_(dy) if block.residual else dn).to(dy.dtype)
        assert x is not None
        kernels = aten if block.kernel == "aten" else norm_kernels
        dtotal = dy if block.residual else None
        dx, dw, db = kernels.norm_grad(dn, dtotal, x, w.norm, rule=block.rule, needs=needs[:3])
        self.add(norm=dw, norm_bias=db)
        return dx


def over(*free: Tensor | None, like: Tensor) -> Tensor:
    """Return the first of the buffers that are free, else a new one."""
    for buffer in free:
        if buffer is not None:
            return buffer
    return torch.empty_like(like)


def backward(
    dy: Tensor,
    x: Tensor | None,
    w: Weights,
    gate: Tensor | None,
    up: Tensor | None,
    block: Block,
    needs: Needs,
    donates: bool = False,
) -> dict[str, Tensor]:
    """Return the wanted gradients by the names of Needs; x may be None where nothing reads it.

    gate, up: those outputs, where they were saved; donates: they may be written over.
    """
    run, dx = Backward(w, block, needs, donates), None
    needs_hidden = needs.hidden
    reads_n = needs.gate or needs.up or gate is None or (up is None and w.up is not None)
    for rows in row_chunks(dy.shape[0], block.chunks):
        dy_rows, x_rows = dy[rows], None if x is None else x[rows]
        if needs.down_bias:
            run.add(down_bias=column_sums(dy_rows))
        if not needs_hidden:
            continue
        n = normalised(x_rows, w, block) if reads_n else None  # type: ignore[arg-type]  # x is there
        z, u = None if gate is None else gate[rows], None if up is None else up[rows]
        dn = run.single(dy_rows, n, z) if w.up is None else run.gated(dy_rows, n, z, u)
        del n
        if dn is None:
            continue
        grad = run.input(dn, dy_rows, x_rows)
        if grad is None or block.chunks == 1:
            dx = grad
            continue
        if dx is None:
            dx = grad.new_empty(dy.shape[0], grad.shape[1])
        dx[rows] = grad
        # before the next chunk asks for as much
        del dn, grad
    if dx is not None:
        run.grads["x"] = dx
    return run.grads
