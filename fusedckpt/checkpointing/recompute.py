"""The recompute of a checkpointed segment, which brings back the tensors that its forward dropped.

It ends with the last tensor that backward needs; where that is in a fused layer, before the layer
computes anything. GEMM outputs that spare a fused layer's backward a GEMM are not among those
tensors: the recompute leaves them in slots.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError

from fusedckpt.autograd import phases, private, storages
from fusedckpt.autograd.phases import PhaseLevels, ProductMetas, Tensors
from fusedckpt.autograd.private import uncompiled
from fusedckpt.autograd.storages import stale
from fusedckpt.checkpointing import calls
from fusedckpt.checkpointing.attention import functions_called
from fusedckpt.checkpointing.calls import Argument, HeldArgument, LeafSource, Packed, Trace
from fusedckpt.checkpointing.determinism import WatchedRun, same_bits
from fusedckpt.checkpointing.module_calls import RecomputedCall
from fusedckpt.checkpointing.regions import CheckpointPhase, RegionCall
from fusedckpt.checkpointing.rounded import RoundedArgument
from fusedckpt.checkpointing.samples import Pair, name_of
from fusedckpt.checkpointing.stateful import advice_for
from fusedckpt.checkpointing.surroundings import NOTHING


class Stop(BaseException):
    """Ends a recompute that has brought back the tensors that backward needs."""


_NO_SLOT = None, None
# errors of operations that get tensors of other shapes
_OF_SHAPES = RuntimeError, ValueError, IndexError, AssertionError


class _Lent:
    """A saved tensor of a recompute's own graph, until the recompute ends.

    Nothing runs that graph backward later. A function may leave tensors of it in attributes, as
    routers leave their losses; they would keep all that it saved until the next step.
    """

    __slots__ = "__weakref__", "tensor"

    def __init__(self, tensor: Tensor):
        # a description of it once the recompute has ended
        self.tensor: Tensor | str = tensor

    def end(self, name: str) -> None:
        """Free the tensor; name: of the function that was recomputed."""
        tensor = self.tensor
        if isinstance(tensor, Tensor):
            self.tensor = f"{name} (it saved {tensor.dtype} {list(tensor.shape)})"


def _unpack(lent: _Lent) -> Tensor:
    """Return the tensor; refuse one after the recompute."""
    if isinstance(lent.tensor, str):
        raise RuntimeError(
            "checkpoint: backward ran through a tensor whose graph is freed. The recompute of "
            f"{lent.tensor} stored it outside of the call, as in an attribute or a list. Store "
            "tensor.detach() there, or add such a loss before the backward of the checkpoint"
        )
    return lent.tensor


class Progress:
    """How far a recompute has come among the saved tensors of its segment, and how far it goes.

    - A tensor is brought back if nothing else keeps it. Where the recompute runs to its end, as
      with debug=True, every tensor is, but for those that a region saved.
    - The recompute ends with the last tensor that backward can ask for, brought back or not: nodes
      whose saved tensors are freed ask for nothing.
    - Leaves are compared with the forward's as far as the last tensor that is brought back: weights
      behind it are not read for it. Where no leaf is known as far as that, those behind it tell,
      too.

    It raises where a parameter was written in place since the forward.
    """

    def __init__(self, segment: Trace):
        # how many tensors the function has saved so far, which is the place of the next one
        self.count = 0
        # whether the recompute ends with the last one
        self.stops = segment.stops
        # the place of the last tensor that backward can ask for
        self.last = -1
        # the place of the last tensor of which leaves are compared
        self.last_compared = -1
        # by the places of tensors that backward can ask for, whether they are brought back; one
        # that stays saved is compared all the same
        self.wanted: dict[int, bool] = {}
        # of tensors that are leaves, or views of leaves
        self._leaves: list[LeafSource] = []
        for reference in segment.saved:
            packed = reference()
            if packed is None:
                continue
            self.last = place = packed.index
            source = packed.source
            is_dropped = source is None
            if isinstance(source, LeafSource):
                # one that is loaded for each forward anew is gone; a written one raises
                is_dropped = source.leaf() is None
                self._leaves.append(source)
            is_wanted = is_dropped or not (self.stops or place in segment.staying)
            self.wanted[place] = is_wanted
            if is_wanted:
                self.last_compared = place
        if next(iter(segment.leaves), self.last) > self.last_compared:
            self.last_compared = self.last

    def ends_within(self, count: int) -> bool:
        """Whether the recompute ends with one of the next `count` tensors."""
        return self.stops and self.count + count > self.last

    def accept_writes(self) -> None:
        """Accept writes to leaves by the recompute itself."""
        for source in self._leaves:
            if (leaf := source.reference()) is not None:
                source.version = leaf._version


class Recompute(CheckpointPhase):
    """One recompute of a segment, inside a backward: the tensors it brought back, until taken.

    With `keeps`, until the end of that backward.
    """

    recomputes = True
    # with GEMM outputs, which backward reads next; it counts on none, as the forward had none
    levels = PhaseLevels("inputs", "preact")

    def __init__(self, segment: Trace, keeps: bool, asked: int = -1):
        self._segment = segment
        # the place of the tensor that the node of a backward asks for; -1 outside of a backward
        self._asked = asked
        self._keeps = keeps
        self._compares = segment.options.determinism_check == "default"
        self.may_differ = segment.may_differ
        self.region_calls = list[RegionCall]()
        self._met = iter(segment.region_calls)
        self._names = {region_call.name for region_call in segment.region_calls}
        # a checkpoint around may have asked for them
        self.patterns = segment.options.save_regions or tuple(self._names)
        # GEMM outputs of fused layers, by the places of their slots
        self.products: dict[int, Tensors] = {}
        # by place, the tensors that came back and were not taken yet, with their versions
        self.values: dict[int, tuple[Tensor, int]] = {}
        # samples of the forward with those of this recompute
        self.pairs: list[Pair] = []
        samples = segment.samples
        self._samples: Any = None if samples is None else samples.recompute()
        # of the tensors with samples
        self._strides = {} if samples is None else samples.strides
        # whether a call has begun and not ended
        self._entered = False
        # whether all tensors came back before its end
        self._stopped = False
        self._problems: list[str] = []
        # of the tensor saved before, where it requires no gradient: the operation, shape and dtype
        self._noise: tuple[Any, ...] = ()
        # those that its graph still holds
        self._lent: list[weakref.ref[_Lent]] = []
        self._progress = Progress(segment)

    @property
    def is_wanted(self) -> bool:
        """Whether it brings anything back."""
        return any(self._progress.wanted.values())

    def take_over(self, ahead: Recompute) -> None:
        """Take the tensors that another brought back; raise where an argument was written since."""
        for call in self._segment.calls:
            for value in (*call.inner, *call.values):
                if type(value) in (Argument, HeldArgument, RoundedArgument):
                    value.check()
        self.values = ahead.values
        self.products = ahead.products
        self.pairs = ahead.pairs
        del self._segment, self._progress, self._lent, self.region_calls, self._met

    def run(self) -> None:
        """Make the calls of the segment again, up to the last tensor that is wanted."""
        segment = self._segment
        run = segment.watch and WatchedRun(segment.calls[0].fn, segment.watch)
        self.watch = run
        self._leaves = calls.Leaves()
        try:
            for call in segment.calls:
                for argument in call.inner:
                    argument.check()
            self._run_calls(run)
        except Stop:
            pass
        except Exception as error:
            # TorchScript makes another error of it
            if not self._stopped:
                self._explain(error, run)
                raise
        finally:
            for reference in self._lent:
                if (lent := reference()) is not None:
                    lent.end(name_of(segment.calls[0].fn).removeprefix("checkpoint: "))
            progress = self._progress
            progress.accept_writes()
            # this lives until the end of the backward; arguments, called functions and outputs of
            # regions do not
            del self._segment, self._progress, self._lent, self.region_calls, self._met
        self._check(segment, progress, run)
        if self._samples is not None:
            self.pairs = segment.samples.pairs(self._samples)
            self._samples = None
            self._strides = {}

    def _run_calls(self, run: WatchedRun | None) -> None:
        made: dict[Any, Any] = {}
        for call in self._segment.calls:
            # before anything is entered: an enclosing checkpoint may have to recompute them, which
            # is to run in its own contexts alone
            args, kwargs = call.arguments(made)
            with (
                saved_tensors_hooks(phases.pack_hook(self), _unpack),
                torch.enable_grad(),
                call.surroundings.restored(),
                RecomputedCall(call),
                functions_called(self),
            ):
                if run is None and self._segment.contexts is calls.NO_CONTEXTS:
                    result = self._made(call, args, kwargs)
                else:
                    # the context may count operations: buffers are put back outside of it
                    context = self._segment.contexts[1]
                    with NOTHING if run is None else run.watched(), context:
                        result = self._made(call, args, kwargs)
            call.leave(result, made)
            if run is not None:
                run.see("the segment", result)
            # the next call gets the parts of it that it needs
            del result, args, kwargs

    def _made(self, call: Any, args: Any, kwargs: Any) -> Any:
        """Make a call again, and return its result."""
        self._entered = True
        result = call.fn(*args, **kwargs)
        self._entered = False
        if call is self._segment.calls[-1]:
            for place in self._segment.outputs:
                self.pack(calls.result_tensors(result)[place])
        return result

    def _explain(self, error: Exception, run: WatchedRun | None) -> None:
        """Raise a CheckpointError in place of an error that the forward did not have."""
        # running out of memory is an error of another class
        if not self._entered or type(error) not in _OF_SHAPES:
            return
        if (operation := private.written_entry(error)) is not None:
            raise CheckpointError(
                f"checkpoint: the policy of context_fn saves the result of {operation}, and the "
                f"function writes it in place: let the policy recompute {operation}"
            ) from error
        advice = advice_for(self._segment.calls)
        if advice or type(error) is RuntimeError:
            raise CheckpointError(
                f"checkpoint: the recompute raised {type(error).__name__}: {error}. The function "
                f"must do the same each time it is called.{advice}"
                f"{'' if run is None else run.listed()}"
            ) from error

    def _check(self, segment: Trace, progress: Progress, run: WatchedRun | None) -> None:
        """Raise where the recompute did not do the same as the forward."""
        problems = self._problems
        count = len(segment.saved)
        num_saved = progress.count
        if num_saved <= progress.last or (
            segment.is_complete and not progress.stops and num_saved < count
        ):
            different = "A different number of tensors was saved during the original forward and"
            problems.insert(0, f"{different} recomputation: {count} and {num_saved}")
        if run is not None and segment.is_complete and run.difference is not None:
            problems.insert(0, run.difference)
        if problems:
            advice = "pass `debug=True` to see what differs" if run is None else run.listed()
            raise CheckpointError(
                f"checkpoint: {'; '.join(problems)}. The function must do the same each time it is "
                f"called: {advice}.{advice_for(segment.calls)}"
            )

    @uncompiled
    def pack(self, tensor: Tensor, is_sampled: bool = True, key: int = 0) -> _Lent:
        """Bring back the tensor that the forward saved at this place."""
        progress = self._progress
        index = progress.count
        if index > progress.last and progress.stops:
            self._stop()
        progress.count = index + 1
        segment = self._segment
        if index >= len(segment.saved):
            self._see_more(index)
        elif self._compares:
            self._compare(index, tensor)
        requires_grad = tensor.requires_grad
        if requires_grad:
            # its graph would come to hold itself
            tensor = tensor.detach()
        if index in self._strides:
            self._samples.add(index, tensor, self._strides[index])
        if progress.wanted.get(index):
            self.values[index] = tensor, tensor._version
        if index >= progress.last - 1 and progress.stops:
            self._end_at(index, tensor, requires_grad)
        lent = _Lent(tensor)
        self._lent.append(weakref.ref(lent))
        return lent

    def _see_more(self, index: int) -> None:
        """Note that the function saves more tensors than in the forward."""
        if index == len(self._segment.saved) and self._segment.is_complete:
            self._problems.append(
                f"the recompute saves more tensors than the {index} of the forward"
            )

    def _end_at(self, index: int, tensor: Tensor, requires_grad: bool) -> None:
        """End with the last tensor, unless rrelu is yet to draw the one before."""
        like = private.num_nodes(), tensor.shape, tensor.dtype
        if index == self._progress.last:
            follows_noise = requires_grad and self._noise == like
            if not (follows_noise and self._may_draw(index)):
                self._stop()
        self._noise = () if requires_grad else like

    def _may_draw(self, index: int) -> bool:
        """Whether the operation that saves a tensor, and one like it before, may be rrelu.

        It saves noise, then its input, and only then draws the noise: the recompute goes on to the
        next operation that saves a tensor. Others save such a pair, too (atan2, xlogy); the node
        that asks for one of both says which operation it is of.
        """
        node = private.current_node() if self._asked in (index - 1, index) else None
        return node is None or "Rrelu" in node.name()

    def asks(self, name: str) -> bool:
        """Whether the forward saved regions of this name."""
        return name in self._names

    def meet(self, name: str) -> RegionCall:
        """Return the call of the region that the recompute has come to."""
        region_call = next(self._met, None)
        if region_call is None or region_call.name != name:
            last = "none" if region_call is None else repr(region_call.name)
            raise CheckpointError(
                f"checkpoint: the recompute calls a region {name!r}, where the forward called "
                f"{last}. The function must do the same each time it is called"
            )
        self.region_calls.append(region_call)
        return region_call

    def skip(self, region_call: RegionCall, inputs: Sequence[Tensor]) -> None:
        """Take the tensors derived from a region's inputs; end where they are the last."""
        for derived in region_call.derived:
            if derived is None:
                self._progress.count += 1
            else:
                self.pack(derived.of(inputs))
        if self._progress.ends_within(0):
            self._stop()

    def _compare(self, index: int, tensor: Tensor) -> None:
        """Note where a tensor is not the forward's, or is computed from other leaves."""
        base = tensor._base
        owner = tensor if base is None else base
        leaves: Sequence[Tensor] = ()
        # `leaf_of`, without a call
        if owner.is_leaf and (owner.requires_grad or storages.is_parameter(owner)):
            leaves = (owner,)
            self._leaves.are_found = True
        elif not self._leaves.are_found:
            leaves = self._leaves.behind(tensor)
        packed = self._segment.saved[index]()
        if packed is None:
            return
        now = tensor.shape, tensor.dtype, tensor.device
        if packed.meta != now:
            self._problems.append(
                "Recomputed values for the following tensors have different metadata than "
                f"during the forward pass: tensor {index} was {packed.meta}, is {now}"
            )
        elif not (leaves or index in self._segment.leaves):
            # most
            return
        elif index <= self._progress.last_compared and self._is_replaced(packed, leaves, tensor):
            self._problems.append(
                f"a parameter was replaced between forward and backward, as functional_call does "
                f"when it returns, and the recompute makes tensor {index} ({tensor.dtype} "
                f"{list(tensor.shape)}) from the new one; pass such parameters as arguments"
            )

    def _is_replaced(self, packed: Packed, now: Sequence[Tensor], tensor: Tensor) -> bool:
        """Whether a leaf that a tensor is, or is computed from, is not the forward's."""
        source = packed.source
        if isinstance(source, LeafSource) and now and source.reference() is now[0]:
            return False
        references = self._segment.leaves.get(packed.index)
        if references is None:
            # later ones may be so in only one run: sharding makes views before a module's call
            owner = storages.leaf_of(tensor)
            return owner is not None and storages.is_parameter(owner)
        # a leaf that is loaded for each forward anew is gone
        before = [leaf() for leaf in references]
        if not now and isinstance(source, LeafSource):
            # a leaf then, computed now
            before = [leaf if leaf is None else source.view_of(leaf) for leaf in before]
            now = [tensor]
        if len(before) != len(now):
            return False
        for was, x in zip(before, now, strict=True):
            if was is not None and was is not x and self._is_other(was, x):
                return True
        return False

    def _is_other(self, was: Tensor, now: Tensor) -> bool:
        """Whether a leaf has other values than the forward's.

        One that the function makes each time has the same values.
        """
        storage = storages.storage_of(was)
        if was.is_meta or (storage and was.untyped_storage().nbytes() == 0):
            # a leaf that has no memory now cannot be compared
            return False
        if not (storage and storages.storage_of(now)):
            return storages.is_parameter(was) and storages.is_parameter(now)
        arguments = (x for call in self._segment.calls for x in call.values)
        if any(isinstance(x, Argument) and x.storage == storage for x in arguments):
            # hooks may return another tensor for an argument
            return False
        is_alike = (was.shape, was.dtype, was.device) == (now.shape, now.dtype, now.device)
        return not (is_alike and same_bits(was.detach(), now.detach()))

    def _stop(self) -> NoReturn:
        self._stopped = True
        raise Stop

    def take(self, index: int) -> Tensor | None:
        """Return a tensor; None where it was taken before, unless this keeps tensors."""
        take = self.values.get if self._keeps else self.values.pop
        tensor, version = take(index, (None, 0))
        if tensor is not None and tensor._version != version:
            raise RuntimeError(stale("checkpoint: a tensor saved for backward", tensor))
        return tensor

    def enter(self, tensors: Tensors, product_metas: ProductMetas = ()) -> None:
        """End the recompute before the layer's own work, where the layer is its end."""
        if not self._progress.ends_within(len(tensors)):
            return
        present = [tensor for tensor in tensors if tensor is not None]
        if self._progress.ends_within(len(present)):
            for tensor in present:
                self.pack(tensor)
            self._stop()

    def save(
        self,
        ctx: Any,
        name: str,
        tensors: Tensors,
        products: Tensors = (),
        product_metas: ProductMetas = (),
    ) -> None:
        """Leave the GEMM outputs in the slot of the forward's layer."""
        super().save(ctx, name, tensors, [None] * len(products))
        place = self._progress.count
        expected, slot = self._segment.slots.get(place, _NO_SLOT)
        # another layer than the forward's leaves nothing for that one's backward
        if slot is not None and name == expected and slot() is not None:
            self.products[place] = phases.fitting(products, product_metas)
