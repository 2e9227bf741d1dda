"""Bytes that autograd saves, and peaks of memory, counted exactly.

Saved bytes come from `saved_tensors_hooks`, which see every autograd node. Peaks come from the
allocator on CUDA and from the profiler's memory events on a CPU; a dispatch mode would not see
allocations inside an op.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import record_function

from fusedckpt.allocations import open_workspaces, profiled
from fusedckpt.autograd.private import local_of, storage_key

__all__ = [
    "Phase",
    "SavedStorage",
    "SavedTensors",
    "addresses_of",
    "allocator_count",
    "nbytes_of",
    "peak_bytes",
    "phases_of",
    "saved_tensors",
    "seconds",
    "storages_of",
    "strided",
]

_MARK = "fusedckpt.mark:"

# sets a marker of that name
Mark = Callable[[str], None]


@dataclass(frozen=True)
class SavedStorage:
    """A storage saved for backward."""

    # its size, in bytes
    nbytes: int
    # the dtype of the first tensor that was saved from it
    dtype: str
    # the shape of that tensor
    shape: tuple[int, ...]
    # the name of the module that saved it first
    owner: str
    # the names of other modules that saved it, in order
    sharers: tuple[str, ...]


class _Saved(NamedTuple):
    """A storage, as the first tensor shows it that was saved from it."""

    # of the whole storage
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


class SavedTensors:
    """The distinct storages that autograd saved inside `saved_tensors`."""

    # fused layers may write over tensors that go through these hooks
    only_counts = True

    def __init__(self, exclude: Iterable[Tensor] = (), owner: Callable[[], str] = str):
        self._excluded = set(map(storage_key, storages_of(exclude)))
        self._owner = owner
        # the saved storages, by their keys
        self._saved: dict[int, _Saved] = {}
        # by the same keys, how often each was saved
        self._num_saves: dict[int, int] = {}
        # by the same keys, the modules that saved each storage, in order
        self._owners: dict[int, dict[str, None]] = {}
        # a weak reference keeps the address from being used again for another storage, but not the
        # memory, which would raise the peak of the backward
        self._references: list[tuple[StorageWeakRef, int]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all saved storages, each counted once."""
        return sum(saved.nbytes for saved in self._saved.values())

    def holds(self, storage: StorageWeakRef) -> bool:
        """Whether a storage is among the saved ones."""
        return storage.cdata in self._saved

    @property
    def storages(self) -> tuple[SavedStorage, ...]:
        """The saved storages, in order."""
        storages = list[SavedStorage]()
        for key, saved in self._saved.items():
            owner, *sharers = self._owners[key]
            storages.append(SavedStorage(*saved, owner, tuple(sharers)))
        return tuple(storages)

    @property
    def addresses(self) -> set[int]:
        """Addresses of the saved storages that are still alive."""
        return {address for storage, address in self._references if not storage.expired()}

    def _pack(self, tensor: Tensor) -> Tensor:
        # autograd keeps views of parameters too, such as weight.t()
        owner = _sharded(tensor)
        owner = owner if owner._base is None else owner._base
        is_leaf = isinstance(owner, nn.Parameter) or (owner.requires_grad and owner.is_leaf)
        for part in strided(tensor):
            if not is_leaf and storage_key(part.untyped_storage()) not in self._excluded:
                self._add(part)
        # an output packed as it is would hold its own node: a cycle that is never freed
        return tensor.detach() if tensor.requires_grad else tensor

    def discount(self, tensor: Tensor) -> None:
        """Count a tensor once less: without these hooks a function would save its recipe."""
        key = storage_key(tensor.untyped_storage())
        if key in self._saved:
            self._num_saves[key] -= 1
            if not self._num_saves[key]:
                del self._saved[key], self._owners[key]

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        self._num_saves[key] = self._num_saves.get(key, 0) + 1
        if key not in self._saved:
            self._references.append((StorageWeakRef(storage), _address(storage)))
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._saved[key] = _Saved(storage.nbytes(), dtype, tuple(tensor.shape))
        self._owners.setdefault(key, {})[self._owner()] = None


# the parts that hold the memory of a sparse or nested tensor
_PARTS_OF_LAYOUT: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
    torch.jagged: ("values", "offsets"),
}


def _sharded(tensor: Tensor) -> Tensor:
    """Return the leaf DTensor that holds this local tensor, any other tensor as it is."""
    node = tensor.grad_fn
    if node is None or node.name() != "_ToTorchTensorBackward":
        return tensor
    return getattr(node.next_functions[0][0], "variable", tensor)


def strided(tensor: Tensor) -> list[Tensor]:
    """Return its dense tensors: parts of a sparse or nested one, of a DTensor this rank's.

    Of a class that has other tensors in place of memory, such as a quantized weight's, those.
    """
    if (local := local_of(tensor)) is not tensor:
        return strided(local)
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None and tensor.layout == torch.strided:
        return [part for name in flatten()[0] for part in strided(getattr(tensor, name))]
    if tensor.layout not in _PARTS_OF_LAYOUT:
        return [tensor]
    tensor = tensor.detach()
    return [getattr(tensor, part)() for part in _PARTS_OF_LAYOUT[tensor.layout]]


