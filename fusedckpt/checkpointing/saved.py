"""What stands for the tensors of a segment: its arguments, and what autograd saves in it.

Nothing here keeps alive what would not be alive without the checkpoint, but for the arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from fusedckpt.autograd.saved_tensor import is_plain, make_saved, version_of


class Argument:
    """A tensor argument, saved as autograd saves one.

    So the recompute gets the same object, an enclosing checkpoint may drop it, and a change in
    place raises autograd's own error.
    """

    def __init__(self, tensor: Tensor):
        self.dtype, self.layout = tensor.dtype, layout_of(tensor)
        # autograd refuses to save an inference tensor
        self._saved = tensor if tensor.is_inference() else make_saved(tensor, is_output=False)

    def tensor(self, made: dict[Any, Any] | None = None) -> Tensor:
        """Return the argument; raise where it was written in place since."""
        return self._saved if isinstance(self._saved, Tensor) else self._saved.unpack()


class Dropped:
    """Stands for a dropped tensor: the recompute finds it again by its index.

    Autograd holds it, the segment does not, and so knows which tensors are still wanted.
    """

    __slots__ = ("__weakref__", "index")
    # whether only a recompute brings the tensor back
    is_dropped = True

    def __init__(self, index: int):
        self.index = index

    def kept(self) -> Tensor | None:
        """Return the tensor where it is at hand, None where it takes a recompute."""
        return None


class View(Dropped):
    """An argument, or a view of one, which is at hand as the segment keeps its arguments."""

    __slots__ = ("argument", "layout")
    is_dropped = False

    def __init__(self, index: int, tensor: Tensor, argument: Argument):
        super().__init__(index)
        layout = layout_of(tensor)
        # None for the whole, which hooks around the segment may bring back in another layout
        self.argument, self.layout = argument, None if layout == argument.layout else layout

    def kept(self) -> Tensor:
        """Return it, without its graph."""
        tensor = self.argument.tensor()
        whole = tensor.detach() if tensor.requires_grad else tensor
        return whole if self.layout is None else whole.as_strided(*self.layout)


class Leaf(Dropped):
    """A parameter or another leaf, or a view of one, for as long as somebody else keeps it."""

    __slots__ = ("layout", "ref", "version")

    def __init__(self, index: int, tensor: Tensor, owner: Tensor):
        super().__init__(index)
        self.ref, self.version = TensorWeakRef(owner), version_of(owner)
        self.layout = None if tensor is owner else layout_of(tensor)

    @property
    def is_dropped(self) -> bool:
        """Whether it is gone, as what is loaded for each forward anew is."""
        return self.ref() is None

    def kept(self) -> Tensor | None:
        """Return it, None where it is gone."""
        owner = self.check()
        if owner is None or self.layout is None:
            return owner
        return owner.detach().as_strided(*self.layout)

    def check(self) -> Tensor | None:
        """Return what it is or is a view of; raise where that was written in place since."""
        owner = self.ref()
        if owner is not None and version_of(owner) != self.version:
            raise RuntimeError(stale("a parameter saved for backward", owner))
        return owner

    def renew(self) -> None:
        """Accept what the recompute itself wrote."""
        if (owner := self.ref()) is not None:
            self.version = version_of(owner)


def leaf_of(tensor: Tensor, index: int) -> Leaf | None:
    """Return what stands for a parameter, another leaf that requires grad, or a view of one."""
    owner = tensor if (base := tensor._base) is None else base
    if not (owner.is_leaf and (owner.requires_grad or isinstance(owner, nn.Parameter))):
        return None
    # how a view of another kind of tensor is made again is for a recompute to know
    alike = is_plain(tensor) and is_plain(owner) and tensor.dtype == owner.dtype
    return Leaf(index, tensor, owner) if tensor is owner or alike else None


def layout_of(tensor: Tensor) -> tuple[Any, Any, Any]:
    """Return where in its storage a tensor is."""
    return tensor.size(), tensor.stride(), tensor.storage_offset()


def meta_of(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """Return what a saved tensor and the recomputed one in its place must share."""
    return tensor.shape, tensor.dtype, tensor.device


def stale(what: str, tensor: Tensor) -> str:
    """Say that something was written in place between forward and backward."""
    return (
        f"checkpoint: {what} ({tensor.dtype} {list(tensor.shape)}) has been modified by an inplace "
        "operation between forward and backward, so that recomputing would give other values"
    )
