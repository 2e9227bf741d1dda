"""A module that runs its own forward again in backward, but for calls of attention and of scans.

It saves its input, and the results of these calls: `F.scaled_dot_product_attention`, transformers'
attention interface, the functions of `scans`. Where a fused norm made its input, the norm's input
is saved in its place. Attention that calls none of these, and a scan in torch's ops, runs again
where it would save more than four times its result. So does an MLP that no program computes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedckpt.autograd import dispatch, index, levels, next_call, phases, private, tracker
from fusedckpt.autograd.recipes import Count, Leaf, Made, View
from fusedckpt.autograd.storages import storage_of
from fusedckpt.checkpointing.attention import NAME
from fusedckpt.checkpointing.call_state import is_flat, modules_in
from fusedckpt.checkpointing.calls import Packed, objects_in, result_tensors, tensors_among
from fusedckpt.checkpointing.regions import MOST_TIMES_OUTPUT
from fusedckpt.checkpointing.scans import SCAN
from fusedckpt.checkpointing.segment import Segment, segment_of, was_segment
from fusedckpt.fusing.fused_mlps import MLPMatch, MLPPattern
from fusedckpt.fusing.recomputed_call import needs_gradient, recomputed_call
from fusedckpt.fusing.swap import Swapped
from fusedckpt.layers import fallbacks
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.layers.notes import NO_NOTES, NOTES, set_notes
from fusedckpt.recipes import attention_recipes, recipe_mode, shared_layers
from fusedckpt.recipes.node_patterns import FinishedCall
from fusedckpt.state.holders import ATOMS
from fusedckpt.state.noted import is_collection

# the pattern of an MLP that no program computes
RERUN = MLPPattern("recomputed", (), "")

# patterns of nodes that a module keeps
_MOST_PATTERNS = 4
# the notes that its calls leave, as they are before the first one
LEARNED = {"little_gain": None, "writes": None, "follows_nodes": None, "patterns": ()}
# objects of these classes do not change in a forward
_CONSTANT = ("BlockMask", "device", "dtype", "Size")


class _CallOptions(NamedTuple):
    """The options by which a module computes attention itself, or calls a function for it."""

    # of the module's config
    implementation: Any
    # arguments of the call
    need_weights: Any
    output_attentions: Any


class _LittleGain(NamedTuple):
    """The calls of a module that are not recomputed, as that gains little."""

    options: _CallOptions
    shape: torch.Size
    # the key of a reason
    key: str


class Recomputed(Swapped):
    """The forward of a module's own class, recomputed in backward but for attention and scans.

    At the levels "gate" and "preact" an attention module is not recomputed.
    """

    @property
    def save_levels(self) -> tuple[str, ...] | None:
        """Return the levels that it offers to a plan; None of an MLP, which has one."""
        return ("inputs", "preact") if self._fusedckpt.match is None else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original forward, in a checkpoint where that saves less."""
        forward = super(Swapped, self).forward
        x: Any = args[0] if args else kwargs.get(next(iter(self._fusedckpt_names), ""))
        if self._runs_unchanged(x):
            return forward(*args, **kwargs)
        values = *args, *kwargs.values()
        if not (getattr(x, "requires_grad", False) or needs_gradient(self, tensors_among(values))):
            return forward(*args, **kwargs)
        modules = modules_in(self, values)
        in_mode = private.num_function_modes() > 0 and tracker.sees_alone()
        # neither checkpoints nor nodes need the mode, which would see each function
        watched = partial(recipe_mode.exposing, forward) if in_mode else forward
        if self._fusedckpt.follows_nodes and self._may_follow_nodes(modules):
            # hooks that count are still there, and told of it
            view = (
                tracker.outside_mode(shared_layers.recipe_of, x, self)
                if in_mode
                else shared_layers.recipe_of(x, self)
            )
            run = partial(self._saving_recipes, watched, x, args, kwargs, view, in_mode)
            run = partial(phases.with_own_hooks, run, partial(watched, *args, **kwargs))
            return tracker.outside_mode(run) if in_mode else run()
        obstacle = repeat_obstacle(modules, values)
        little_gain: _LittleGain | None = self._fusedckpt.little_gain
        if obstacle is None and little_gain is not None and little_gain.shape == x.shape:
            # a config takes long to tell its options
            is_alike = little_gain.options == _options_of(self, kwargs)
            obstacle = NotFused(little_gain.key) if is_alike else None
        if obstacle is not None:
            fallbacks.note_fallback(self, obstacle)
            return forward(*args, **kwargs)
        is_mlp = self._fusedckpt.match is not None
        # torch.compile cannot ask
        since = 0 if is_mlp else private.num_nodes()
        y = recomputed_call(
            modules,
            watched,
            x,
            values,
            tuple(kwargs),
            regions=() if is_mlp else (NAME, SCAN),
            draws_torch=self.training,
            draws_python=not is_mlp,
        )
        if not is_mlp:
            self._learn(modules, x, y, kwargs, since)
        return y

    def _may_follow_nodes(self, modules: Sequence[nn.Module]) -> bool:
        """Whether attention may save recipes in this call, of the values that linears read.

        Hooks of the modules inside may gather weights for their own calls alone.
        """
        is_rounded = self._fusedckpt.store or levels.override.store
        is_free = not is_rounded and not dispatch.has_hooks(*modules[1:])
        return is_free and attention_recipes.may_save_recipes()

    def _saving_recipes(
        self,
        forward: Callable[..., Any],
        x: Tensor,
        args: Any,
        kwargs: Any,
        view: View | None,
        in_mode: bool,
        count: Count,
    ) -> Any:
        """Run the forward once: attention saves recipes of its inputs.

        Where one is not found, later calls run in a checkpoint again. view: how to read x, None
        where nodes save it; in_mode: whether a mode of recipes is around.
        """
        known = index.known_of(x) if in_mode else None
        since = private.num_nodes()
        # linears that look for the recipe of x themselves take longer
        with levels.plain_layers():
            y = forward(*args, **kwargs)
        # code of the model has run
        next_call.forget()
        if in_mode and view is not None and not index.still_tells(known, x):
            # it got the argument's memory
            view = None
        call = _call_of(since, x, y)
        if not call.results:
            return y
        known = self._fusedckpt.patterns
        pattern = attention_recipes.save_recipes(call, view, known, count)
        if count is not None:
            self._count(call, count, (*args, *kwargs.values()))
        if pattern is None:
            set_notes(self, follows_nodes=False, patterns=())
            return y
        if pattern not in known:
            set_notes(self, patterns=(pattern, *known[: _MOST_PATTERNS - 1]))
        if not dispatch.has_hooks(self):
            source = partial(attention_recipes.recipe_of_result, pattern)
            index.put(call.results[0], index.MODULE, source)
        return y

    def _count(self, call: FinishedCall, count: Any, values: Sequence[Any]) -> None:
        """Count saved tensors as a checkpoint does.

        Its arguments are counted, but for tensors in containers, which hold them, and buffers.
        """
        given = [value for value in values if isinstance(value, Tensor)]
        for tensor in given:
            if tensor is not call.x:
                count(tensor)
        inside = [t for t in tensors_among(values) if all(t is not each for each in given)]
        attention_recipes.count_saved(call, count, {*map(storage_of, [*inside, *self.buffers()])})

    def _runs_unchanged(self, x: Any) -> bool:
        """Whether a call saves nothing for backward, or a level, compiler or checkpoint decides."""
        if self._fusedckpt.match is not None:
            return not torch.is_grad_enabled() or dispatch.is_traced(x)
        level = levels.override.level or self._fusedckpt.save
        return not self.training or level != "inputs" or _saves_nothing(x)

    def _mlp_obstacle(self, match: MLPMatch, values: tuple[Any, ...]) -> NotFused | None:
        if len(values) != 1 or not isinstance(values[0], Tensor):
            return NotFused("arguments")
        # Dynamo cannot ask
        if not torch.compiler.is_compiling() and private.why_no_hooks() is not None:
            return NotFused("no hooks")
        change = self._fusedckpt.reader.change(self)
        if change is not None or dispatch.are_plain(*values, *self.parameters()):
            return change
        return fallbacks.fallback_of(values[0], **dict(self.named_parameters(recurse=False)))

    def _learn(
        self,
        modules: Sequence[nn.Module],
        x: Tensor,
        y: Any,
        kwargs: Mapping[str, Any],
        since: float,
    ) -> None:
        """Note that attention or a scan runs again; if it gains little, recompute no later calls.

        That is where attention is no region, and saves little itself.
        """
        results = result_tensors(y)
        for place, result in enumerate(results):
            node: Any = result.grad_fn
            segment = node and segment_of(node)
            if segment:
                reason = self._reason_of(segment, results)
            elif node and was_segment(node):
                # autograd saves nothing that would hold it
                reason = NotFused("saves nothing")
            else:
                continue
            if reason is not None:
                fallbacks.note_fallback(self, reason)
            if reason is not None and reason.key != "again":
                options = _options_of(self, kwargs)
                set_notes(self, little_gain=_LittleGain(options, x.shape, reason.key))
                return
            is_new = self._fusedckpt.follows_nodes is None and not segment.is_saved
            if reason is None and is_new and self._may_follow_nodes(modules):
                dropped = _dropped(segment, modules)
                found = attention_recipes.are_all_found(_call_of(since, x, y), dropped)
                set_notes(self, follows_nodes=found)
            if not (segment.is_saved or dispatch.has_hooks(self)):
                # a norm of the result saves nothing; hooks may gather weights only for the call
                source = partial(_recipe_of_output, weakref.ref(segment), place)
                parameters = [p for m in modules for p in m._parameters.values()]
                index.put(result, index.MODULE, source, *[p for p in parameters if p is not None])
            return

    def _reason_of(self, segment: Segment, results: list[Tensor]) -> NotFused | None:
        """Return the function that runs again, or why a segment gains little; None without one."""
        called = set()
        for record in segment.region_calls:
            if record.outputs is None:
                return NotFused("again", record.name)
            called.add(record.name)
        if NAME in called or self._fusedckpt.mixes != {NAME}:
            return None
        samples = segment.samples
        is_large = samples is None or samples.nbytes > MOST_TIMES_OUTPUT * results[0].nbytes
        return NotFused("again", NAME) if is_large else NotFused("unseen")


