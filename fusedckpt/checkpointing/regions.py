"""Regions: calls in a checkpoint that its recompute does not run again.

In a segment's forward a region runs. Tensors that autograd saves inside stay saved, but for
the region's inputs and views of them: the recompute gets as far as the region's call, takes these
from its arguments, skips the body, and goes on with the outputs that were saved. So attention saves
its output and its log-sum-exp, and not q, k, v.

A region in nested checkpoints is one of all up to the outermost that asks for it. Hooks and
checkpoints around that one see the tensors that the region saves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fusedckpt.autograd import arguments, phases, private
from fusedckpt.autograd.backward import versions_of
from fusedckpt.autograd.phases import SavePhase
from fusedckpt.autograd.private import pytree, uncompiled
from fusedckpt.autograd.storages import VersionCheck, storage_of
from fusedckpt.checkpointing.calls import (
    Argument,
    ArgumentSource,
    LateArgument,
    Provisional,
    tensors_among,
)
from fusedckpt.checkpointing.derived import Derived, by_storage, derived_from
from fusedckpt.checkpointing.determinism import WatchedRun
from fusedckpt.memory import nbytes_of
from fusedckpt.state.rng import RandomStates

# a region that would save more than this many times its output is recomputed
MOST_TIMES_OUTPUT = 4
# for errors
_OUTPUT = "checkpoint: an output of a region"
# the input of a region without inputs that need a gradient
_ANCHOR = torch.empty(0, requires_grad=True)
_STOCK = (
    "region: torch's checkpoint recomputes regions. To save them, call "
    "fusedckpt.checkpoint(..., save_regions=[...])"
)


class RegionCall(NamedTuple):
    """A call of a region in a forward."""

    # the name of the region
    name: str
    # for each tensor saved inside, how a recompute derives it; None for a tensor that stays saved
    derived: Sequence[Derived | None] = ()
    # leaves of the result, tensors as Arguments, and whether each requires grad; None where a
    # recompute runs the region again
    outputs: Sequence[tuple[Any, bool]] | None = None
    # how the leaves make the result, None for a result that is the one leaf
    spec: Any = None
    # the states of random number generators behind the call
    states: Sequence[RandomStates] = ()
    # of outputs that hooks of other code hold, whose versions autograd does not check
    checks: Sequence[VersionCheck] = ()


class CheckpointPhase(SavePhase):
    """A phase of our checkpoint, its forward or its recompute, in which regions are called."""

    # patterns of the names of regions that it saves
    patterns: tuple[str, ...] = ()
    # whether all regions inside run again
    refuses = False
    # whether its recompute, or one around, begins with rounded values
    may_differ = False
    # whether a region that it saves was called
    has_matched = False
    # the record of the forward, in a debugging checkpoint
    watch: WatchedRun | None = None
    # the phase in which it runs
    enclosing: SavePhase | None = None
    # the regions that were called, in the order of their calls
    region_calls: list[RegionCall]
    # the places of tensors that stay saved, and no recompute brings back
    staying: set[int]
    # elements of the tensors that were dropped, by which a recompute is compared
    samples: Any = None
    # until it packs a tensor: arguments that are saved then, each outside of this phase or of the
    # phase beside it; None afterwards, and in a recompute
    late: list[tuple[LateArgument, CheckpointPhase | None]] | None = None

    def asks(self, name: str) -> bool:
        """Whether it saves regions of this name."""
        return is_among(name, self.patterns)

    def pack(self, tensor: Tensor, is_sampled: bool = True, key: int = 0) -> Any:
        """Pack a saved tensor.

        is_sampled: whether a recompute may bring it back; key: of its storage, if known.
        """
        raise NotImplementedError

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor that was packed."""
        return packed

    def save_exactly(self, tensor: Tensor) -> Argument:
        """Save a tensor of a region."""
        return Argument(tensor)

    def know_output(self, output: Argument) -> None:
        """Note a saved output of a region: later saved tensors may be views of it."""

    def random_states(self) -> RandomStates | None:
        """Return the states now of the generators that a recompute restores."""
        return None

    def meet(self, name: str) -> RegionCall | None:
        """Return the call of the region that a recompute has come to, None in a forward."""

    def skip(self, region_call: RegionCall, inputs: Sequence[Tensor]) -> None:
        """Take from the inputs of a region the tensors that are derived from them."""


