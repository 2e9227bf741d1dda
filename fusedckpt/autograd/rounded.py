"""Saved tensors in nine bits a value: store="int8".

The forward computes with the tensor that it was given. Its codes and scales (kernels/int8.py), one
tensor of bytes, are saved in its place. Backward gets its values, rounded: it is that of one
function, at a point nearby.

A tensor that several readers save, layers or checkpoints, is packed once. The check for writes in
place is that of the tensor: the bytes are no part of its memory, but gradients through it would
still be of other values than the writer's.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from fusedckpt.autograd import dispatch, private
from fusedckpt.autograd.private_nodes import saved_by
from fusedckpt.autograd.recipes import Count, Leaf, View
from fusedckpt.autograd.storages import VersionCheck, is_dense, owns_storage, storage_of
from fusedckpt.kernels import int8

# a tensor of fewer elements stays as it is: statistics of rows are small, and need their digits
LEAST = 1 << 10
# nodes of views
_VIEW_NODES = frozenset(
    ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "TransposeBackward0")
    + ("TBackward0", "PermuteBackward0", "SqueezeBackward1", "UnsqueezeBackward0")
    + ("AliasBackward0", "ExpandBackward0", "ViewAsBackward0")
)


def is_rounded(tensor: Tensor) -> bool:
    """Whether a tensor is kept in nine bits.

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


def is_kept(tensor: Tensor) -> bool:
    """Whether the operation that made a tensor has saved it, as attention, softmax and ReLU do."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _VIEW_NODES:
        node = node.next_functions[0][0]
    if node is None:
        return False
    key = storage_of(tensor)
    return any(isinstance(saved, Tensor) and storage_of(saved) == key for saved in saved_by(node))


class RoundedLayout(NamedTuple):
    """How the values of a packed tensor lay in memory."""

    # the dtype of the tensor
    dtype: torch.dtype
    # its sizes
    shape: torch.Size
    # its strides
    stride: tuple[int, ...]
    # the number of its elements
    numel: int

    @property
    def width(self) -> int:
        """The elements of a row: of the dimension that is adjacent in memory, or of all."""
        pairs = zip(self.shape, self.stride, strict=True)
        width = next((n for n, stride in pairs if stride == 1 and n > 1), 1)
        return width if width >= int8.GROUP else self.numel

    @property
    def has_rows(self) -> bool:
        """Whether the tensor is contiguous, and its last dimension the rows of codes."""
        size = 1
        for n, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if n != 1 and stride != size:
                return False
            size *= n
        return self.shape[-1:] == (self.width,)

    def values(self, packed: Tensor) -> Tensor:
        """Return the rounded values of a packed tensor, in memory of their own."""
        # an estimate sees the memory that others do not see filled
        out = torch.empty(self.numel, dtype=self.dtype, device=packed.device)
        with private.unseen(), torch.no_grad():
            rows = out.view(-1, self.width)
            int8.unpack_int8(packed, rows, _path(packed, self.dtype))
            return out.as_strided(self.shape, self.stride)


def layout_of_rounded(tensor: Tensor) -> RoundedLayout:
    """Return how a tensor lies in memory."""
    return RoundedLayout(tensor.dtype, tensor.shape, tensor.stride(), tensor.numel())


class _Known(NamedTuple):
    """A tensor that was packed."""

    packed: TensorWeakRef
    # of its storage, so that no other gets this key
    source: StorageWeakRef
    version: int


# by storage, dtype and width of rows
_known: dict[Any, _Known] = {}


def packed_of(tensor: Tensor) -> Tensor:
    """Return the codes and scales of a tensor, made once as long as they live."""
    width = layout_of_rounded(tensor).width
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


def _path(tensor: Tensor, dtype: torch.dtype) -> str:
    return "aten" if dispatch.is_aten(tensor.device, dtype) else "triton"


class RoundedLeaf(Leaf):
    """A tensor that is saved in nine bits a value, from its first reader on.

    Each read makes the values anew: a reader of the same tensor later in backward would hold them
    through the temporaries of those before it.
    """

    __slots__ = ("_layout", "_packed", "_written")

    name = "rounded"
    is_rounded = True

    def __init__(self, tensor: Tensor):
        super().__init__(tensor)
        self._layout = layout_of_rounded(tensor)
        self._packed: Tensor | None = None
        self._written = VersionCheck(tensor, "fuse: an input that store='int8' keeps")

    @property
    def is_packed(self) -> bool:
        """Whether any reader has saved the tensor."""
        return self._packed is not None

    @property
    def dtype(self) -> torch.dtype:
        """Return the tensor's dtype."""
        return self._layout.dtype

    @property
    def size(self) -> torch.Size:
        """Return the tensor's shape."""
        return self._layout.shape

    @property
    def stride(self) -> tuple[int, ...]:
        """Return the tensor's strides."""
        return self._layout.stride

    @property
    def offset(self) -> int:
        """Return the tensor's offset in its storage."""
        return 0

    def is_current(self) -> bool:
        """Whether the tensor is as it was."""
        return self._written.is_current()

    def read(self) -> Tensor:
        """Return the rounded values."""
        self._written.check()
        return self._tensor if self._packed is None else self._layout.values(self._packed)

    def packed(self) -> Tensor:
        """Return codes and scales, of a tensor that a reader has saved."""
        self._written.check()
        assert self._packed is not None
        return self._packed

    def holds(self, view: View) -> bool:
        """Whether a view is of all rows of the tensor, so that kernels can read them packed."""
        layout = self._layout
        is_whole = view.size == layout.shape and view.stride == layout.stride and not view.offset
        return is_whole and layout.has_rows and view.check is None

    def add_reader(self, count: Count) -> None:
        """Pack the tensor for its first reader; count the bytes for a hook that counts."""
        if self._packed is None:
            self._packed = packed_of(self._tensor)
            # frees the tensor itself
            del self._tensor
        if count is not None:
            count(self._packed)


def rounded_leaf(tensor: Tensor) -> RoundedLeaf | None:
    """Return the source of a tensor that is kept in nine bits; None where it stays as it is.

    It stays where it is no tensor of `is_rounded`, or its maker has saved it.
    """
    return None if not is_rounded(tensor) or is_kept(tensor) else RoundedLeaf(tensor)
