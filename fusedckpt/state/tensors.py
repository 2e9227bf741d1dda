"""The values of tensors, copied and put back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusedckpt.autograd.private import storage_key


def tensor_restorer(
    tensor: Tensor, copy: Callable[[Tensor], Tensor] = torch.clone
) -> Callable[[], None]:
    """Copy a tensor, and return a function that puts its value and its memory back.

    It writes nothing where nothing changed. copy: copies a tensor, to any device.
    """
    memory = tensor.detach()
    # one element stands for all of an expanded axis
    for axis, stride in enumerate(memory.stride()):
        if stride == 0 and memory.shape[axis] > 1:
            memory = memory.narrow(axis, 0, 1)
    before = copy(memory)
    version = tensor._version
    whole = tensor.detach()

    def restore() -> None:
        put_memory_back(tensor, whole)
        # some of torch's own ops, batch_norm among them, write without a new version
        if tensor._version != version or not torch.equal(memory, before.to(memory.device)):
            memory.copy_(before)

    return restore


def put_memory_back(tensor: Tensor, whole: Tensor) -> None:
    """Undo `tensor.data = other`. whole: the tensor as it was, detached."""
    if storage_key(tensor.untyped_storage()) != storage_key(whole.untyped_storage()):
        tensor.data = whole
