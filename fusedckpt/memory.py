"""What autograd keeps alive and how high memory climbs, counted exactly.

Saved bytes come from `saved_tensors_hooks`, so every autograd node is seen, PyTorch's and ours.
Peaks come from the allocator on CUDA and from the profiler's memory events on a CPU: a dispatch
mode would be blind to what is allocated inside an op.
"""

from __future__ import annotations

import inspect
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from fusedckpt.autograd.surroundings import no_trace

__all__ = [
    "ChainSizes",
    "SavedStorage",
    "SavedTensors",
    "chain_sizes",
    "least_starts",
    "live_bytes",
    "measured_starts",
    "nbytes_of",
    "open_workspaces",
    "peak_bytes",
    "profiled",
    "saved_tensors",
    "strided",
]

_LOG_LEVEL = "KINETO_LOG_LEVEL"


@dataclass(frozen=True)
class SavedStorage:
    """One storage kept for backward: `dtype` and `shape` of the first tensor that was saved of it.

    `owner` is who kept it first, `sharers` are the others that kept it too, in order.
    """

    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    owner: str
    sharers: tuple[str, ...]


class SavedTensors:
    """The distinct storages that autograd kept while `saved_tensors` was open."""

    # fused layers may write over what goes through these hooks
    only_counts = True

    def __init__(self, exclude: Iterable[Tensor] = (), owner: Callable[[], str] = str):
        self._excluded = {part.untyped_storage()._cdata for x in exclude for part in strided(x)}
        self._owner = owner
        self._kept: dict[int, tuple[int, str, tuple[int, ...]]] = {}
        self._keepers: dict[int, dict[str, None]] = {}
        # a weak reference keeps the address from being used again for another storage, but not the
        # memory, which would raise the peak of the backward
        self._references: list[StorageWeakRef] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all kept storages, each counted once."""
        return sum(nbytes for nbytes, _, _ in self._kept.values())

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._kept

    def holds(self, storage: StorageWeakRef) -> bool:
        """Whether a storage, referred to since it was alive, is among the kept ones."""
        return storage.cdata in self._kept

    @property
    def storages(self) -> tuple[SavedStorage, ...]:
        """What was kept, in the order in which it was."""
        found = []
        for key, kept in self._kept.items():
            owner, *sharers = self._keepers[key]
            found.append(SavedStorage(*kept, owner, tuple(sharers)))
        return tuple(found)

    def _pack(self, tensor: Tensor) -> Tensor:
        # autograd keeps views of parameters too, such as weight.t()
        owner = tensor if tensor._base is None else tensor._base
        given = isinstance(owner, nn.Parameter) or (owner.requires_grad and owner.is_leaf)
        for part in strided(tensor):
            if not given and part.untyped_storage()._cdata not in self._excluded:
                self._add(part)
        # an output packed as it is would hold its own node: a cycle that is never freed
        return tensor.detach()

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._kept:
            self._references.append(StorageWeakRef(storage))
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._kept[key] = (storage.nbytes(), dtype, tuple(tensor.shape))
        self._keepers.setdefault(key, {})[self._owner()] = None


# what holds the memory of a sparse tensor
_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def strided(tensor: Tensor) -> list[Tensor]:
    """Return the tensor, or what a sparse one consists of."""
    if tensor.layout not in _PARTS:
        return [tensor]
    tensor = tensor.detach()
    return [getattr(tensor, part)() for part in _PARTS[tensor.layout]]


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages of `tensors`."""
    parts = [part.untyped_storage() for tensor in tensors for part in strided(tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in parts}.values())


