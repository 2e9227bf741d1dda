"""A checkpointed segment's forward: what it drops, and where its backward finds that again.

What autograd saves in a segment's forward is dropped, and found again by its position when the
segment is recomputed, inside the first backward that asks or, by `prefetch`, before it. What costs
nothing to keep stays: parameters and other leaves, and views of the arguments. A recompute serves
one backward, whose end drops all it made.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import TensorWeakRef

from fusedckpt.autograd import phases
from fusedckpt.autograd.backward import at_end_of_backward, backward_id
from fusedckpt.autograd.phases import Likes, Phase, Tensors
from fusedckpt.autograd.uncompiled import uncompiled
from fusedckpt.checkpointing import calls
from fusedckpt.checkpointing.calls import (
    Argument,
    Call,
    Options,
    Packed,
    Trace,
    layout_of,
    stale,
)
from fusedckpt.checkpointing.determinism import Run
from fusedckpt.checkpointing.recompute import Recompute

# where the node of autograd's graph that made an output refers to its segment
NODE_KEY = "fusedckpt segment"


class Segment(Trace, Phase):
    """The forward of a checkpoint."""

    # GEMM outputs for backward would be dropped
    levels = "inputs", "inputs"

    def __init__(self, options: Options | None = None):
        super().__init__(options or Options())
        # by storage, while a call runs
        self._arguments: dict[int, Argument] = {}
        self._recomputes: dict[int, Recompute] = {}
        # one that came before its backward
        self._ahead: Recompute | None = None

    def run(self, call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
        """Make a call for the first time, dropping what autograd saves."""
        self.is_complete, around = False, phases.current()
        # what comes back through hooks is elsewhere in memory
        self._is_hooked = phases.top_hooks() is not None
        self.watched = run = Run(call.fn) if self.options.debug else None
        self.calls.append(call)
        try:
            # what an enclosing checkpoint recomputes, it gives back once only
            for held in call.held if around is None and phases.can_see_hooks() else ():
                if isinstance(held, Argument) and held.storage:
                    self._arguments[held.storage] = held
            if around is not None:
                # where the arguments were all that an enclosing recompute is for
                around.enter(())
            with (
                torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack),
                nullcontext() if run is None else run.watched(),
                self.contexts[0],
            ):
                output = call.fn(*args, **kwargs)
                self.is_complete = True
        finally:
            self._arguments = {}
        if not self.is_complete:
            raise RuntimeError("checkpoint: the forward's context suppressed an exception")
        if run is not None:
            run.see("the segment", output)
        if around is None:
            self._mark(output, (*args, *kwargs.values()))
        return output

    def _mark(self, output: Any, given: tuple[Any, ...]) -> None:
        """Let the nodes of an output be known as the segment's own, but of what it was given."""
        for leaf in (output,) if isinstance(output, Tensor) else pytree.tree_leaves(output):
            node: Any = leaf.grad_fn if isinstance(leaf, Tensor) else None
            if node is not None and not any(leaf is x for x in given):
                node.metadata[NODE_KEY] = weakref.ref(self)

    @uncompiled
    def pack(self, tensor: Tensor) -> Packed:
        """Return what autograd keeps in the tensor's place."""
        packed = Packed()
        packed.index, packed.source, packed.layout = len(self.saved), None, None
        owner = tensor if tensor._base is None else tensor._base
        if owner.is_leaf and (owner.requires_grad or isinstance(owner, nn.Parameter)):
            # how a view of another kind of tensor is made again is for a recompute to know
            if tensor is owner or (
                tensor.dtype == owner.dtype and calls.storage_of(tensor) and calls.storage_of(owner)
            ):
                packed.source, packed.version = TensorWeakRef(owner), owner._version
                packed.layout = None if tensor is owner else layout_of(tensor)
        elif self._arguments:
            argument = self._arguments.get(calls.storage_of(tensor))
            if argument is not None and argument.dtype == tensor.dtype:
                layout = layout_of(tensor)
                # the whole comes back through any hooks, a view not
                packed.layout = None if layout == argument.layout else layout
                packed.source = None if self._is_hooked and packed.layout else argument
        self.saved.append((weakref.ref(packed), (tensor.shape, tensor.dtype, tensor.device)))
        return packed

    @uncompiled
    def unpack(self, packed: Packed) -> Tensor:
        """Return the tensor that `pack` was given, recomputing the segment if need be."""
        source = packed.source
        if self.stops and source is not None:
            if isinstance(source, Argument):
                tensor = source.tensor()
                # without its graph
                tensor = tensor.detach() if tensor.requires_grad else tensor
            else:
                tensor = source()
                if tensor is not None and tensor._version != packed.version:
                    raise RuntimeError(stale("a parameter saved for backward", tensor))
            if tensor is not None:
                layout = packed.layout
                return tensor if layout is None else tensor.detach().as_strided(*layout)
        backward = backward_id()
        recompute = self._recomputes.get(backward) or self._recompute(backward)
        tensor = recompute.take(packed.index)
        # read twice in one backward: once more, and then for as long as that takes
        return self._recompute(backward, True).values[packed.index][0] if tensor is None else tensor

    def _recompute(self, backward: int, keeps: bool = False) -> Recompute:
        recompute, ahead = Recompute(self, keeps), self._ahead
        if ahead is None or keeps or backward == -1:
            recompute.run()
        else:
            self._ahead = None
            recompute.take_over(ahead)
        if backward != -1:
            self._recomputes[backward] = recompute
            at_end_of_backward(partial(self._recomputes.pop, backward, None))
        return recompute

    def prefetch(self) -> bool:
        """Recompute for the next backward; return whether there was anything to bring back."""
        if self._ahead is None:
            ahead = Recompute(self, False)
            if not ahead.is_wanted:
                return False
            ahead.run()
            self._ahead = ahead
        return True

    def recompute_of(self, backward: int) -> Recompute | None:
        """Return what this backward recomputed, or what was recomputed for it."""
        found = self._recomputes.get(backward)
        return self._recompute(backward) if found is None and self._ahead is not None else found

    def save(
        self, ctx: Any, name: str, given: Tensors, extras: Tensors = (), likes: Likes = ()
    ) -> None:
        """Save what the layer was given, and leave a slot for its GEMM outputs."""
        super().save(ctx, name, given, [None] * len(extras))
        # the recompute makes them for this layer alone
        ctx.owns_extras = True
        if any(likes):
            # no more than that: the layer's node outlives its saved tensors, which hold the segment
            ctx.recall = slot = partial(_recall, weakref.ref(self), len(self.slots))
            self.slots.append((name, weakref.ref(slot)))


def _recall(of: weakref.ref[Segment], slot: int, extras: Tensors) -> Tensors:
    """Return the GEMM outputs that the recompute left in a slot."""
    segment = of()
    recompute = None if segment is None else segment.recompute_of(backward_id())
    return extras if recompute is None else recompute.extras.pop(slot, extras)
