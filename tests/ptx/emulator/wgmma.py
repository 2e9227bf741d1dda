"""sm_90: products of warp groups, whose operands lie in shared memory.

A product happens when its group is waited for, so it reads shared memory as late as it may.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import copy
from functools import lru_cache
from typing import Any

import numpy as np

from . import floats
from .binding import Binding, Call
from .floats import TYPES
from .hopper import swizzled
from .memory import Fault
from .warps import left_fragment, numbers_of

Array = np.ndarray
# bits 62 and 63 of a descriptor: bytes of a row that is swizzled
_SWIZZLES = {1: 128, 2: 64, 3: 32}


def bind_wgmma(b: Binding) -> Call:
    """Start a product, close a group of them, or wait for all groups but the last few."""
    unit, action = b.unit, b.instruction.words[1]
    if action == "mma_async":
        return _start_product(b)
    if action == "fence":
        return _fence(b)
    if action == "commit_group":
        return lambda mask: unit.products.append([])
    left = int(b.operands[0])

    def wait(mask: Any) -> None:
        # the kernel may touch the registers of products now
        unit.products_fenced[b.lanes(mask)] = False
        # the last list is of products that are in no group yet
        while len(unit.products) - 1 > left:
            for product in unit.products.pop(0):
                product()

    return wait


def _fence(b: Binding) -> Call:
    """Order a warp's accesses to registers before the products that follow."""

    def fence(mask: Any) -> None:
        b.unit.products_fenced[b.whole_warps(mask)] = True

    return fence


@lru_cache(256)
def addresses(descriptor: int, shape: tuple[int, int], size: int, turns: bool) -> Array:
    """Return where the numbers [rows, depth] of an operand lie in the shared memory of a block.

    The array belongs to the cache.
    """
    rows, depth = shape
    start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    if descriptor >> 62 not in _SWIZZLES or descriptor >> 49 & 7:
        raise NotImplementedError(f"wgmma descriptor {descriptor:#x}: layout")
    width = _SWIZZLES[descriptor >> 62]
    r, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
    if turns:
        # transposed: 8 of its depth form a piece, `width` bytes of rows each
        across = width // size
        address = start + r // across * leading + k // 8 * stride
        address = address + k % 8 * width + r % across * size
    else:
        address = start + r // 8 * stride + r % 8 * width + k * size
    return swizzled(address, width)


class Operand:
    """An operand [rows, depth] in shared memory, as a descriptor names it.

    `place`: where its numbers lie.
    """

    def __init__(
        self, unit: Any, block: int, descriptor: int, shape: tuple[int, int], kind: str, turns: bool
    ):
        self.shared, self.kind, self.size = unit.launch.shared, kind, TYPES[kind].itemsize
        address = addresses(descriptor, shape, self.size, turns)
        if address.max() + self.size > self.shared.size:
            raise Fault("wgmma reads beyond shared memory")
        self.place = block * self.shared.size + address

    def part(self, rows: slice) -> Operand:
        """Return some rows."""
        part = copy(self)
        part.place = self.place[rows]
        return part

    def note(self, warp: int, text: str) -> None:
        """Note that a warp reads it now, or at any time until its wait."""
        if self.shared.races:
            place = self.place.ravel()
            self.shared.note_read(place, np.full(len(place), warp), self.size, text)

    def read(self) -> Array:
        """Return its numbers as float32."""
        words = self.shared.views[self.size][self.place >> (self.size.bit_length() - 1)]
        is_tf32 = self.kind == "tf32"
        return floats.cut_to_tf32(words) if is_tf32 else floats.widen(words, self.kind)


def _start_product(b: Binding) -> Call:
    unit, kind = b.unit, b.kind
    shape = next(word for word in b.instruction.words if word.startswith("m64"))
    columns, depth = (int(number) for number in re.findall(r"[nk](\d+)", shape))
    names, first, second, scale, sign_a, sign_b, *transposed = b.operands
    if (sign_a, sign_b) != ("1", "1"):
        raise NotImplementedError(f"a negated operand: {b.text}")
    registers, in_registers = b.registers_of(names), isinstance(first, tuple)
    # an operand in registers has no flag, 32-bit numbers have none at all
    flags = [flag == "1" for flag in transposed]
    left_turns, right_turns = [False, False, *flags][-2:]
    left = b.registers_of(first) if in_registers else b.source(first, "u64")
    right, adds = b.source(second, "u64"), b.source(scale, "pred")

    def groups(mask: Any) -> Iterator[Array]:
        """Yield lanes that multiply at once: a warp group, a warp where races are checked."""
        # of the four warps of a group each may name operands of its own
        descriptors = [d for d in (None if in_registers else left, right) if np.ndim(d)]
        is_whole = mask is None and unit.lanes % 128 == 0 and not unit.launch.shared.races
        for lanes in b.whole_warps(mask).reshape(-1, 128 if is_whole else 32):
            agree = all((d[lanes[::32]] == d[lanes[0]]).all() for d in descriptors)
            yield from lanes.reshape(1 if agree else -1, -1 if agree else 32)

    def start(mask: Any) -> None:
        if not unit.products_fenced[b.whole_warps(mask)].all():
            raise Fault(f"{b.text}: no wgmma.fence since the last wait")
        for lanes in groups(mask):
            lane, warp = lanes[0], int(unit.warp[lanes[0]])
            # a warp has 16 of the 64 rows of its group
            block, row = int(unit.block[lane]), 16 * (warp % 4)
            if in_registers:
                x: Any = left_fragment(numbers_of(left, lanes, kind), depth).reshape(-1, depth)
            else:
                whole = Operand(unit, block, int(left[lane]), (64, depth), kind, left_turns)
                x = whole.part(slice(row, row + len(lanes) // 2))
                x.note(warp, b.text)
                unit.launch.shared.check_fenced(x.place, block, warp, b.text)
            w = Operand(unit, block, int(right[lane]), (columns, depth), kind, right_turns)
            w.note(warp, b.text)
            unit.launch.shared.check_fenced(w.place, block, warp, b.text)
            task = lanes, warp, x, w, bool(np.broadcast_to(adds, unit.lanes)[lane])
            unit.products[-1].append(lambda task=task: product(*task))

    def product(lanes: Array, warp: int, x: Any, w: Operand, add: bool) -> None:
        # it may have read at any time since its start
        for operand in (x, w):
            if isinstance(operand, Operand):
                operand.note(warp, b.text)
        left_numbers = x.read() if isinstance(x, Operand) else x
        total = left_numbers.astype(np.float64) @ w.read().T.astype(np.float64)
        # rows: warps, halves, groups of 4 lanes; columns: pieces of 8, lanes, neighbors. Registers
        # go by piece, half and neighbor, each with a number per lane
        total = total.reshape(-1, 2, 8, columns // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4)
        total = total.reshape(len(registers), len(lanes))
        place = slice(lanes[0], lanes[-1] + 1)
        if add:
            before = np.stack([register[place] for register in registers])
            total = total + before.view(np.float32)
        for register, row in zip(registers, total.astype(np.float32).view(np.uint32), strict=True):
            register[place] = row

    return start
