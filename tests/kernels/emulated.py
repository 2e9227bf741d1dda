"""What a launch moves and executes: two of its programs run in the PTX emulator at full size.

Bytes are counted from addresses, in sectors of 32 bytes, not from shapes. Instructions are those of
the SASS, each loop as often as the emulated PTX goes around it. Of the code outside loops that
share counts which ran in PTX: of two sides of a branch mostly one.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from tempfile import NamedTemporaryFile
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton import knobs
from triton.runtime.jit import JITFunction

from fusedckpt.kernels import gated_norm, norm
from tests.kernels import compile_only, sass
from tests.ptx.emulator import launching, machine
from tests.ptx.emulator.memory import GlobalMemory, SharedMemory
from tests.ptx.emulator.parser import parse

SECTOR = 5
# classes of SASS, by the pipe that executes them
CLASSES = {
    "load": r"LDG?|LDGSTS|UTMALDG",
    "store": r"STG?|RED|ATOMG",
    "shared": r"LDS|LDSM|STS|STSM|ATOMS|SHFL|REDUX|LDL|STL",
    "special": r"MUFU",
    "float": r"F(FMA|ADD|MUL)2?|H(FMA2|ADD2|MUL2)",
    "multiply": r"IMAD|IDP",
    "integer": r"F2F|F2FP|F2I|I2F|I2FP|FRND|F(SETP|SEL|MNMX3?|SET|CHK)|HSETP2|HMNMX2|IADD3?|LEA"
    r"|LOP3|SHF|PRMT|ISETP|SEL|MOV|POPC|IABS|IMNMX|VIADD|VIMNMX|PLOP3|P2R|R2P",
}


@dataclass
class Launch:
    """A launch as it was recorded, then as it was counted; numbers are of one thread."""

    name: str
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    kernel: Any
    registers: int
    spills: int
    shared: int
    num_warps: int
    # executed instructions by class, and all
    classes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    instructions: float = 0.0
    barriers: float = 0.0
    # groups of loads that wait for one another
    waits: float = 0.0
    # whether loads of a loop's next turn are under way, or there is no loop
    is_prefetched: bool = True
    # bytes of the launch that memory moves, and that a program reads once more
    read: float = 0.0
    written: float = 0.0
    again: float = 0.0
    # bytes that a program reads between two reads of a sector
    distance: float = 0.0

    @property
    def programs(self) -> int:
        """How many programs run."""
        return self.grid[0] * self.grid[1] * self.grid[2]


@contextmanager
def recorded(arch: str, units: int) -> Iterator[list[Launch]]:
    """Record the launches inside, on meta tensors, for a chip of so many multiprocessors."""
    launches: list[Launch] = []
    with ExitStack() as stack:
        stack.enter_context(compile_only.compile_for(arch))
        compiled: Any = JITFunction.run

        def run(function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if callable(grid):
                grid = grid(launching.bound_arguments(function, args, kwargs))
            kernel = compiled(function, *args, grid=grid, warmup=True, **kwargs)
            known = compile_only._read(kernel)
            x, y, z = (*map(int, grid), 1, 1)[:3]
            launches.append(
                Launch(
                    function.fn.__name__,
                    (x, y, z),
                    launching.bound_arguments(function, args, kwargs),
                    kernel,
                    known["registers"],
                    sum(known["spills"].values()),
                    known["shared"],
                    known["num_warps"],
                )
            )
            return kernel

        stack.enter_context(patch.object(JITFunction, "run", run))
        for module in (norm, gated_norm):
            stack.enter_context(patch.object(module, "num_multiprocessors", lambda _: units))
        yield launches


def count(launch: Launch) -> None:
    """Count a launch, by its first program and one in the middle."""
    blocks = (0, launch.programs // 2) if launch.programs > 1 else (0,)
    program, executed, memory = run_blocks(launch, blocks)
    turns = ptx_loops(program)
    loops = [(executed[target], moved) for target, end, moved in turns if executed[target] > 0]
    ran = share_run(program, executed, [(target, end) for target, end, _ in turns])
    count_instructions(launch, listing_of(launch.kernel.asm["cubin"]), loops, ran)
    share = launch.programs / len(blocks)
    for low, high in zip(memory.lows, memory.highs, strict=True):
        read, written = (
            32 * sum(low >> SECTOR <= sector <= high - 1 >> SECTOR for sector in touched)
            for touched in (memory.read, memory.written)
        )
        launch.read += min(int(high - low), read * share)
        launch.written += min(int(high - low), written * share)
    launch.again = max(0.0, memory.asked - 32 * memory.distinct) * share
    launch.distance = float(np.median(memory.distances)) if memory.distances else 0.0


class Watched(GlobalMemory):
    """Global memory that notes the sectors that programs touch."""

    def __init__(self, tensors: Any):
        super().__init__(tensors)
        self.read: set[int] = set()
        self.written: set[int] = set()
        self.asked = 0
        # sectors that programs have read, each counted once a program
        self.distinct = 0
        self.distances: list[int] = []
        self._begun: dict[int, int] = {}
        self._clock = 0

    def end_program(self) -> None:
        """Forget what one program has read."""
        self.distinct += len(self._begun)
        self._begun = {}
        self._clock = 0

    def load(self, address: Any, size: int, count: int, text: str) -> Any:
        """Note and load."""
        nbytes = size * count
        self.asked += len(address) * nbytes
        self._clock += len(address) * nbytes
        for sector in np.unique(address.view(np.int64) >> SECTOR).tolist():
            if sector % 64 == 0 and sector in self._begun:
                self.distances.append(self._clock - self._begun[sector])
            self._begun[sector] = self._clock
            self.read.add(sector)
        return super().load(address, size, count, text)

    def store(self, address: Any, words: Any, text: str) -> None:
        """Note and store."""
        self.written.update((address.view(np.int64) >> SECTOR).tolist())
        super().store(address, words, text)


def without_hints(ptx: str) -> str:
    """Return PTX without hints to the caches, which other libraries give: values are the same."""
    ptx = re.sub(r"[^\n;]*createpolicy[^;]*;", "", ptx)
    ptx = re.sub(r"((?:ld|st)\.global[^;]*?)\.L2::cache_hint([^;]*?),\s*%rd\d+\s*;", r"\1\2;", ptx)
    return re.sub(r"\.L1::(evict_\w+|no_allocate)", "", ptx)


def run_blocks(launch: Launch, blocks: tuple[int, ...]) -> tuple[Any, Any, Watched]:
    """Run some programs; return the PTX, how often one executes each instruction, the memory."""
    made: dict[int, torch.Tensor] = {}

    def real(value: Any) -> Any:
        if isinstance(value, tuple):
            items = [real(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage._cdata not in made:
            # pages of zeros exist once they are touched
            made[storage._cdata] = torch.zeros(storage.nbytes() + 16, dtype=torch.uint8)
        place = value.storage_offset(), value.shape, value.stride()
        zeros = torch.empty(0, dtype=value.dtype)
        return zeros.set_(made[storage._cdata].untyped_storage(), *place)

    types = launch.kernel.src.signature
    values = {name: real(value) for name, value in launch.arguments.items()}
    leaves = [leaf for name in values for leaf in launching._leaves(types[name], values[name])]
    params, maps = launching._encode(leaves, [])
    program = parse(without_hints(launch.kernel.asm["ptx"]))
    memory = Watched([value for kind, value in leaves if kind.startswith("*")])
    shared = SharedMemory(1, launch.shared, False)
    named = dict(zip(program.params, params, strict=True))
    threads = launch.num_warps * 32
    state = machine.Launch(memory, shared, named, launch.grid, threads, maps, False)
    machine.seed_noise(0)
    units = machine._units(program, state, 1, False)
    executed = np.zeros(len(program.instructions) + 1)
    for unit in units:
        unit.code = [counted(call, at, executed, threads) for at, call in enumerate(unit.code)]
    x, y = launch.grid[:2]
    with np.errstate(all="ignore"):
        for number in blocks:
            shared.begin()
            state.barriers.clear()
            ids = np.array([[number % x], [number // x % y], [number // (x * y)]], np.uint32)
            for unit in units:
                unit.begin(np.repeat(ids, unit.lanes, 1), None)
            machine._run_blocks(units, shared, machine.Hostility().order)
            memory.end_program()
    return program, executed / len(blocks), memory


def counted(call: Callable[..., Any], at: int, executed: Any, threads: int) -> Callable[..., Any]:
    """Return an instruction that notes the share of threads that execute it."""

    def noted(mask: Any) -> Any:
        executed[at] += 1.0 if mask is None else np.count_nonzero(mask) / threads
        return call(mask)

    return noted


def ptx_loops(program: Any) -> list[tuple[int, int, int]]:
    """Return the loops of PTX: first and last instruction, and bytes a thread reads in a turn."""
    loops = []
    for at, instruction in enumerate(program.instructions):
        target = (
            program.labels.get(str(instruction.operands[0]), at + 1)
            if instruction.opcode == "bra"
            else at + 1
        )
        if target <= at:
            body = program.instructions[target : at + 1]
            loops.append((target, at + 1, sum(map(bytes_read, body))))
    return sorted(loops)


def share_run(program: Any, executed: Any, loops: list[tuple[int, int]]) -> float:
    """Return which share of the instructions of PTX outside loops a program runs."""
    count = len(program.instructions)
    starts = {0, count, *program.labels.values()}
    starts |= {at + 1 for at, i in enumerate(program.instructions) if i.opcode == "bra"}
    blocks = list(pairwise(sorted(starts)))
    outside = [b for b in blocks if not any(first <= b[0] < end for first, end in loops)]
    # of a masked instruction in a block some lanes alone count
    ran = sum((end - first) * min(1.0, executed[first:end].max()) for first, end in outside)
    total = sum(end - first for first, end in outside)
    return ran / total if total else 1.0


def bytes_read(instruction: Any) -> int:
    """Return the bytes that a thread reads of global memory in an instruction of PTX."""
    name = instruction.name
    if name.startswith(("cp.async.ca", "cp.async.cg")):
        return int(str(instruction.operands[2]), 0)
    found = re.match(r"ld\.global(?:\.cg)?(?:\.v(\d))?\.[bfsu](\d+)", name)
    return 0 if found is None else int(found[1] or 1) * int(found[2]) // 8


def listing_of(cubin: bytes) -> str:
    """Disassemble a compiled kernel."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "--print-code", "--no-dataflow", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def count_instructions(
    launch: Launch, listing: str, loops: list[tuple[float, int]], ran: float
) -> None:
    """Weigh the SASS of a launch by how often PTX goes around its loops, given with their bytes.

    ran: the share of the code outside them that runs.
    """
    opcodes, jumps = sass.loops(listing)
    # of several jumps to one place the last ends the loop
    spans = [s for s in sorted(dict(sorted(jumps)).items()) if has_work(opcodes[slice(*s)])]
    turns = turns_of(opcodes, spans, loops)
    weights = np.full(len(opcodes), ran)
    # inner loops last
    for (start, end), times in sorted(
        zip(spans, turns, strict=True), key=lambda x: -x[0][1] + x[0][0]
    ):
        weights[start:end] = times
    # a loop's first load waits for its turn before
    starts = {start for start, _ in spans}
    is_waiting = True
    for at, (opcode, weight) in enumerate(zip(opcodes, weights, strict=True)):
        is_waiting |= at in starts
        base = opcode.split(".")[0]
        if base == "NOP":
            continue
        kind = next((k for k, pattern in CLASSES.items() if re.fullmatch(pattern, base)), "other")
        launch.classes[kind] += weight
        launch.instructions += weight
        is_barrier = opcode.startswith("BAR")
        launch.barriers += weight * is_barrier
        if base in ("LDG", "LD"):
            launch.waits += weight * is_waiting
            is_waiting = False
        is_waiting |= is_barrier
    launch.is_prefetched = not spans or any(o.startswith(("LDGSTS", "UTMALDG")) for o in opcodes)


def has_work(opcodes: list[str]) -> bool:
    """Whether a loop does more than wait."""
    pattern = "|".join(CLASSES[name] for name in ("load", "store", "shared", "float"))
    return any(re.fullmatch(pattern, opcode.split(".")[0]) for opcode in opcodes)


def turns_of(
    opcodes: list[str], spans: list[tuple[int, int]], loops: list[tuple[float, int]]
) -> list[float]:
    """Return how often each loop of SASS goes around, from the turns and bytes of PTX's."""
    inside = [sass.moved(opcodes[start:end], sass.READ + "|" + sass.COPY) for start, end in spans]
    if len(spans) == len(loops):
        # ptxas unrolls a loop: a turn reads more
        return [
            times * (moved / here if moved and here else 1.0)
            for (times, moved), here in zip(loops, inside, strict=True)
        ]
    total = sum(times * moved for times, moved in loops)
    most = max((times for times, _ in loops), default=1.0)
    return [total / sum(inside) if sum(inside) and here else most for here in inside]