def _dropped(segment: Segment, modules: Sequence[nn.Module]) -> set[Packed]:
    """Return the stand-ins of tensors that a recompute brings back, but for views of buffers."""
    buffers = {storage_of(b) for m in modules for b in m._buffers.values() if b is not None}
    dropped = set[Packed]()
    for reference in segment.saved:
        packed = reference()
        if packed is not None and packed.source is None and packed.storage not in buffers:
            dropped.add(packed)
    return dropped


def _call_of(since: float, x: Tensor, y: Any) -> FinishedCall:
    """Return a call that began at a node's number, and returned y."""
    return FinishedCall(
        since, x, [result for result in result_tensors(y) if result.grad_fn is not None]
    )


def repeat_obstacle(modules: Sequence[nn.Module], values: tuple[Any, ...]) -> NotFused | None:
    """Return why a call with these arguments cannot be made twice, None if it can.

    modules: the module that is called, those inside, and those among the arguments.
    """
    module, *layers = modules
    if private.num_function_modes() and tracker.has_foreign_modes():
        # backward may run outside of the mode
        return NotFused("mode")
    notes = module.__dict__.get(NOTES, NO_NOTES)
    match = notes.match
    if match is not None and isinstance(module, Recomputed):
        return module._mlp_obstacle(match, values)
    if private.why_no_hooks() is not None:
        return NotFused("no hooks")
    if notes.writes:
        return NotFused("writes itself", notes.writes)
    for value in values:
        if type(value) is Tensor or type(value) in ATOMS or is_flat(value):
            # most
            continue
        for part in objects_in(value):
            is_module = isinstance(part, nn.Module)
            is_known = isinstance(part, Tensor) or is_collection(part)
            if is_module and part is value:
                # it is among `modules`
                is_known = not any(inner is module for inner in modules_in(part))
            if not is_known and type(part).__name__ not in _CONSTANT:
                return NotFused("module" if is_module else "cache", type(part).__name__)
    if not (layers and dispatch.has_hooks(*layers)):
        return None
    named = {layer: name for name, layer in module.named_modules()}
    hooked = next(x for x in layers if dispatch.has_hooks(x))
    return NotFused("hooked", named.get(hooked, type(hooked).__name__))


def _recipe_of_output(
    reference: weakref.ref[Segment], place: int, y: Tensor, parameters: Sequence[Any]
) -> Made | None:
    """Return the recipe of an output: its module's run in backward, which computes it anyway."""
    segment = reference()
    if segment is None:
        return None
    output = partial(_output, segment, segment.pack_output(place, y))
    # the module's own backward, which checks parameters, may be over
    made = Made("module", output, [Leaf(p) for p in parameters], [y])
    made.is_rounded = segment.may_differ
    return made


def _output(segment: Segment, packed: Packed, *_: Tensor) -> Tensor:
    return segment.unpack(packed)


def _saves_nothing(x: Any) -> bool:
    """Whether a call saves nothing for backward, or a checkpoint or compiler around decides."""
    return (
        not isinstance(x, Tensor)
        or torch.compiler.is_compiling()
        or not torch.is_grad_enabled()
        or dispatch.is_traced(x)
        or phases.current() is not None
    )


def _options_of(module: nn.Module, kwargs: Mapping[str, Any]) -> _CallOptions:
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return _CallOptions(implementation, kwargs.get("need_weights"), kwargs.get("output_attentions"))
