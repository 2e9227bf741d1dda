"""A layer that reads a norm's output n saves the norm's input, and normalises again in backward.

The norm saves its input x anyway. The layer saves n as usual; hooks on that saved tensor replace it
by x, and recompute n when backward reads it, so gradients of any order, hooks on n and other
readers of n are unchanged. A norm notes its inputs on its node, and a reader uses them while n is
unmodified (writes through `.data` are not detected, as in autograd). A layer that reads rows
gathered from several ranks likewise saves its own rows, and gathers again. A norm that reads the
output of a module that backward runs again saves nothing: that run makes the output, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedckpt.autograd import phases, private
from fusedckpt.autograd.backward import Versioned, is_unwatched, versions_of
from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.autograd.private import Hooks
from fusedckpt.autograd.recipes import Stored, Tracker
from fusedckpt.blocks import ops, run

# where the node of a module's output has its `Output`
OUTPUT = "fusedckpt output"


class Source(NamedTuple):
    """How to recompute a norm's result from its node's first saved tensor and the parameters.

    versions: of the result and the parameters.
    """

    again: Callable[..., Tensor]
    weight: Tensor | None
    bias: Tensor | None
    versions: tuple[int, ...]


class Output(NamedTuple):
    """An output of a module that runs again in backward.

    segment: a weak reference to the checkpoint that does, as a node outlives what it saves; place:
    among the outputs; given: the module's parameters; versions: of the output.
    """

    segment: Any
    place: int
    given: Versioned
    versions: tuple[int, ...]


class MadeAgain(NamedTuple):
    """What is saved in place of an output: a stand-in, and the reader's dtype."""

    segment: Any
    kept: Any
    given: Versioned
    dtype: torch.dtype

    def read(self) -> Tensor:
        """Return the output; the module's own backward, which checks parameters, may be over."""
        self.given.read()
        return self.segment.unpack(self.kept).to(self.dtype)


class Recipe:
    """How to recompute a value: `again` of another recipe's value, if there is one, and tensors.

    dtype: of the value, None for its own; readers: saved tensors that are recomputed by it; left:
    those not read in this backward, for which the value is kept.
    """

    def __init__(
        self,
        again: Callable[..., Tensor],
        parent: Recipe | None,
        tensors: Sequence[Tensor | None],
        dtype: torch.dtype | None = None,
    ):
        self.again, self.parent, self.given = again, parent, Versioned(*tensors)
        self.dtype, self.value = dtype, None
        self.readers = self.left = 0

    @property
    def tensors(self) -> list[Tensor]:
        """Return the tensors that the recipe keeps alive."""
        own = [t for t in self.given.read() if t is not None]
        return own if self.parent is None else [*self.parent.tensors, *own]

    def added(self) -> None:
        """Count a reader."""
        self.readers += 1
        self.left += 1

    def read(self) -> Tensor:
        """Return the value for a reader."""
        with torch.no_grad():
            value = self._lent()
        self.left -= 1
        if self.left <= 0:
            self.left, self.value = self.readers, None
        return value if self.dtype is None else value.to(self.dtype)

    def _lent(self) -> Tensor:
        """Return the value, and keep it for the readers left."""
        value: Tensor | None = self.value
        if value is None:
            first = () if self.parent is None else (self.parent._lent(),)
            value = self.again(*first, *self.given.read())
        if self.left:
            self.value = value
        return value


def unpack(saved: Any) -> Tensor:
    """Return a tensor that a recipe, or another object with `read`, replaces."""
    # compiled autograd cannot trace a look at versions
    return _uncompiled(saved) if torch.compiler.is_compiling() else saved.read()


@private.breaks_graph
def _uncompiled(saved: Any) -> Tensor:
    return saved.read()


