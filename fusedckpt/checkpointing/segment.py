"""A checkpointed segment: what its forward drops, and the recompute that brings it back.

Everything that autograd saves in a segment's forward is an event. An event's tensor is dropped, and
found again by its position when the segment is recomputed. What costs nothing to keep stays:
parameters and other leaves, and views of the segment's inputs. A recompute ends with the last event
that backward needs; where that is in a fused layer, before the layer computes anything. The extras
of fused layers, GEMM outputs that spare their backward a GEMM, are no events: the recompute leaves
them in slots.

One recompute serves one backward, and the end of that backward drops all it made.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils import _pytree as pytree

from fusedckpt.autograd.phases import Like, Phase, can_see_hooks, current
from fusedckpt.checkpointing.determinism import SEGMENT, Record
from fusedckpt.checkpointing.kept import (
    Call,
    Event,
    Held,
    Leaf,
    Marks,
    Output,
    View,
    is_parameter,
    is_plain,
    maker,
    marks_of,
    owner_of,
)
from fusedckpt.checkpointing.recompute import Recompute
from fusedckpt.checkpointing.replay import Conditions
from fusedckpt.checkpointing.versions import stale, version_of

_exec_group: Callable[[], Any] | None = getattr(torch._C, "_get_graph_exec_group", None)


class _Slot:
    """Where a fused layer finds the extras that the recompute made for it."""

    def __init__(self, segment: Segment, index: int):
        # the layer's node outlives its saved tensors, which hold the segment
        self.segment, self.index = weakref.ref(segment), index

    def __call__(self, extras: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        segment = self.segment()
        recompute = None if segment is None else segment.running()
        return extras if recompute is None else recompute.extras.pop(self.index, extras)


class Segment(Phase):
    """The forward of a checkpoint: one call, or several in a row that hand on their outputs."""

    def __init__(self, record: Record | None = None):
        self.record = record
        self.calls: list[Call] = []
        # what an enclosing checkpoint recomputes, it gives back once only
        self._is_nested = current() is not None or not can_see_hooks()
        # of every tensor saved: what it was like, and where it was dropped, its event
        self.marks: list[Marks] = []
        self.events: list[weakref.ref[Event] | None] = []
        self.slots: list[tuple[str, weakref.ref[_Slot]]] = []
        # by storage, while a call runs
        self._arguments: dict[int, tuple[Held, Tensor]] = {}
        self._leaves: dict[int, tuple[Tensor, Held]] = {}
        self._outputs: dict[int, tuple[weakref.ref[Tensor], int, Output]] = {}
        self._recomputes: dict[int, Recompute] = {}

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        flat: tuple[list[Any], Any],
        conditions: Conditions,
        level: str = "preact",
    ) -> Any:
        """Call `fn`, dropping what autograd saves.

        `flat` is the arguments flattened, `conditions` are those of now.
        """
        leaves, spec = flat
        try:
            held = [self._hold(leaf) for leaf in leaves]
            self.calls.append(Call(maker(fn), held, spec, conditions, level))
            if (around := current()) is not None:
                # where these were all that an enclosing recompute is for
                around.enter(())
            watch = nullcontext() if self.record is None else self.record.forward()
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack), watch:
                output = fn(*args, **kwargs)
        finally:
            self._arguments, self._leaves = {}, {}
        if self.record is not None:
            self.record.see(SEGMENT, output)
        conditions.settle()
        return output

    def _hold(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        known = self._outputs.get(id(leaf))
        if known is not None and known[0]() is leaf and known[1] == version_of(leaf):
            return known[2]
        if id(leaf) in self._leaves:
            # given twice: the recompute gets one tensor twice too
            return self._leaves[id(leaf)][1]
        held = Held(leaf)
        self._leaves[id(leaf)] = leaf, held
        if is_plain(leaf) and not self._is_nested:
            self._arguments[leaf.untyped_storage()._cdata] = held, leaf
        return held

    def hand_on(self, output: Any) -> None:
        """Remember what the last call returned, for the next one."""
        call = len(self.calls) - 1
        for index, leaf in enumerate(pytree.tree_leaves(output)):
            if isinstance(leaf, Tensor):
                place = Output(call, index)
                self._outputs[id(leaf)] = weakref.ref(leaf), version_of(leaf), place

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd keeps in the tensor's place."""
        owner = owner_of(tensor)
        packed: Any = None
        if is_parameter(owner) or (owner.is_leaf and owner.requires_grad):
            # a view would hold its own node
            packed = Leaf(tensor if tensor.is_leaf else tensor.detach(), tensor._version)
        elif self._arguments and is_plain(tensor):
            packed = self._view(tensor)
        # an argument comes from no node in the recompute
        made_here = packed is None and id(tensor) not in self._leaves
        self.marks.append(marks_of(tensor, made_here, id(owner) in self._leaves))
        if packed is not None:
            self.events.append(None)
            return packed
        event = Event(len(self.events))
        self.events.append(weakref.ref(event))
        return event

    def _view(self, tensor: Tensor) -> View | None:
        held, argument = self._arguments.get(tensor.untyped_storage()._cdata, (None, tensor))
        if held is None or tensor.dtype != argument.dtype or tensor.numel() != argument.numel():
            return None
        same = tensor.size() == argument.size() and tensor.stride() == argument.stride()
        # of equal offset, as they have equally many elements of one storage
        reshaped = tensor.is_contiguous() and argument.is_contiguous()
        here = tensor.storage_offset() == argument.storage_offset()
        return View(held, tensor.size()) if here and (same or reshaped) else None

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor that `pack` was given, recomputing the segment if need be."""
        if isinstance(packed, Leaf):
            if packed.tensor._version != packed.version:
                raise RuntimeError(stale("a parameter", packed.tensor))
            return packed.tensor
        if isinstance(packed, View):
            return packed.held.tensor().view(packed.size)
        if torch.compiler.is_compiling():
            return _uncompiled(self._bring_back, packed)
        return self._bring_back(packed)

    def _bring_back(self, packed: Event) -> Tensor:
        value = (self.running() or self._recompute()).take(packed.index)
        if value is None:
            warnings.warn(
                "checkpoint: a saved tensor was read twice in one backward, which recomputes its "
                "segment once more and then keeps all: read ctx.saved_tensors once",
                stacklevel=2,
            )
            value = self._recompute(keeps=True).take(packed.index)
        assert value is not None
        return value

    def running(self) -> Recompute | None:
        """Return the recompute that serves the backward of now."""
        return self._recomputes.get(_backward_id())

    def _recompute(self, keeps: bool = False) -> Recompute:
        recompute = Recompute(self, keeps)
        recompute.run()
        recompute.release()
        backward = _backward_id()
        if backward != -1:
            self._recomputes[backward] = recompute
            _at_end_of_backward(partial(self._recomputes.pop, backward, None))
        return recompute

    def runs(self, level: str) -> str:
        """Compute no extras: they would be dropped."""
        return "inputs"

    keeps = runs

    def save(
        self,
        ctx: Any,
        name: str,
        given: Sequence[Tensor | None],
        extras: Sequence[Tensor | None] = (),
        likes: Sequence[Like] = (),
    ) -> None:
        """Keep what the layer was given as events, and leave a slot for its extras."""
        super().save(ctx, name, given, [None] * len(extras))
        # the recompute makes them for this layer alone
        ctx.owns_extras = True
        if any(like is not None for like in likes):
            ctx.recall = slot = _Slot(self, len(self.slots))
            self.slots.append((name, weakref.ref(slot)))


@_disable_dynamo
def _uncompiled(fn: Callable[..., Any], *args: Any) -> Any:
    """Call what compiled autograd is to leave to eager execution."""
    return fn(*args)


def _backward_id() -> int:
    """Return what tells one backward from another, -1 outside of any."""
    group = None if _exec_group is None else _exec_group()
    return torch._C._current_graph_task_id() if group is None else id(group)


def _at_end_of_backward(callback: Callable[[], Any]) -> None:
    """Have the end of this backward call back; under a GraphExecGroup, the end of the group."""
    group = None if _exec_group is None else _exec_group()
    if group is None:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    else:
        weakref.finalize(group, callback)
