"""The recompute of a checkpointed segment, inside a backward."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from fusedckpt.autograd.module_calls import PutsBackBuffers, observed, putting_back
from fusedckpt.autograd.phases import Likes, Phase, Tensors, fitting, recomputing
from fusedckpt.autograd.saved_tensor import is_plain, storage_of
from fusedckpt.autograd.surroundings import unbatched
from fusedckpt.autograd.uncompiled import uncompiled
from fusedckpt.checkpointing.determinism import Run
from fusedckpt.checkpointing.saved import Leaf, meta_of, stale
from fusedckpt.checkpointing.tape import Tape


class Stop(BaseException):
    """Ends a recompute that has brought back all that backward needs."""


class Recompute(Phase):
    """One recompute of a segment: the tensors it brought back, until backward takes them.

    With `keeps`, until the end of that backward.
    """

    recomputes = True

    def __init__(self, tape: Tape, keeps: bool = False):
        self._tape, self._keeps, self._stops = tape, keeps, tape.options.stops
        self.extras: dict[int, Tensors] = {}
        self.values: dict[int, tuple[Tensor, int]] = {}
        self._num_saved = self._num_slots = 0
        self._stopped = False
        self._problems: list[str] = []
        # what was saved last, where no gradient flows into it
        self._before: Tensor | None = None
        alive = tape.alive()
        self._leaves = [entry for entry in alive if isinstance(entry, Leaf)]
        # by index, whether the tensor is dropped: what is kept is compared all the same
        self._wanted = {e.index: e.is_dropped or not self._stops for e in alive}
        self._last = max(self._wanted, default=-1)

    def run(self) -> None:
        """Call what the segment called, up to the last tensor that is wanted."""
        tape = self._tape
        tape.check()
        for leaf in self._leaves:
            leaf.check()
        hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)
        run = None if tape.run is None else Run(tape.calls[0].fn, tape.run)
        try:
            watched = observed(PutsBackBuffers()) if run is None else run.watched()
            with recomputing(), unbatched(), hooks, torch.enable_grad(), watched:
                self._run_calls(run)
        except Stop:
            pass
        except Exception:
            # TorchScript makes another error of it
            if not self._stopped:
                raise
        finally:
            self._before = None
            for leaf in self._leaves:
                leaf.renew()
            # this lives until the end of the backward, the segment's arguments do not
            del self._tape, self._leaves
        self._check(tape, run)

    def _run_calls(self, run: Run | None) -> None:
        made = {}
        for call in self._tape.calls:
            self._level = call.level
            with (
                call.surroundings.restored(),
                # outside of the context, which may count operations
                putting_back(getattr(call.fn, "__self__", None)),
                self._tape.contexts[1],
            ):
                result = call.again(made)
            if run is not None:
                run.see("the segment", result)

    def _check(self, tape: Tape, run: Run | None) -> None:
        """Raise where the recompute did not do what the forward did."""
        problems, count, found = self._problems, len(tape.saved), self._num_saved
        if found <= self._last or (tape.is_complete and not self._stops and found < count):
            different = "A different number of tensors was saved during the original forward and"
            problems.insert(0, f"{different} recomputation: {count} and {found}")
        if run is not None and tape.is_complete and run.difference is not None:
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
        index, tape = self._num_saved, self._tape
        if index > self._last and self._stops:
            self._stop()
        self._num_saved += 1
        if index == len(tape.saved) and tape.is_complete:
            self._problems.append(
                f"trying to save more tensors during recomputation than the {index} of the forward"
            )
        if requires_grad := tensor.requires_grad:
            # its graph would come to hold itself
            tensor = tensor.detach()
        if index in self._wanted:
            if self._wanted[index]:
                self.values[index] = tensor, tensor._version
            was, now = tape.metas[index], meta_of(tensor)
            if was != now and tape.options.determinism_check == "default":
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
        plain = is_plain(before) and is_plain(tensor)
        return not plain or storage_of(before) != storage_of(tensor)

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
        tensors = [tensor for tensor in given if tensor is not None]
        if self._stops and self._num_saved <= self._last < self._num_saved + len(tensors):
            for tensor in tensors:
                self.pack(tensor)
        if self._stops and self._num_saved > self._last:
            self._stop()

    def save(
        self, ctx: Any, name: str, given: Tensors, extras: Tensors = (), likes: Likes = ()
    ) -> None:
        """Leave the GEMM outputs in the slot of the forward's layer."""
        super().save(ctx, name, given, [None] * len(extras))
        if all(like is None for like in likes):
            return
        slots, index = self._tape.slots, self._num_slots
        self._num_slots += 1
        expected, slot = slots[index] if index < len(slots) else ("nothing more", None)
        if name != expected and self._tape.is_complete:
            self._problems.append(
                f"fused layer {index} was {expected} in forward and is {name} when recomputed"
            )
        elif slot is not None and slot() is not None:
            self.extras[index] = fitting(extras, likes)
