"""The notes that nodes of autograd's graph have: which module made a result, and how to again.

No other file writes to a node. A note holds no tensor but parameters: a node outlives what it
saves. So a recipe is made when its first reader asks, from what the node has saved by then, and
lives as long as its readers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt.autograd import private
from fusedckpt.autograd.backward import versions_of
from fusedckpt.autograd.recipes import Leaf, Made, View, view_in

_ORIGIN = "fusedckpt origin"
_RECIPE = "fusedckpt recipe"
_SEGMENT = "fusedckpt segment"
# the makers of results
NORM = "norm"
ROWS = "rows"
MODULE = "module"
LINEAR = "linear"
ACTIVATION = "activation"


# returns the source of a node's result, given that and the parameters of its note; None where the
# tensors that it is made from are gone. It holds no tensor
Source = Callable[[Tensor, Sequence[Tensor | None]], Leaf | Made | None]


class Origin(NamedTuple):
    """How the result of a node is made again."""

    # its maker: NORM, ROWS gathered from ranks, MODULE that runs again, LINEAR, ACTIVATION
    maker: str
    source: Source
    # parameters that the recipe reads
    tensors: tuple[Tensor | None, ...]
    # the versions of the result and the parameters
    versions: tuple[int, ...]


def note(y: Tensor, maker: str, source: Source, *tensors: Tensor | None) -> None:
    """Note how a result is made again; tensors: parameters that its recipe reads."""
    node: Any = y.grad_fn
    if node is not None:
        node.metadata[_ORIGIN] = Origin(maker, source, tensors, versions_of(y, *tensors))


def view_of(y: Any, *makers: str) -> View | None:
    """Return how to read a result of one of some makers; None if it has to be saved.

    It has to be if it was written since, as were parameters of its maker, or has hooks: these may
    free or replace the parameters before backward reaches the maker. FSDP2 frees those of a unit
    after its forward, and hooks the results of the unit, but a view of one hides its hooks.
    """
    if not isinstance(y, Tensor) or y.grad_fn is None:
        return None
    whole: Any = y
    notes: dict[str, Any] = whole.grad_fn.metadata
    if _ORIGIN not in notes and y._base is not None and y._base.dtype == y.dtype:
        # a view of a result, such as its rows, has a node of its own
        whole = y._base
        notes = {} if whole.grad_fn is None else whole.grad_fn.metadata
    origin: Origin | None = notes.get(_ORIGIN)
    if origin is None or origin.maker not in makers or not torch.is_grad_enabled():
        return None
    if origin.versions != versions_of(whole, *origin.tensors) or _is_one_freed(origin.tensors):
        return None
    if private.hooks_of(y) or private.hooks_of(whole):
        return None
    reference = notes.get(_RECIPE)
    source = None if reference is None else reference()
    if source is None:
        source = origin.source(whole, origin.tensors)
        if source is None:
            return None
        # the same one for all readers, as long as there is one
        notes[_RECIPE] = weakref.ref(source)
    return view_in(source, y)


def _is_one_freed(parameters: Sequence[Tensor | None]) -> bool:
    """Whether a parameter has no memory."""
    for p in parameters:  # noqa: SIM110  # without a call of Python's for each
        if p is not None and not p.untyped_storage().nbytes() and p.numel():
            return True
    return False


def of_first_saved(
    name: str, again: Callable[..., Tensor], y: Tensor, tensors: Sequence[Tensor | None]
) -> Made | None:
    """Return the source `again(x, *tensors)`, x the first tensor that y's node has saved.

    Tensors that are None are left out. With a name and `again` alone, this is a note's `Source`.
    """
    x = saved_view(y.grad_fn)
    if x is None:
        return None
    inputs = [x]
    for tensor in tensors:
        if tensor is not None:
            inputs.append(Leaf(tensor))
    return Made(name, again, inputs, [y])


def saved_view(node: Any) -> View | Leaf | None:
    """Return how to read the first tensor that a node has saved, None where it is freed."""
    try:
        (raw, *_) = private.raw_saved(node)
        if isinstance(raw.data, (View, Leaf)):
            return raw.data
        return Leaf(node.saved_tensors[0])
    except (RuntimeError, ValueError):
        # the node has run already, has saved nothing, or x was changed in place
        return None


def mark_segment(node: Any, segment: Any) -> None:
    """Note the checkpoint of the function that returned a node's result."""
    node.metadata[_SEGMENT] = weakref.ref(segment)


def segment_of(node: Any) -> Any:
    """Return the checkpoint of the function that returned a node's result, or None."""
    reference = node.metadata.get(_SEGMENT)
    return None if reference is None else reference()
