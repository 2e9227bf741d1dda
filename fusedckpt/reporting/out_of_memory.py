"""`report_on_oom`: prints the tensors on the GPU when its memory runs out, by module and by line.

The allocator records the line of Python of each allocation. Hooks on all modules note the number of
allocations so far when a module's forward begins and ends, so the number of an allocation names its
module. Nothing is measured in advance: this is the step that failed.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet, ref

import torch
from torch import nn

from fusedckpt.autograd import private_memory
from fusedckpt.autograd.weak_map import WeakMap
from fusedckpt.reporting.tables import size, table
from fusedckpt.reporting.timeline import LOSS, RunningModules

# actions of the allocator, and calls of modules, that are recorded; older ones are forgotten
_MOST_ACTIONS = 100_000
# lines of each table
_ROWS = 12
# the module of an allocation from before the first recorded action
EARLIER = "(earlier)"
# the module of code outside of the model
OUTSIDE = "(outside the model)"
_BACKWARD = "no line of Python: the backward pass"
# lines in torch and in this library say less than their callers
_SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


class LiveAllocation(NamedTuple):
    """An allocation that was in use."""

    # its requested bytes
    nbytes: int
    # the module that ran when it was allocated
    module: str
    # `file:line in function` that asked for it
    line: str


class MeasuredPlan(Protocol):
    """A plan with a measured step."""

    @property
    def measured_bytes(self) -> int | None:
        """Return the peak of a step, on the inputs that the plan was measured with."""
        ...

    @property
    def extra_ms(self) -> float:
        """Return the time that a step takes more than one that saves everything."""
        ...


# the plans of each model that were measured in this process
_measured_plans = WeakMap[nn.Module, list[MeasuredPlan]]()


def note_plan(model: nn.Module, plan: MeasuredPlan) -> None:
    """Note a plan of a model, for a report at an error."""
    plans = _measured_plans.get(model)
    if plans is None:
        plans = _measured_plans.put(model, [])
    plans.append(plan)


def advice_for_plan(model: nn.Module, nbytes: int) -> str:
    """Name the fastest measured plan that peaks within some bytes; "" where none was measured."""
    plans = [plan for plan in _measured_plans.get(model) or () if plan.measured_bytes is not None]
    if not plans:
        return ""
    least = min(plan.measured_bytes or 0 for plan in plans)
    fitting = [plan for plan in plans if (plan.measured_bytes or 0) <= nbytes]
    if not fitting:
        return f"no measured plan fits into {size(nbytes)}: the least peak is {size(least)}"
    plan = min(fitting, key=lambda plan: plan.extra_ms)
    return (
        f"fits into {size(nbytes)}: the plan that was measured to peak at "
        f"{size(plan.measured_bytes or 0)}, {plan.extra_ms:.1f} ms a step slower than without, on "
        "the inputs of that measurement: plan.apply(model)"
    )


@dataclass(frozen=True)
class OutOfMemoryReport:
    """The memory in use on a device when a request failed. Sizes are bytes."""

    # the name of the device
    device: str
    # bytes of the failed request
    requested_bytes: int
    # bytes of the device
    total_bytes: int
    # bytes of the device, without torch's cache
    free_bytes: int
    # the module that ran its forward
    running: str
    # the allocations in use, the largest first
    live: tuple[LiveAllocation, ...] = field(repr=False)
    # a measured plan that fits into the memory that torch could have, see `advice_for_plan`
    way: str = ""

    @property
    def live_bytes(self) -> int:
        """Bytes of all allocations in use."""
        return sum(allocation.nbytes for allocation in self.live)

    @property
    def live_by_module(self) -> dict[str, int]:
        """Bytes in use by the module that allocated them, the largest first."""
        counts: Counter[str] = Counter()
        for allocation in self.live:
            counts[allocation.module] += allocation.nbytes
        return dict(counts.most_common())

    def __str__(self) -> str:
        total = max(self.live_bytes, 1)
        by_module = [(k, size(n), f"{n / total:.1%}") for k, n in self.live_by_module.items()]
        if len(by_module) > _ROWS:
            rest = sum([*self.live_by_module.values()][_ROWS:])
            more = (f"{len(by_module) - _ROWS} more", size(rest), f"{rest / total:.1%}")
            by_module = [*by_module[:_ROWS], more]
        largest = [(size(x.nbytes), x.module, x.line) for x in self.live[:_ROWS]]
        return "\n".join(
            (
                f"Out of memory on {self.device}, while {self.running} ran",
                f"  requested {size(self.requested_bytes)}; tensors have {size(self.live_bytes)} "
                f"of {size(self.total_bytes)}, {size(self.free_bytes)} are free",
                *([f"  {self.way}"] if self.way else []),
                "",
                table(("module", "live", "share"), by_module, numbers=(1, 2)),
                "",
                table(("largest", "module", "allocated at"), largest, numbers=(0,)),
            )
        )


class OutOfMemoryWatch:
    """Watches a model until `remove` is called; `last` is the report of the last error, or None."""

    def __init__(self, model: nn.Module, device: torch.device):
        self.last: OutOfMemoryReport | None = None
        self.device = device
        self._model = ref(model)
        self._log = _AllocationLog(model, device)
        self._stack = ExitStack()
        self._stack.callback(private_memory.record_lines(_MOST_ACTIONS))
        self._stack.enter_context(self._log.hooked())
        _watches.add(self)

    def remove(self) -> None:
        """Stop watching."""
        _watches.discard(self)
        self._stack.close()

    def report(self, requested: int, total: int, free: int) -> None:
        """Note the living tensors, and print them on stderr."""
        snapshot = private_memory.snapshot(self.device)
        model = self._model()
        available = free + torch.cuda.memory_reserved(self.device)
        self.last = OutOfMemoryReport(
            device=str(self.device),
            requested_bytes=requested,
            total_bytes=total,
            free_bytes=free,
            running=OUTSIDE if (name := self._log.current()) == LOSS else name,
            live=_live(snapshot, self._log),
            way="" if model is None else advice_for_plan(model, available),
        )
        print(self.last, file=sys.stderr)


class _AllocationLog(RunningModules):
    """Notes the number of allocations at each beginning and end of a module's call."""

    def __init__(self, model: nn.Module, device: torch.device):
        super().__init__(model)
        self._device = device
        self._counts: deque[int] = deque(maxlen=_MOST_ACTIONS)
        self._modules: deque[str] = deque(maxlen=_MOST_ACTIONS)

    def mark(self, kind: str, name: str) -> None:
        """Note the module that runs from now on."""
        self._counts.append(self.count())
        self._modules.append(self.current())

    def count(self) -> int:
        """Return the number of allocations so far."""
        return torch.cuda.memory_stats(self._device)["allocation.all.allocated"]

    def modules_of(self, numbers: Iterable[int]) -> list[str]:
        """Return the module of each allocation, by its number from 1."""
        counts = list(self._counts)
        names = list(self._modules)
        places = (bisect_left(counts, number) - 1 for number in numbers)
        modules = (names[place] if place >= 0 else LOSS for place in places)
        return [OUTSIDE if name == LOSS else name for name in modules]


