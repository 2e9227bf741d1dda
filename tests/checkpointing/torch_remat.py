"""A stand-in for meta-pytorch's torch_remat: a checkpoint in which named regions can be saved.

As documented there: `checkpoint` is torch's non-reentrant one with a context of its own, and its
recompute starts at its output, so that it runs to the end. A saved region runs in the forward under
hooks of its own, which keep what it saves but for its inputs; the recompute skips it, gives it the
inputs again, and returns the output that the forward kept. Outputs require gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as stock_checkpoint


class Regions:
    """The saved regions of one checkpoint: by name, the output, tensors kept, and inputs."""

    def __init__(self) -> None:
        self.saved: dict[str, tuple[Tensor, list[Tensor], list[Tensor]]] = {}
        self.is_recomputing = False

    @contextmanager
    def active(self, is_recomputing: bool) -> Iterator[None]:
        self.is_recomputing, token = is_recomputing, _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def call(self, name: str, fn: Callable[..., Tensor], args: tuple[Tensor, ...]) -> Tensor:
        if self.is_recomputing:
            output, _, inputs = self.saved[name]
            inputs[:] = [x.detach() for x in args]
            return output.detach().requires_grad_()
        kept, inputs = list[Tensor](), list[Tensor]()
        storages = [x.untyped_storage().data_ptr() for x in args]

        def pack(tensor: Tensor) -> Any:
            storage = tensor.untyped_storage().data_ptr()
            if storage in storages:
                layout = tensor.shape, tensor.stride(), tensor.storage_offset()
                return storages.index(storage), layout
            kept.append(tensor.detach())
            return kept[-1]

        def unpack(packed: Any) -> Tensor:
            return (
                packed if isinstance(packed, Tensor) else inputs[packed[0]].as_strided(*packed[1])
            )

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            output = fn(*args)
        self.saved[name] = output.detach(), kept, inputs
        return output


_active: ContextVar[Regions | None] = ContextVar("regions", default=None)


class _Boundary(torch.autograd.Function):
    """The last to save a tensor, and the first to need one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.new_empty(0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        assert len(ctx.saved_tensors) == 1
        return dy


def checkpoint(fn: Callable[..., Tensor], *args: Tensor) -> tuple[Tensor, Regions]:
    """Return what `fn` returns, and the regions that it saved."""
    regions = Regions()
    output = stock_checkpoint(
        lambda *args: _Boundary.apply(fn(*args)),
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        determinism_check="none",
        context_fn=lambda: (regions.active(False), regions.active(True)),
    )
    return output, regions


def region(fn: Callable[..., Tensor], name: str, *, recompute: bool) -> Callable[..., Tensor]:
    """Return `fn`, which a checkpoint around recomputes or saves."""
    regions = _active.get()
    return fn if recompute or regions is None else lambda *args: regions.call(name, fn, args)
