"""The random numbers of a dropout, drawn again by its random state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fusedckpt.autograd import private
from fusedckpt.state import rng


class Noise:
    """The noise by which dropout multiplies on a CPU, and its random state."""

    def __init__(self, like: Tensor, p: float):
        self.state = rng.CPU.read()
        self.p = p
        self.size = like.shape
        self.stride = like.stride()
        self.dtype = like.dtype
        # a CPU, or meta tensors of an estimate
        self.device = like.device

    def __call__(self) -> Tensor:
        """Return the noise again."""
        noise = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        with _at(rng.CPU, self.state):
            return drawn(noise, self.p)


@contextmanager
def _at(generator: Any, state: Any) -> Iterator[None]:
    """Set the random state of a generator inside, where no vmap of a backward refuses ops."""
    is_batched = private.are_transforms_active()
    outside = private.outside_vmaps if is_batched else private.outside_legacy_vmap
    with outside(), rng.kept([generator]):
        generator.write(state)
        yield


def drawn(noise: Tensor, p: float) -> Tensor:
    """Draw the noise of a dropout into a tensor."""
    keep = 1 - p
    return noise.bernoulli_(keep).div_(keep)


class Mask:
    """The mask of dropout's CUDA kernel, and its random state."""

    def __init__(self, input: Tensor, p: float, state: Any):
        self.state = state
        self.p = p
        self.device = input.device
        # contiguous, as `random_state` asks for
        self.size = input.shape
        self.dtype = input.dtype

    def __call__(self) -> Tensor:
        """Return the mask again: the random numbers depend on the layout, not on the data."""
        x = torch.empty(self.size, dtype=self.dtype, device=self.device)
        (generator,) = rng.of_device(self.device)
        with _at(generator, self.state):
            return torch.native_dropout(x, self.p, True)[1]


def random_state(x: Tensor) -> Any:
    """Return CUDA's random state, None where dropout of x cannot be drawn again by it."""
    # where the data do not begin at 16 bytes, the kernel draws in another order
    is_aligned = x.is_contiguous() and x.data_ptr() % 16 == 0
    if x.device.type != "cuda" or not is_aligned or torch.cuda.is_current_stream_capturing():
        return None
    (generator,) = rng.of_device(x.device)
    return generator.read()


def masked(scale: float, x: Tensor, mask: Tensor) -> Tensor:
    """Return a dropout's result, from its mask."""
    return torch.ops.aten.native_dropout_backward(x, mask, scale)
