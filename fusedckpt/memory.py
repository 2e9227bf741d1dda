"""What autograd keeps alive and how high memory climbs, counted exactly.

Saved bytes come from `saved_tensors_hooks`, so every autograd node is seen, PyTorch's and ours.
Peaks come from the allocator on CUDA and from the profiler's memory events on a CPU: a dispatch
mode would be blind to what is allocated inside an op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["SavedTensors", "peak_bytes", "saved_tensors"]


class SavedTensors:
    """The distinct storages that autograd kept while `saved_tensors` was open."""

    def __init__(self, exclude: Iterable[Tensor] = ()):
        self._excluded = {tensor.untyped_storage()._cdata for tensor in exclude}
        self._storages: dict[int, torch.UntypedStorage] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all kept storages, each counted once."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # autograd keeps views of parameters too, such as weight.t()
        owner = tensor if tensor._base is None else tensor._base
        given = isinstance(owner, nn.Parameter) or (owner.requires_grad and owner.is_leaf)
        if not given and storage._cdata not in self._excluded:
            # the reference keeps the address from being used again for another storage
            self._storages[storage._cdata] = storage
        # an output packed as it is would hold its own node: a cycle that is never freed
        return tensor.detach()


def is_counting(pack: Callable[..., Any]) -> bool:
    """Whether a saved-tensor hook only counts: it is one of `saved_tensors`."""
    return getattr(pack, "__func__", None) is SavedTensors._pack


@contextmanager
def saved_tensors(exclude: Iterable[Tensor] = ()) -> Iterator[SavedTensors]:
    """Count what the forward passes run inside keep for their backward.

    Parameters and other leaves that require grad are not counted, nor are the storages of
    `exclude` (inputs and buffers that the caller holds anyway). A view counts its whole storage,
    once. Place it outermost: hooks pushed inside, such as those of `torch.utils.checkpoint`, see
    their tensors first.

        with saved_tensors(exclude=[tokens]) as saved:
            loss = model(tokens)
        print(saved.nbytes)
    """
    saved = SavedTensors(exclude)
    with torch.autograd.graph.saved_tensors_hooks(saved._pack, lambda tensor: tensor):
        yield saved


def peak_bytes(fn: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """Run `fn` once and return how many bytes memory rose above its starting point.

    Includes what `fn` returns and leaves behind, such as `.grad`. On CUDA this reads the
    allocator's peak, on a CPU the allocations and frees that the profiler records. On a CPU, what
    `fn` frees of what was there before is not subtracted.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        start = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        fn()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - start
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        fn()
    kineto: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]  # set while profiling
    events = sorted(_memory_events(kineto.experimental_event_tree()), key=lambda e: e.start_time_ns)
    return _peak(event.extra_fields for event in events)


def _memory_events(events: Iterable[Any]) -> Iterator[Any]:
    """Yield the allocations and frees among nested profiler events."""
    for event in events:
        if event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            yield event
        yield from _memory_events(event.children)


def _peak(records: Iterable[Any]) -> int:
    live = peak = 0
    ours: set[int] = set()
    for record in records:
        if record.alloc_size > 0:
            ours.add(record.ptr)
        # a block from before: its size, where one is given, is that of an earlier block there
        elif record.ptr not in ours:
            continue
        live += record.alloc_size
        peak = max(peak, live)
    return peak