def _live(snapshot: Mapping[str, Any], log: _AllocationLog) -> tuple[LiveAllocation, ...]:
    """Return the allocations in use, the largest first."""
    # by address the last allocation that the history has
    allocations = [x for x in snapshot["device_traces"] if x["action"] == "alloc"]
    first = log.count() - len(allocations) + 1
    names = log.modules_of(range(first, first + len(allocations)))
    modules = {x["addr"]: name for x, name in zip(allocations, names, strict=True)}
    allocations = [
        LiveAllocation(
            nbytes=block["requested_size"],
            module=modules.get(block["address"], EARLIER),
            line=_line(block["frames"]) if block["address"] in modules else "",
        )
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    return tuple(sorted(allocations, key=lambda allocation: -allocation.nbytes))


def _line(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the innermost line outside of torch and this library."""
    theirs = [x for x in frames if not str(x["filename"]).startswith(_SKIPPED)]
    if not frames:
        return _BACKWARD
    frame = (theirs or frames)[0]
    return f"{frame['filename']}:{frame['line']} in {frame['name']}"


_watches: WeakSet[OutOfMemoryWatch] = WeakSet()
# torch calls an observer as long as the process lives
_attached: list[bool] = []


def _observe(index: int, requested: int, total: int, free: int) -> None:
    """Let the watches of a device report; torch raises its error afterwards."""
    for watch in list(_watches):
        if watch.device.index == index:
            watch.report(requested, total, free)


def report_on_oom(model: nn.Module) -> OutOfMemoryWatch:
    """Print the tensors on a model's GPU whenever its memory runs out, before torch's error.

        watch = fusedckpt.report_on_oom(model)
        train(model)

    On stderr: the bytes in use by the module that allocated them, and the largest tensors with the
    line that allocated each. Memory from before this call, such as the parameters, is "(earlier)".
    If `plan` measured plans of this model in this process, the fastest that fits is named.
    The error is torch's own and is raised unchanged; `watch.last` has the report, and
    `watch.remove()` ends the watch.

    It is for a run that fails: until then each call of a module reads the allocator's statistics
    twice, and each allocation notes the lines of Python that run. A history that you record with
    torch.cuda.memory yourself stays as it is; lines are known if it has them.

    Raises:
        TypeError: `model` is not an nn.Module.
        ValueError: the model is not on a CUDA device. A CPU has no such limit: use `report`.
        RuntimeError: this torch's allocator has no history, as cudaMallocAsync has none.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"report_on_oom: model must be an nn.Module, got {type(model).__name__}")
    tensors = [*model.parameters(), *model.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(
            f"report_on_oom: expected a model on a CUDA device, its first tensor is on {device}. "
            "Only CUDA's allocator records its blocks. On any device, fusedckpt.report says where "
            "the memory of a step goes"
        )
    if not private_memory.has_history():
        raise RuntimeError(
            "report_on_oom: this CUDA allocator records no history: use torch's own, without "
            "backend:cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF"
        )
    if not _attached:
        _attached.append(private_memory.attach_to_out_of_memory(_observe))
    return OutOfMemoryWatch(model, device)
