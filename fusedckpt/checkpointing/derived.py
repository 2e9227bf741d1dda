"""Tensors that a recompute derives from the inputs of a region."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fusedckpt.autograd.storages import storage_of
from fusedckpt.checkpointing.calls import layout_of


class Derived(NamedTuple):
    """A saved tensor that is an input of its region, or a view of it."""

    # the number of the input
    number: int
    # the layout of a view: size, stride, and the offset from that of the input
    layout: tuple[Any, Any, Any] | None
    # the strides of the input
    stride: tuple[int, ...]

    def of(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the tensor, given the region's inputs in the recompute."""
        x = inputs[self.number]
        if self.layout is None:
            return x
        x = x.detach()
        size, stride, offset = self.layout
        if x.stride() != self.stride:
            # hooks gave an argument another layout
            x = x.new_empty_strided(x.size(), self.stride).copy_(x)
        return x.as_strided(size, stride, x.storage_offset() + offset)


def by_storage(inputs: Sequence[Tensor]) -> dict[int, list[tuple[int, Tensor]]]:
    """Return the inputs of a region with their numbers, by the keys of their storages."""
    keyed: dict[int, list[tuple[int, Tensor]]] = {}
    for number, x in enumerate(inputs):
        key = storage_of(x)
        if key:
            keyed.setdefault(key, []).append((number, x))
    return keyed


def derived_from(tensor: Tensor, inputs: Sequence[tuple[int, Tensor]]) -> Derived | None:
    """Return how a tensor is derived from one of the inputs of its storage, None for none."""
    for number, x in inputs:
        if x.dtype != tensor.dtype:
            continue
        layout = layout_of(tensor)
        if layout_of(x) == layout:
            return Derived(number, None, layout[1])
        offset = tensor.storage_offset() - x.storage_offset()
        if offset >= 0 and offset + _extent(tensor) <= _extent(x):
            return Derived(number, (*layout[:2], offset), x.stride())
    return None


def _extent(x: Tensor) -> int:
    return sum((n - 1) * stride for n, stride in zip(x.size(), x.stride(), strict=True))
