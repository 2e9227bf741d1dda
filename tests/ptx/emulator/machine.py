"""Runs a kernel: lanes of one or more warps step together, each instruction a numpy call.

Hostile where the programming model allows it: registers and shared memory start as NaN, a copy
happens as late as its wait permits, or at once; warps run one after the other between barriers, in
any order; approximate instructions err within their bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .binding import BARRIER, EXIT, SPIN, Call
from .floats import TYPES, seed_noise
from .memory import Fault, GlobalMemory, SharedMemory
from .operations import bind
from .parser import Program

Array = np.ndarray
_WIDTHS = {"pred": "pred", "f32": "b32", "f64": "b64"} | {
    f"{kind}{bits}": f"b{bits}" for kind in "bus" for bits in (8, 16, 32, 64)
}


class Param(NamedTuple):
    """A parameter: its bytes, and of a tensor map the number by which the kernel names it."""

    data: bytes
    handle: int = 0


@dataclass(frozen=True)
class Hostility:
    """How a run uses the freedom that hardware has."""

    # whether each warp runs alone to its next barrier; else all warps of several blocks step
    # together, which is faster
    by_warp: bool = False
    # from the number of warps to the order in which they run
    order: Callable[[int], Sequence[int]] = range
    # whether accesses to shared memory that no barrier or fence orders raise
    races: bool = False
    # whether copies happen at once, not as late as allowed
    early: bool = False
    # of the errors of approximate instructions, None where there are none
    seed: int | None = 0


@dataclass
class Launch:
    """The state that the lanes of some blocks share."""

    memory: GlobalMemory
    # of all blocks that run at a time, one after another
    shared: SharedMemory
    # by name
    params: dict[str, Param]
    # blocks along x, y and z
    grid: tuple[int, int, int]
    # of a block
    threads: int
    # the tensor maps by the number that names them
    maps: dict[int, Any]
    # whether copies happen at once
    early: bool
    # the mbarriers by block and address
    barriers: dict[Any, Any] = field(default_factory=dict)


class Unit:
    """Lanes that step together; `block` and `thread` number the place of each."""

    def __init__(self, program: Program, launch: Launch, block: Array, thread: Array):
        self.program, self.launch = program, launch
        self.block, self.thread, self.lanes = block, thread, len(thread)
        self.warp, self.steps = thread // 32, 0
        self.ctaid = np.zeros((3, self.lanes), np.uint32)
        self.every = np.arange(self.lanes)
        # blocks of the grid along x, y and z; a bound instruction reads them
        self.nctaid = np.zeros((3, self.lanes), np.uint32)
        self.stores: list[Array] = []
        self.registers: dict[str, Array] = {}
        for name, (kind, count) in program.registers.items():
            names = [f"{name}{i}" for i in range(count)] if count else [name]
            store = np.zeros((len(names), self.lanes), TYPES[_WIDTHS[kind]])
            self.stores.append(store)
            self.registers.update(zip(names, store, strict=True))
        # a branch to the end of the kernel finds the last of these
        self.code: list[Call] = [*(bind(i, self) for i in program.instructions), lambda mask: EXIT]

    def begin(self, ctaid: Array, runs: Array | None) -> None:
        """Put the lanes of `runs`, or all, at the first instruction of the blocks `ctaid`."""
        self.ctaid[...] = ctaid
        for store in self.stores:
            # NaN in every type
            store.view(np.uint8)[...] = 0 if store.dtype == bool else 0xFF
        # lanes at one instruction: its number, and a mask, None for all
        self.running: list[tuple[int, Any]] = [(0, runs)]
        self.waiting: list[tuple[int, Any]] = []
        self.spinning: list[tuple[int, Any]] = []
        # transfers.Copy under way, and how many groups each lane has closed
        self.copies: list[Any] = []
        self.groups = np.zeros(self.lanes, np.int64)
        # groups of products under way; the last one is open
        self.products: list[list[Any]] = [[]]
        # whether a wgmma.fence came after the last wait for products, by lane
        self.products_fenced = np.zeros(self.lanes, bool)

    def special(self, name: str) -> Array:
        """Return a special register such as %tid.x."""
        base, _, axis = name.partition(".")
        number = "xyz".index(axis) if axis else 0
        full = lambda value: np.full(self.lanes, value, np.uint32)  # noqa: E731
        return {
            "%tid": lambda: full(0) if number else self.thread.astype(np.uint32),
            "%ntid": lambda: full(1 if number else self.launch.threads),
            "%ctaid": lambda: self.ctaid[number],
            "%nctaid": lambda: self.nctaid[number],
            "%laneid": lambda: (self.thread % 32).astype(np.uint32),
            "%warpid": lambda: self.warp.astype(np.uint32),
        }[base]()

    def resume(self) -> int:
        """Run until every lane is at a barrier, waits for a copy, or has ended; return which."""
        if self.spinning:
            self.running, self.spinning = self.spinning, []
        else:
            self.running, self.waiting = self.running + self.waiting, []
        while self.running:
            self._merge()
            self._run(*self.running.pop(0))
        return SPIN if self.spinning else BARRIER if self.waiting else EXIT

    def _merge(self) -> None:
        """Put the lanes that are furthest behind first, together with all at their place."""
        if len(self.running) == 1:
            return
        places: dict[int, Any] = {}
        for number, mask in self.running:
            places[number] = mask if number not in places else places[number] | mask
        self.running = [
            (number, None if mask is not None and mask.all() else mask)
            for number, mask in sorted(places.items())
        ]

    def _run(self, number: int, mask: Any) -> None:
        """Step lanes until they wait, end, part, or meet lanes that are ahead."""
        limit = self.running[0][0] if self.running else 1 << 60
        code = self.code
        while number < limit:
            self.steps += 1
            signal = code[number](mask)
            if signal is None:
                number += 1
            elif isinstance(signal, tuple):
                target, taken, rest = signal
                self.running += [(target, taken), (number + 1, rest)]
                return
            elif signal == EXIT:
                return
            elif signal in (BARRIER, SPIN):
                state = self.waiting if signal == BARRIER else self.spinning
                state.append((number + (signal == BARRIER), mask))
                return
            else:
                number = signal
        self.running.append((number, np.ones(self.lanes, bool) if mask is None else mask))


def run(
    program: Program,
    grid: tuple[int, int, int],
    threads: int,
    shared_size: int,
    params: dict[str, Param],
    tensors: Sequence[Any],
    maps: dict[int, Any],
    how: Hostility,
    lanes: int = 4096,
) -> int:
    """Run every block of the grid and return the number of steps; `lanes` step together."""
    seed_noise(how.seed)
    count = grid[0] * grid[1] * grid[2]
    together = 1 if how.by_warp else max(1, min(count, lanes // threads))
    has_groups = any(i.opcode == "wgmma" for i in program.instructions)
    shared = SharedMemory(together, shared_size, how.races, proxies=has_groups)
    launch = Launch(GlobalMemory(tensors), shared, params, grid, threads, maps, how.early)
    units = _units(program, launch, together, how.by_warp)
    for first in range(0, count, together):
        numbers = first + np.arange(together)
        x, y = grid[:2]
        ids = np.stack([numbers % x, numbers // x % y, numbers // (x * y)]).astype(np.uint32)
        shared.begin()
        launch.barriers.clear()
        for unit in units:
            # the last blocks may be fewer
            exist = numbers[unit.block] < count
            unit.begin(ids[:, unit.block], None if exist.all() else exist)
        _run_blocks(units, shared, how.order)
    return sum(unit.steps for unit in units)


def _units(program: Program, launch: Launch, together: int, by_warp: bool) -> list[Unit]:
    """Return the units of some blocks, of an earlier launch if it was alike: binding takes long."""
    key = launch.threads, together, by_warp
    if key not in program.units:
        every = np.arange(together * launch.threads)
        parts = np.split(every, launch.threads // 32) if by_warp else [every]
        places = [(part // launch.threads, part % launch.threads) for part in parts]
        program.units[key] = [Unit(program, launch, *place) for place in places]
    for unit in program.units[key]:
        unit.launch, unit.steps = launch, 0
        unit.nctaid[...] = np.array(launch.grid)[:, None]
    return program.units[key]


def _run_blocks(units: list[Unit], shared: SharedMemory, order: Any) -> None:
    """Run units from barrier to barrier until all have ended."""
    states = dict.fromkeys(range(len(units)), BARRIER)
    while states:
        before = sum(unit.steps for unit in units)
        spins = [index for index, state in states.items() if state == SPIN]
        # a warp that waits for a copy has not come to the barrier yet
        ready = spins or list(states)
        shared.epoch += not spins
        for position in order(len(ready)):
            states[ready[position]] = units[ready[position]].resume()
        states = {index: state for index, state in states.items() if state != EXIT}
        if spins and sum(unit.steps for unit in units) - before == len(spins):
            raise Fault("every warp waits for a copy that does not end")
