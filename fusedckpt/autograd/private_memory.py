"""Private touches of torch's CUDA allocator: its history, and its call when memory runs out.

As in `private`, a name that this torch lacks has a fallback. A CPU's torch lacks them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# whether the allocator records its history, starts or ends that, and the history with all blocks
_is_recording: Any = getattr(torch._C, "_cuda_isHistoryEnabled", None)
_record: Any = getattr(torch.cuda.memory, "_record_memory_history", None)
_snapshot: Any = getattr(torch.cuda.memory, "_snapshot", None)
# has a function called with device, requested, total and free bytes before an out-of-memory error
_attach: Any = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)


def has_history() -> bool:
    """Whether the allocator has a history: torch's own has, cudaMallocAsync's has not."""
    has_names = None not in (_is_recording, _record, _snapshot)
    return has_names and torch.cuda.get_allocator_backend() == "native"


@contextmanager
def allocator_history(device: torch.device) -> Iterator[list[dict[str, Any]]]:
    """Yield a list that has the actions of CUDA's allocator when the context ends.

    A history that the caller records goes on, and its actions come first. Without it report() sees
    the free of a tensor that Python drops only when its memory is allocated again.
    """
    actions: list[dict[str, Any]] = []
    if not has_history():
        yield actions
        return
    is_callers = _is_recording()
    if not is_callers:
        _record("all", context=None, stacks="python")
    try:
        yield actions
        actions += snapshot(device)["device_traces"]
    finally:
        if not is_callers:
            _record(None)


def snapshot(device: torch.device) -> dict[str, Any]:
    """Return the allocator's snapshot, of one device: `segments` and `device_traces`."""
    whole = _snapshot()
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = [segment for segment in whole["segments"] if segment["device"] == index]
    return {"segments": segments, "device_traces": whole["device_traces"][index]}


def record_lines(count: int) -> Callable[[], None]:
    """Record the lines of Python that allocate, for the last `count` actions; return the end of it.

    A history that the caller records goes on as it is.
    """
    if _is_recording():
        return lambda: None
    _record("all", context="alloc", stacks="python", max_entries=count)
    return lambda: _record(None)


def attach_to_out_of_memory(observer: Callable[[int, int, int, int], None]) -> bool:
    """Have a function called before each out-of-memory error, for good; return whether it will be.

    It gets the device's index, and requested, total and free bytes.
    """
    if _attach is not None:
        _attach(observer)
    return _attach is not None
