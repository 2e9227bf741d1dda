"""Linears with adapters, quantised weights or dropout at work: a norm before them, an MLP after.

GEMMs are the vendor's; what elementwise work there is runs in place, as in `kernels.mlp`. A dense
form of a quantised weight lives for one GEMM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt.autograd.dropout import dropout
from fusedckpt.autograd.lora import Parts
from fusedckpt.kernels.elementwise import HiddenGrad
from fusedckpt.kernels.linear import hidden, hidden_grad
from fusedckpt.kernels.mlp import over, row_chunks
from fusedckpt.layers.adapted_call import AdaptedCall
from fusedckpt.layers.projections import Adapter, Projection, Sums, is_wanted, reads_x_of


class Needs(NamedTuple):
    """Which gradients are wanted: of x, of the norm's two, and of each linear's parts."""

    norm: list[bool]
    linears: list[Parts]
    has_last: bool

    @property
    def dn(self) -> bool:
        """Whether that of what the first linears read is."""
        return any(self.norm)

    @property
    def first(self) -> list[Parts]:
        """Those of the linears that read x."""
        return self.linears[:-1] if self.has_last else self.linears

    @property
    def dz(self) -> bool:
        """Whether that of a first linear's output is."""
        return self.dn or any(is_wanted(parts) for parts in self.first)

    @property
    def hidden(self) -> bool:
        """Whether any reads the hidden layer."""
        return self.dz or (self.has_last and reads_x_of(self.linears[-1]))


