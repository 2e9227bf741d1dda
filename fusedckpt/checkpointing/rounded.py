"""Arguments in nine bits a value: `checkpoint(..., store="int8")`.

The forward computes with the tensor that it was given. What stays of it are its codes and scales
(kernels/int8.py), one tensor of bytes, which is saved as any argument is: hooks around see it, an
enclosing checkpoint drops it, offload moves it. The recompute gets its values, rounded, and so do
all tensors that it brings back, the argument itself among them: backward is that of one function,
at a point nearby.

A tensor that several segments get is packed once. The check for writes in place is that of the
tensor: the bytes are no part of its memory, but gradients through it would still be of other values
than the writer's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from fusedckpt.autograd import dispatch, private
from fusedckpt.checkpointing.calls import (
    Argument,
    VersionCheck,
    is_dense,
    owns_storage,
    storage_of,
)
from fusedckpt.kernels import int8

# a tensor of fewer elements stays as it is: statistics of rows are small, and need their digits
LEAST = 1 << 10


def is_rounded(tensor: Tensor) -> bool:
    """Whether an argument is kept in nine bits.

    That is a tensor of 16 or 32 bits a value that an operation made, with a gradient, in memory of
    its own. A leaf, a mask, a table of positions or a view of a larger tensor is kept by others.
    """
    return (
        tensor.grad_fn is not None
        and tensor.dtype in int8.PACKED_DTYPES
        and tensor.numel() >= LEAST
        and owns_storage(tensor)
        and is_dense(tensor.shape, tensor.stride())
    )


class RoundedArgument(Argument):
    """An argument that waits for backward in nine bits a value.

    save: saves the bytes.
    """

    # no tensor that autograd saves is this one: the recompute brings back the rounded values
    storage = 0
    layout = None

    def __init__(self, tensor: Tensor, save: Callable[[Tensor], Argument]):
        self.dtype = tensor.dtype
        rounded = _Rounded(
            save(_packed(tensor)),
            tensor.dtype,
            tensor.numel(),
            tensor.shape,
            tensor.stride(),
            VersionCheck(tensor),
        )
        self._written = rounded.written
        # autograd notes where the tensor is in the graph, and these hooks hold its bytes: no cycle,
        # which would never be freed
        with saved_tensors_hooks(lambda _: rounded, _values):
            self._saved = private.make_saved(tensor, is_output=False)

    def check(self) -> None:
        """Raise where the argument was written in place since."""
        self._written.check()


class _Rounded(NamedTuple):
    """A tensor in nine bits."""

    # codes and scales
    packed: Argument
    # the dtype of the tensor
    dtype: torch.dtype
    # the number of its elements
    numel: int
    # its sizes
    shape: torch.Size
    # its strides
    stride: tuple[int, ...]
    # raises where the tensor was written since
    written: VersionCheck


def _values(rounded: _Rounded) -> Tensor:
    """Return the rounded values, in memory of their own."""
    rounded.written.check()
    packed = rounded.packed.tensor()
    # an estimate sees the memory that others do not see filled
    out = torch.empty(rounded.numel, dtype=rounded.dtype, device=packed.device)
    with private.unseen(), torch.no_grad():
        rows = out.view(-1, _width(rounded.shape, rounded.stride, rounded.numel))
        int8.unpack_int8(packed, rows, _path(packed, rounded.dtype))
        return out.as_strided(rounded.shape, rounded.stride)


class _Known(NamedTuple):
    """A tensor that was packed."""

    packed: TensorWeakRef
    # of its storage, so that no other gets this key
    source: StorageWeakRef
    version: int


# by storage, dtype and width of rows
_known: dict[Any, _Known] = {}


def _packed(tensor: Tensor) -> Tensor:
    """Return the codes and scales of a tensor, made once as long as they live."""
    width = _width(tensor.shape, tensor.stride(), tensor.numel())
    key = storage_of(tensor), tensor.dtype, width
    known = _known.get(key)
    packed = known.packed() if known is not None and known.version == tensor._version else None
    if packed is None:
        nbytes = int8.packed_nbytes(tensor.numel() // width, width)
        packed = torch.empty(nbytes, dtype=torch.int8, device=tensor.device)
        with private.unseen(), torch.no_grad():
            rows = tensor.detach().as_strided((tensor.numel(),), (1,)).view(-1, width)
            int8.pack_int8(rows, _path(tensor, tensor.dtype), packed)
        source = StorageWeakRef(tensor.untyped_storage())
        known = _Known(TensorWeakRef(packed), source, tensor._version)
        _known[key] = known
        weakref.finalize(packed, _forget, key, known).atexit = False
    return packed


def _forget(key: Any, known: _Known) -> None:
    if _known.get(key) is known:
        del _known[key]


def _width(shape: Sequence[int], strides: Sequence[int], count: int) -> int:
    """Return the elements of a row: of the dimension that is adjacent in memory, or of all."""
    width = next((n for n, stride in zip(shape, strides, strict=True) if stride == 1 and n > 1), 1)
    return width if width >= int8.GROUP else count


def _path(tensor: Tensor, dtype: torch.dtype) -> str:
    return "aten" if dispatch.is_aten(tensor.device, dtype) else "triton"
