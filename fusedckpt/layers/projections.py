"""Linear layers as a fused block computes them: dense, dequantised where used, with adapters.

    y = x W' + b + sum of s drop(x) A' B'        dx = dy W + sum of drop(s dy B A)
    dA = (s dy B)' drop(x)     dB = s dy' (drop(x) A')     dW = dy' x     db = column sums of dy

for primes as transposes. Nothing wider than the rank is kept: drop(x) and the product with A' are
made again. Adapters are computed in their own dtype, and their result is added in place. A GEMM
multiplies by s what it has summed, in float32: no factor overflows where peft's result does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt.autograd.dropout import dropout
from fusedckpt.autograd.lora import Constants, Parts
from fusedckpt.kernels.linear import linear
from fusedckpt.kernels.products import add_product, wide_product
from fusedckpt.kernels.runtime import as_vector, as_weight, column_sums


class Sums:
    """Gradients by the number of their linear and their place in `flat`, added up over chunks."""

    def __init__(self, chunks: int):
        self.chunks = chunks
        self.found: dict[tuple[int, int], Tensor] = {}

    def add(self, which: int, place: int, grad: Tensor) -> None:
        """Add a chunk's gradient, already in at least float32 or alone."""
        key = which, place
        self.found[key] = self.found[key] + grad if key in self.found else grad

    def add_product(self, which: int, place: int, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
        """Add scale * a' b, in float32 where there are several chunks."""
        key = which, place
        if self.chunks == 1:
            self.found[key] = scaled_product(a.t(), b, scale)
        elif scale != 1:
            self.add(which, place, wide_product(a.t(), b).mul_(scale))
        elif key not in self.found:
            self.found[key] = wide_product(a.t(), b)
        else:
            add_product(self.found[key], a.t(), b)


def scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return scale * a @ b, rounded once."""
    if scale == 1:
        return torch.mm(a, b)
    # what is multiplied by beta is not read
    return torch.addmm(a.new_empty(1, 1), a, b, beta=0, alpha=scale)


class Adapter(NamedTuple):
    """A [r, K] and B [N, r] in the dtype that they are multiplied in; None for what is not there.

    first_row: which of all rows a chunk begins with.
    """

    a: Any
    b: Any
    constants: Constants
    seed: Tensor | None
    dtype: torch.dtype

    def dropped(self, x: Tensor, first_row: int) -> Tensor:
        """Return what A reads."""
        return dropout(x.to(self.dtype), self.constants.dropout, self.seed, first_row)

    def add_output(self, y: Tensor, x: Tensor, first_row: int) -> Tensor:
        """Return y + s drop(x) A' B', see `_sum`."""
        low, scale = torch.mm(self.dropped(x, first_row), self.a.t()), self.constants.scale
        if y.dtype == self.dtype:
            return torch.addmm(y, low, self.b.t(), alpha=scale, out=y)
        return _sum(y, scaled_product(low, self.b.t(), scale))

    def low_grad(self, dy: Tensor) -> Tensor:
        """Return s dy B, of which both dA and dx are made."""
        return scaled_product(dy.to(self.dtype), self.b, self.constants.scale)

    def add_input_grad(self, total: Tensor, dlow: Tensor, first_row: int) -> Tensor:
        """Return the gradient of x with drop(s dy B A) added, see `_sum`."""
        if total.dtype == self.dtype and not self.constants.dropout:
            return torch.addmm(total, dlow, self.a, out=total)
        dx = torch.mm(dlow, self.a)
        return _sum(total, dropout(dx, self.constants.dropout, self.seed, first_row))


def _sum(total: Tensor, part: Tensor) -> Tensor:
    """Return their sum in the dtype that torch promotes to, written over one that has it."""
    wide = torch.promote_types(total.dtype, part.dtype)
    return total.add_(part) if wide == total.dtype else part.to(wide).add_(total)


class Projection(NamedTuple):
    """A linear layer: its number, its parts, the gradients wanted of them, its GEMM's dtype."""

    which: int
    parts: Parts
    needs: Parts
    adapters: tuple[Adapter, ...]
    dtype: torch.dtype

    @property
    def features(self) -> int:
        """How many outputs there are."""
        return shape_of(self.parts)[0]

    @property
    def needs_x(self) -> bool:
        """Whether a gradient of its own reads x."""
        return reads_x_of(self.needs)

    def _dense(self, rows: slice | None) -> Tensor:
        base = self.parts.base
        return as_weight(self.parts.weight if base is None else base.dense(rows), self.dtype)

    def _pieces(self) -> Any:
        base = self.parts.base
        return (None,) if base is None else base.pieces(self.dtype)

    def output(self, x: Tensor, first_row: int, out: Tensor | None = None) -> Tensor:
        """Return y [M, N] for x [M, K], in `out` if given."""
        y = x.new_empty(x.shape[0], self.features) if out is None else out
        bias = as_vector(self.parts.bias, self.dtype)
        for rows in self._pieces():
            if rows is None:
                linear(x, self._dense(None), bias, y)
            else:
                part = None if bias is None else bias[rows]
                y[:, rows] = linear(x, self._dense(rows), part)
        total = y
        for adapter in self.adapters:
            total = adapter.add_output(total, x, first_row)
        # rounded once, as peft does
        return y if total is y else y.copy_(total)

    def low_grads(self, dy: Tensor, needs_dx: bool) -> list[Tensor | None]:
        """Return for every adapter s dy B, None where neither dA nor dx is wanted."""
        pairs = zip(self.adapters, self.needs.adapters, strict=True)
        return [adapter.low_grad(dy) if needs_dx or need[0] else None for adapter, need in pairs]

    def input_grad(
        self, dy: Tensor, lows: list[Tensor | None], first_row: int, total: Tensor | None = None
    ) -> Tensor:
        """Return the gradient of x, added to `total`, which is written over, if given."""
        for rows in self._pieces():
            part = dy if rows is None else dy[:, rows]
            if total is None:
                total = torch.mm(part, self._dense(rows))
            else:
                torch.addmm(total, part, self._dense(rows), out=total)
        assert total is not None
        wide = total
        for adapter, low in zip(self.adapters, lows, strict=True):
            assert low is not None
            wide = adapter.add_input_grad(wide, low, first_row)
        return total if wide is total else total.copy_(wide)

    def add_grads(
        self,
        dy: Tensor,
        x: Tensor | None,
        lows: list[Tensor | None],
        first_row: int,
        sums: Sums,
    ) -> None:
        """Add the wanted gradients of weight, bias, A and B."""
        if self.needs.bias:
            sums.add(self.which, 1, column_sums(dy))
        if x is None:
            return
        if self.needs.weight:
            sums.add_product(self.which, 0, dy, x)
        triples = zip(self.adapters, lows, self.needs.adapters, strict=True)
        for index, (adapter, low, (needs_a, needs_b)) in enumerate(triples):
            if not (needs_a or needs_b):
                continue
            read = adapter.dropped(x, first_row)
            if needs_a:
                assert low is not None
                sums.add_product(self.which, 2 + 2 * index, low, read)
            if needs_b:
                x_low, dy_read = torch.mm(read, adapter.a.t()), dy.to(adapter.dtype)
                scale = adapter.constants.scale
                sums.add_product(self.which, 3 + 2 * index, dy_read, x_low, scale)


def shape_of(parts: Parts) -> torch.Size:
    """Return [N, K]."""
    return (parts.weight if parts.base is None else parts.base).shape


def flat(parts: Parts) -> list[Any]:
    """Return weight, bias, and A and B of every adapter."""
    return [parts.weight, parts.bias, *(t for pair in parts.adapters for t in pair)]


def refilled(parts: Parts, values: Any) -> Parts:
    """Return the parts with the next of an iterator's values in the order of `flat`."""
    weight, bias = next(values), next(values)
    adapters = tuple([(next(values), next(values)) for _ in parts.adapters])
    return parts._replace(weight=weight, bias=bias, adapters=adapters)


def cast(parts: Parts, dtype: torch.dtype, adapter_dtypes: Sequence[torch.dtype]) -> Parts:
    """Return the parts, weight and bias in `dtype`, and A and B in that of their adapter."""
    weight, bias = (None if t is None else t.to(dtype) for t in (parts.weight, parts.bias))
    pairs = zip(parts.adapters, adapter_dtypes, strict=True)
    adapters = [tuple([None if t is None else t.to(dtype) for t in ab]) for ab, dtype in pairs]
    return parts._replace(weight=weight, bias=bias, adapters=tuple(adapters))


def reads_x_of(needs: Parts) -> bool:
    """Whether a wanted gradient of weight, A or B reads x."""
    return bool(needs.weight) or any(a or b for a, b in needs.adapters)


def is_wanted(needs: Parts) -> bool:
    """Whether any gradient of the layer's own is."""
    return bool(needs.bias) or reads_x_of(needs)


def kept(parts: Parts, needs: Parts, computes: bool, needs_dx: bool) -> Parts:
    """Return the parts, None for what backward does not read.

    computes: whether it computes the layer's output again.
    """

    def pair(given: tuple[Any, Any], need: tuple[Any, Any]) -> tuple[Any, Any]:
        a = given[0] if computes or needs_dx or need[1] else None
        b = given[1] if computes or needs_dx or need[0] else None
        return a, b

    pairs = zip(parts.adapters, needs.adapters, strict=True)
    return parts._replace(
        weight=parts.weight if computes or needs_dx else None,
        bias=parts.bias if computes else None,
        adapters=tuple([pair(given, need) for given, need in pairs]),
    )
