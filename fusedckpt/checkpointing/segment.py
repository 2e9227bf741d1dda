"""`checkpoint`, and a segment's forward: tensors it drops, and where its backward finds them.

Tensors that autograd saves in a segment's forward are dropped, and found again by their position
when the segment is recomputed, inside the first backward that asks or, by `prefetch`, before it.
Tensors that cost nothing to keep stay: parameters and other leaves, and views of the arguments. A
recompute serves one backward; the end of that backward drops all that the recompute made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint as stock
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import TensorWeakRef

from fusedckpt.autograd import arguments, phases, private
from fusedckpt.autograd.levels import saving
from fusedckpt.autograd.phases import Likes, Tensors
from fusedckpt.autograd.private import at_end_of_backward, backward_id, pytree, uncompiled
from fusedckpt.checkpointing import calls
from fusedckpt.checkpointing.attention import SAVED_CONTEXTS, functions_called, is_asked
from fusedckpt.checkpointing.calls import (
    Argument,
    Call,
    Checkpointed,
    Contexts,
    LateArgument,
    Leaves,
    Options,
    Packed,
    Saved,
    Trace,
    layout_of,
    stale,
)
from fusedckpt.checkpointing.determinism import Run
from fusedckpt.checkpointing.recompute import Recompute
from fusedckpt.checkpointing.regions import Keeper, patterns_of, warn_of_no_region
from fusedckpt.checkpointing.samples import Samples, compare_at_end, may_change, name_of

# where the node of autograd's graph that made an output refers to its segment
NODE_KEY = "fusedckpt segment"


class Segment(Trace, Keeper):
    """The forward of a checkpoint."""

    # GEMM outputs for backward would be dropped
    levels = "inputs", "inputs"

    def __init__(self, options: Options):
        super().__init__(options)
        # by storage, while a call runs
        self._arguments: dict[int, Argument] = {}
        self._leaves = Leaves()
        # while it may turn out that a call writes its arguments: the tensors it saved, and versions
        self.held: list[tuple[Packed, Tensor, int]] | None = None
        self.late = []
        self._recomputes: dict[int, Recompute] = {}
        # one that came before its backward
        self._ahead: Recompute | None = None
        self.patterns, of_ops = self.options.save_regions, self.options.context_fn
        # a context may count all ops, or save some
        self.refuses = of_ops is not stock.noop_context_fn

    def run(self, call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
        """Make a call for the first time, dropping the tensors that autograd saves."""
        self.is_complete, self.around = False, (around := phases.current())
        # a tensor that comes back through hooks is elsewhere in memory
        self._is_hooked = not private.SEES_HOOKS or private.top_hooks() is not None
        self.watch = run = Run(call.fn) if self.options.debug else None
        self.calls.append(call)
        if self.options.samples and not may_change(private.top_hooks()):
            self.samples = self.samples or Samples(name_of(call.fn))
            self.samples.begin((*args, *kwargs.values()))
        try:
            # an enclosing checkpoint gives a tensor that it recomputes back once only
            for held in call.held if around is None and private.SEES_HOOKS else ():
                if isinstance(held, Argument) and held.storage:
                    self._arguments[held.storage] = held
            if around is not None:
                # where the arguments were all that an enclosing recompute is for
                around.enter(())
            with (
                saved_tensors_hooks(phases.pack_hook(self), self.unpack),
                nullcontext() if run is None else run.watched(),
                functions_called(self),
                self.contexts[0],
            ):
                output = call.fn(*args, **kwargs)
                self.is_complete = True
        finally:
            self._arguments, self.around = {}, None
        if not self.is_complete:
            raise RuntimeError("checkpoint: the forward's context suppressed an exception")
        if run is not None:
            run.see("the segment", output)
        if self.samples is not None:
            self.samples.drop(self.kept)
        if self.held is not None:
            self._keep(self.held)
        if around is None:
            self._mark(output, (*args, *kwargs.values()))
        return output

    def hold_late(self, tensor: Tensor) -> LateArgument:
        """Return an argument that is saved with the first tensor that autograd saves."""
        argument = LateArgument(tensor)
        if self.late is not None:
            self.late.append((argument, None))
        return argument

    def _save_late(self) -> None:
        late, self.late = self.late or (), None
        for argument, outermost in late:
            with phases.outside_hooks_of(outermost or self):
                argument.save()

    def _keep(self, held: list[tuple[Packed, Tensor, int]]) -> None:
        """Keep saved tensors, as without a checkpoint; a tensor written since still raises."""
        for packed, tensor, version in held:
            if tensor._version == version:
                packed.source, packed.layout = Argument(tensor), None
        self.stops, self.held = True, None

    def _mark(self, output: Any, given: tuple[Any, ...]) -> None:
        """Mark an output's nodes as the segment's own, but not those of tensors it was given."""
        known = {*map(id, given)}
        for leaf in (output,) if isinstance(output, Tensor) else pytree.tree_leaves(output):
            node: Any = leaf.grad_fn if isinstance(leaf, Tensor) else None
            if node is not None and id(leaf) not in known:
                node.metadata[NODE_KEY] = weakref.ref(self)

    def pack_output(self, place: int, output: Tensor) -> Packed:
        """Return the stand-in for an output at a place, for which a recompute runs to its end."""
        self.outputs.append(place)
        return self.pack(output)

    @uncompiled
    def pack(self, tensor: Tensor) -> Packed:
        """Return the stand-in that autograd keeps in the tensor's place."""
        if self.late:
            self._save_late()
        self.late = None
        packed = Packed()
        packed.index, packed.source, packed.layout = len(self.saved), None, None
        leaves, owner = self._leaves.of(tensor), calls.leaf_of(tensor)
        if owner is not None:
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
        like = tensor.shape, tensor.dtype, tensor.device
        self.saved.append(Saved(weakref.ref(packed), like, [*map(TensorWeakRef, leaves)]))
        if self.held is not None:
            # without its graph, which would come to hold itself
            tensor = tensor.detach() if tensor.requires_grad else tensor
            self.held.append((packed, tensor, tensor._version))
        if self.samples is not None and packed.source is None:
            self.samples.take(packed.index, tensor)
        return packed

    @uncompiled
    def unpack(self, packed: Packed) -> Tensor:
        """Return the tensor that `pack` was given, recomputing the segment if need be."""
        source = packed.source
        if source is not None and (self.stops or packed.index in self.kept):
            if isinstance(source, Argument):
                tensor = source.tensor()
                # without its graph
                tensor = tensor.detach() if tensor.requires_grad else tensor
            else:
                tensor = source()
                if tensor is not None and tensor._version != packed.version:
                    raise RuntimeError(stale("a parameter saved for backward", tensor))
            if tensor is not None:
                return packed.of(tensor)
        backward = backward_id()
        recompute = self._recomputes.get(backward) or self._recompute(backward)
        tensor = recompute.take(packed.index)
        # read twice in one backward: once more, and then for as long as that takes
        return self._recompute(backward, True).values[packed.index][0] if tensor is None else tensor

    def states(self) -> list[tuple[Callable[[Any], Any], Any]]:
        """Return the states of the generators that a recompute restores."""
        return self.calls[-1].surroundings.states()

    def _recompute(self, backward: int, keeps: bool = False) -> Recompute:
        recompute, ahead = Recompute(self, keeps), self._ahead
        if ahead is None or keeps or backward == -1:
            recompute.run()
        else:
            self._ahead = None
            recompute.take_over(ahead)
        if recompute.pairs:
            compare_at_end(recompute.pairs)
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

    def save(
        self, ctx: Any, name: str, given: Tensors, extras: Tensors = (), likes: Likes = ()
    ) -> None:
        """Save the tensors that the layer was given, and leave a slot for its GEMM outputs."""
        super().save(ctx, name, given, [None] * len(extras))
        # the recompute makes them for this layer alone
        ctx.owns_extras = True
        if any(likes):
            # no more than that: the layer's node outlives its saved tensors, which hold the segment
            place = len(self.saved)
            ctx.recall = slot = partial(_recall, weakref.ref(self), place)
            self.slots[place] = name, weakref.ref(slot)


