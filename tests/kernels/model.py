"""Instructions and bytes of a compiled kernel, counted for a multiprocessor, without a GPU.

Times are paper: bytes and instructions over the chip's best rates of moving and issuing them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.kernels.compile_only import Compiled
from tests.kernels.sass import Body

# seconds that memory takes to answer under load
LATENCY = 1e-6


class Chip(NamedTuple):
    """Multiprocessors, their shared memory; GHz; TB/s of a copy, TFLOP/s of a large bf16 matmul."""

    name: str
    units: int
    shared: int
    clock: float
    copy: float
    matmul: float

    @property
    def in_flight(self) -> float:
        """Bytes that a multiprocessor has to wait for at a time, for memory to be always busy."""
        return self.copy * 1e12 / self.units * LATENCY

    @property
    def issued(self) -> float:
        """Instructions that threads issue in the time in which memory moves a byte."""
        return 128 * self.units * self.clock * 1e9 / (self.copy * 1e12)


CHIPS = {
    "sm_80": Chip("A100", 108, 164 << 10, 1.41, 1.7, 250.0),
    "sm_90": Chip("H200", 132, 228 << 10, 1.75, 4.3, 790.0),
    "sm_100": Chip("B200", 148, 228 << 10, 1.85, 7.0, 1600.0),
}


class Model(NamedTuple):
    """A multiprocessor's work on a kernel, counted, not measured.

    blocks: on it at a time; in_flight: bytes that they wait for; moved, minimum: bytes per element
    that threads ask for, caches included, and that there are, of a GEMM those of its epilogue;
    barriers: per row of a tile, of a GEMM per step along K; trips: to memory per tile, one after
    another; instructions: per element; share: of issuing in the time that its bytes take, of a
    GEMM's epilogue in that of its main loop.
    """

    kernel: str
    registers: int
    spills: int
    blocks: int
    in_flight: int
    moved: float
    minimum: int
    barriers: float
    trips: int
    instructions: float
    share: float


def model(record: Compiled) -> Model:
    """Count instructions, bytes and barriers in the compiled form of a kernel of NVIDIA's."""
    chip, body = CHIPS[record.target], Body(*record.body)
    threads, (elements, rows) = 32 * record.num_warps, record.tile
    k, times, loaded = record.loop
    registers = -(-record.registers // 8) * 8 * threads
    fitting = min(65536 // registers, chip.shared // (record.shared + 1024), 2048 // threads)
    # without a device one multiprocessor's share of programs that persist is launched
    fitting = min(fitting, record.grid)
    if loaded:
        ahead = body.depth * loaded
        moved = threads * (body.read_after + body.written_after) / elements
        instructions = threads * (body.before + times * body.instructions + body.after)
        share = moved / chip.copy / (2 * k / chip.matmul)
    else:
        ahead = body.copied * body.depth if body.copied else body.read // max(1, body.trips)
        ahead *= threads
        moved = threads * (body.read + body.copied + body.written) / elements
        instructions = threads * body.instructions
        share = instructions / elements / (moved * chip.issued)
    return Model(
        _name(record.label) + (f", K = {k}" if loaded else ""),
        record.registers,
        sum(record.spills.values()),
        fitting,
        in_flight=fitting * ahead,
        moved=moved,
        minimum=record.operand_bytes,
        barriers=body.barriers / (1 if loaded else rows),
        trips=body.trips,
        instructions=instructions / elements,
        share=share,
    )


# keys of a label that tell kernels apart
_TELLING = ("STORE", "ACTIVATION", "LAYER", "BLOCK_M", "BLOCK_N")


def _name(label: str) -> str:
    kernel, _, rest = label.removesuffix("]").partition("[")
    pairs = [part.split("=") for part in rest.split(", ") if "=" in part]
    told = {key: value for key, value in pairs if key in _TELLING}
    rows, columns = told.pop("BLOCK_M", "1"), told.pop("BLOCK_N", None)
    words = [told[key] for key in ("STORE", "ACTIVATION") if key in told]
    if "LAYER" in told:
        words.append("layer" if told["LAYER"] == "True" else "rms")
    if columns:
        words.append(f"{rows}x{columns}")
    absent = [key.rpartition(".")[2] for key, value in pairs if value == "None"]
    words += [f"no {', '.join(absent)}"] if absent else []
    return re.sub("_kernel|store_", "", " ".join([kernel, *words]))
