"""Offload: the inputs of checkpointed segments wait for their backward in host memory.

    y = fusedckpt.checkpoint(block, x, offload=True)

The large inputs of a segment are copied to the host on a stream of their own, while the segments
behind it run. In backward they are copied back while the segment behind it is recomputed. The
inputs of the latest segment stay on the device, as backward needs them first.

    compute   forward 0 | forward 1         | forward 2         | ...    recompute 1 | recompute 0
    copies                input 0 to host     input 1 to host            input 0 back

Memory of the device belongs to the stream that computes. A copy begins behind an event of that
stream, which waits for the end of the copy before it frees the memory or reads the copied tensor.
So the peak does not depend on how far the host is ahead of the device.

A saved tensor that hooks on saved tensors moved is not checked for writes in place; here it is, by
`VersionCheck`.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from fusedckpt.autograd import phases, private
from fusedckpt.autograd.storages import VersionCheck, owns_storage, storage_of
from fusedckpt.checkpointing.calls import (
    Argument,
    layout_of,
)
from fusedckpt.checkpointing.host_memory import HostMemory

# a tensor of fewer bytes stays on the device
LEAST_NBYTES = 1 << 20
# the inputs of so many of the latest segments stay on the device
KEPT = 1
# the inputs of so many segments are on the device in backward: one is read, one arrives
BACK = 2

# bytes that left their device; and by reason, how many inputs stay on it. A report reads and clears
# both
num_bytes_left: Counter[torch.device] = Counter()
stays: Counter[str] = Counter()
host_memory = HostMemory()


class OffloadedTensor:
    """The whole storage of a tensor, in one dimension: on the device, on the host, or on both."""

    def __init__(self, tensor: Tensor):
        self.key = storage_of(tensor)
        self.dtype = tensor.dtype
        self.on_device: Tensor | None = _whole(tensor)
        self.on_host: Tensor | None = None
        # whether something else keeps it on the device
        self.stays = False
        self.original = TensorWeakRef(tensor)
        # so that no other storage gets this key
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self.written = VersionCheck(tensor, "checkpoint: an argument")

    def take(self, tensor: Tensor) -> None:
        """Take the tensor that another holder keeps on the device."""
        self.on_device = _whole(tensor)

    def living(self) -> Tensor | None:
        """Return the tensor that was offloaded, where the caller still has it."""
        original = self.original()
        return original if original is not None and storage_of(original) == self.key else None


class _SavedPlace(NamedTuple):
    """A saved tensor: an offloaded storage, and where in it the tensor is."""

    storage: OffloadedTensor
    layout: tuple[Any, ...]


def _whole(tensor: Tensor) -> Tensor:
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0)


class CopyStream:
    """The copies of one device, in order, on a stream beside those that compute."""

    def __init__(self, device: torch.device):
        self.device = device
        self.memory = host_memory
        self._stream = self.new_stream()
        self.lock = threading.RLock()
        # by storage
        self.known = weakref.WeakValueDictionary[int, OffloadedTensor]()
        # segments' inputs, by weak references, as a graph that is dropped frees its own: those that
        # stay, those that leave, and those that are back
        self.kept = deque[weakref.ref[OffloadedInputs]]()
        self.leaving = deque[weakref.ref[OffloadedInputs]]()
        self.back = deque[weakref.ref[OffloadedInputs]]()

    def new_stream(self) -> Any:
        """Return a stream for the copies."""
        return torch.Stream(self.device)

    def computing(self) -> Any:
        """Return the stream that computes."""
        return torch.accelerator.current_stream(self.device)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], ready: Any) -> Any:
        """Copy pairs (target, source) behind an event; return the event of their end."""
        with self._stream:
            self._stream.wait_event(ready)
            for target, source in pairs:
                self.transfer(target, source)
            return self._stream.record_event()

    def transfer(self, target: Tensor, source: Tensor) -> None:
        """Start one copy on the current stream."""
        target.copy_(source, non_blocking=True)

    def use(self, tensor: Tensor, stream: Any) -> None:
        """Keep a tensor's memory from being reused before a stream is done with it now.

        Does nothing where the memory belongs to that stream.
        """
        tensor.record_stream(stream)

    def push(self, inputs: OffloadedInputs) -> None:
        """Free the inputs that have left, and let those leave that are not the latest."""
        with self.lock:
            while self.leaving:
                if (gone := self.leaving.popleft()()) is not None:
                    gone.free()
            self.kept.append(weakref.ref(inputs))
            while len(self.kept) > KEPT:
                if (older := self.kept.popleft()()) is not None:
                    older.leave()

    def came_back(self, inputs: OffloadedInputs) -> None:
        """Note the inputs that come back, and free those beyond BACK."""
        living = [ref for ref in self.back if ref() not in (None, inputs)]
        self.back = deque([*living, weakref.ref(inputs)])
        while len(self.back) > BACK:
            if (used := self.back.popleft()()) is not None:
                used.free()


class _NoCopies(CopyStream):
    """Copies of meta tensors, of which a host has no bytes: an estimate counts those that stay."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.memory: Any = self
        self._computing = _NoStream()

    def new_stream(self) -> Any:
        """Return no stream."""

    def computing(self) -> Any:
        """Return a stream on which nothing runs."""
        return self._computing

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return a tensor of that size, and the memory of one element."""
        return tensor.new_empty(()).expand(tensor.shape)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], ready: Any) -> Any:
        """Copy nothing."""

    def use(self, tensor: Tensor, stream: Any) -> None:
        """Do nothing."""


class _NoStream:
    """A stream on which nothing runs."""

    def record_event(self) -> None:
        """Return no event."""

    def wait_event(self, event: None) -> None:
        """Do nothing."""


_streams: dict[torch.device, CopyStream] = {}
_lock = threading.Lock()


def copy_stream(device: torch.device) -> CopyStream:
    """Return the copies of a device."""
    with _lock:
        if device not in _streams:
            kind = _NoCopies if device.type == "meta" else CopyStream
            _streams[device] = kind(device)
        return _streams[device]


def obstacle(device: torch.device) -> str:
    """Return why a device's tensors cannot be offloaded now, "" where they can."""
    if device.type == "cpu":
        return "tensors of a CPU are in host memory already"
    if device.type == "meta":
        return ""
    if not hasattr(torch.get_device_module(device.type), "Stream"):
        return f"{device.type} has no streams"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph was being captured"
    return ""


