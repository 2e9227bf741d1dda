"""Functions with results larger than each of their inputs: concatenations, pictures scaled up.

    y = conv(torch.cat([skip, up(x)], 1))

Such a result is saved as its parts: those that have recipes, and copies of the others. A part of a
concatenation is a slice of the result; of pixels that are repeated each first one is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter, methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt.autograd import private_nodes
from fusedckpt.autograd.recipes import Made, read_passing
from fusedckpt.autograd.replay import Replay, replay_of

# the one with all pixels of its input in its result
_REPEATING = "UpsampleNearest2DBackward"
_UPSAMPLING = ("output_size", "scales_h", "scales_w")
# by the class of a node, its function, and the options that it has saved
_UPSAMPLINGS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    _REPEATING: (torch.ops.aten.upsample_nearest2d, _UPSAMPLING),
    "UpsampleBilinear2DBackward": (
        torch.ops.aten.upsample_bilinear2d,
        ("align_corners", *_UPSAMPLING),
    ),
}


class GrownPart(NamedTuple):
    """A part of a result."""

    # the node that made it
    node: Any
    # the number of that among the node's results
    number: int
    # of the part
    shape: Sequence[int]
    # returns it as a view of the result, None where the result has other values
    view: Callable[[Tensor], Tensor] | None

    def layout_in(self, x: Tensor) -> Tensor:
        """Return a tensor without memory, of the part's shape and as dense as a result x."""
        order = sorted(range(x.dim()), key=x.stride().__getitem__, reverse=True)
        like = torch.empty_permuted(self.shape, order, dtype=x.dtype, device=x.device)
        like.untyped_storage().resize_(0)
        return like


class MadeOfParts(Made):
    """A result made of its parts: backward reads those of skip connections long before others."""

    __slots__ = ()

    def _run(self) -> Sequence[Tensor]:
        """Return the result."""
        return [self.again(*map(read_passing, self.inputs))]


@cache
def is_grown(kind: type) -> bool:
    """Whether a class of nodes is that of such a function."""
    return private_nodes.is_cat(kind) or private_nodes.name_of_kind(kind) in _UPSAMPLINGS


def parts_of_grown(node: Any, x: Tensor) -> list[GrownPart]:
    """Return the parts of a result x by its node, [] for a node that does not tell them."""
    if not private_nodes.is_cat(node.__class__):
        return _parts_of_scaled(node, x)
    dim = private_nodes.dim_of_cat(node)
    inputs = node.next_functions
    parts = []
    start = 0
    for parent, number in inputs:
        meta = private_nodes.meta_of_result(parent, number)
        if meta is None or meta.dtype is not x.dtype or len(meta.shape) != x.dim():
            return []
        shape = torch.Size(meta.shape)
        view = methodcaller("narrow", dim, start, shape[dim])
        node = private_nodes.without_padding(parent)
        parts.append(GrownPart(node, number if node is parent else 0, shape, view))
        start += shape[dim]
    return parts


def _parts_of_scaled(node: Any, x: Tensor) -> list[GrownPart]:
    """Return the picture that a larger one was made of: each pixel once, if all are repeated."""
    shape, *scales = private_nodes.saved_options(node, ("self_sym_sizes", "scales_h", "scales_w"))
    ((parent, number),) = node.next_functions
    steps = [slice(None), slice(None)]
    for size, before, scale in zip(x.shape[2:], shape[2:], scales, strict=True):
        step, rest = divmod(size, before)
        # of a power of two no scale is rounded
        if rest or step.bit_count() > 1 or scale not in (None, step):
            return [GrownPart(parent, number, shape, None)]
        steps.append(slice(None, None, step))
    is_repeated = private_nodes.name_of_kind(node.__class__) == _REPEATING
    view = itemgetter(tuple(steps)) if is_repeated else None
    return [GrownPart(parent, number, shape, view)]


def replay_of_grown(node: Any, x: Tensor, num_parts: int) -> Replay:
    """Return the call that made a result x, as a function of its parts."""
    tensors = [x] * num_parts
    if private_nodes.is_cat(node.__class__):
        replay, _ = replay_of(torch.cat, (tensors, private_nodes.dim_of_cat(node)), {})
    else:
        func, names = _UPSAMPLINGS[private_nodes.name_of_kind(node.__class__)]
        options = dict(zip(names, private_nodes.saved_options(node, names), strict=True))
        replay, _ = replay_of(func, tensors, options)
    # the tensors are those that autocast has cast
    replay.autocast = None
    return replay
