"""A segment's forward: the tensors that it drops, and where its backward finds them.

Tensors that autograd saves in a segment's forward are dropped, and found again by their position
when the segment is recomputed, inside the first backward that asks or, by `prefetch`, before it.
Tensors that cost nothing to keep stay: parameters and other leaves, and views of the arguments. A
recompute serves one backward; the end of that backward drops all that the recompute made.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint as stock
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import TensorWeakRef

from fusedckpt.autograd import phases, private, storages
from fusedckpt.autograd.phases import PhaseLevels, ProductMetas, Tensors
from fusedckpt.autograd.private import at_end_of_backward, backward_id, uncompiled
from fusedckpt.autograd.rounded import is_rounded
from fusedckpt.checkpointing import calls
from fusedckpt.checkpointing.attention import functions_called
from fusedckpt.checkpointing.calls import (
    Argument,
    ArgumentSource,
    Call,
    HeldArgument,
    LateArgument,
    LeafSource,
    Leaves,
    Options,
    Packed,
    Provisional,
    Trace,
    layout_of,
)
from fusedckpt.checkpointing.determinism import WatchedRun
from fusedckpt.checkpointing.offload import OffloadedInputs
from fusedckpt.checkpointing.recompute import Recompute
from fusedckpt.checkpointing.regions import CheckpointPhase
from fusedckpt.checkpointing.rounded import RoundedArgument
from fusedckpt.checkpointing.samples import Pair, Samples, compare_recompute, may_change, name_of
from fusedckpt.state.rng import RandomStates

# of a node: the segment of the function that returned its result
_METADATA_KEY = "fusedckpt segment"


def segment_of(node: Any) -> Any:
    """Return the segment of the function that returned a node's result, or None."""
    reference = node.metadata.get(_METADATA_KEY)
    return None if reference is None else reference()


def was_segment(node: Any) -> bool:
    """Whether a function of a segment returned a node's result, also where the segment is freed."""
    return _METADATA_KEY in node.metadata


