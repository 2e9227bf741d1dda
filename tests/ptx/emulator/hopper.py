"""sm_90: barriers in shared memory, and tiles that the copy engine writes into shared memory.

A copy happens when its barrier is waited for, or at once with `early`: hardware may do either.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from . import floats
from .binding import SPIN, Binding, Call
from .memory import Fault, SharedMemory

Array = np.ndarray


@dataclass
class Barrier:
    """An mbarrier."""

    # arrivals that end a phase
    count: int
    # arrivals that this phase still waits for
    pending: int
    # the parity of this phase
    phase: int = 0
    # bytes that this phase waits for
    expected: int = 0
    # copies under way: what ends each, and its bytes
    copies: list[tuple[Callable[[], None], int]] = field(default_factory=list)
    # the warp that made it, and the epoch in which no other warp may use it
    maker: tuple[int, int] = (-1, -1)

    def try_wait(self, parity: int) -> bool:
        """Whether the phase of this parity is over; finish its copies if that ends it."""
        if self.phase != parity:
            return True
        if self.pending or sum(nbytes for _, nbytes in self.copies) != self.expected:
            return False
        for copy, _ in self.copies:
            copy()
        self.copies, self.expected, self.pending = [], 0, self.count
        self.phase ^= 1
        return True


@dataclass
class TensorMap:
    """A tensor descriptor as the host encodes it."""

    tensor: torch.Tensor
    # elements of each dimension, the innermost last; so are the others
    shape: list[int]
    # elements between neighbors
    strides: list[int]
    # the shape of a copy
    box: list[int]
    # 0 for none, else rows of 16 << swizzle bytes are permuted
    swizzle: int
    # whether copies round float32 to TF32
    rounds_to_tf32: bool = False

    def __post_init__(self):
        size = self.tensor.element_size()
        if self.tensor.data_ptr() % 16 or any(s * size % 16 for s in self.strides[:-1]):
            raise Fault("a tensor map's address or stride is no multiple of 16 bytes")

    @property
    def nbytes(self) -> int:
        """Bytes of a box: those past an edge are counted too."""
        return int(np.prod(self.box)) * self.tensor.element_size()

    def read(self, corner: list[int]) -> Array:
        """Return the bytes [rows, bytes of a row] of a box, zeros past the edges."""
        size = self.tensor.element_size()
        numbers = np.zeros(self.box, f"u{size}")
        bounds = [
            (max(c, 0), min(c + b, s)) for c, b, s in zip(corner, self.box, self.shape, strict=True)
        ]
        if all(low < high for low, high in bounds):
            part = self.tensor.detach().as_strided(self.shape, self.strides)
            part = part.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[size])
            for axis, (low, high) in enumerate(bounds):
                part = part.narrow(axis, low, high - low)
            inner = tuple(
                slice(low - c, high - c) for c, (low, high) in zip(corner, bounds, strict=True)
            )
            numbers[inner] = part.contiguous().numpy().view(f"u{size}")
        if self.rounds_to_tf32:
            numbers = floats.f32_to_tf32(numbers.view(np.float32))
        return np.ascontiguousarray(numbers).reshape(-1, self.box[-1]).view(np.uint8)


def swizzled(address: Array, width: int) -> Array:
    """Permute the 16-byte pieces of rows of `width` bytes by the address."""
    return address ^ (((address >> 7) & (width // 16 - 1)) << 4)


def _keys(b: Binding, text: str) -> Callable[[Array], list[tuple[int, int]]]:
    """Return a function from lanes to their barriers, by block and address."""
    address, unit = b.address(text), b.unit
    return lambda lanes: list(zip(unit.block[lanes].tolist(), address(lanes).tolist(), strict=True))


def bind_mbarrier(b: Binding) -> Call:
    """Make, end, arrive at or wait for a barrier in shared memory."""
    action = b.instruction.words[1]
    if action == "try_wait":
        return _try_wait(b)
    if action == "arrive":
        return _arrive(b)
    keys = _keys(b, b.operands[0])
    count = int(b.operands[1]) if action == "init" else 0

    def change(mask: Any) -> None:
        lanes = b.lanes(mask)
        for lane, key in zip(lanes, keys(lanes), strict=True):
            if action == "init":
                maker = int(b.unit.warp[lane]), b.unit.launch.shared.epoch
                b.unit.launch.barriers[key] = Barrier(count, count, maker=maker)
            else:
                b.unit.launch.barriers.pop(key, None)

    return change


def _barrier(b: Binding, key: tuple[int, int], warp: int) -> Barrier:
    """Return the barrier of a block and address, for a warp to use."""
    barrier = b.unit.launch.barriers.get(key)
    if barrier is None:
        raise Fault(f"{b.text}: no barrier at {key[1]}")
    maker, epoch = barrier.maker
    if maker != warp and epoch == b.unit.launch.shared.epoch:
        raise Fault(f"{b.text}: another warp makes the barrier at {key[1]} at the same time")
    return barrier


def _arrive(b: Binding) -> Call:
    keys, expects = _keys(b, b.operands[1]), b.has("expect_tx")
    nbytes = b.source(b.operands[2], "u32") if expects else np.uint32(0)

    def arrive(mask: Any) -> None:
        lanes = b.lanes(mask)
        sizes = np.broadcast_to(nbytes, b.unit.lanes)[lanes].tolist()
        for lane, size, key in zip(lanes, sizes, keys(lanes), strict=True):
            barrier = _barrier(b, key, int(b.unit.warp[lane]))
            barrier.expected += size
            barrier.pending -= 1
            if barrier.pending < 0:
                raise Fault(f"{b.text}: more arrivals than the barrier counts")

    return arrive


def _try_wait(b: Binding) -> Call:
    write, keys = b.target(b.operands[0], "pred"), _keys(b, b.operands[1])
    parity = b.source(b.operands[2], "u32")

    def wait(mask: Any) -> Any:
        lanes = b.lanes(mask)
        wanted = (np.broadcast_to(parity, b.unit.lanes)[lanes] & 1).tolist()
        waits = set(zip(keys(lanes), wanted, b.unit.warp[lanes].tolist(), strict=True))
        # each is asked: a wait that is over finishes its copies
        over = [_barrier(b, key, warp).try_wait(bit) for key, bit, warp in waits]
        if not all(over):
            return SPIN
        write(True, mask)
        return None

    return wait


def bind_cp(b: Binding) -> Call:
    """Copy a box of a tensor map into shared memory."""
    unit = b.unit
    to, keys = b.address(b.operands[0]), _keys(b, b.operands[2])
    parts = re.fullmatch(r"\[\s*(%\w+)\s*,\s*\{(.*)\}\s*\]", b.operands[1])
    assert parts, b.text
    handle = b.source(parts[1], "u64")
    corner = [b.source(part.strip(), "s32") for part in parts[2].split(",")]

    def start(mask: Any) -> None:
        lanes = b.lanes(mask)
        for lane, key in zip(lanes, keys(lanes), strict=True):
            tensor_map = unit.launch.maps[int(handle[lane])]
            # the innermost coordinate comes first
            at = [int(np.broadcast_to(c, unit.lanes)[lane]) for c in corner][::-1]
            base = int(to(np.array([lane]))[0])
            if base % (1024 if tensor_map.swizzle else 128):
                raise Fault(f"{b.text}: shared address {base} is not aligned")
            copy = BoxCopy(unit.launch.shared, tensor_map, at, base, int(unit.block[lane]))
            copy.start(unit.warp[lane], b.text, unit.launch.early)
            _barrier(b, key, int(unit.warp[lane])).copies.append((copy.finish, tensor_map.nbytes))

    return start


class BoxCopy:
    """A copy of a box under way to the pieces of 16 bytes in shared memory at `place`."""

    def __init__(
        self, shared: SharedMemory, tensor_map: TensorMap, corner: list[int], base: int, block: int
    ):
        self.shared, self.tensor_map, self.corner = shared, tensor_map, corner
        address = base + np.arange(0, tensor_map.nbytes, 16)
        if tensor_map.swizzle:
            address = swizzled(address, 16 << tensor_map.swizzle)
        if address.max() + 16 > shared.size:
            raise Fault(f"a box beyond shared memory of {shared.size} bytes")
        self.place, self.is_written = block * shared.size + address, False

    def start(self, warp: int, text: str, early: bool) -> None:
        """Note that no other warp may read or write there; write at once if `early`."""
        if self.shared.races:
            warps, before = np.full(len(self.place), warp), self.shared.load(self.place, 4, 4)
            self.shared.note_write(self.place, warps, 16, text, ~before)
        if early:
            self._write()

    def finish(self) -> None:
        """Write, if not done yet; from now on every warp that has waited may read."""
        self._write()
        self.shared.settle(self.place, 16)

    def _write(self) -> None:
        if not self.is_written:
            pieces = self.tensor_map.read(self.corner).reshape(-1, 16)
            self.shared.store(self.place, pieces)
            self.shared.leave_unfenced(self.place, -1)
            self.is_written = True