def _recall(of: weakref.ref[Segment], place: int, extras: Tensors) -> Tensors:
    """Return the GEMM outputs that the recompute left in a slot."""
    segment, backward = of(), backward_id()
    if segment is None:
        return extras
    recompute = segment._recomputes.get(backward)
    if recompute is None and segment._ahead is not None:
        recompute = segment._recompute(backward)
    return extras if recompute is None else recompute.extras.pop(place, extras)


def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Contexts] = stock.noop_context_fn,
    determinism_check: str = "default",
    debug: bool | str = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    preserve_python_rng: bool = False,
    save_regions: str | Sequence[str] = (),
    **kwargs: Any,
) -> Any:
    """Return function(*args, **kwargs), saving its arguments and running it again in backward.

        y = fusedckpt.checkpoint(block, x)

        @fusedckpt.checkpoint(save_regions="attention")
        def run(x): ...

    A drop-in for torch.utils.checkpoint.checkpoint(..., use_reentrant=False), with its results and
    the arguments of the newest torch. Without a function it returns a decorator, which takes
    functions, methods and modules. The differences:

    - Fused layers at any level save nothing in the forward, and their GEMM outputs in the
      recompute, so that backward recomputes no GEMM. A fused layer that ends the segment is not
      recomputed.
    - A recompute runs only if backward needs a recomputed tensor, and its tensors are freed at the
      end of that backward. Saved tensors may be read twice.
    - The RNG state is restored on every device of the tensors in args and kwargs, and of any
      torch.Generator among them.
    - Buffers of modules are restored after their call in the recompute, so that BatchNorm updates
      once.
    - Backward raises if a tensor argument, or a parameter that autograd saved, was modified in
      place since the forward, as it does without a checkpoint.
    - It also raises if such a parameter was replaced by one with other values, which the recompute
      would read. `torch.func.functional_call` replaces parameters until it returns: call it inside
      `function`, and pass its parameters as arguments.

    Args:
        function: a function or module that computes the same each time it is called.
        args, kwargs: its arguments, the same objects each time. Other state that it reads is
            neither checked nor restored.
        use_reentrant: False or None; True is torch's other implementation.
        preserve_rng_state: give the recompute the random numbers of the forward.
        context_fn: returns two context managers, for the forward and for the recompute, such as
            torch.utils.checkpoint.create_selective_checkpoint_contexts makes.
        determinism_check: "default" compares shape, dtype and device of recomputed tensors, and the
            parameters that they are computed from, with the forward's; "none" compares nothing.
        debug: copy the output of every module in `function`, run the recompute to its end,
            and raise if any bit differs, with the name of the first such module and the operations
            of both runs. "samples": at little cost, compare 64 elements of each tensor that the
            recompute brings back, and raise at the end of that backward where any differs by more
            than rounding.
        early_stop: end the recompute with the last tensor that backward needs.
        respect_saved_tensors_hooks: whether tensors that a selective `context_fn` saves go through
            the hooks on saved tensors around, such as save_on_cpu. None is False, with torch's
            warning where there are such hooks. Before torch 2.14 they do not.
        preserve_python_rng: give the recompute those of `random` and `numpy.random`, too.
        save_regions: patterns (fnmatch) of the names of regions that the recompute does not run
            again, see `region`. Calls of F.scaled_dot_product_attention and of flash_attn's and
            transformers' attention functions are regions named "attention", those of transformers'
            kernels of mixers and of fla's and mamba_ssm's Functions regions named "scan".

    torch's set_checkpoint_debug_enabled and set_checkpoint_early_stop override these. Under
    torch.compile this is torch's own checkpoint; under no_grad, torch.func and forward-mode AD a
    plain call.

    Raises:
        ValueError: use_reentrant is True, determinism_check or debug is unknown, debug comes with a
            context_fn, or a call without a function has other arguments than options.
        TypeError: `function` is not callable, or `save_regions` are not strings.
        torch.utils.checkpoint.CheckpointError: in backward: the recompute differs from the forward,
            or would read another parameter.
        RuntimeError: in backward: an argument or a parameter was modified in place.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
    """
    if use_reentrant:
        advice = "pass use_reentrant=False, or call torch.utils.checkpoint.checkpoint"
        raise ValueError(f"checkpoint: use_reentrant=True is not supported: {advice}")
    samples = debug == "samples"
    if isinstance(debug, str) and not samples:
        raise ValueError(f"checkpoint: debug must be True, False or 'samples', got {debug!r}")
    options = Options(
        preserve_rng_state=preserve_rng_state,
        preserve_python_rng=preserve_python_rng,
        determinism_check=determinism_check,
        early_stop=early_stop,
        debug=bool(debug) and not samples,
        context_fn=context_fn,
        save_regions=patterns_of(save_regions),
        samples=samples,
        respect_saved_tensors_hooks=respect_saved_tensors_hooks,
    )
    if function is not None or args:
        return run_checkpoint(options, function, args, kwargs)
    if kwargs:
        found = ", ".join(kwargs)
        raise ValueError(f"checkpoint: expected a function, or its options alone, got {found}")
    return partial(Checkpointed, partial(run_checkpoint, options))


