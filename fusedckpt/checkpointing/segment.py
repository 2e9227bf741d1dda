"""A checkpointed segment: what its forward drops, and the recompute that brings it back.

What autograd saves in a segment's forward is dropped, and found again by its position when the
segment is recomputed. What costs nothing to keep stays: parameters and other leaves, and views of
the arguments. A recompute ends with the last tensor that backward needs; where that is in a fused
layer, before the layer computes anything. GEMM outputs that spare a fused layer's backward a GEMM
are not among those tensors: the recompute leaves them in slots. It serves one backward, whose end
drops all it made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedckpt.autograd.backward import at_end_of_backward, backward_id
from fusedckpt.autograd.phases import Likes, Phase, Tensors, can_see_hooks, current, top_hooks
from fusedckpt.autograd.saved_tensor import is_plain, storage_of
from fusedckpt.autograd.uncompiled import tell_dynamo, uncompiled
from fusedckpt.checkpointing.determinism import Run
from fusedckpt.checkpointing.recompute import Recompute
from fusedckpt.checkpointing.saved import Argument, Dropped, View, leaf_of, meta_of
from fusedckpt.checkpointing.tape import Call, Options, Tape


class Segment(Phase):
    """The forward of a checkpoint."""

    def __init__(self, options: Options | None = None):
        self.tape = Tape(options or Options())
        self._stops = self.tape.options.stops
        # what an enclosing checkpoint recomputes, it gives back once only
        self._is_nested = current() is not None or not can_see_hooks()
        # what comes back through hooks is elsewhere in memory
        self._is_hooked = top_hooks() is not None
        # by storage, while a call runs
        self._arguments: dict[int, Argument] = {}
        self._recomputes: dict[int, Recompute] = {}

    def run(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call `fn`, dropping what autograd saves."""
        tape = self.tape
        tape.is_complete = False
        tell_dynamo()
        try:
            tape.calls.append(self._call(fn, args, kwargs))
            if (around := current()) is not None:
                # where the arguments were all that an enclosing recompute is for
                around.enter(())
            tape.run = Run(fn) if tape.options.debug else None
            with (
                torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack),
                nullcontext() if tape.run is None else tape.run.watched(),
                tape.contexts[0],
            ):
                output = fn(*args, **kwargs)
                tape.is_complete = True
        finally:
            self._arguments = {}
        if not tape.is_complete:
            raise RuntimeError("checkpoint: the forward's context suppressed an exception")
        if tape.run is not None:
            tape.run.see("the segment", output)
        return output

    def _call(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Call:
        return Call(fn, args, kwargs, self.tape.options, self._hold)

    def _hold(self, tensor: Tensor) -> Argument:
        argument = Argument(tensor)
        if is_plain(tensor) and not self._is_nested:
            self._arguments[storage_of(tensor)] = argument
        return argument

    @uncompiled
    def pack(self, tensor: Tensor) -> Dropped:
        """Return what autograd keeps in the tensor's place."""
        index = len(self.tape.saved)
        packed = leaf_of(tensor, index) or self._view_of(tensor, index) or Dropped(index)
        self.tape.saved.append(weakref.ref(packed))
        self.tape.metas.append(meta_of(tensor))
        return packed

    def _view_of(self, tensor: Tensor, index: int) -> View | None:
        if not self._arguments or not is_plain(tensor):
            return None
        argument = self._arguments.get(storage_of(tensor))
        if argument is None or argument.dtype != tensor.dtype:
            return None
        view = View(index, tensor, argument)
        return None if self._is_hooked and view.layout is not None else view

    @uncompiled
    def unpack(self, packed: Dropped) -> Tensor:
        """Return the tensor that `pack` was given, recomputing the segment if need be."""
        tensor = packed.kept() if self._stops else None
        if tensor is None:
            tensor = (self.running() or self._recompute()).take(packed.index)
        # read twice in one backward: once more, and then for as long as that takes
        return self._recompute(keeps=True).values[packed.index][0] if tensor is None else tensor

    def running(self) -> Recompute | None:
        """Return the recompute that serves the backward of now."""
        return self._recomputes.get(backward_id())

    def _recompute(self, keeps: bool = False) -> Recompute:
        recompute = Recompute(self.tape, keeps)
        recompute.run()
        backward = backward_id()
        if backward != -1:
            self._recomputes[backward] = recompute
            at_end_of_backward(partial(self._recomputes.pop, backward, None))
        return recompute

    def runs(self, level: str) -> str:
        """Compute no GEMM outputs for backward: they would be dropped."""
        return "inputs"

    keeps = runs

    def save(
        self, ctx: Any, name: str, given: Tensors, extras: Tensors = (), likes: Likes = ()
    ) -> None:
        """Save what the layer was given, and leave a slot for its GEMM outputs."""
        super().save(ctx, name, given, [None] * len(extras))
        # the recompute makes them for this layer alone
        ctx.owns_extras = True
        if any(like is not None for like in likes):
            # no more than that: the layer's node outlives its saved tensors, which hold the segment
            ctx.recall = slot = partial(_recall, weakref.ref(self), len(self.tape.slots))
            self.tape.slots.append((name, weakref.ref(slot)))


def _recall(of: weakref.ref[Segment], slot: int, extras: Tensors) -> Tensors:
    """Return the GEMM outputs that the recompute left in a slot."""
    segment = of()
    recompute = None if segment is None else segment.running()
    return extras if recompute is None else recompute.extras.pop(slot, extras)