class Segment(Trace, CheckpointPhase):
    """The forward of a checkpoint.

    Its recompute reads the fields of `Trace` (calls.py); layers and regions that run in it call the
    methods of `CheckpointPhase` (regions.py).
    """

    # GEMM outputs for backward would be dropped
    levels = PhaseLevels("inputs", "inputs")

    def __init__(self, options: Options):
        super().__init__(options)
        # by storage, while a call runs: the tensor arguments, and saved outputs of regions
        self._arguments: dict[int, Argument] = {}
        self._leaves = Leaves()
        # while it may turn out that a call writes its arguments, the tensors that it saved
        self.provisional: list[Provisional] | None = None
        # whether they are saved, and no recompute is for them
        self.is_saved = False
        self.late = []
        # the storage of arguments that come back elsewhere in memory: 0 for none, None for any
        self._moved: int | None = 0
        # by the id of the backward that each serves
        self._recomputes: dict[int, Recompute] = {}
        # a recompute that came before its backward
        self._ahead: Recompute | None = None
        self.patterns = self.options.save_regions
        # a context may count all ops, or save some
        self.refuses = self.options.context_fn is not stock.noop_context_fn
        self.offloaded = OffloadedInputs() if options.offload else None

    def run(self, call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
        """Make a call for the first time, dropping the tensors that autograd saves."""
        self.is_complete = False
        enclosing = phases.current()
        self.enclosing = enclosing
        # a tensor that comes back through hooks is elsewhere in memory
        hooks = private.top_hooks()
        self._moved = phases.moved_by(hooks)
        # a recompute around may give this one other values to begin with
        compares = not (isinstance(enclosing, CheckpointPhase) and enclosing.may_differ)
        self.may_differ = self.options.rounds or not compares
        run = WatchedRun(call.fn) if self.options.debug and compares else None
        self.watch = run
        self.calls.append(call)
        options = self.options
        samples = options.samples or (options.rounds and options.determinism_check == "default")
        if samples and compares and not may_change(hooks):
            is_late = options.reads_samples_late or options.rounds
            name = name_of(call.fn)
            self.samples = self.samples or Samples(name, is_late, is_rounded=options.rounds)
            self.samples.begin(calls.tensors_among((*args, *kwargs.values())))
        try:
            for value in (*call.inner, *call.values):
                if isinstance(value, Argument):
                    self._know(value)
            if enclosing is not None:
                # where the arguments were all that an enclosing recompute is for
                enclosing.enter(())
            with saved_tensors_hooks(phases.pack_hook(self), self.unpack), functions_called(self):
                if run is None and self.contexts is calls.NO_CONTEXTS:
                    output = call.fn(*args, **kwargs)
                    self.is_complete = True
                else:
                    with nullcontext() if run is None else run.watched(), self.contexts[0]:
                        output = call.fn(*args, **kwargs)
                        self.is_complete = True
            call.surroundings.end()
        finally:
            self._arguments = {}
            self.enclosing = None
            if self.samples is not None and not self.is_complete:
                # their graph holds this segment
                self.samples.clear()
        if not self.is_complete:
            raise RuntimeError(
                "checkpoint: the forward's context of context_fn suppressed an exception: let its "
                "__exit__ return False"
            )
        if call.buffers is not None:
            call.buffers.end()
        if run is not None:
            run.see("the segment", output)
        if self.samples is not None:
            self.samples.end(self.staying)
        if self.provisional is not None:
            self._save(self.provisional)
        if enclosing is None:
            self._mark(output, (*args, *kwargs.values()))
        if self.offloaded is not None:
            self.offloaded.segment_ran()
        return output

    def _know(self, argument: Argument) -> None:
        """Note an argument, or a saved output of a region: views of it need no recompute."""
        # an enclosing checkpoint gives a tensor that it recomputes back once only
        if self.enclosing is None and private.SEES_HOOKS and argument.storage:
            self._arguments[argument.storage] = argument

    def know_output(self, output: Argument) -> None:
        """Note a saved output of a region, unless another tensor may get its storage meanwhile."""
        # hooks around, and offloading, hold a copy of it
        if self._moved is not None and self.offloaded is None:
            self._know(output)

    def save_argument(self, tensor: Tensor) -> Argument:
        """Return an argument that is saved now, as it is or, where the checkpoint rounds, not."""
        if self.options.packs and is_rounded(tensor):
            return RoundedArgument(tensor, partial(self.save_exactly, of=tensor))
        return self.save_exactly(tensor)

    def save_exactly(self, tensor: Tensor, of: Tensor | None = None) -> Argument:
        """Return a tensor, perhaps the bytes of another one, that is saved now as it is."""
        if self.offloaded is None:
            return Argument(tensor)
        node: Any = (tensor if of is None else of).grad_fn
        segment = None if node is None else segment_of(node)
        return self.offloaded.save(tensor, None if segment is None else segment.offloaded)

    def save_argument_late(self, tensor: Tensor) -> LateArgument:
        """Return an argument that is saved with the first tensor that autograd saves."""
        argument = LateArgument(tensor)
        if self.late is not None:
            self.late.append((argument, None))
        return argument

    def _save_late(self) -> None:
        late = self.late or ()
        self.late = None
        for argument, outermost in late:
            with phases.outside_hooks_of(outermost or self):
                argument.save()

    def _save(self, provisional: list[Provisional]) -> None:
        """Save tensors as without a checkpoint; a tensor written since still raises."""
        for packed, tensor, version in provisional:
            if tensor._version == version:
                packed.source = ArgumentSource(Argument(tensor))
        self.stops = True
        self.is_saved = True
        self.provisional = None

    def _mark(self, output: Any, inputs: tuple[Any, ...]) -> None:
        """Mark an output's nodes as the segment's own, but not those of tensors it was given."""
        known = {*map(id, inputs)}
        for leaf in calls.result_tensors(output):
            node: Any = leaf.grad_fn
            if node is not None and id(leaf) not in known:
                node.metadata[_METADATA_KEY] = weakref.ref(self)

    def pack_output(self, place: int, output: Tensor) -> Packed:
        """Return the stand-in for an output at a place, for which a recompute runs to its end."""
        self.outputs.append(place)
        return self.pack(output)

    @uncompiled
    def pack(self, tensor: Tensor, is_sampled: bool = True, key: int = 0) -> Packed:
        """Return the stand-in that autograd keeps in the tensor's place."""
        if self.late is not None:
            self._save_late()
        index = len(self.saved)
        source: Any = None
        base = tensor._base
        owner = tensor if base is None else base
        # `leaf_of`, without a call
        if owner.is_leaf and (owner.requires_grad or storages.is_parameter(owner)):
            source = self._leaf_source(index, tensor, owner)
        else:
            if not self._leaves.are_found and (leaves := self._leaves.behind(tensor)):
                self.leaves[index] = [*map(TensorWeakRef, leaves)]
            key = key or storages.storage_of(tensor)
            argument = self._arguments.get(key)
            if argument is not None:
                source = self._argument_source(tensor, argument)
        packed = Packed(index, (tensor.shape, tensor.dtype, tensor.device), source, key)
        self.saved.append(weakref.ref(packed))
        if source is None and is_sampled and self.samples is not None:
            self.samples.take(index, tensor, key)
        if self.provisional is not None:
            # without its graph, which would come to hold itself
            tensor = tensor.detach() if tensor.requires_grad else tensor
            self.provisional.append(Provisional(packed, tensor, tensor._version))
        return packed

    def _leaf_source(self, index: int, tensor: Tensor, owner: Tensor) -> LeafSource | None:
        """Note the leaf of a saved tensor, and return it as the tensor's source."""
        reference = TensorWeakRef(owner)
        self.leaves[index] = [reference]
        self._leaves.are_found = True
        # a view of another dtype, or of a tensor that is not plain, is for a recompute to make
        if tensor is owner or (
            tensor.dtype == owner.dtype
            and storages.storage_of(tensor)
            and storages.storage_of(owner)
        ):
            return LeafSource(tensor, owner, reference)
        return None

    def _argument_source(self, tensor: Tensor, argument: Argument) -> ArgumentSource | None:
        """Return the argument with a tensor's storage as its source, None for another dtype."""
        if argument.dtype != tensor.dtype:
            return None
        layout = layout_of(tensor)
        if layout == argument.layout:
            return ArgumentSource(argument)
        # the whole comes back through any hooks, a view not; tensors in containers meet none
        is_moved = self._moved is None or self._moved == argument.storage
        if is_moved and type(argument) is not HeldArgument:
            return None
        return ArgumentSource(argument, layout)

    @uncompiled
    def unpack(self, packed: Packed) -> Tensor:
        """Return the tensor that `pack` was given, recomputing the segment if need be."""
        source = packed.source
        if source is not None and (self.stops or packed.index in self.staying):
            tensor = source.tensor()
            if tensor is not None:
                return tensor
        backward = backward_id()
        index = packed.index
        recompute = self._recomputes.get(backward) or self._recompute(backward, asked=index)
        tensor = recompute.take(index)
        # read twice in one backward: once more, and then for as long as that takes
        return self._recompute(backward, True, index).values[index][0] if tensor is None else tensor

    def random_states(self) -> RandomStates | None:
        """Return the states now of the generators that a recompute restores."""
        return self.calls[-1].surroundings.random_states()

    def _recompute(self, backward: int, keeps: bool = False, asked: int = -1) -> Recompute:
        """Return a recompute that has run, or has taken over the one that was prefetched.

        backward: the id of the backward that it serves, -1 outside of any. keeps: whether it keeps
        tensors that were taken. asked: the place of the tensor that a node asks for.
        """
        recompute = Recompute(self, keeps, asked)
        ahead = self._ahead
        if ahead is None or keeps or backward == -1:
            recompute.run()
        else:
            self._ahead = None
            recompute.take_over(ahead)
        if recompute.pairs:
            compare_recompute(recompute.pairs, partial(self._samples_again, asked))
            # this lives until the end of the backward
            recompute.pairs = []
        if backward != -1:
            self._recomputes[backward] = recompute
            at_end_of_backward(partial(self._recomputes.pop, backward, None))
        return recompute

    def _samples_again(self, asked: int) -> list[Pair]:
        """Return the samples of one more recompute."""
        recompute = Recompute(self, True, asked)
        recompute.run()
        return recompute.pairs

    def prefetch(self) -> bool:
        """Recompute for the next backward; return whether there was anything to bring back."""
        if self._ahead is None:
            ahead = Recompute(self, False)
            if not ahead.is_wanted:
                return False
            ahead.run()
            self._ahead = ahead
        return True

    def save(
        self,
        ctx: Any,
        name: str,
        tensors: Tensors,
        products: Tensors = (),
        product_metas: ProductMetas = (),
    ) -> None:
        """Save the tensors that the layer was given, and leave a slot for its GEMM outputs."""
        super().save(ctx, name, tensors, [None] * len(products))
        # the recompute makes them for this layer alone
        ctx.owns_products = True
        if any(product_metas):
            # no more than that: the layer's node outlives its saved tensors, which hold the segment
            place = len(self.saved)
            slot = partial(_recall, weakref.ref(self), place)
            ctx.recall = slot
            self.slots[place] = name, weakref.ref(slot)


def _recall(reference: weakref.ref[Segment], place: int, products: Tensors) -> Tensors:
    """Return the GEMM outputs that the recompute left in a slot."""
    segment = reference()
    backward = backward_id()
    if segment is None:
        return products
    recompute = segment._recomputes.get(backward)
    if recompute is None and segment._ahead is not None:
        recompute = segment._recompute(backward)
    return products if recompute is None else recompute.products.pop(place, products)


def is_plain_call() -> bool:
    """Whether nothing is saved for backward here, or torch.func or forward-mode AD is at work."""
    is_transformed = private.are_transforms_active() or private.forward_level() >= 0
    if is_transformed or not torch.is_grad_enabled():
        return True
    # a trace runs no backward, and checks itself by running again; torch.compile reads this, too
    return torch.jit.is_tracing()  # type: ignore[reportPrivateImportUsage]
