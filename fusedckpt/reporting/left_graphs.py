"""Tensors that a recompute leaves in attributes of modules: each keeps the recompute's graph alive.

A router that leaves its loss in an attribute leaves another one when a checkpoint calls it again in
backward. No backward runs through that one, so that its graph lives until the next step, under
torch's checkpoint with all tensors saved in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import Tensor, nn

from fusedckpt.state.holders import nested


class LeftGraphs:
    """The attributes of a model's modules that are set in backward to tensors with a graph."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._before: dict[int, weakref.ref[Tensor]] = {}

    def begin(self) -> None:
        """Note the tensors with a graph that attributes hold when backward begins."""
        self._before = {id(x): weakref.ref(x) for _, x in self._tensors()}

    def names(self) -> tuple[str, ...]:
        """Return the names of attributes that hold other tensors with a graph by now."""
        names = [name for name, x in self._tensors() if not self._was_held(x)]
        return tuple(dict.fromkeys(names))

    def _was_held(self, tensor: Tensor) -> bool:
        reference = self._before.get(id(tensor))
        return reference is not None and reference() is tensor

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors with a graph in attributes, and in containers and objects there."""
        for prefix, module in self._model.named_modules():
            attributes = {k: x for k, x in vars(module).items() if not k.startswith("_")}
            for name, value in {**attributes, **module._buffers}.items():
                for part in nested(value):
                    if isinstance(part, Tensor) and part.grad_fn is not None:
                        yield f"{prefix}.{name}".removeprefix("."), part