@contextmanager
def saved_tensors(
    exclude: Iterable[Tensor] = (), owner: Callable[[], str] = str
) -> Iterator[SavedTensors]:
    """Count what the forward passes run inside keep for their backward.

    Parameters and other leaves that require grad are not counted, nor are the storages of
    `exclude` (inputs and buffers that the caller holds anyway). A view counts its whole storage,
    once. Place it outermost: hooks pushed inside, such as those of `torch.utils.checkpoint`, see
    their tensors first. `owner` names who runs at the moment, for `storages`.

        with saved_tensors(exclude=[tokens]) as saved:
            loss = model(tokens)
        print(saved.nbytes)
    """
    saved = SavedTensors(exclude, owner)
    with torch.autograd.graph.saved_tensors_hooks(saved._pack, lambda tensor: tensor):
        yield saved


def peak_bytes(fn: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """Run `fn` once and return how many bytes memory rose above its starting point.

    Includes what `fn` returns and leaves behind, such as `.grad`. Counts the bytes that were asked
    for: on CUDA the allocator's own peak, which this resets, on a CPU the allocations and frees
    that the profiler records. On a CPU, what `fn` frees of what was there before is not subtracted.
    """
    if torch.device(device).type == "cuda":
        return _peak_on_cuda(fn, device)
    events = sorted(_memory_events(profiled(fn)), key=lambda event: event.start_time_ns)
    return max(live_bytes(event.extra_fields for event in events), default=0)


def _peak_on_cuda(fn: Callable[[], Any], device: torch.device | str) -> int:
    # a block from the cache may be a MiB larger than what was asked of it, by what ran before; only
    # torch's own allocator knows what was asked
    is_native = torch.cuda.get_allocator_backend() == "native"
    count = "requested_bytes" if is_native else "allocated_bytes"
    open_workspaces(device)
    torch.cuda.synchronize(device)
    start = torch.cuda.memory_stats(device)[f"{count}.all.current"]
    torch.cuda.reset_peak_memory_stats(device)
    fn()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_stats(device)[f"{count}.all.peak"] - start


def open_workspaces(device: torch.device | str) -> None:
    """Have the device's libraries allocate what they keep for good, so that nobody is charged.

    cuBLAS takes 32 MiB in the first product of each thread, and backward has a thread of its own.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(16, 16, device=device, requires_grad=True)
        (x @ x).sum().backward()


def profiled(fn: Callable[[], Any], device: torch.device | str = "cpu") -> list[Any]:
    """Run `fn` once, and return the profiler's tree of its events, allocations among them."""
    if torch.device(device).type == "cuda":
        open_workspaces(device)
    with (
        _quiet(),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profiler,
    ):
        fn()
    kineto: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]  # set while profiling
    return kineto.experimental_event_tree()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the profiler's own messages, of which torch 2.13 has two a run, off stderr."""
    # read when the profiler is first used; who has set it wants it so
    given = _LOG_LEVEL in os.environ
    os.environ.setdefault(_LOG_LEVEL, "99")
    try:
        yield
    finally:
        if not given:
            del os.environ[_LOG_LEVEL]


def _memory_events(events: Iterable[Any]) -> Iterator[Any]:
    """Yield the allocations and frees among nested profiler events."""
    for event in events:
        if event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            yield event
        yield from _memory_events(event.children)


def live_bytes(records: Iterable[Any]) -> Iterator[int]:
    """Yield, after each allocation or free, how many bytes live that were allocated by these."""
    live = 0
    ours: set[int] = set()
    for record in records:
        if record.alloc_size > 0:
            ours.add(record.ptr)
        # a block from before: its size, where one is given, is that of an earlier block there
        if record.ptr in ours:
            live += record.alloc_size
        yield live


class ChainSizes(NamedTuple):
    """Bytes by function: what is saved of its input, what besides, and all of its input.

    `handed` is infinite where no segment can start, as the input is written in place from there on.
    """

    inputs: list[int]
    own: list[int]
    handed: list[float]


