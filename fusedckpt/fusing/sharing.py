"""Linears and activations that save a recipe of their input, where that takes fewer bytes.

A linear that reads a fused norm's output saves the norm's input, which the norm saves anyway. An
activation that reads such a linear's output saves the same, and so does a linear that reads that
activation's: an MLP written inside a layer's forward saves only the input of its norm. Values are
recomputed when backward reads them, each once: a value that a later node of the backward needs too
stays until then.

The layer's own forward runs, on the same tensors; hooks on saved tensors do the rest. A module that
reads anything else runs as it did.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedckpt.autograd import dispatch, private
from fusedckpt.autograd.backward import Versioned, versions_of
from fusedckpt.autograd.dispatch import autocast_dtype
from fusedckpt.blocks import norm_sharing
from fusedckpt.blocks.norm_sharing import Recipe

# where a node has its note, and its recipe
_NOTE, _RECIPE = "fusedckpt note", "fusedckpt recipe"
# nodes of casts, and of views as rows
_RESHAPES = ("ToCopyBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")


class Note(NamedTuple):
    """How a layer made a node's result."""

    # makes it again from the value of the parent and the tensors, None for one that is saved itself
    again: Callable[..., Tensor] | None
    # a weak reference to the recipe of the layer's input, which goes when backward has read it
    parent: Any
    # the parameters that the layer read
    tensors: tuple[Any, ...]
    # the layer: "linear" or "activation"
    makes: str
    # versions of the result
    versions: tuple[int, ...]


class _Kept:
    """The object saved in place of a tensor: a recipe and a dtype, or the tensor itself.

    alive: a recipe that lives as long as this.
    """

    def __init__(self, recipe: Recipe | None, like: Tensor, alive: Recipe):
        self.recipe, self.alive = recipe, alive
        self.dtype, self.shape = like.dtype, like.shape
        # an output packed as it is would hold its own node
        self.own = None if recipe is not None else Versioned(like.detach())

    def read(self) -> Tensor:
        """Return the tensor."""
        if self.recipe is None:
            (tensor,) = self.own.read()  # type: ignore[union-attr]  # where there is no recipe
            assert tensor is not None
            return tensor
        return self.recipe.read().to(self.dtype).view(self.shape)


def recipe_of(x: Any, *makers: str) -> Recipe | None:
    """Return how to recompute x where a fused norm or one of `makers` made it, None otherwise."""
    if torch.compiler.is_compiling() or not isinstance(x, Tensor) or x.grad_fn is None:
        return None
    whole = norm_sharing.whole_of(x)
    node: Any = whole.grad_fn
    if hasattr(node, "source") and (whole is x or not private.hooks_of(x)):
        tensors = norm_sharing.made_from(whole)
        return None if tensors is None else _remembered(node, node.source.again, None, tensors)
    note: Note | None = node.metadata.get(_NOTE)
    if note is None or note.makes not in makers or private.hooks_of(x):
        return None
    parent = note.parent()
    if parent is None or note.versions != versions_of(x) or not torch.is_grad_enabled():
        return None
    if note.again is None:
        return _remembered(node, lambda value: value, None, [x.detach()])
    return _remembered(node, note.again, parent, note.tensors)


def _remembered(node: Any, *how: Any) -> Recipe:
    """Return a node's recipe: the same one for all readers, as long as one is there."""
    known = node.metadata.get(_RECIPE)
    recipe = None if known is None else known()
    if recipe is None:
        recipe = Recipe(*how)
        node.metadata[_RECIPE] = weakref.ref(recipe)
    return recipe


