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
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError
from torch.utils.weak import TensorWeakRef

from fusedckpt.autograd import phases
from fusedckpt.autograd.backward import at_end_of_backward, backward_id
from fusedckpt.autograd.module_calls import PutsBackBuffers, recomputed
from fusedckpt.autograd.phases import Likes, Phase, Tensors
from fusedckpt.autograd.uncompiled import uncompiled
from fusedckpt.checkpointing import calls
from fusedckpt.checkpointing.calls import Argument, Call, Options, Packed, layout_of, stale
from fusedckpt.checkpointing.determinism import Run


class Segment(Phase):
    """The forward of a checkpoint."""

    def __init__(self, options: Options | None = None):
        self.options = options or Options()
        self.contexts = self.options.context_fn()
        # whether a recompute runs only when, and as far as, backward needs it
        self.stops = self.options.early_stop and not self.options.debug
        self.calls: list[Call] = []
        # whether the last call has returned
        self.is_complete = False
        # in order, what stands for each saved tensor, and what it was like
        self.saved: list[tuple[weakref.ref[Packed], tuple[Any, ...]]] = []
        # the fused layers by name, each with what waits for its GEMM outputs
        self.slots: list[tuple[str, weakref.ref[Any]]] = []
        self.watched: Run | None = None
        # by storage, while a call runs
        self._arguments: dict[int, Argument] = {}
        self._recomputes: dict[int, Recompute] = {}

    def run(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call `fn`, dropping what autograd saves."""
        self.is_complete, around = False, phases.current()
        # what comes back through hooks is elsewhere in memory
        self._is_hooked = phases.top_hooks() is not None
        self.watched = run = Run(fn) if self.options.debug else None
        try:
            call = self._call(fn, args, kwargs)
            self.calls.append(call)
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
                output = fn(*args, **kwargs)
                self.is_complete = True
        finally:
            self._arguments = {}
        if not self.is_complete:
            raise RuntimeError("checkpoint: the forward's context suppressed an exception")
        if run is not None:
            run.see("the segment", output)
        return output

    def _call(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Call:
        return Call(fn, args, kwargs, self.options)

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
        recompute = Recompute(self, keeps)
        recompute.run()
        if backward != -1:
            self._recomputes[backward] = recompute
            at_end_of_backward(partial(self._recomputes.pop, backward, None))
        return recompute

    def runs(self, level: str) -> str:
        """Compute no GEMM outputs for backward: they would be dropped."""
        return "inputs"

    keeps = runs

    def enter(self, given: Tensors, likes: Likes = ()) -> None:
        """Nothing to do: every layer of a forward computes."""

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
    recompute = None if segment is None else segment._recomputes.get(backward_id())
    return extras if recompute is None else recompute.extras.pop(slot, extras)


class Stop(BaseException):
    """Ends a recompute that has brought back all that backward needs."""


class Recompute(Phase):
    """One recompute of a segment, inside a backward: the tensors it brought back, until taken.

    With `keeps`, until the end of that backward.
    """

    recomputes = True

    def __init__(self, segment: Segment, keeps: bool):
        self._segment, self._keeps, self._stops = segment, keeps, segment.stops
        self.extras: dict[int, Tensors] = {}
        self.values: dict[int, tuple[Tensor, int]] = {}
        self._num_saved = self._num_slots = 0
        self._stopped = False
        self._problems: list[str] = []
        # what was saved last, where no gradient flows into it
        self._before: Tensor | None = None
        self._leaves: list[tuple[Packed, TensorWeakRef]] = []
        # by index, whether the tensor is dropped: what is kept is compared all the same
        self._wanted: dict[int, bool] = {}
        for ref, _ in segment.saved:
            if (packed := ref()) is not None:
                source, is_dropped = packed.source, packed.source is None
                if isinstance(source, TensorWeakRef):
                    owner = source()
                    # what is loaded for each forward anew is gone
                    is_dropped = owner is None
                    if owner is not None and owner._version != packed.version:
                        raise RuntimeError(stale("a parameter saved for backward", owner))
                    self._leaves.append((packed, source))
                self._wanted[packed.index] = is_dropped or not self._stops
        self._last = max(self._wanted, default=-1)

    def run(self) -> None:
        """Call what the segment called, up to the last tensor that is wanted."""
        segment = self._segment
        run = segment.watched and Run(segment.calls[0].fn, segment.watched)
        hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)
        try:
            for call in segment.calls:
                if call.inner:
                    call.check()
            with hooks, torch.enable_grad(), nullcontext() if run is None else run:
                self._run_calls(run)
        except Stop:
            pass
        except Exception:
            # TorchScript makes another error of it
            if not self._stopped:
                raise
        finally:
            self._before = None
            for packed, leaf in self._leaves:
                # what the recompute itself wrote is accepted
                if (owner := leaf()) is not None:
                    packed.version = owner._version
            # this lives until the end of the backward, the segment's arguments do not
            del self._segment, self._leaves
        self._check(segment, run)

    def _run_calls(self, run: Run | None) -> None:
        made = {}
        observer = PutsBackBuffers() if run is None else run
        for call in self._segment.calls:
            self._level = call.level
            # the context may count operations: buffers are put back outside of it
            with (
                call.surroundings.restored(),
                recomputed(call.fn, observer),
                self._segment.contexts[1],
            ):
                result = call.again(made)
            if run is not None:
                run.see("the segment", result)

    def _check(self, segment: Segment, run: Run | None) -> None:
        """Raise where the recompute did not do what the forward did."""
        problems, count, found = self._problems, len(segment.saved), self._num_saved
        if found <= self._last or (segment.is_complete and not self._stops and found < count):
            different = "A different number of tensors was saved during the original forward and"
            problems.insert(0, f"{different} recomputation: {count} and {found}")
        if run is not None and segment.is_complete and run.difference is not None:
            problems.insert(0, run.difference)
        if problems:
            advice = "pass `debug=True` to see what differs" if run is None else run.listed()
            raise CheckpointError(
                f"checkpoint: {'; '.join(problems)}. The function must do the same each time it is "
                f"called: {advice}"
            )

    @uncompiled
    def pack(self, tensor: Tensor) -> Tensor:
        """Bring back the tensor that the forward saved at this place."""
        index, segment = self._num_saved, self._segment
        if index > self._last and self._stops:
            self._stop()
        self._num_saved += 1
        if index == len(segment.saved) and segment.is_complete:
            self._problems.append(
                f"trying to save more tensors during recomputation than the {index} of the forward"
            )
        if requires_grad := tensor.requires_grad:
            # its graph would come to hold itself
            tensor = tensor.detach()
        if index in self._wanted:
            if self._wanted[index]:
                self.values[index] = tensor, tensor._version
            was, now = segment.saved[index][1], (tensor.shape, tensor.dtype, tensor.device)
            if was != now and segment.options.determinism_check == "default":
                self._problems.append(
                    "Recomputed values for the following tensors have different metadata than "
                    f"during the forward pass: tensor {index} was {was}, is {now}"
                )
        if index == self._last and self._stops:
            # what requires no grad may be a mask that is yet to be written
            written = requires_grad and not self._is_after_noise(tensor)
            if written or not self._wanted[index]:
                self._stop()
        self._before = None if requires_grad else tensor
        return tensor

    def _stop(self) -> NoReturn:
        self._stopped = True
        raise Stop

    def _is_after_noise(self, tensor: Tensor) -> bool:
        """Whether the tensor before this one may yet be written: rrelu saves, then draws noise."""
        before = self._before
        if before is None or before.shape != tensor.shape or before.dtype != tensor.dtype:
            return False
        # an output is saved written, and again by what takes it as input
        storage = calls.storage_of(tensor)
        return storage == 0 or storage != calls.storage_of(before)

    def take(self, index: int) -> Tensor | None:
        """Hand over a tensor; None where it was handed over before and not kept."""
        take = self.values.get if self._keeps else self.values.pop
        tensor, version = take(index, (None, 0))
        if tensor is not None and tensor._version != version:
            raise RuntimeError(stale("a tensor saved for backward", tensor))
        return tensor

    def runs(self, level: str) -> str:
        """Compute GEMM outputs: backward reads them next."""
        return self._level

    def keeps(self, level: str) -> str:
        """Count on no GEMM outputs: the forward had none."""
        return "inputs"

    def enter(self, given: Tensors, likes: Likes = ()) -> None:
        """End the recompute before the layer's own work, where the layer is its end."""
        if not self._stops:
            return
        tensors = [tensor for tensor in given if tensor is not None]
        if self._num_saved <= self._last < self._num_saved + len(tensors):
            for tensor in tensors:
                self.pack(tensor)
        if self._num_saved > self._last:
            self._stop()

    def save(
        self, ctx: Any, name: str, given: Tensors, extras: Tensors = (), likes: Likes = ()
    ) -> None:
        """Leave the GEMM outputs in the slot of the forward's layer."""
        super().save(ctx, name, given, [None] * len(extras))
        if not any(likes):
            return
        slots, index = self._segment.slots, self._num_slots
        self._num_slots += 1
        expected, slot = slots[index] if index < len(slots) else ("nothing more", None)
        if name != expected and self._segment.is_complete:
            self._problems.append(
                f"fused layer {index} was {expected} in forward and is {name} when recomputed"
            )
        elif slot is not None and slot() is not None:
            self.extras[index] = phases.fitting(extras, likes)
