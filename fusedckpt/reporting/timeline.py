"""How memory rises and falls through one training step, and which module runs meanwhile.

The profiler has every allocation and free, also those inside ops. Instant markers that hooks on
all modules set say which module's forward runs (hooks of single modules would keep fused layers
from fusing). In backward nothing is hooked: tensor hooks would hold gradients longer and module
backward hooks put views around outputs. The profiler's events carry autograd's sequence number
instead, that of the forward op which made a node and of the engine's call of that node. CUDA's
caching allocator reports to the same profiler; that part has not run on a GPU yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.profiler import record_function

from fusedckpt.allocations import Change, Profile
from fusedckpt.checkpointing.module_calls import watched

# the name of the model itself
ROOT = "(model)"
# the names of code outside of the model
LOSS = "(loss)"
OPTIMIZER = "(optimizer)"
_LABEL = "fusedckpt.report:"
_NODE = "autograd::engine::evaluate_function: "


class Moment(NamedTuple):
    """Live bytes after one allocation or free."""

    # nanoseconds since the step began; of an estimate, the number of ops since
    time_ns: int
    # bytes of all memory in use
    live_bytes: int
    # forward, backward or optimizer
    phase: str
    # the module that runs, or with nodes that run in backward
    module: str
    # among the live bytes, those of gradients that the step makes and leaves
    gradient_bytes: int = 0
    # among the live bytes, those of memory that the optimizer's step allocates
    optimizer_bytes: int = 0


class ModuleAllocation(NamedTuple):
    """An allocation, and the module that ran."""

    # the address of its first byte
    address: int
    # its size
    nbytes: int
    # the phase in which it was allocated
    phase: str
    # the module that ran then
    module: str
    # the index of the moment of its allocation
    since: int


class Term(NamedTuple):
    """An allocation that autograd added to another gradient of the same tensor, and then freed."""

    allocation: ModuleAllocation
    # the index of the moment at which it was freed
    until: int
    # the sum, None where the other gradient was written in place
    total: ModuleAllocation | None


class TimelineReading(NamedTuple):
    """A step's moments, and the allocations of its forward that live when backward begins."""

    moments: list[Moment]
    held: list[ModuleAllocation]


