"""A device on a CPU with streams that know what is done: a copy too early or late is an error.

Work is done when it is asked for. But each stream has a clock, and knows of another's only as far
as it waited, so that an order which a device might break raises in every run. Host memory is not
torch's: the peaks of a CPU are those of the device alone.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fusedckpt.checkpointing import offload
from fusedckpt.checkpointing.host_memory import HostMemory

CPU = torch.device("cpu")


class RaceError(AssertionError):
    """Memory is read, written or freed before the stream that does so waited for its last use."""


class Event:
    def __init__(self, name: str, clock: Counter[str], device: Any = None):
        self.name, self.clock, self.device = name, Counter(clock), device

    def synchronize(self) -> None:
        """Have the host wait, and so all work that is asked for later."""
        self.device.compute.wait_event(self)


class Stream:
    """clock: by stream, how much of its work is done before the next work of this one."""

    def __init__(self, device: Device, name: str):
        self.device, self.name, self.clock = device, name, Counter[str]()

    def work(self) -> int:
        self.clock[self.name] += 1
        return self.clock[self.name]

    def record_event(self) -> Event:
        self.work()
        number = self.device.num_events = self.device.num_events + 1
        self.device.log.append(f"{self.name}: record event {number}")
        return Event(f"event {number}", self.clock, self.device)

    def wait_event(self, event: Event) -> None:
        # memory that was freed before this wait did not wait for it
        self.device.look()
        self.device.log.append(f"{self.name}: wait for {event.name}")
        for name, count in event.clock.items():
            self.clock[name] = max(self.clock[name], count)

    def __enter__(self) -> Stream:
        self.device.current.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        self.device.current.pop()


class Host(HostMemory):
    """Host memory of numpy, which no profiler of torch sees."""

    def allocate(self, count: int, dtype: torch.dtype, is_pinned: bool) -> Tensor:
        nbytes = count * torch.empty(0, dtype=dtype).element_size()
        return torch.from_numpy(np.full(nbytes, 0xFF, np.uint8)).view(dtype)


class Device(offload.CopyStream):
    """The copies of a CPU whose memory counts as a device's."""

    def __init__(self, pinned: int = 1 << 40):
        self.log, self.num_events = list[str](), 0
        self.compute = Stream(self, "compute")
        self.current = [self.compute]
        super().__init__(CPU)
        self.memory = Host()
        self.memory._limit = pinned
        # by storage: its last write, as stream and time; and its uses by copies
        self.writes = dict[int, tuple[str, int]]()
        self.uses = dict[int, tuple[StorageWeakRef, list[tuple[str, int]]]]()
        self.to_host = self.to_device = 0

    def new_stream(self) -> Stream:
        return Stream(self, "copies")

    def computing(self) -> Stream:
        return self.current[-1]

    def use(self, tensor: Tensor, stream: Stream) -> None:
        """The compute stream's memory: there is no other stream that computes."""

    def transfer(self, target: Tensor, source: Tensor) -> None:
        stream = self.current[-1]
        is_back = source.untyped_storage().data_ptr() in self.hosts()
        if is_back:
            self.to_device += source.nbytes
            # the memory may be in use by all that the compute stream was asked for
            self.expect(stream, ("compute", self.compute.clock["compute"]), "a copy back")
        else:
            self.to_host += source.nbytes
        self.log.append(f"{stream.name}: copy {'to the device' if is_back else 'to the host'}")
        self.read(source, stream)
        super().transfer(target, source)
        now = stream.name, stream.work()
        self.writes[key(target)] = now
        for tensor in (target, source):
            reference = StorageWeakRef(tensor.untyped_storage())
            self.uses.setdefault(key(tensor), (reference, []))[1].append(now)

    def hosts(self) -> set[int]:
        """Addresses of host memory of living tensors."""
        tensors = [x.on_host for x in self.known.values() if x.on_host is not None]
        return {x.untyped_storage().data_ptr() for x in tensors}

    def num_on_device(self) -> int:
        """Return how many offloaded storages are on the device."""
        return sum(storage.on_device is not None for storage in self.known.values())

    def made(self, tensor: Tensor) -> Tensor:
        """Note that the compute stream made a tensor."""
        self.writes[key(tensor)] = "compute", self.compute.work()
        return tensor

    def read(self, tensor: Tensor, stream: Stream | None = None) -> Tensor:
        """Raise where a stream that reads a tensor did not wait for the one that wrote it."""
        if key(tensor) in self.writes:
            self.expect(stream or self.compute, self.writes[key(tensor)], "a read")
        if stream is None:
            self.compute.work()
        return tensor

    def expect(self, stream: Stream, use: tuple[str, int], what: str) -> None:
        name, time = use
        if stream.clock[name] < time:
            raise RaceError(f"{what} on {stream.name} did not wait for {name}")

    def look(self) -> None:
        """Raise where memory was freed that copies still use."""
        for number, (reference, uses) in [*self.uses.items()]:
            if reference.expired():
                del self.uses[number]
                self.writes.pop(number, None)
                for use in uses:
                    # the memory goes to the next tensor of the compute stream
                    self.expect(self.compute, use, "memory that was freed")


def key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def fake_device(monkeypatch: Any, small: int = 1 << 10, kept: int = 1, pinned: int = 1 << 40):
    """Offload from a CPU meanwhile, as from a device."""
    device = Device(pinned)
    with monkeypatch.context() as patch:
        patch.setattr(offload, "obstacle", lambda device: "")
        patch.setattr(offload, "copy_stream", lambda at: device)
        patch.setattr(offload, "LEAST_NBYTES", small)
        patch.setattr(offload, "KEPT", kept)
        yield device
        device.look()
