"""Cards on paper: their numbers, and a context in which libraries find one that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch


class Card(NamedTuple):
    """A card on paper."""

    # as `bench predict --card` names it
    name: str
    arch: str
    # multiprocessors, their shared memory in bytes
    units: int
    shared: int
    # GHz under load
    clock: float
    # bytes of the L2 cache
    l2: float
    # float32 instructions of threads that a multiprocessor executes at a clock
    floats: int


CARDS = {
    "A100": Card("A100", "sm_80", 108, 164 << 10, 1.41, 40e6, 64),
    "H100": Card("H100", "sm_90", 132, 228 << 10, 1.755, 50e6, 128),
}


def card_of_driver() -> Card:
    """Return the card for which Triton compiles now, see `tests.kernels.compile_only`."""
    from triton.runtime import driver

    active: Any = driver.active
    arch = f"sm_{active.get_current_target().arch}"
    return next(card for card in CARDS.values() if card.arch == arch)


def properties_of(card: Card) -> SimpleNamespace:
    """Return the properties of a card as torch.cuda names them."""
    return SimpleNamespace(
        name=f"NVIDIA {card.name}",
        major=int(card.arch[3]),
        minor=0,
        multi_processor_count=card.units,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=card.shared - (1 << 10),
        shared_memory_per_multiprocessor=card.shared,
        total_memory=80 << 30,
        L2_cache_size=int(card.l2),
        gcnArchName="",
    )


@contextmanager
def played(card: Card) -> Iterator[None]:
    """Let torch.cuda and inductor find a card inside that does not exist."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._subclasses import fake_tensor

    properties = properties_of(card)
    capability = properties.major, properties.minor
    cuda: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": capability,
        "synchronize": None,
        "set_device": None,
        "_DeviceGuard": nullcontext(),
    }
    interface: dict[str, Any] = {
        "get_device_properties": properties,
        "get_compute_capability": 10 * properties.major,
        "is_available": True,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
    }
    with ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(patch.object(torch.cuda, name, _answers(value)))
        for name, value in interface.items():
            stack.enter_context(patch.object(CudaInterface, name, staticmethod(_answers(value))))
        stream = patch.object(torch._C, "_cuda_getCurrentRawStream", _answers(0), create=True)
        stack.enter_context(stream)
        # some releases of torch that are built with CUDA make a tensor there
        context = patch.object(fake_tensor, "init_gpu_context", _answers(None), create=True)
        stack.enter_context(context)
        yield


def _answers(value: Any) -> Any:
    return lambda *_, **__: value
