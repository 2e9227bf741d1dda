"""Allocations and frees of memory while a function runs, from the profiler.

The profiler records them among its events, also those inside ops. Two things are missing of a CUDA
device. The tree of events lacks those outside of all ops, such as the free of a tensor that Python
drops; the flat list of events has them, without addresses. Sizes are those of the caching
allocator's blocks, which depend on earlier work. The allocator's own history has the addresses and
the requested bytes of the same allocations and frees in the same order, so both are read in step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from fusedckpt.autograd.private_memory import allocator_history

__all__ = ["Change", "Profile", "open_workspaces", "profiled"]

_LOG_LEVEL = "KINETO_LOG_LEVEL"
_MEMORY = "[memory]"
# an allocation in the allocator's history
_ALLOC = "alloc"
# a free
_FREE = "free_requested"


class Change(NamedTuple):
    """An allocation, or a free."""

    # of the profiler's clock
    time_ns: int
    # the address of its first byte
    address: int
    # of the allocation, below 0 for a free
    nbytes: int


class Profile(NamedTuple):
    """The profiler's events of a run, each before those within it, and the changes of memory.

    Changes are those of one device, in the order of time, without allocations from before the run.
    """

    events: list[Any]
    changes: list[Change]


def profiled(fn: Callable[[], Any], device: torch.device | str = "cpu") -> Profile:
    """Run `fn` once under the profiler; return its events, and the changes of a device's memory."""
    device = torch.device(device)
    history: list[Any] = []
    with _quiet():
        profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )
        if device.type == "cuda":
            open_workspaces(device)
            with allocator_history(device) as history, profiler:
                fn()
        else:
            with profiler:
                fn()
    kineto: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]  # set while profiling
    events = _flat(kineto.experimental_event_tree())
    changes = _in_step(kineto.events(), history, device) if history else None
    if changes is None:
        fields = [(x.start_time_ns, x.extra_fields) for x in events if x.name == _MEMORY]
        changes = [
            Change(time_ns, x.ptr, x.alloc_size)
            for time_ns, x in fields
            if _is_on(x.device.type, x.device.index, device)
        ]
        changes.sort(key=lambda change: change.time_ns)
    return Profile([event for event in events if event.name != _MEMORY], list(_paired(changes)))


def _flat(events: Sequence[Any]) -> list[Any]:
    """Return events of a tree, each before those within it."""
    flat = []
    waiting = [*reversed(events)]
    while waiting:
        event = waiting.pop()
        flat.append(event)
        waiting += reversed(event.children)
    return flat


def _in_step(
    events: Iterable[Any], history: Sequence[Any], device: torch.device
) -> list[Change] | None:
    """Return changes with times of the profiler's flat list, addresses and sizes of the history.

    Returns None where these two differ.
    """
    timed = [
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == _MEMORY
        and _is_on(event.device_type().name.lower(), event.device_index(), device)
    ]
    timed.sort(key=lambda item: item[0])
    entries = [entry for entry in history if entry["action"] in (_ALLOC, _FREE)]
    # a history that the caller records began earlier
    entries = entries[max(0, len(entries) - len(timed)) :]
    signs = [1 if entry["action"] == _ALLOC else -1 for entry in entries]
    if signs != [1 if nbytes > 0 else -1 for _, nbytes in timed]:
        return None
    return [
        Change(time_ns, entry["addr"], sign * entry["size"])
        for (time_ns, _), entry, sign in zip(timed, entries, signs, strict=True)
    ]


def _is_on(kind: str, index: int | None, device: torch.device) -> bool:
    # memory of a CPU has no index, or -1
    return kind == device.type and (kind == "cpu" or device.index in (None, index))


def _paired(changes: Iterable[Change]) -> Iterator[Change]:
    """Yield changes in which each free has its allocation's size, and each allocation has a free.

    An allocation ends at the latest when its memory is allocated again. The free of an allocation
    from before is left out: its size, if it has one, is that of an earlier one at its address.
    """
    sizes: dict[int, int] = {}
    for time_ns, address, nbytes in changes:
        if address in sizes:
            yield Change(time_ns, address, -sizes.pop(address))
        if nbytes > 0:
            sizes[address] = nbytes
            yield Change(time_ns, address, nbytes)


def open_workspaces(device: torch.device | str) -> None:
    """Have the device's libraries allocate their workspaces, so that they are not counted later.

    cuBLAS allocates 32 MiB in the first GEMM of each thread, and backward has a thread of its own.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(16, 16, device=device, requires_grad=True)
        (x @ x).sum().backward()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the profiler's own messages, of which torch 2.13 has two a run, off stderr."""
    # read when the profiler is first used; a value set by the user stands
    is_set = _LOG_LEVEL in os.environ
    os.environ.setdefault(_LOG_LEVEL, "99")
    try:
        yield
    finally:
        if not is_set:
            del os.environ[_LOG_LEVEL]