def remember(norm: nn.Module, n: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Note on n's node that a norm module computed it, and return n.

    Not for a module with hooks, which may gather its weights only during the call, nor inside a
    checkpoint, where reading its input would recompute it.
    """
    if torch.compiler.is_compiling():
        return n
    node: Any = n.grad_fn
    # an eager reference's node has no call
    call = getattr(node, "call", None)
    if getattr(call, "num_dims", 0) == 1 and node.is_free and not has_hooks(norm):
        node.source = Source(partial(_normalised, call), weight, bias, versions_of(n, weight, bias))
    return n


def _normalised(call: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    compute = run.forward if is_unwatched() else ops.forward
    return compute(call, call.forward(()), (x, weight, bias))[0]


def apply(function: Callable[..., Any], n: Tensor, read: Tensor, *args: Any) -> Any:
    """Run a block on `read`, its first input, which is n in its compute dtype; save no n.

    Only if there are no saved-tensor hooks, or only counting ones.
    """
    whole = whole_of(n)
    tensors, run = made_from(whole), partial(function, read, *args)
    if tensors is None or private.hooks_of(n):
        return run()
    again = whole.grad_fn.source.again  # type: ignore[union-attr]  # noted
    if whole is not n:
        again = partial(_viewed, again, n.shape)
    return _replacing(run, lambda: Recipe(again, None, tensors, read.dtype), tensors)


def whole_of(x: Tensor) -> Tensor:
    """Return the norm's result that x shows whole in another shape, as rows, or x itself."""
    base = x._base
    if base is None or not hasattr(base.grad_fn, "source") or base.numel() != x.numel():
        return x
    return base if base.is_contiguous() and x.is_contiguous() and base.dtype == x.dtype else x


def _viewed(again: Callable[..., Tensor], shape: torch.Size, *tensors: Tensor | None) -> Tensor:
    return again(*tensors).view(shape)


def apply_norm(function: Callable[..., Any], x: Tensor, read: Tensor, *args: Any) -> Any:
    """Run a norm on `read`, x in its compute dtype; save no x that a module's second run makes.

    Under the same rule.
    """
    run, node = partial(function, read, *args), x.grad_fn
    output: Output | None = None if node is None else node.metadata.get(OUTPUT)  # type: ignore[attr-defined]  # a dict
    if output is None or output.versions != versions_of(x) or private.hooks_of(x):
        return run()
    if (segment := output.segment()) is None:
        return run()

    def kept() -> MadeAgain:
        return MadeAgain(segment, segment.pack_output(output.place, x), output.given, read.dtype)

    return _replacing(run, kept)


def apply_tracked(
    tracker: Tracker,
    function: Callable[..., Any],
    share: Callable[..., Any] | None,
    call: Any,
    x: Tensor,
    read: Tensor,
    tensors: Sequence[Any],
) -> Any:
    """Run a block in a forward whose functions save recipes.

    share: as without a tracker, None to save the input. The block saves the recipe of its input,
    if that has one, and a norm's result gets one.
    """
    view = tracker.view_of(read)
    if view is None:
        y = function(read, *tensors) if share is None else share(function, x, read, *tensors)
    else:
        y = _replacing(partial(function, read, *tensors), lambda: Stored(None, view))
        if call.is_norm and y.grad_fn is not None:
            # readers of a norm's result ask the tracker; its node would make the input for them
            y.grad_fn.is_free = False
    if not isinstance(y, Tensor) or y.grad_fn is None:
        return y
    node: Any = y.grad_fn
    inputs = (read, *tensors)
    if view is None:
        for index in node.saved.inputs:
            if isinstance(inputs[index], Tensor):
                tracker.note_saved(inputs[index])
    if call.is_norm:
        are_given = [isinstance(t, Tensor) for t in inputs]
        again = partial(_normalised_from, call, are_given)
        tracker.note_made(again, [t for t in inputs if isinstance(t, Tensor)], [y])
    return y


def _normalised_from(call: Any, are_given: Sequence[bool], *tensors: Tensor) -> Tensor:
    """Return a norm's result, from those of its tensors that are given."""
    remaining = iter(tensors)
    x, *parameters = [next(remaining) if is_given else None for is_given in are_given]
    return _normalised(call, x, *parameters)  # type: ignore[arg-type]  # x is given


def _replacing(
    run: Callable[[], Any], make: Callable[[], Any], given: Sequence[Tensor | None] = ()
) -> Any:
    """Run a block; save what `make` returns in place of its first input. given: counted for it."""
    with uncounted() as count:
        # hooks can be set only on tensors saved without hooks
        if private.top_hooks() is None:
            y = run()
            saved, inputs = y.grad_fn.saved_tensors, y.grad_fn.saved.inputs
            if 0 in inputs and (raw := private.raw_saved(y.grad_fn)):
                kept, place = make(), inputs.index(0)
                # the pack hook is called at once, and frees the input
                raw[place].register_hooks(lambda _: kept, unpack)
                saved = *given, *saved[:place], *saved[place + 1 :]
            for tensor in saved:
                if tensor is not None and count is not None:
                    count(tensor)
            return y
    return run()


def made_from(n: Tensor) -> tuple[Tensor | None, ...] | None:
    """Return x, weight and bias of the norm that computed n; None if unknown, freed or modified."""
    node: Any = n.grad_fn
    source: Source | None = getattr(node, "source", None)
    # a hook on n may free or replace the norm's weights before backward reaches the norm
    if source is None or not torch.is_grad_enabled() or private.hooks_of(n):
        return None
    if source.versions != versions_of(n, source.weight, source.bias):
        return None
    saved = getattr(node, "saved", None)
    if saved is not None and not saved.inputs:
        # a norm's node, and no gradient needs x
        return None
    try:
        x = node.saved_tensors[0]
    except RuntimeError:
        # the norm's node has run already, or x was changed in place
        return None
    return x, source.weight, source.bias


@contextmanager
def uncounted() -> Iterator[Callable[[Tensor], Any] | None]:
    """Remove hooks that only count, and return a function that counts a tensor as they would."""
    lifted: list[Hooks] = []
    while (hooks := private.top_hooks()) is not None and phases.only_count(hooks):
        lifted.append(hooks)
        torch.autograd.graph.saved_tensors_hooks(*hooks).__exit__()
    try:
        yield lifted[0][0] if lifted else None
    finally:
        for hooks in reversed(lifted):
            torch.autograd.graph.saved_tensors_hooks(*hooks).__enter__()