def storages_of(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storage of each of `tensors`; shared ones occur several times."""
    return [part.untyped_storage() for tensor in tensors for part in strided(tensor)]


def storage_ref(tensor: Tensor) -> StorageWeakRef:
    """Return a reference that is the same for tensors that share memory, and keeps none."""
    return StorageWeakRef(storages_of([tensor])[0])


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages of `tensors`."""
    sizes = {}
    for tensor in tensors:
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
        for part in (tensor,) if is_plain else strided(tensor):
            storage = part.untyped_storage()
            sizes[storage_key(storage)] = storage.nbytes()
    return sum(sizes.values())


def addresses_of(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of the storages of `tensors`."""
    return {_address(storage) for storage in storages_of(tensors)}


def _address(storage: torch.UntypedStorage) -> int:
    if storage.device.type == "meta":
        # it has no memory, and a key of its own
        return storage_key(storage)
    try:
        return storage.data_ptr()
    except RuntimeError:
        # one without memory, such as a fake tensor's
        return 0


@contextmanager
def saved_tensors(
    exclude: Iterable[Tensor] = (), owner: Callable[[], str] = str
) -> Iterator[SavedTensors]:
    """Count the bytes that forward passes inside save for backward.

    Parameters and other leaves that require grad are not counted, nor are the storages of
    `exclude` (inputs and buffers that the caller holds anyway). A view counts its whole storage,
    once. Make it the outermost context: hooks pushed inside, such as those of
    `torch.utils.checkpoint`, see tensors first. `owner` returns the name of the running module, for
    `storages`.

        with saved_tensors(exclude=[tokens]) as saved:
            loss = model(tokens)
        print(saved.nbytes)
    """
    saved = SavedTensors(exclude, owner)
    with torch.autograd.graph.saved_tensors_hooks(saved._pack, lambda tensor: tensor):
        yield saved


class Phase(NamedTuple):
    """The part of a run from a marker to the next one."""

    # the name of the marker at its start
    name: str
    # live bytes at its start
    start: int
    # the most live bytes in it
    peak: int
    ms: float


def peak_bytes(fn: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """Run `fn` once and return its peak memory, in bytes above the start.

    Includes memory that `fn` returns and leaves allocated, such as `.grad`. Counts requested bytes:
    on CUDA by the allocator's peak, which this resets; on a CPU by the profiler's allocations and
    frees, without the frees of memory from before.
    """
    return max(phase.peak for phase in phases_of(lambda mark: fn(), torch.device(device)))


def phases_of(run: Callable[[Mark], Any], device: torch.device, resident: int = 0) -> list[Phase]:
    """Run a function that sets markers, return its phases; resident: live bytes as it begins."""
    read = _phases_on_cuda if device.type == "cuda" else _phases_on_cpu
    return read(run, device, resident)


def _phases_on_cpu(run: Callable[[Mark], Any], device: torch.device, resident: int) -> list[Phase]:
    def mark(name: str) -> None:
        with record_function(_MARK + name):
            pass

    profile = profiled(lambda: (mark("begin"), run(mark), mark("")), device)
    entries: list[tuple[int, int, str]] = [
        (event.start_time_ns, 0, event.name.removeprefix(_MARK))
        for event in profile.events
        if event.name.startswith(_MARK)
    ]
    entries += [(change.time_ns, change.nbytes, "") for change in profile.changes]
    # at one time, a marker comes last
    entries.sort(key=lambda entry: (entry[0], not entry[1]))
    phases = list[Phase]()
    live = resident
    # the phase that runs
    name = ""
    since_ns = 0
    start = resident
    peak = resident
    for time_ns, nbytes, marked in entries:
        if nbytes:
            live += nbytes
            peak = max(peak, live)
        else:
            phases.append(Phase(name, start, peak, (time_ns - since_ns) / 1e6))
            name = marked
            since_ns = time_ns
            start = live
            peak = live
    # events before the first marker are the profiler's
    return phases[1:]


def _phases_on_cuda(run: Callable[[Mark], Any], device: torch.device, resident: int) -> list[Phase]:
    count = f"{allocator_count()}.all"
    open_workspaces(device)
    phases = list[Phase]()
    phase = Phase("begin", start=resident, peak=resident, ms=0.0)
    since = seconds(device)
    # bytes that the allocator counts and `resident` does not
    other = torch.cuda.memory_stats(device)[f"{count}.current"] - resident
    torch.cuda.reset_peak_memory_stats(device)

    def mark(name: str) -> None:
        nonlocal phase, since
        now = seconds(device)
        stats = torch.cuda.memory_stats(device)
        live, peak = (stats[f"{count}.{x}"] - other for x in ("current", "peak"))
        phases.append(phase._replace(peak=peak, ms=1e3 * (now - since)))
        torch.cuda.reset_peak_memory_stats(device)
        phase = Phase(name, start=live, peak=live, ms=0.0)
        since = now

    run(mark)
    mark("")
    return phases


def seconds(device: torch.device) -> float:
    """Return the time at which the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    # the time of a single thread is free of other work of the machine
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time() if alone else time.perf_counter()


def allocator_count() -> str:
    """Return the name of the bytes that CUDA's allocator counts."""
    # a block from the cache may be a MiB larger than the request, by the work before; only
    # torch's own allocator knows the request
    is_native = torch.cuda.get_allocator_backend() == "native"
    return "requested_bytes" if is_native else "allocated_bytes"
