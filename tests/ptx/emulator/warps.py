"""Instructions of whole warps: exchanges, reductions, products of fragments, barriers."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import floats
from .binding import BARRIER, Binding, Call

Array = np.ndarray


def bind_shfl(b: Binding) -> Call:
    """Read another lane's register."""
    mode, (to, *sources) = b.instruction.words[2], b.operands
    names = to.split("|")
    write = b.target(names[0], "b32")
    write_inside = b.target(names[1], "pred") if len(names) > 1 else None
    value, by, clamp = (
        b.source(text, kind) for text, kind in zip(sources, ("b32", "u32", "u32"), strict=False)
    )
    lane = b.every % 32

    def places(offset: Any, bounds: Any) -> tuple[Array, Array]:
        """Return the lane that each lane reads, and whether that is within its bounds."""
        offset = np.asarray(offset).astype(np.int64) & 31
        bounds = np.asarray(bounds).astype(np.int64)
        segment = (bounds >> 8) & 31
        last = (lane & segment) | (bounds & 31 & ~segment)
        other = {
            "bfly": lane ^ offset,
            "up": lane - offset,
            "down": lane + offset,
            "idx": (lane & segment) | (offset & ~segment),
        }[mode]
        inside = other >= last if mode == "up" else other <= last
        return b.every - lane + np.where(inside, other, lane), inside

    # most read the same lane each time
    fixed = places(by, clamp) if np.ndim(by) == np.ndim(clamp) == 0 else None

    def shuffle(mask: Any) -> None:
        b.check_warps(mask)
        place, inside = fixed or places(by, clamp)
        write(np.broadcast_to(value, b.unit.lanes)[place], mask)
        if write_inside is not None:
            write_inside(inside, mask)

    return shuffle


def bind_redux(b: Binding) -> Call:
    """Reduce a register over a warp."""
    operators = {
        "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
        "or": np.bitwise_or, "xor": np.bitwise_xor,
    }  # fmt: skip
    operator = operators[b.instruction.words[2]]
    write, value = b.target(b.operands[0], b.kind), b.source(b.operands[1], b.kind)

    def reduce(mask: Any) -> None:
        b.check_warps(mask)
        reduced = operator.reduce(value.reshape(-1, 32), axis=1, dtype=value.dtype)
        write(np.repeat(reduced, 32), mask)

    return reduce


def bind_elect(b: Binding) -> Call:
    """Choose the first lane of a warp."""
    leader, elected = b.operands[0].split("|")
    write_leader, write_elected = b.target(leader, "b32"), b.target(elected, "pred")
    is_first = b.every % 32 == 0

    def elect(mask: Any) -> None:
        b.check_warps(mask)
        write_leader(0, mask)
        write_elected(is_first, mask)

    return elect


def bind_bar(b: Binding) -> Call:
    """Wait for all warps of the block; the lanes of a warp step together anyway."""
    if b.has("warp"):
        return lambda mask: None
    assert b.operands == ["0"], b.text
    return lambda mask: BARRIER


def _matrices(b: Binding, place: str, operand: Any) -> tuple[Any, int, Any]:
    """Return the registers of 8x8 matrices, their number, and where the rows of warps lie."""
    count = int(next(w for w in b.instruction.words if w in ("x1", "x2", "x4"))[1:])
    registers, address, unit = b.registers_of(operand), b.address(place), b.unit
    assert len(registers) == count, b.text

    def rows_of(lanes: Array) -> tuple[Array, Array]:
        # lane 8 i + j has the address of row j of matrix i
        heads = lanes.reshape(-1, 32)[:, : 8 * count].ravel()
        at = unit.launch.shared.place(address(heads), unit.block[heads], 16, b.text)
        return at, unit.warp[heads]

    return registers, count, rows_of


def bind_ldmatrix(b: Binding) -> Call:
    """Load one, two or four 8x8 matrices of 16-bit numbers."""
    to, place = b.operands
    registers, count, rows_of = _matrices(b, place, to)
    unit, is_transposed = b.unit, b.has("trans")

    def load(mask: Any) -> None:
        lanes, shared = b.whole_warps(mask), unit.launch.shared
        at, warp = rows_of(lanes)
        shared.note_read(at, warp, 16, b.text)
        rows = shared.load(at, 2, 8).reshape(-1, count, 8, 8)
        rows = rows.swapaxes(2, 3) if is_transposed else rows
        words = np.ascontiguousarray(rows).view(np.uint32).reshape(-1, count, 32)
        for index, register in enumerate(registers):
            register[lanes] = words[:, index].ravel()

    return load


def bind_stmatrix(b: Binding) -> Call:
    """Store one, two or four 8x8 matrices of 16-bit numbers."""
    place, source = b.operands
    registers, count, rows_of = _matrices(b, place, source)
    unit, is_transposed = b.unit, b.has("trans")

    def store(mask: Any) -> None:
        lanes, shared = b.whole_warps(mask), unit.launch.shared
        at, warp = rows_of(lanes)
        words = np.stack([register[lanes].reshape(-1, 32) for register in registers], 1)
        rows = np.ascontiguousarray(words).view(np.uint16).reshape(-1, count, 8, 8)
        rows = rows.swapaxes(2, 3) if is_transposed else rows
        rows = np.ascontiguousarray(rows).reshape(-1, 8)
        shared.note_write(at, warp, 16, b.text, rows)
        shared.leave_unfenced(at, warp)
        shared.store(at, rows)

    return store


def numbers_of(registers: list[Array], lanes: Any, kind: str) -> Array:
    """Return the numbers in a fragment's registers as float32.

    Their axes: registers, warps, 8 groups of 4 lanes, the lanes, the numbers of a register.
    """
    words = np.stack([register[lanes] for register in registers])
    if kind == "tf32":
        numbers = floats.cut_to_tf32(words)
    else:
        # the low half comes first
        numbers = floats.widen(words.view(np.uint16), kind)
    return numbers.reshape(len(registers), -1, 8, 4, 1 if kind == "tf32" else 2)


def left_fragment(numbers: Array, depth: int) -> Array:
    """Return x [warps, 16, depth] of the numbers that lanes hold."""
    registers, warps = numbers.shape[:2]
    # of two registers that follow, the second is 8 rows below
    halves = numbers.reshape(registers // 2, 2, *numbers.shape[1:])
    return halves.transpose(2, 1, 3, 0, 4, 5).reshape(warps, 16, depth)


def right_fragment(numbers: Array, depth: int) -> Array:
    """Return w [warps, depth, 8] of the numbers that lanes hold."""
    return numbers.transpose(1, 0, 3, 4, 2).reshape(numbers.shape[1], depth, 8)


def bind_mma(b: Binding) -> Call:
    """D [16, 8] = A B + C; the sum is taken in float64 and rounded once."""
    shape, kind = b.instruction.words[3], b.kinds[1]
    depth = int(shape.partition("k")[2])
    to, first, second, third = map(b.registers_of, b.operands)

    def multiply(mask: Any) -> None:
        b.check_warps(mask)
        lanes = b.index(mask)
        x = left_fragment(numbers_of(first, lanes, kind), depth).astype(np.float64)
        w = right_fragment(numbers_of(second, lanes, kind), depth).astype(np.float64)
        # rows: halves and groups of lanes; columns: lanes and the registers of a half
        total = (x @ w).reshape(-1, 2, 8, 4, 2)
        for index, (out, acc) in enumerate(zip(to, third, strict=True)):
            part = total[:, index // 2, :, :, index % 2].reshape(-1)
            out[lanes] = (part + acc[lanes].view(np.float32)).astype(np.float32).view(np.uint32)

    return multiply
