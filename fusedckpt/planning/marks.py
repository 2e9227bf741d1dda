"""Live bytes of a step between markers: by the profiler on a CPU, by the allocator on CUDA."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from fusedckpt.memory import allocator_count, open_workspaces, profiled
from fusedckpt.planning.timing import seconds

__all__ = ["Mark", "Reading", "phases_of"]

_MARK = "fusedckpt.plan:"
# markers that begin no phase
_INSIDE = "returned", "checked", "backward"

Mark = Callable[[str], None]


class Phase(NamedTuple):
    """From one marker to the next: live bytes at its start, the most in between, and ms."""

    name: str
    start: int
    peak: int
    ms: float


def phases_of(run: Callable[[Mark], Any], device: torch.device, resident: int) -> list[Phase]:
    """Run a function that sets markers, return its phases; resident: live bytes as it begins."""
    return (_on_cuda if device.type == "cuda" else _on_cpu)(run, device, resident)


def _mark(name: str) -> None:
    with record_function(_MARK + name):
        pass


def _on_cpu(run: Callable[[Mark], Any], device: torch.device, resident: int) -> list[Phase]:
    entries: list[tuple[int, int, Any]] = []
    _collect(profiled(lambda: run(_mark), device), entries)
    entries.sort(key=lambda entry: entry[:2])
    found, blocks = list[Phase](), dict[int, int]()
    name, since, start, peak, live = "begin", entries[0][0], resident, resident, resident
    for time_ns, is_mark, what in [*entries, (entries[-1][0], 1, "")]:
        if is_mark:
            found.append(Phase(name, start, peak, (time_ns - since) / 1e6))
            name, since, start, peak = what, time_ns, live, live
        elif what.alloc_size > 0:
            blocks[what.ptr] = what.alloc_size
            live += what.alloc_size
            peak = max(peak, live)
        else:
            live -= blocks.pop(what.ptr, 0)
    return found


def _collect(events: Any, found: list[tuple[int, int, Any]]) -> None:
    for event in events:
        name = event.name
        if name == "[memory]":
            if event.extra_fields.device.type == "cpu":
                found.append((event.start_time_ns, 0, event.extra_fields))
        elif name.startswith(_MARK):
            found.append((event.start_time_ns, 1, name.removeprefix(_MARK)))
        _collect(event.children, found)


def _on_cuda(run: Callable[[Mark], Any], device: torch.device, resident: int) -> list[Phase]:
    found, last = list[Phase](), ("begin", seconds(device), resident)
    open_workspaces(device)
    count = f"{allocator_count()}.all"
    first = torch.cuda.memory_stats(device)[f"{count}.current"]
    torch.cuda.reset_peak_memory_stats(device)

    def mark(name: str) -> None:
        nonlocal last
        now, stats = seconds(device), torch.cuda.memory_stats(device)
        live, peak = (stats[f"{count}.{x}"] - first for x in ("current", "peak"))
        found.append(Phase(last[0], last[2], peak + resident, 1e3 * (now - last[1])))
        torch.cuda.reset_peak_memory_stats(device)
        last = name, now, live + resident

    run(mark)
    mark("")
    return found


class Reading:
    """A step's phases by unit: peaks, live bytes at its markers, and ms.

    late: bytes that live when a unit begins, or the model returns, and are gone in the end.
    """

    def __init__(self, phases: Sequence[Phase], late: Sequence[int]):
        self._late, self.live = late, dict[str, int]()
        self._peaks, self._ms = Counter[str](), dict[str, float]()
        where = "begin"
        for phase in phases:
            self.live.setdefault(phase.name, phase.start)
            if phase.name == "check":
                continue
            where = where if phase.name in _INSIDE else phase.name
            self._peaks[where] = max(self._peaks[where], phase.peak)
            self._ms[where] = self._ms.get(where, 0.0) + phase.ms

    def peak(self, kind: str, i: int) -> int:
        """Return the peak of a unit's phase; of one that was not called, the bytes of then."""
        return self._peaks.get(f"{kind} {i}", 0 if kind == "back" else self.begin(i))

    def ms(self, kind: str, i: int) -> float:
        """Return the ms of a unit's phase."""
        return self._ms.get(f"{kind} {i}", 0.0)

    def begin(self, i: int) -> int:
        """Return the live bytes when unit i begins, or when the model returns."""
        later = (self.live.get(f"enter {k}") for k in range(i, len(self._late)))
        return next((x for x in later if x is not None), self.live["returned"])

    def kept(self, i: int) -> int:
        """Return the bytes of them that live on until backward."""
        return self.begin(i) - self._late[i]

    @property
    def base(self) -> int:
        """The live bytes when the step begins."""
        return self.live["begin"]

    @property
    def most(self) -> int:
        """The peak of the step."""
        return max(self._peaks.values())

    @property
    def before(self) -> int:
        """The peak until the first unit begins."""
        return max(self._peaks["begin"], self._peaks["forward"])

    @property
    def after(self) -> int:
        """The peak of the optimizer's step."""
        return max(self._peaks["optimizer"], self._peaks["end"])