def _hooks_around() -> str:
    is_seen = private.SEES_HOOKS and phases.only_count(private.top_hooks())
    return "" if is_seen else "saved-tensor hooks of other code or an outer checkpoint were active"


def is_movable(tensor: Tensor) -> bool:
    """Whether a tensor is large, all of its storage, and no leaf."""
    return owns_storage(tensor) and tensor.nbytes >= LEAST_NBYTES


class OffloadedInputs:
    """The large inputs of one segment, which leave the device and come back together."""

    def __init__(self) -> None:
        self._tensors = list[OffloadedTensor]()
        # set with the first tensor: the device's copies, and the stream that computes
        self._copies: CopyStream | None = None
        self._stream: Any = None
        # the event behind which the tensors are complete, and the number of these
        self._ready: Any = None
        self._num_ready = 0
        # the inputs that backward needs next
        self._next: weakref.ref[OffloadedInputs] | None = None
        # the end of the copies under way
        self._pending: Any = None

    def save(self, tensor: Tensor, made_by: OffloadedInputs | None = None) -> Argument:
        """Save an input; made_by: the inputs of the segment that returned it, if one did."""
        reason = obstacle(tensor.device) or _hooks_around()
        if not (reason or is_movable(tensor)):
            reason = "smaller than 1 MiB, a leaf, or a view of a larger storage"
        if self._copies is not None and self._copies.device != tensor.device:
            reason = "on another device than the inputs before"
        if reason:
            stays[reason] += 1
            return Argument(tensor)
        copies = self._copies or copy_stream(tensor.device)
        with copies.lock:
            if self._copies is None:
                self._copies = copies
                self._stream = copies.computing()
                self._next = copies.kept[-1] if copies.kept else None
            storage = self._storage_of(copies, tensor)
            if storage is None:
                return Argument(tensor)
            if made_by is not None and made_by._tensors:
                self._next = weakref.ref(made_by)
        place = _SavedPlace(storage, layout_of(tensor))
        with saved_tensors_hooks(lambda _: place, self._unpack):
            return Argument(tensor)

    def _storage_of(self, copies: CopyStream, tensor: Tensor) -> OffloadedTensor | None:
        """Return a tensor's storage as one of these inputs; None where it is to stay."""
        storage = copies.known.get(storage_of(tensor))
        if storage is None or storage.written.version != tensor._version:
            storage = copies.known[storage_of(tensor)] = OffloadedTensor(tensor)
            self._tensors.append(storage)
            copies.use(tensor, self._stream)
        elif storage not in self._tensors:
            # an input of two segments, which would come back for each
            storage.take(tensor)
            storage.stays = True
            stays["an input of several segments"] += 1
            return None
        return storage if storage.dtype == tensor.dtype else None

    def segment_ran(self) -> None:
        """Let the inputs of earlier segments leave, once a call of this one's segment has run."""
        copies = self._copies
        count = len(self._tensors)
        if copies is None or count == self._num_ready:
            return
        is_new = not self._num_ready
        self._num_ready = count
        self._ready = self._stream.record_event()
        if is_new:
            copies.push(self)

    def _unpack(self, place: _SavedPlace) -> Tensor:
        """Return a saved tensor, and start to bring back the inputs that backward needs next."""
        storage = place.storage
        copies = self._copies
        assert copies is not None
        storage.written.check()
        with copies.lock:
            self.fetch()
            self._settle()
            assert storage.on_device is not None
            tensor = storage.on_device.as_strided(*place.layout)
            now = copies.computing()
            if now != self._stream:
                now.wait_event(self._stream.record_event())
                copies.use(tensor, now)
            following = None if self._next is None else self._next()
            if following is not None:
                following.fetch()
        return tensor

    def leave(self) -> None:
        """Start the copies to the host."""
        copies = self._copies
        pairs = []
        assert copies is not None
        for storage in self._tensors:
            if storage.on_device is not None and storage.on_host is None and not storage.stays:
                storage.on_host = copies.memory.empty_like(storage.on_device)
                pairs.append((storage.on_host, storage.on_device))
        if pairs:
            num_bytes_left[copies.device] += sum(source.nbytes for _, source in pairs)
            self._pending = copies.copy(pairs, self._ready)
            copies.leaving.append(weakref.ref(self))

    def free(self) -> None:
        """Free the device's memory of tensors that the host has."""
        self._settle()
        for storage in self._tensors:
            if storage.on_host is not None and not storage.stays:
                storage.on_device = None

    def fetch(self) -> None:
        """Start the copies from the host of tensors that the device has not."""
        copies = self._copies
        pairs = []
        assert copies is not None
        for storage in self._tensors:
            if storage.on_device is not None:
                continue
            if (living := storage.living()) is not None:
                storage.take(living)
                continue
            assert storage.on_host is not None
            storage.on_device = torch.empty_like(storage.on_host, device=copies.device)
            pairs.append((storage.on_device, storage.on_host))
        if pairs:
            self._stream = copies.computing()
            # behind all that used this memory before
            self._pending = copies.copy(pairs, self._stream.record_event())
            copies.came_back(self)

    def _settle(self) -> None:
        """Have the stream that computes wait for the copies under way."""
        if self._pending is not None:
            self._stream.wait_event(self._pending)
            self._pending = None

    def __del__(self) -> None:
        # memory that is freed now may still be copied
        self._settle()
