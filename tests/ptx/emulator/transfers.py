"""Loads, stores, and copies from global to shared memory that happen later."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from .binding import Binding, Call, address_parts
from .floats import TYPES
from .memory import Fault

Array = np.ndarray


class Copy(NamedTuple):
    """A copy of `size` bytes per lane under way: where to, where from, bytes to read, group."""

    size: int
    lanes: Array
    place: Array
    source: Array
    read: Array
    group: Array

    def part(self, chosen: Array) -> Copy:
        """Return the copies of some lanes."""
        return Copy(self.size, *(array[chosen] for array in self[1:]))


def _pieces(b: Binding, operand: Any) -> tuple[int, int]:
    """Return the bytes of a word and the number of words that an access moves."""
    count = next((int(w[1:]) for w in b.instruction.words if re.fullmatch(r"v\d", w)), 1)
    assert count == (len(operand) if isinstance(operand, tuple) else 1), b.text
    return TYPES[b.kind].itemsize, count


def bind_ld(b: Binding) -> Call:
    """Load words from global or shared memory, or a parameter."""
    to, place = b.operands
    size, count = _pieces(b, to)
    registers = b.registers_of(to)
    is_signed = TYPES[b.kind].kind == "i"

    def put(lanes: Any, words: Array) -> None:
        for index, register in enumerate(registers):
            if register is None:
                continue
            word = words[:, index]
            if register.dtype.itemsize != size:
                # a wider register holds the sign of a signed number
                word = word.view(f"i{size}") if is_signed else word
                word = word.astype(f"i{register.dtype.itemsize}").view(register.dtype)
            register[lanes] = word

    if b.has("param"):
        return _load_param(b, place, size, count, put)
    address, unit = b.address(place), b.unit
    if b.has("global"):
        return lambda mask: put(
            lanes := b.index(mask),
            unit.launch.memory.load(address(lanes), size, count, b.text),
        )

    def load_shared(mask: Any) -> None:
        lanes, shared = b.index(mask), unit.launch.shared
        at = shared.place(address(lanes), unit.block[lanes], size * count, b.text)
        shared.note_read(at, unit.warp[lanes], size * count, b.text)
        put(lanes, shared.load(at, size, count))

    return load_shared


def _load_param(b: Binding, place: str, size: int, count: int, put: Any) -> Call:
    name, offset = address_parts(place)

    def load(mask: Any) -> None:
        data = b.unit.launch.params[name].data[offset:][: size * count]
        # one row for all lanes
        put(b.index(mask), np.frombuffer(data, f"u{size}")[None])

    return load


def bind_st(b: Binding) -> Call:
    """Store words to global or shared memory."""
    place, source = b.operands
    size, count = _pieces(b, source)
    names = source if isinstance(source, tuple) else (source,)
    registers = b.unit.registers
    parts = [registers[n] if n in registers else b.source(n, b.kind) for n in names]
    address, unit = b.address(place), b.unit

    def gathered(lanes: Any) -> Array:
        words = np.empty((len(b.every[lanes]), count), f"u{size}")
        for index, part in enumerate(parts):
            # of a wider register the low bytes
            words[:, index] = part[lanes] if np.ndim(part) else np.asarray(part).view(f"u{size}")
        return words

    def store_global(mask: Any) -> None:
        lanes = b.index(mask)
        unit.launch.memory.store(address(lanes), gathered(lanes), b.text)

    def store_shared(mask: Any) -> None:
        lanes, shared = b.index(mask), unit.launch.shared
        at = shared.place(address(lanes), unit.block[lanes], size * count, b.text)
        words = gathered(lanes)
        shared.note_write(at, unit.warp[lanes], size * count, b.text, words)
        shared.leave_unfenced(at, unit.warp[lanes])
        shared.store(at, words)

    return store_shared if b.has("shared") else store_global


def bind_cp_async(b: Binding) -> Call:
    """Start a copy, close a group of copies, or wait for all groups but the last few."""
    unit = b.unit
    if b.has("commit_group"):

        def commit(mask: Any) -> None:
            unit.groups[b.lanes(mask)] += 1

        return commit
    if b.has("wait_group"):
        return _wait_for_copies(b, int(b.operands[0]))
    return _wait_for_copies(b, None) if b.has("wait_all") else _start_copy(b)


def _wait_for_copies(b: Binding, left: int | None) -> Call:
    """Finish copies; `left`: how many groups may stay under way, None for no copy at all."""
    unit = b.unit

    def wait(mask: Any) -> None:
        inside = np.ones(unit.lanes, bool) if mask is None else mask
        kept = []
        for copy in unit.copies:
            lanes = copy.lanes
            done = inside[lanes]
            if left is not None:
                done = done & (copy.group + left < unit.groups[lanes])
            if done.any():
                _finish(b, copy.part(done))
            if not done.all():
                kept.append(copy.part(~done))
        unit.copies = kept

    return wait


def _start_copy(b: Binding) -> Call:
    unit = b.unit
    to, source, size = b.address(b.operands[0]), b.address(b.operands[1]), int(b.operands[2], 0)
    count = b.source(b.operands[3], "u32") if len(b.operands) > 3 else np.uint32(size)

    def start(mask: Any) -> None:
        lanes, shared = b.lanes(mask), unit.launch.shared
        at = shared.place(to(lanes), unit.block[lanes], size, b.text)
        # from now on no other warp may read or write there: note numbers that differ
        shared.note_write(at, unit.warp[lanes], size, b.text, ~shared.load(at, 4, size // 4))
        read = np.broadcast_to(count, unit.lanes)[lanes].astype(np.int64)
        copy = Copy(size, lanes, at, source(lanes), read, unit.groups[lanes])
        if unit.launch.early:
            _finish(b, copy)
        else:
            unit.copies.append(copy)

    return start


def _finish(b: Binding, copy: Copy) -> None:
    """Write what a copy reads now, zeros where it reads nothing."""
    if ((copy.read != 0) & (copy.read != copy.size)).any():
        raise Fault(f"{b.text}: a copy of a part")
    launch, words = b.unit.launch, np.zeros((len(copy.lanes), copy.size // 4), np.uint32)
    if (full := copy.read > 0).any():
        words[full] = launch.memory.load(copy.source[full], 4, copy.size // 4, "cp.async")
    warp = b.unit.warp[copy.lanes]
    launch.shared.note_write(copy.place, warp, copy.size, b.text, words)
    launch.shared.leave_unfenced(copy.place, warp)
    launch.shared.store(copy.place, words)
