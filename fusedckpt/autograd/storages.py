"""The storage of a tensor: its key, its leaf, and whether it was written since."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fusedckpt.autograd import private
from fusedckpt.autograd.replay import PLAIN_TENSORS


def storage_of(tensor: Tensor) -> int:
    """Return a key of a tensor's storage, unique while it lives; 0 for a tensor that is not plain.

    A plain tensor is dense, of no subclass, not nested, and no lazy conjugate or negative.
    """
    if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
        return 0
    if tensor.is_nested or tensor.is_conj() or tensor.is_neg():
        return 0
    return private.storage_key(tensor.untyped_storage())


def leaf_of(tensor: Tensor) -> Tensor | None:
    """Return the parameter or other leaf with gradients that a tensor is, or is a view of."""
    base = tensor._base
    owner = tensor if base is None else base
    return owner if owner.is_leaf and (owner.requires_grad or is_parameter(owner)) else None


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter; the class of parameters takes long to say no."""
    kind = type(tensor)
    return kind is nn.Parameter or (kind is not Tensor and isinstance(tensor, nn.Parameter))


def owns_storage(tensor: Tensor) -> bool:
    """Whether a tensor is plain, all of its storage, and no leaf."""
    # of a tensor that is not plain, such as a sparse one, `nbytes` may be undefined
    if not storage_of(tensor) or tensor.is_inference():
        return False
    return tensor.nbytes == tensor.untyped_storage().nbytes() and leaf_of(tensor) is None


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements fill the memory between the first and the last."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class _Empties(dict[tuple[torch.device, torch.dtype], Tensor]):
    """Tensors without memory."""

    def __missing__(self, key: tuple[torch.device, torch.dtype]) -> Tensor:
        device, dtype = key
        return self.setdefault(key, torch.empty(0, device=device, dtype=dtype))


_EMPTIES = _Empties()


def write_counter(tensor: Tensor) -> Tensor:
    """Return a tensor without memory that has the version of another one, as that may be freed."""
    counter = tensor.detach()
    counter.data = _EMPTIES[tensor.device, tensor.dtype]
    return counter


class VersionCheck:
    """Notes the version of a tensor, and keeps none of its memory."""

    __slots__ = ("_count", "_name", "_shape", "version")

    def __init__(self, tensor: Tensor, name: str):
        # of the tensor, for the error
        self._name = name
        self._count = write_counter(tensor)
        self._shape = tensor.shape
        self.version = tensor._version

    def is_current(self) -> bool:
        """Whether the tensor is as it was."""
        return self._count._version == self.version

    def check(self) -> None:
        """Raise where the tensor was written in place since."""
        if self._count._version != self.version:
            raise RuntimeError(stale(self._name, self._count, self._shape))


def stale(name: str, tensor: Tensor, shape: Sequence[int] | None = None) -> str:
    """Say that a tensor, of this shape if given, was written between forward and backward."""
    return (
        f"{name} ({tensor.dtype} {list(shape or tensor.shape)}) has been modified by "
        "an inplace operation between forward and backward, so that recomputing would give other "
        "values"
    )
