"""The recompute of a checkpointed segment, inside a backward."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointError

from fusedckpt._kept import Event, Held, Output, describe, like_of
from fusedckpt._paranoia import SEGMENT
from fusedckpt._phases import Like, Phase, current
from fusedckpt._replay import stale

if TYPE_CHECKING:
    from fusedckpt._segment import Segment


class Stop(BaseException):
    """Ends a recompute that has brought back all that backward needs."""


class Recompute(Phase):
    """One recompute of a segment: the tensors it brought back, until backward takes them."""

    recomputes = True

    def __init__(self, segment: Segment):
        self.segment = segment
        self.extras: dict[int, Sequence[Tensor | None]] = {}
        self._values: dict[int, tuple[Tensor, int]] = {}
        self._taken: dict[int, weakref.ref[Tensor]] = {}
        self._num_saved = self._num_slots = 0
        self._level = "preact"
        count = len(segment.events)
        self._last = next((i for i in reversed(range(count)) if _alive(segment.events[i])), -1)

    def run(self) -> None:
        """Call what the segment called, up to the last event whose tensor is wanted."""
        for call in self.segment.calls:
            call.conditions.check()
        hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)
        record = self.segment.record
        watch = nullcontext() if record is None else record.recompute()
        try:
            with hooks, torch.enable_grad(), _recomputing(), watch:
                self._run_calls()
        except Stop:
            return
        if self._num_saved <= self._last:
            raise CheckpointError(
                f"checkpoint: the segment saved {len(self.segment.events)} tensors in forward and "
                f"{self._num_saved} when recomputed: it must do the same each time"
            )

    def _run_calls(self) -> None:
        outputs: dict[Output, Tensor] = {}
        for number, call in enumerate(self.segment.calls):
            leaves = [self._argument(leaf, outputs) for leaf in call.leaves]
            args, kwargs = pytree.tree_unflatten(leaves, call.spec)
            del leaves
            self._level = call.level
            with call.conditions.restored():
                result = call.fn(*args, **kwargs)
            del args, kwargs
            if self.segment.record is not None:
                self.segment.record.see(SEGMENT, result)
            later = [leaf for call in self.segment.calls[number + 1 :] for leaf in call.leaves]
            made = {Output(number, i): leaf for i, leaf in enumerate(pytree.tree_leaves(result))}
            outputs = {place: leaf for place, leaf in (outputs | made).items() if place in later}

    def _argument(self, leaf: Any, outputs: dict[Output, Tensor]) -> Any:
        if isinstance(leaf, Output):
            return outputs[leaf]
        if isinstance(leaf, Held):
            return leaf.tensor().requires_grad_(leaf.requires_grad)
        return leaf

    def pack(self, tensor: Tensor) -> Tensor:
        """Bring back the tensor that the forward saved at this place."""
        index, segment = self._num_saved, self.segment
        # else the recompute's graph would hold itself
        tensor, attached = tensor.detach(), tensor
        if index >= len(segment.likes):
            raise CheckpointError(
                f"checkpoint: the segment saves more than the {len(segment.likes)} tensors of its "
                "forward when recomputed: it must do the same each time"
            )
        event, before = segment.events[index], segment.likes[index]
        like = like_of(attached, event is not None)
        if like != before:
            raise CheckpointError(
                f"checkpoint: tensor {index} that the segment saves was {describe(before)} in "
                f"forward and is {describe(like)} when recomputed"
            )
        self._num_saved += 1
        if _alive(event):
            self._values[index] = tensor, tensor._version
        # all the outputs are compared when they are recorded
        if index == self._last and segment.record is None:
            raise Stop
        return tensor

    def take(self, index: int) -> Tensor | None:
        """Hand over a tensor; None where it was handed over before and is gone."""
        if index not in self._values:
            return self._taken[index]() if index in self._taken else None
        tensor, version = self._values.pop(index)
        if tensor._version != version:
            raise RuntimeError(stale("a tensor saved for backward", tensor))
        self._taken[index] = weakref.ref(tensor)
        return tensor

    def runs(self, level: str) -> str:
        """Compute extras: backward reads them next."""
        return self._level

    def keeps(self, level: str) -> str:
        """Count on no extras: the forward had none."""
        return "inputs"

    def enter(self, given: Sequence[Tensor | None]) -> None:
        """End the recompute before the layer's own work, where the layer is its end."""
        tensors = [tensor for tensor in given if tensor is not None]
        is_last = self._num_saved <= self._last < self._num_saved + len(tensors)
        if is_last and self.segment.record is None:
            for tensor in tensors:
                self.pack(tensor)

    def save(
        self,
        ctx: Any,
        name: str,
        given: Sequence[Tensor | None],
        extras: Sequence[Tensor | None] = (),
        likes: Sequence[Like] = (),
    ) -> None:
        """Leave the extras in the slot of the forward's layer."""
        super().save(ctx, name, given, [None] * len(extras))
        if all(like is None for like in likes):
            return
        slots, index = self.segment.slots, self._num_slots
        expected, slot = slots[index] if index < len(slots) else ("nothing more", None)
        if name != expected:
            raise CheckpointError(
                f"checkpoint: fused layer {index} of the segment was {expected} in forward and is "
                f"{name} when recomputed"
            )
        self._num_slots += 1
        if slot is not None and slot() is not None:
            self.extras[index] = extras


def is_recomputing() -> bool:
    """Whether the code that asks runs in the recompute of a checkpoint, ours or torch's.

    For forward hooks and counters that are to act once per step.
    """
    if _state.depth:
        return True
    phase = current()
    return phase is not None and phase.recomputes


class _State(threading.local):
    depth = 0


_state = _State()


@contextmanager
def _recomputing() -> Iterator[None]:
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1


def _alive(event: weakref.ref[Event] | None) -> bool:
    return event is not None and event() is not None
