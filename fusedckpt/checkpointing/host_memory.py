"""Host memory for offloaded tensors: pinned up to a bound, pageable beyond it.

A device copies to and from pinned memory on a stream, while other streams compute. Pinned memory
cannot be swapped out, and all processes of a machine share it: the bound is a share of the memory
that is available when the first tensor is offloaded.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

# the share of the available memory that the processes of a machine pin together
_SHARE = 0.5
# where Linux tells of the machine's memory, of this process's cgroup, and of the limits of cgroups
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
# a cgroup without a limit has "max", or in version 1 more bytes than any machine
_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


class HostMemory:
    """Allocates host memory for copies of a device's tensors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._limit: int | None = None
        # bytes that are pinned, and bytes of pageable copies, while these live
        self.pinned = 0
        self.pageable = 0

    @property
    def limit(self) -> int:
        """The bytes that this process may pin."""
        if self._limit is None:
            self._limit = pinned_limit()
        return self._limit

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return host memory for a dense tensor, in one dimension."""
        # torch pins powers of two, and keeps them for the next tensors
        nbytes = 1 << (tensor.nbytes - 1).bit_length()
        with self._lock:
            is_pinned = self.pinned + nbytes <= self.limit
            nbytes = nbytes if is_pinned else tensor.nbytes
            self._count(is_pinned, nbytes)
        copy = self.allocate(tensor.numel(), tensor.dtype, is_pinned)
        weakref.finalize(copy, self._count, is_pinned, -nbytes).atexit = False
        return copy

    def allocate(self, count: int, dtype: torch.dtype, is_pinned: bool) -> Tensor:
        """Return memory for so many elements."""
        return torch.empty(count, dtype=dtype, device="cpu", pin_memory=is_pinned)

    def _count(self, is_pinned: bool, nbytes: int) -> None:
        if is_pinned:
            self.pinned += nbytes
        else:
            self.pageable += nbytes


def pinned_limit() -> int:
    """Return the bytes that this process may pin: its share of the memory available now.

    Launchers such as torchrun tell by LOCAL_WORLD_SIZE how many processes run on this machine.
    """
    available = min(_machine_bytes(), *_cgroup_bytes(), 1 << 62)
    try:
        count = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    except ValueError:
        count = 1
    return int(_SHARE * available) // max(1, count)


def _machine_bytes() -> int:
    """Return the available bytes of the machine; where it does not say, none are pinned."""
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
        sizes = dict(line.split(":", 1) for line in lines)
        return 1024 * int(sizes["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return 0


def _cgroup_bytes() -> Iterator[int]:
    """Yield the bytes that each cgroup around this process has left."""
    for folder in _cgroup_folders():
        for limit, usage in _FILES:
            try:
                most, used = (int((folder / name).read_text()) for name in (limit, usage))
            except (OSError, ValueError):
                # no such file, or no limit
                continue
            yield max(0, most - used)


def _cgroup_folders() -> Iterator[Path]:
    """Yield the folder of this process's cgroup and those above it."""
    path = "/"
    try:
        for line in CGROUP.read_text(encoding="utf-8").splitlines():
            number, _, name = line.split(":", 2)
            path = name if number == "0" else path
    except (OSError, ValueError):
        pass
    folder = CGROUPS / path.lstrip("/")
    yield folder
    while folder != CGROUPS and CGROUPS in folder.parents:
        folder = folder.parent
        yield folder
