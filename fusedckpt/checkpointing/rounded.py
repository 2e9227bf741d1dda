"""Arguments in nine bits a value: `checkpoint(..., store="int8")`, by `autograd.rounded`.

The bytes are saved as any argument is: hooks around see them, an enclosing checkpoint drops them,
offload moves them. The recompute gets the values, rounded, and so do all tensors that it brings
back, the argument itself among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fusedckpt.autograd import private
from fusedckpt.autograd.rounded import RoundedLayout, layout_of_rounded, packed_of
from fusedckpt.autograd.storages import VersionCheck
from fusedckpt.checkpointing.calls import Argument


class RoundedArgument(Argument):
    """An argument that waits for backward in nine bits a value.

    save: saves the bytes.
    """

    # no tensor that autograd saves is this one: the recompute brings back the rounded values
    storage = 0
    layout = None

    def __init__(self, tensor: Tensor, save: Callable[[Tensor], Argument]):
        self.dtype = tensor.dtype
        written = VersionCheck(tensor, "checkpoint: an argument")
        rounded = _Rounded(save(packed_of(tensor)), layout_of_rounded(tensor), written)
        self._written = written
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
    # how its values lay in memory
    layout: RoundedLayout
    # raises where the tensor was written since
    written: VersionCheck


def _values(rounded: _Rounded) -> Tensor:
    """Return the rounded values, in memory of their own."""
    rounded.written.check()
    return rounded.layout.values(rounded.packed.tensor())