@lru_cache(64)
def is_among(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether patterns of regions' names mean one."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class _RegionPhase(SavePhase):
    """The phase inside a region, in which layers save the tensors of their level."""

    def __init__(self, phase: CheckpointPhase):
        self._checkpoint = phase

    @uncompiled
    def pack(self, tensor: Tensor) -> Any:
        """Pack a saved tensor as the checkpoint does."""
        return self._checkpoint.pack(tensor)


class _FirstRun(_RegionPhase):
    """The phase inside a region in a forward, which finds the tensors that stay saved."""

    def __init__(self, phase: CheckpointPhase, inputs: Sequence[Tensor]):
        super().__init__(phase)
        self._inputs = inputs
        self._keyed = by_storage(inputs)
        self._before = versions_of(*inputs)
        self._provisional: list[Provisional] = []
        # for each tensor saved inside, how a recompute derives it from the inputs
        self._derived: list[Derived | None] = []
        # the places of the tensors that none derives
        self._places: list[int] = []

    @uncompiled
    def pack(self, tensor: Tensor) -> Any:
        """Hold a tensor until the region returns, unless a recompute can derive it."""
        key = storage_of(tensor)
        derived = derived_from(tensor, self._keyed[key]) if key in self._keyed else None
        packed = self._checkpoint.pack(tensor, derived is not None, key)
        if packed.source is not None:
            derived = None
        self._derived.append(derived)
        if derived is None:
            self._places.append(packed.index)
        if derived is None and not isinstance(packed.source, ArgumentSource):
            # without its graph, which would come to hold itself; leaves have none
            value = tensor.detach() if packed.source is None else tensor
            self._provisional.append(Provisional(packed, value, tensor._version))
        return packed

    def region_call(
        self, name: str, result: Any, checkpoints: Sequence[CheckpointPhase]
    ) -> RegionCall:
        """Save provisional tensors and the result, as arguments are outside of checkpoints.

        Nothing is saved where the tensors are too large, or an input or a saved tensor was written.
        Where the checkpoints have saved nothing yet, the result is saved when they do.
        """
        # most return one tensor, which a tree takes long to find
        leaves, spec = ([result], None) if type(result) is Tensor else pytree.tree_flatten(result)
        outputs = [x for x in leaves if isinstance(x, Tensor)]
        unsaved = []
        is_written = versions_of(*self._inputs) != self._before
        for packed, tensor, version in self._provisional:
            is_written |= tensor._version != version
            if packed.source is None:
                unsaved.append(tensor)
        if is_written or nbytes_of([*unsaved, *outputs]) > MOST_TIMES_OUTPUT * nbytes_of(outputs):
            return RegionCall(name)
        is_late = all(phase.late is not None for phase in checkpoints)
        outermost = checkpoints[-1]
        save = LateArgument if is_late else outermost.save_exactly
        with phases.outside_hooks_of(outermost):
            for packed, tensor, _ in self._provisional:
                packed.source = ArgumentSource(outermost.save_exactly(tensor))
            saved = [save(x.detach()) if isinstance(x, Tensor) else x for x in leaves]
            is_hooked = phases.moved_by(private.top_hooks()) is None
        checks = []
        for output in outputs if is_hooked else ():
            if storage_of(output) and not output.is_inference():
                checks.append(VersionCheck(output, _OUTPUT))
        for phase in checkpoints:
            if phase.late is not None:
                enclosing = None if phase is outermost else outermost
                phase.late += [(x, enclosing) for x in saved if isinstance(x, LateArgument)]
        for output in saved:
            if isinstance(output, Argument):
                self._checkpoint.know_output(output)
        self._checkpoint.staying.update(self._places)
        needs = [isinstance(x, Tensor) and x.requires_grad for x in leaves]
        states = [x for phase in checkpoints if (x := phase.random_states()) is not None]
        leaves = [*zip(saved, needs, strict=True)]
        return RegionCall(name, self._derived, leaves, spec, states, checks)

    def end(self) -> None:
        """Free the inputs: autograd holds a pack hook, and so this, as long as the saved tensor."""
        self._inputs = ()
        self._keyed = {}
        self._provisional = []

    def sample(self) -> None:
        """Take the samples of the tensors that a recompute brings back after all."""
        samples = self._checkpoint.samples
        for packed, tensor, version in self._provisional:
            if samples is not None and packed.source is None and tensor._version == version:
                samples.take(packed.index, tensor)


def patterns_of(save_regions: str | Sequence[str]) -> tuple[str, ...]:
    """Return the patterns that a checkpoint was given."""
    if save_regions == ():
        return ()
    is_pattern = isinstance(save_regions, str) or not isinstance(save_regions, Iterable)
    patterns: Any = (save_regions,) if is_pattern else tuple(save_regions)
    for pattern in patterns:
        if not isinstance(pattern, str):
            arguments.wrong_type("checkpoint", "save_regions", "strings", pattern)
    return patterns


def warn_of_no_region(function: Any, patterns: Collection[str]) -> None:
    """Warn that a checkpointed function called no region that its checkpoint asks for."""
    name = getattr(function, "__qualname__", type(function).__name__)
    warnings.warn(
        f"checkpoint: {name} called no region that save_regions={list(patterns)} names, so all of "
        "it is recomputed. A function that a module imported by name is not a region: wrap its "
        "call in fusedckpt.region(fn, name)",
        stacklevel=5,
    )


def region(fn: Callable[..., Any], name: str, recompute: bool = False) -> Callable[..., Any]:
    """Return a function that calls `fn`, and that a checkpoint around need not run again.

        y = fusedckpt.region(F.scaled_dot_product_attention, "attention")(q, k, v)

    The recompute of `fusedckpt.checkpoint(..., save_regions=["attention"])` returns the outputs
    that were saved in the forward, and does not call `fn`. Tensors that autograd saves inside `fn`
    stay saved, but for its inputs and views of them. Random numbers after it are the forward's.
    Outside of our checkpoints, in those that do not ask for `name`, and under torch.compile, it is
    a call of `fn`.

    These regions run again all the same: one that would save more than four times the bytes of its
    outputs, that writes to its inputs, or raises; all in a checkpoint with a `context_fn`. A region
    inside a region is part of it.

    `fn` may have no side effects that the checkpointed function reads, because they happen only in
    the forward. If `fn` sets an attribute, for instance, the recompute reads the value of the last
    call, and gradients are silently wrong. `debug=True` finds that: it also skips the region, and
    compares the other tensors with the forward bit by bit.

    Args:
        fn: any function. The tensors among its arguments, also those in plain containers, are the
            region's inputs.
        name: matched with the patterns of `save_regions`.
        recompute: True to run it again in any case.

    Raises:
        TypeError: `fn` is not callable, `name` is not a string, or `recompute` is not a flag.
        RuntimeError: in backward: an output was modified in place, or a gradient is taken through
            the region inside the checkpointed function.
    """
    if not callable(fn):
        arguments.wrong_type("region", "fn", "callable", fn)
    if not isinstance(name, str):
        arguments.wrong_type("region", "name", "a string", name)
    return fn if arguments.flag("region", "recompute", recompute) else partial(_call, fn, name)


# called with the name of each region that is called
_watchers: list[Callable[[str], None]] = []


@contextmanager
def regions_seen(see: Callable[[str], None]) -> Iterator[None]:
    """Call `see` with the names of regions that are called inside."""
    _watchers.append(see)
    try:
        yield
    finally:
        _watchers.remove(see)


def _call(fn: Callable[..., Any], name: str, /, *args: Any, **kwargs: Any) -> Any:
    for see in _watchers:
        see(name)
    checkpoints = _checkpoints_around(name)
    if not checkpoints:
        return fn(*args, **kwargs)
    watches = [phase.watch for phase in checkpoints if phase.watch is not None]
    if not watches:
        return _call_in(checkpoints, fn, name, args, kwargs)
    # the recompute does not run the region: only operations outside of it are compared
    with ExitStack() as stack:
        for watch in watches:
            stack.enter_context(watch.paused())
        return _call_in(checkpoints, fn, name, args, kwargs)


def _call_in(checkpoints: list[CheckpointPhase], fn: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Call a region in the phases that ask for it."""
    inputs = tensors_among((*args, *kwargs.values()))
    call = partial(fn, *args, **kwargs)
    top = checkpoints[0]
    met = [region_call for phase in checkpoints if (region_call := phase.meet(name)) is not None]
    if not met:
        return _run(call, name, checkpoints, _FirstRun(top, inputs))
    for phase in checkpoints:
        if not phase.recomputes:
            phase.region_calls.append(met[0])
    if met[0].outputs is None:
        with saved_tensors_hooks(phases.pack_hook(_RegionPhase(top)), top.unpack):
            return call()
    top.skip(met[0], inputs)
    return _result(met[0], inputs)


# for code that looks for regions of a name: a partial's function, and then its arguments
_call.is_region = True  # type: ignore[attr-defined]


def _checkpoints_around(name: str) -> list[CheckpointPhase]:
    """Return the checkpoints that run, from within, up to the outermost that asks for a region."""
    checkpoints = list[CheckpointPhase]()
    count = 0
    phase = phases.current()
    if phase is not None and phase.levels is not None and not isinstance(phase, CheckpointPhase):
        warnings.warn(_STOCK, stacklevel=4)
    while isinstance(phase, CheckpointPhase) and not phase.refuses:
        checkpoints.append(phase)
        if phase.asks(name):
            phase.has_matched = True
            count = len(checkpoints)
        phase = phase.enclosing
    return checkpoints[:count]


def _run(
    call: Callable[[], Any], name: str, checkpoints: list[CheckpointPhase], inside: _FirstRun
) -> Any:
    """Call a region for the first time."""
    region_call = RegionCall(name)
    try:
        with saved_tensors_hooks(phases.pack_hook(inside), checkpoints[0].unpack):
            result = call()
        region_call = inside.region_call(name, result, checkpoints)
    finally:
        if region_call.outputs is None:
            inside.sample()
        inside.end()
        # a region that raised raises again
        for phase in checkpoints:
            phase.region_calls.append(region_call)
    return result


def _result(region_call: RegionCall, inputs: Sequence[Tensor]) -> Any:
    """Return a region's result in a recompute."""
    outputs = region_call.outputs or ()
    for check in region_call.checks:
        check.check()
    leaves = [x.tensor() if isinstance(x, Argument) else x for x, _ in outputs]
    needed = [i for i, (_, needs_grad) in enumerate(outputs) if needs_grad]
    if needed:
        anchors = inputs if any(x.requires_grad for x in inputs) else [_ANCHOR]
        made = _Skipped.apply(region_call.name, [leaves[i] for i in needed], *anchors)
        for i, x in zip(needed, made, strict=True):
            leaves[i] = x
    for states in region_call.states:
        states.restore()
    return (
        leaves[0] if region_call.spec is None else pytree.tree_unflatten(leaves, region_call.spec)
    )


class _Skipped(torch.autograd.Function):
    """Returns the saved outputs of a region, as computed from its inputs."""

    @staticmethod
    def forward(ctx: Any, name: str, outputs: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs."""
        ctx.name = name
        return tuple(x.detach() for x in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Raise: the nodes inside the region are those of the forward."""
        raise RuntimeError(
            f"region: a checkpointed function computes a gradient through {ctx.name!r}, which its "
            "recompute does not run: pass recompute=True to region"
        )
