"""The recompute of a checkpointed segment, inside a backward."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch._functorch import pyfunctorch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointError

from fusedckpt.autograd.phases import Like, Phase, current
from fusedckpt.checkpointing.determinism import SEGMENT
from fusedckpt.checkpointing.kept import Call, Event, Held, Output, is_plain, marks_of
from fusedckpt.checkpointing.versions import stale

if TYPE_CHECKING:
    from fusedckpt.checkpointing.segment import Segment


_clear_stack: Any = getattr(pyfunctorch, "temporarily_clear_interpreter_stack", None)


class Stop(BaseException):
    """Ends a recompute that has brought back all that backward needs."""


class Recompute(Phase):
    """One recompute of a segment: the tensors it brought back, until backward takes them.

    With `keeps`, until the end of that backward.
    """

    recomputes = True

    def __init__(self, segment: Segment, keeps: bool = False):
        self.segment, self._keeps = segment, keeps
        self.extras: dict[int, Sequence[Tensor | None]] = {}
        self._values: dict[int, tuple[Tensor, int]] = {}
        self._num_saved = self._num_slots = 0
        self._stopped = False
        # the one that runs
        self._call: Call
        # what was saved before, where no gradient flows into it
        self._before: Tensor | None = None
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
            with _unbatched(), hooks, torch.enable_grad(), _recomputing(), watch:
                self._run_calls()
        except Stop:
            return
        except Exception:
            # TorchScript makes another error of it
            if not self._stopped:
                raise
            return
        finally:
            self._before = None
        if self._num_saved <= self._last:
            raise CheckpointError(
                f"checkpoint: the segment saved {len(self.segment.events)} tensors in forward and "
                f"{self._num_saved} when recomputed: it must do the same each time"
            )

    def release(self) -> None:
        """Let go of the segment: this lives until the end of the backward, its arguments do not."""
        del self.segment, self._call

    def _run_calls(self) -> None:
        outputs: dict[Output, Tensor] = {}
        for number, call in enumerate(self.segment.calls):
            leaves = _arguments(call.leaves, outputs)
            args, kwargs = pytree.tree_unflatten(leaves, call.spec)
            del leaves
            self._call = call
            with call.conditions.restored():
                result = call.make()(*args, **kwargs)
            del args, kwargs
            if self.segment.record is not None:
                self.segment.record.see(SEGMENT, result)
            later = [leaf for call in self.segment.calls[number + 1 :] for leaf in call.leaves]
            made = {Output(number, i): leaf for i, leaf in enumerate(pytree.tree_leaves(result))}
            outputs = {place: leaf for place, leaf in (outputs | made).items() if place in later}

    def pack(self, tensor: Tensor) -> Tensor:
        """Bring back the tensor that the forward saved at this place."""
        index, segment = self._num_saved, self.segment
        if index > self._last and segment.record is None:
            self._stop()
        # else the recompute's graph would hold itself
        tensor, attached = tensor.detach(), tensor
        if index >= len(segment.marks):
            raise CheckpointError(
                f"checkpoint: the segment saves more than the {len(segment.marks)} tensors of its "
                "forward when recomputed: it must do the same each time"
            )
        event, before = segment.events[index], segment.marks[index]
        marks = marks_of(attached, event is not None)
        if marks != before:
            was, now = map(self._call.conditions.modules.describe, (before, marks))
            raise CheckpointError(
                f"checkpoint: tensor {index} that the segment saves was {was} in forward and is "
                f"{now} when recomputed: it must do the same each time"
            )
        self._num_saved += 1
        if _alive(event):
            self._values[index] = tensor, tensor._version
        # all outputs are compared where they are recorded
        is_last = index == self._last and segment.record is None
        if is_last and attached.requires_grad and not self._is_noise(tensor):
            self._stop()
        self._before = None if attached.requires_grad else tensor
        return tensor

    def _stop(self) -> NoReturn:
        self._stopped = True
        raise Stop

    def _is_noise(self, tensor: Tensor) -> bool:
        """Whether the tensor before this one may yet be written: rrelu saves, then draws noise."""
        before = self._before
        if before is None or before.shape != tensor.shape or before.dtype != tensor.dtype:
            return False
        if not (is_plain(before) and is_plain(tensor)):
            return True
        # else it is an output, and this one the same as input of what follows
        return before.untyped_storage()._cdata != tensor.untyped_storage()._cdata

    def take(self, index: int) -> Tensor | None:
        """Hand over a tensor; None where it was handed over before and not kept."""
        given = self._values.get(index) if self._keeps else self._values.pop(index, None)
        if given is None:
            return None
        tensor, version = given
        if tensor._version != version:
            raise RuntimeError(stale("a tensor saved for backward", tensor))
        return tensor

    def runs(self, level: str) -> str:
        """Compute extras: backward reads them next."""
        return self._call.level

    def keeps(self, level: str) -> str:
        """Count on no extras: the forward had none."""
        return "inputs"

    def enter(self, given: Sequence[Tensor | None]) -> None:
        """End the recompute before the layer's own work, where the layer is its end."""
        if self.segment.record is not None:
            return
        tensors = [tensor for tensor in given if tensor is not None]
        if self._num_saved <= self._last < self._num_saved + len(tensors):
            for tensor in tensors:
                self.pack(tensor)
        if self._num_saved > self._last:
            self._stop()

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


def _arguments(leaves: Sequence[Any], outputs: dict[Output, Tensor]) -> list[Any]:
    """Return a call's leaves as the forward had them; what was given twice is one tensor."""
    given: dict[Held, Tensor] = {}
    found = []
    for leaf in leaves:
        if isinstance(leaf, Held):
            if leaf not in given:
                given[leaf] = leaf.tensor().requires_grad_(leaf.requires_grad)
            found.append(given[leaf])
        else:
            found.append(outputs[leaf] if isinstance(leaf, Output) else leaf)
    return found


def is_recomputing() -> bool:
    """Whether the code that asks runs in the recompute of a checkpoint, ours or torch's.

    For forward hooks and counters that are to act once per step.
    """
    if _state.depth:
        return True
    phase = current()
    return phase is not None and phase.recomputes


def _unbatched() -> AbstractContextManager[Any]:
    """Leave the vmap of a batched backward: the forward was not in it, and random ops refuse it."""
    if _clear_stack is None or not torch._C._are_functorch_transforms_active():
        return nullcontext()
    return _clear_stack()


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