# the names that a call of `checkpoint` takes for itself
OPTIONS = frozenset(checkpoint.__kwdefaults__ or ())


def run_checkpoint(options: Options, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return function(*args, **kwargs), whose keywords may be names of options."""
    if not torch.compiler.is_compiling():
        return _run(options, function, args, kwargs)
    contexts = options.context_fn
    if contexts is stock.noop_context_fn and is_asked(options.save_regions):
        contexts = SAVED_CONTEXTS
    # Dynamo does not take these defaults where they are named
    rest: dict[str, Any] = {}
    if contexts is not stock.noop_context_fn:
        rest["context_fn"] = contexts
    if private.user_hooks is not None and options.respect_saved_tensors_hooks is not None:
        rest["respect_saved_tensors_hooks"] = options.respect_saved_tensors_hooks
    taken = {name: kwargs.pop(name) for name in {*OPTIONS, "function"} & {*kwargs}}
    # fused layers save nothing of their own; torch 2.11 takes no such change in the function
    with saving("inputs"):
        return stock.checkpoint(
            partial(function, **taken) if taken else function,
            *args,
            use_reentrant=False,
            determinism_check=options.determinism_check,
            debug=options.debug,
            early_stop=options.early_stop,
            preserve_rng_state=options.preserve_rng_state,
            **rest,
            **kwargs,
        )


# where torch.compile falls back to eager, it is to compile neither this nor `function` in pieces
@uncompiled
def _run(options: Options, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    for name, value in (("function", function), ("context_fn", options.context_fn)):
        if not callable(value):
            arguments.wrong_type("checkpoint", name, "callable", value)
    # torch's switches, where they are set
    debug, early_stop = private.stock_switches()
    debug = options.debug if debug is None else debug
    early_stop = options.early_stop if early_stop is None else early_stop
    if (debug or options.samples) and options.context_fn is not stock.noop_context_fn:
        raise ValueError(f"checkpoint: debug takes no context_fn, got {options.context_fn}")
    check = options.determinism_check
    arguments.choice("checkpoint", "determinism_check", check, ("default", "none"))
    if is_plain_call():
        return function(*args, **kwargs)
    # the objects that a partial holds are arguments like others
    while isinstance(function, partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    options = options._replace(debug=debug, early_stop=early_stop)
    segment = Segment(options)
    # where no argument needs a gradient, perhaps nothing does
    hold: Any = segment.hold_late
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.requires_grad:
            hold = Argument
    output = segment.run(Call(function, args, kwargs, options, hold), args, kwargs)
    if options.save_regions and not (segment.has_matched or segment.refuses or options.samples):
        warn_of_no_region(function, options.save_regions)
    return output


def is_plain_call() -> bool:
    """Whether nothing is kept for backward here, or torch.func or forward-mode AD is at work."""
    is_transformed = private.are_transforms_active() or private.forward_level() >= 0
    # a trace runs no backward, and checks itself by running again
    return is_transformed or not torch.is_grad_enabled() or private.is_tracing()