class Block:
    """A call at work: its linears, its tensors, and the gradients found so far."""

    def __init__(
        self,
        call: AdaptedCall,
        linears: Sequence[Parts],
        norm: Sequence[Tensor | None],
        seeds: Tensor | None,
        needs: Needs,
    ):
        self.call, self.norm, self.seeds, self.needs = call, norm, seeds, needs
        self.kernel = "aten" if call.on_aten else "split"
        self.sums = Sums(call.chunks)
        projections = [
            Projection(i, parts, needs.linears[i], self._adapters(parts, dtypes), dtype=call.dtype)
            for i, (parts, dtypes) in enumerate(zip(linears, call.adapter_dtypes, strict=True))
        ]
        self.last = projections.pop() if call.has_last else None
        self.first = projections

    def _adapters(self, parts: Parts, dtypes: Sequence[torch.dtype]) -> tuple[Adapter, ...]:
        found = []
        for pair, constants, dtype in zip(parts.adapters, parts.constants, dtypes, strict=True):
            a, b = (None if t is None else t.to(dtype) for t in pair)
            found.append(Adapter(a, b, constants, self._seed(constants.seed), dtype=dtype))
        return tuple(found)

    def _seed(self, index: int | None) -> Tensor | None:
        return None if index is None or self.seeds is None else self.seeds[index]

    def normalised(self, x: Tensor) -> Tensor:
        """Return what the first linears read."""
        norm = self.call.norm
        return x if norm is None else norm.normalised(x, None, *self.norm)[0]

    def dropped(self, h: Tensor, which: tuple[float, int], first_row: int) -> Tensor:
        """Return h, or a gradient of it, through one of the call's own dropouts."""
        p, index = which
        return dropout(h, p, self._seed(index) if p else None, first_row)

    def forward(self, x: Tensor, level: str) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the results, and what the level keeps of the first linears' outputs."""
        call, last, count = self.call, self.last, len(self.first)
        if call.activation is None:
            n = self.normalised(x)
            return [linear.output(n, 0) for linear in self.first], [None] * count
        keeps = [level == "preact" or (level == "gate" and i == 0) for i in range(count)]
        shape = x.shape[0], self.first[0].features
        zs = [x.new_empty(shape, dtype=call.dtype) if keep else None for keep in keeps]
        features = shape[1] if last is None else last.features
        y = x.new_empty(x.shape[0], features, dtype=call.dtype)
        for rows in row_chunks(x.shape[0], call.chunks):
            n = self.normalised(x[rows])
            place = y[rows] if last is None else None
            made = [
                linear.output(n, rows.start, place if z is None else z[rows])
                for linear, z in zip(self.first, zs, strict=True)
            ]
            del n
            # over what is not kept
            free = [z for z, keep in zip(made, keeps, strict=True) if not keep]
            h = over(place, *free[-1:], like=made[0])
            self._hidden(made, h)
            del made, free
            if last is None:
                continue
            h = self.dropped(h, call.dropout, rows.start)
            last.output(h, rows.start, y[rows])
            del h
            if call.output_dropout[0]:
                y[rows] = self.dropped(y[rows], call.output_dropout, rows.start)
            if call.adds:
                y[rows] += x[rows]
        return [y], zs

    def _hidden(self, zs: Sequence[Tensor], h: Tensor) -> Tensor:
        up = zs[1] if len(zs) > 1 else None
        return hidden(zs[0], up, h, str(self.call.activation), kernel=self.kernel)

    def backward(
        self, dys: Sequence[Tensor | None], x: Tensor | None, zs: Sequence[Any], donates: bool
    ) -> Tensor | None:
        """Return the gradient of x, and leave the others in `sums`."""
        dx, rows_of = None, next(dy for dy in dys if dy is not None).shape[0]
        chunks = row_chunks(rows_of, self.call.chunks)
        for rows in chunks:
            parts = [None if dy is None else dy[rows] for dy in dys]
            kept_rows = [None if z is None else z[rows] for z in zs]
            grad = self._chunk(
                parts, None if x is None else x[rows], kept_rows, rows, donates=donates
            )
            if grad is None or len(chunks) == 1:
                dx = grad
                continue
            if dx is None:
                dx = grad.new_empty(rows_of, grad.shape[1])
            dx[rows] = grad
            # before the next chunk asks for as much
            del grad
        return dx

    def _chunk(
        self, dys: list[Any], x: Any, zs: list[Any], rows: slice, donates: bool
    ) -> Tensor | None:
        call, needs, dtotal = self.call, self.needs, dys[0]
        has_hidden = call.activation is not None
        makes = has_hidden and needs.hidden and any(z is None for z in zs)
        reads_n = makes or any(linear.needs_x for linear in self.first)
        n = self.normalised(x) if reads_n else None
        dzs = (
            self._through_hidden(dys[0], n, zs, rows.start, donates=donates) if has_hidden else dys
        )
        dn = None
        for linear, dz in zip(self.first, dzs, strict=True):
            if dz is None:
                continue
            lows = linear.low_grads(dz, needs.dn)
            linear.add_grads(dz, n, lows, rows.start, sums=self.sums)
            if needs.dn:
                dn = linear.input_grad(dz, lows, rows.start, dn)
        del n, dzs, zs
        if dn is None:
            return None
        if call.norm is None:
            return dn.add_(dtotal) if call.adds else dn
        dx, dw, db = call.norm.gradients(
            (dn, dtotal if call.adds else None), x, self.norm[0], needs.norm
        )
        for index, grad in enumerate((dw, db)):
            if grad is not None:
                self.sums.add(-1, index, grad)
        return dx

    def _through_hidden(
        self, dy: Tensor, n: Any, zs: list[Any], first_row: int, donates: bool
    ) -> list[Tensor | None]:
        """Return the gradients of the first linears' outputs; add those of the last linear."""
        last, lows, h = self.last, [], None
        dzs: list[Tensor | None] = [None] * len(zs)
        if last is not None:
            dy = self.dropped(dy, self.call.output_dropout, first_row)
            lows = last.low_grads(dy, self.needs.dz)
        if self.needs.hidden:
            h, dzs = self._hidden_layer(dy, lows, n, zs, first_row=first_row, donates=donates)
        if last is not None:
            last.add_grads(dy, h, lows, first_row, sums=self.sums)
        return dzs

    def _hidden_layer(
        self, dy: Tensor, lows: list[Any], n: Any, zs: list[Any], first_row: int, donates: bool
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return what the last linear read, None where nothing needs it, and what `dy` becomes."""
        call, last = self.call, self.last
        made = [z is None for z in zs]
        zs = [
            linear.output(n, first_row) if z is None else z
            for linear, z in zip(self.first, zs, strict=True)
        ]
        free = [z if new or donates else None for z, new in zip(zs, made, strict=True)]
        dzs: list[Tensor | None] = [None] * len(zs)
        if self.needs.dz:
            dh, free_dh = dy, None
            if last is not None:
                dh = self.dropped(last.input_grad(dy, lows, first_row), call.dropout, first_row)
                free_dh = dh
            grads = _buffers(zs, free, made, free_dh, reads_h=last is not None and last.needs_x)
            del zs, free, free_dh
            # of biases, each linear makes its own
            hidden_grad(dh, grads, str(call.activation), (False, False), kernel=self.kernel)
            del dh
            h, dzs = grads.h, [grads.dz, grads.dup][: len(made)]
        else:
            h = self._hidden(zs, over(*free[::-1], like=zs[0]))
        return None if h is None else self.dropped(h, call.dropout, first_row), dzs


def _buffers(
    zs: list[Any], free: list[Any], made: list[bool], dh: Tensor | None, reads_h: bool
) -> HiddenGrad:
    """Choose what h, dz and dup are written over, as `kernels.mlp.Backward` does."""
    if len(zs) == 1:
        (z,), (free_z,) = zs, free
        h = over(z if made[0] else dh, like=z) if reads_h else None
        dz = over(None if h is dh else dh, None if h is z else free_z, like=z)
        return HiddenGrad(z, None, h, dz, dup=None)
    (z, u), (free_z, free_u) = zs, free
    h = over(dh, like=z) if reads_h else None
    du = over(None if h is dh else dh, free_u, like=z)
    dz = over(free_z, None if du is u else free_u, like=z)
    return HiddenGrad(z, u, h, dz, dup=du)