class RunningModules:
    """Knows which module's forward runs, and leaves markers for `read_timeline` in the profile."""

    def __init__(self, model: nn.Module):
        self._names = {module: name or ROOT for name, module in model.named_modules()}
        self._running: list[str] = []

    def current(self) -> str:
        """Return the name of the innermost module that runs."""
        return self._running[-1] if self._running else LOSS

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Follow every module call made inside."""
        with ExitStack() as hooks:
            enter = register_module_forward_pre_hook(self._enter)
            hooks.callback(enter.remove)
            # after an exception too: a checkpoint that stops its recompute early raises one
            leave = register_module_forward_hook(self._leave, always_call=True)
            hooks.callback(leave.remove)
            hooks.enter_context(watched(self._recomputing))
            yield

    @contextmanager
    def _recomputing(self, module: nn.Module | None) -> Iterator[None]:
        """Surround a recompute's call of a module's forward, which calls no hooks."""
        depth = len(self._running)
        if module is not None:
            self._enter(module, ())
        try:
            yield
        finally:
            # `Stop`, which ends a recompute early, is no Exception: hooks do not hear of it
            for _ in range(depth, len(self._running)):
                self._left()

    def phase(self, name: str) -> None:
        """Mark the beginning of forward, backward, optimizer, or the end."""
        self.mark("phase", name)

    def _enter(self, module: nn.Module, args: Any) -> None:
        # a compiled region is one module: its ops run in another order
        if torch.compiler.is_compiling() or module not in self._names:
            return
        self._running.append(self._names[module])
        self.mark("enter", self._names[module])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and module in self._names:
            self._left()

    def _left(self) -> None:
        self._running.pop()
        self.mark("leave", "")

    def mark(self, kind: str, name: str) -> None:
        """Set a marker: a module was entered or left, or a phase began."""
        with record_function(f"{_LABEL}{kind}:{name}"):
            pass


class _Item(NamedTuple):
    """A change of memory, a marker, or the begin or end of an op or a node in a profile."""

    time_ns: int
    # the name of the method of `TimelineReader` that takes it
    kind: str
    # the argument of that method
    content: Any


def read_timeline(
    profile: Profile, resident: int, gradients: Collection[int] = ()
) -> TimelineReading:
    """Read one step from a profile, where `resident` bytes lived at its start.

    gradients: addresses of the gradients that the step leaves.
    """
    items = _items_of(profile)
    items.sort(key=lambda item: item.time_ns)
    reader = TimelineReader(resident)
    for item in items:
        getattr(reader, item.kind)(item.content)
        if reader.phase_name and item.kind in ("memory", "phase"):
            reader.note(item.time_ns - items[0].time_ns)
    return reader.reading(gradients)


class TimelineReader:
    """Follows allocations, markers and autograd nodes in the order of time.

    `read_timeline` feeds it from a profile, a run on meta tensors while it runs.
    """

    def __init__(self, resident: int):
        self.moments: list[Moment] = []
        # the allocations that live when backward begins
        self.held: list[ModuleAllocation] = []
        self.phase_name = ""
        self._live = resident
        # bytes among these that the optimizer's step allocated
        self._optimizer = 0
        # the allocations in use, by address
        self._allocations: dict[int, ModuleAllocation] = {}
        self._terms: list[Term] = []
        # whether the engine has added gradients up after the node that runs
        self._adds = False
        # the last allocation since, the sum
        self._total: ModuleAllocation | None = None
        self._running: list[str] = []
        # by thread and its sequence number, the module that ran the forward op that made the node
        self._makers: dict[tuple[int, int], str] = {}
        # the thread that runs the step
        self._thread = 0
        # how many nodes run, one inside the other
        self._depth = 0
        # the module of the last node, or of code outside of all modules
        self._last = LOSS

    @property
    def module(self) -> str:
        """The module that runs now; between two nodes of a backward, that of the former one."""
        return self._running[-1] if self._running else self._last

    def note(self, time_ns: int) -> None:
        """Add a moment."""
        self.moments.append(
            Moment(
                time_ns,
                self._live,
                self.phase_name,
                self.module,
                optimizer_bytes=self._optimizer,
            )
        )

    def memory(self, change: Change) -> None:
        """Take an allocation or a free."""
        address = change.address
        nbytes = change.nbytes
        if nbytes > 0:
            allocation = ModuleAllocation(
                address, nbytes, self.phase_name, self.module, len(self.moments)
            )
            self._allocations[address] = self._total = allocation
        else:
            allocation = self._allocations.pop(address)
            if self._adds:
                self._terms.append(Term(allocation, len(self.moments), self._total))
        self._live += nbytes
        if allocation.phase == "optimizer":
            self._optimizer += nbytes

    def reading(self, gradients: Collection[int] = ()) -> TimelineReading:
        """Return a step's moments and held allocations; gradients: addresses of those it leaves."""
        return TimelineReading(self._with_gradients(gradients), self.held)

    def _with_gradients(self, addresses: Collection[int]) -> list[Moment]:
        """Return the moments with their bytes of gradients.

        These are the allocations at these addresses in the end, and those that were added to them.
        """
        allocations = self._allocations.values()
        gradients = [x for x in allocations if x.address in addresses and x.phase != "optimizer"]
        # by moment, the bytes of gradients that it adds
        grown: Counter[int] = Counter()
        for allocation in gradients:
            grown[allocation.since] += allocation.nbytes
        for allocation, until, total in reversed(self._terms):
            # in place: a gradient of that size is older
            totals = [total] if total else [x for x in gradients if x.since < allocation.since]
            if any(x in gradients and x.nbytes == allocation.nbytes for x in totals):
                gradients.append(allocation)
                grown[allocation.since] += allocation.nbytes
                grown[until] -= allocation.nbytes
        sums = accumulate(grown[index] for index in range(len(self.moments)))
        return [m._replace(gradient_bytes=n) for m, n in zip(self.moments, sums, strict=True)]

    def phase(self, marked: tuple[str, int]) -> None:
        """Enter forward, backward or optimizer, or leave the last one; note the step's thread."""
        name, self._thread = marked
        self.phase_name = name if name != "end" else ""
        self._last = {"forward": ROOT, "optimizer": OPTIMIZER}.get(name, LOSS)
        if name == "backward":
            self.held = list(self._allocations.values())

    def enter(self, name: str) -> None:
        """Enter a module's forward."""
        self._running.append(name)

    def leave(self, _: str) -> None:
        """Leave a module's forward."""
        self._running.pop()
        if not self._running:
            self._last = LOSS

    def op(self, place: tuple[int, int]) -> None:
        """Note the module that runs the op."""
        # the number is the next node's: of all ops that show it, the last one made the node
        self._makers[place] = self.module

    def first_op(self, place: tuple[int, int]) -> None:
        """Note the module that runs the op, where the number is that of the last node so far."""
        # the node was made before its op is seen: other ops of that number make none
        self._makers.setdefault(place, self.module)

    def node(self, place: tuple[int, int]) -> None:
        """Enter a node of the backward."""
        # a GPU's backward has a thread of its own, where a recompute counts its ops anew; the nodes
        # of these run inside a node, a reentrant checkpoint's
        thread, number = place
        place = (thread if self._depth else self._thread), number
        # AccumulateGrad has no number, and runs right after the node that fed it
        self._running.append(self._makers.get(place, self.module))
        self._depth += 1

    def sum(self, _: Any) -> None:
        """Note that the engine adds gradients up."""
        self._adds = True
        self._total = None

    def done(self, _: Any) -> None:
        """Leave a node."""
        self._adds = False
        self._depth -= 1
        self._last = self._running.pop()


def _items_of(profile: Profile) -> list[_Item]:
    """Return the items of a profile, in no order but that of nodes which end at one time."""
    items = [_Item(change.time_ns, "memory", change) for change in profile.changes]
    ends: list[_Item] = []
    for event in profile.events:
        name = event.name
        start = event.start_time_ns
        if name.startswith(_LABEL):
            kind, name = name.removeprefix(_LABEL).split(":", 1)
            items.append(_Item(start, kind, (name, event.start_tid) if kind == "phase" else name))
            continue
        number = getattr(event.extra_fields, "sequence_number", -1)
        is_node = name.startswith(_NODE)
        if is_node or number >= 0:
            items.append(_Item(start, "node" if is_node else "op", (event.start_tid, number)))
        if is_node:
            # those within the node's own function are deeper
            sums = [x for x in event.children if x.name in ("aten::add", "aten::add_")]
            items += [_Item(x.start_time_ns, "sum", None) for x in sums]
            ends.append(_Item(event.end_time_ns, "done", None))
    # an inner node ends first
    return items + ends[::-1]