def read(recipe: Recipe, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """Return run(x), which saves the recipe in place of x."""
    with norm_sharing.uncounted() as count:
        if private.top_hooks() is not None or not x.is_contiguous():
            return run(x)
        # autograd keeps the pack hook as long as the saved tensor: it must not hold x
        storage, numel = private.storage_key(x.untyped_storage()), x.numel()
        node: Any = norm_sharing.whole_of(x).grad_fn
        maker = weakref.ref(node) if hasattr(node, "source") else _nothing

        def pack(tensor: Tensor) -> _Kept:
            is_x = private.storage_key(tensor.untyped_storage()) == storage
            is_x = is_x or (tensor._version == 0 and _is_cast(tensor, maker()))
            is_x = is_x and tensor.numel() == numel and tensor.is_contiguous()
            if is_x:
                recipe.added()
            if count is not None:
                for kept in recipe.tensors if is_x else [tensor]:
                    count(kept)
            return _Kept(recipe if is_x else None, tensor, recipe)

        with torch.autograd.graph.saved_tensors_hooks(pack, norm_sharing.unpack):
            return run(x)


def _nothing() -> None:
    return None


def _is_cast(tensor: Tensor, maker: Any) -> bool:
    """Whether a tensor is a copy of a node's result in another dtype, in any shape."""
    node = tensor.grad_fn
    while node is not None and node is not maker and node.name() in _RESHAPES:
        node = node.next_functions[0][0]
    return node is not None and node is maker


def note_maker(
    layer: nn.Module,
    y: Tensor,
    recipe: Recipe,
    again: Callable[..., Tensor] | None,
    makes: str,
    *given: Any,
) -> None:
    """Note on y's node how a layer made it: `again` of the recipe's value, and the tensors given.

    None for a result that is saved itself; makes: "linear" or "activation".
    """
    # hooks may gather a layer's weights for the call alone
    if y.grad_fn is not None and not dispatch.has_hooks(layer):
        node: Any = y.grad_fn
        node.metadata[_NOTE] = Note(again, weakref.ref(recipe), given, makes, versions_of(y))


class Shared(nn.Module):
    """Forward of a layer that may save a recipe of its input."""

    # its name and repr stay as they were
    _fusedckpt_prefix = ""
    # the makers of the inputs that it saves recipes of
    _fusedckpt_reads: tuple[str, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward; save the recipe of the input, if that is known."""
        forward = super().forward
        if len(args) == 1 and not kwargs and not torch.compiler.is_compiling():
            recipe = recipe_of(args[0], *self._fusedckpt_reads)
            if recipe is not None and not dispatch.is_recorded(args[0]):
                return self._shared(args[0], recipe, forward)
        return forward(*args, **kwargs)

    def _shared(self, x: Tensor, recipe: Recipe, forward: Callable[..., Tensor]) -> Tensor:
        raise NotImplementedError

    def __prepare_scriptable__(self) -> Any:
        """Refuse torch.jit.script."""
        raise TypeError("torch.jit.script: the model was fused, call fusedckpt.unfuse first")


class SharedProduct(Shared):
    """Forward of a layer that multiplies its input by a weight of its own."""

    _fusedckpt_reads = ("activation",)

    def _shared(self, x: Tensor, recipe: Recipe, forward: Callable[..., Tensor]) -> Tensor:
        to = autocast_dtype(x.device)
        # as autocast does, on a tensor that is known
        return read(recipe, x if to is None or x.dtype == torch.float64 else x.to(to), forward)


class SharedReader(SharedProduct):
    """Forward of a module with a weight of its own, such as a router of experts.

    It may cast its input, and saves other tensors as ever.
    """

    def _shared(self, x: Tensor, recipe: Recipe, forward: Callable[..., Tensor]) -> Any:
        return read(recipe, x, forward)


class SharedLinear(SharedProduct):
    """Forward of nn.Linear: an activation recomputes its result, or saves it at another level."""

    _fusedckpt_save: str

    def _shared(self, x: Tensor, recipe: Recipe, forward: Callable[..., Tensor]) -> Tensor:
        y = super()._shared(x, recipe, forward)
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        if weight is None:
            # hooks compute it, as those of weight_norm do
            return y
        again = partial(_linear, y.dtype) if self._fusedckpt_save == "inputs" else None
        note_maker(self, y, recipe, again, "linear", weight, bias)
        return y


def cast_by(device: torch.device, to: torch.dtype | None) -> AbstractContextManager[Any]:
    """Let autocast cast to a dtype, or, for None, not at all."""
    if autocast_dtype(device) == to:
        return nullcontext()
    return torch.autocast(device.type, to, enabled=to is not None)


def _linear(dtype: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with cast_by(x.device, None):
        bias = None if bias is None else bias.to(dtype)
        return F.linear(x.to(dtype), weight.to(dtype), bias)