def chain_sizes(functions: Sequence[Callable[..., Any]], input: Any) -> ChainSizes:
    """Run each function once, as if it had not run, and return what autograd saves for it."""
    parameters = [p for f in functions if isinstance(f, nn.Module) for p in f.parameters()]
    sizes = ChainSizes([], [], [sum(_storages(input).values())])
    # what the function before saved of its output; where the memory of the input comes from
    saved_before, origin = 0, 0
    with no_trace([*_tensors(input), *parameters]), _disable_current_modes():
        for i, function in enumerate(functions):
            given = pytree.tree_map_only(Tensor, _fresh, input)
            versions = [tensor._version for tensor in _tensors(given)]
            with saved_tensors() as saved:
                input = function(given)
            before, after = _storages(given), _storages(input)
            kept = {s: nbytes for s, nbytes in (before | after).items() if saved.holds(s)}
            returned = sum(kept[s] for s in kept.keys() & after.keys())
            sizes.inputs.append(max(saved_before, sum(kept.values()) - returned))
            sizes.own.append(saved.nbytes - sum(kept.values()))
            sizes.handed.append(sum(after.values()))
            if versions != [tensor._version for tensor in _tensors(given)]:
                sizes.handed[origin : i + 1] = [math.inf] * (i + 1 - origin)
            saved_before, origin = returned, origin if before.keys() & after.keys() else i + 1
    sizes.own[-1] += saved_before
    return sizes


# starts by functions and their training modes
_known: dict[Any, list[int]] = {}


def measured_starts(functions: Sequence[Callable[..., Any]], input: Any) -> list[int]:
    """Return the starts of segments that keep the least; the first call measures the functions."""
    try:
        key = tuple((_reference(f), getattr(f, "training", None)) for f in functions)
        starts = _known.get(key)
    except TypeError:
        # what has no hash or no weak reference is not known again
        return least_starts(chain_sizes(functions, input))
    if starts is None:
        if len(_known) > 1000:
            # by functions that are made anew for each call
            _known.clear()
        starts = _known[key] = least_starts(chain_sizes(functions, input))
    return starts


def _reference(function: Any) -> weakref.ref[Any]:
    # a bound method is made anew each time that it is looked up
    return (weakref.WeakMethod if inspect.ismethod(function) else weakref.ref)(function)


def least_starts(sizes: ChainSizes) -> list[int]:
    """Return the starts with which what is handed on and the largest segment are the least."""
    # a segment holds ends[stop] - begins[start]: its own input is one that was handed on
    ends = np.cumsum([0, *map(sum, zip(sizes.inputs, sizes.own, strict=True))])
    begins, handed = ends[:-1] + sizes.inputs, np.array([0, *sizes.handed[1:-1]], float)
    least, starts, limit = math.inf, [0], math.inf
    while found := _cheapest(begins, ends, handed, limit):
        kept = handed[found].sum()
        largest = max(ends[b] - begins[a] for a, b in pairwise([*found, len(begins)]))
        if kept + largest < least:
            least, starts = kept + largest, found
        # a lower limit never hands on less; steps of one per cent, for chains of 1,000 functions
        limit = min(largest, least - kept)
        limit -= max(1, limit // 100)
    return starts


def _cheapest(begins: Any, ends: Any, handed: Any, limit: float) -> list[int]:
    """Return starts of segments within the limit that hand on the least; none if none can be."""
    costs, starts = np.zeros(len(ends)), [[]]
    for stop in range(1, len(ends)):
        fits = ends[stop] - begins[:stop] <= limit
        ways = np.where(fits, costs[:stop] + handed[:stop], math.inf)
        start = int(ways.argmin())
        costs[stop] = ways[start]
        starts.append([*starts[start], start])
    return starts[-1] if costs[-1] < math.inf else []


def _fresh(tensor: Tensor) -> Tensor:
    # no leaf, which could not be written in place
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _storages(values: Any) -> dict[StorageWeakRef, int]:
    """Return the bytes of the storages of tensors, in any nesting."""
    parts = [part.untyped_storage() for tensor in _tensors(values) for part in strided(tensor)]
    return {StorageWeakRef(storage): storage.nbytes() for storage in parts}
