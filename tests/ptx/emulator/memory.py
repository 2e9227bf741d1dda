"""Global memory, checked against the tensors of a launch, and blocks' shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

Array = np.ndarray
# numpy refuses an array at address 0
_START = 4096


class Fault(Exception):
    """An error that a device or its sanitizer would report."""


class _WholeProcess:
    """The memory of this process as one array: the tensors of a launch lie in it."""

    __array_interface__: ClassVar = {
        "shape": ((1 << 47) - _START,),
        "typestr": "|u1",
        "data": (_START, False),
        "version": 3,
    }


_BYTES = np.asarray(_WholeProcess())


def _views(memory: Array) -> dict[int, Array]:
    """Return bytes as words of each size; of 16 bytes in a type that NumPy copies at once."""
    return {1: memory} | {n: memory.view(f"u{n}") for n in (2, 4, 8)} | {16: memory.view("c16")}


_VIEWS = _views(_BYTES[: len(_BYTES) // 16 * 16])


def _extent(tensor: Any) -> tuple[int, int]:
    """Return the first and the end address of the elements of a tensor."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = 1 + last if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + count * tensor.element_size()


class GlobalMemory:
    """The memory of this process, of which a kernel may touch the tensors of its launch."""

    def __init__(self, tensors: Sequence[Any]):
        merged: list[list[int]] = []
        for low, high in sorted(map(_extent, tensors)):
            if merged and low <= merged[-1][1]:
                merged[-1][1] = max(high, merged[-1][1])
            elif high > low:
                merged.append([low, high])
        self.lows = np.array([low for low, _ in merged] or [0], np.int64)
        self.highs = np.array([high for _, high in merged] or [0], np.int64)

    def _index(self, address: Array, nbytes: int, text: str) -> Array:
        """Return the numbers of an access's words, or raise what a sanitizer would report."""
        address = address.view(np.int64)
        if np.bitwise_or.reduce(address, initial=0) & (nbytes - 1):
            raise Fault(f"{text}: address not aligned to {nbytes} bytes")
        self._check_bounds(address, nbytes, text)
        return (address - _START) >> (nbytes.bit_length() - 1)

    def _check_bounds(self, address: Array, nbytes: int, text: str) -> None:
        near = np.searchsorted(self.lows, address[0], "right") - 1
        if self.lows[near] <= address.min() and address.max() + nbytes <= self.highs[near]:
            # all in the tensor of the first lane
            return
        place = np.searchsorted(self.lows, address, "right") - 1
        wrong = (place < 0) | (address + nbytes > self.highs[place])
        if wrong.any():
            first = int(address[wrong][0])
            near = int(np.abs(self.lows - first).argmin())
            low, high = int(self.lows[near]), int(self.highs[near])
            raise Fault(
                f"{text}: {int(wrong.sum())} lanes out of bounds, the first "
                f"{first - low} bytes from the start of a tensor of {high - low}"
            )

    def load(self, address: Array, size: int, count: int, text: str) -> Array:
        """Return [lanes, count] words of `size` bytes."""
        nbytes = size * count
        words = _VIEWS[nbytes][self._index(address, nbytes, text)]
        return words.view(f"u{size}").reshape(-1, count)

    def store(self, address: Array, words: Array, text: str) -> None:
        """Write words [lanes, count]."""
        nbytes = words.itemsize * words.shape[1]
        view = _VIEWS[nbytes]
        view[self._index(address, nbytes, text)] = words.reshape(-1).view(view.dtype)


class SharedMemory:
    """Shared memory of several blocks, filled with NaN; finds accesses that no barrier orders.

    Between two barriers, an epoch, each granule of two bytes knows the warp that wrote it last and
    the warps that read it. With `proxies`, each piece of 16 bytes knows the warp that wrote it and
    has not passed it, by a fence, to the async proxy, by which products of warp groups read. A
    fence of the reader does, too, behind a barrier after the write.
    """

    def __init__(self, blocks: int, size: int, races: bool, proxies: bool = False):
        self.size, self.races, self.epoch = -(-max(size, 16) // 16) * 16, races, 0
        self.proxies = proxies
        # the warp's number and one, 0 where a fence came after
        self.unfenced = np.zeros((blocks, self.size // 16 if proxies else 0), np.int16)
        # the epoch of that write, and by block and warp the epoch of its last fence
        self.stored = np.zeros_like(self.unfenced, np.int32)
        self.fences: dict[tuple[int, int], int] = {}
        self.bytes = np.full(blocks * self.size, 0xFF, np.uint8)
        self.views = _views(self.bytes)
        granules = len(self.bytes) // 2 if races else 0
        self.written = np.full(granules, -1, np.int32)
        self.writer = np.zeros(granules, np.int32)
        self.read = np.full(granules, -1, np.int32)
        self.readers = np.zeros(granules, np.uint32)

    def begin(self) -> None:
        """Fill with NaN and start an epoch, for the next blocks."""
        self.bytes[...] = 0xFF
        self.unfenced[...] = 0
        self.fences.clear()
        self.epoch += 1

    def place(self, address: Array, block: Array, size: int, text: str) -> Array:
        """Return where in `bytes` the addresses of blocks lie."""
        address = address.astype(np.int64, copy=False)
        if np.bitwise_or.reduce(address, initial=0) & (size - 1):
            raise Fault(f"{text}: shared address not aligned to {size} bytes")
        # read as unsigned, a negative address is beyond, too
        if address.view(np.uint64).max(initial=0) + size > self.size:
            raise Fault(f"{text}: shared address beyond {self.size}: {int(address.max())}")
        return address + block * self.size

    def note_read(self, place: Array, warp: Array, size: int, text: str) -> None:
        """Note reads of `size` bytes; raise if another warp has written there in this epoch."""
        if not self.races:
            return
        granules, warp = self._granules(place, warp, size)
        race = (self.written[granules] == self.epoch) & (self.writer[granules] != warp)
        stale = granules[self.read[granules] != self.epoch]
        self.read[stale], self.readers[stale] = self.epoch, 0
        np.bitwise_or.at(self.readers, granules, np.uint32(1) << warp.astype(np.uint32))
        self._report(race, text)

    def note_write(self, place: Array, warp: Array, size: int, text: str, words: Array) -> None:
        """Note writes; raise if another warp has read there, or has written another number."""
        if not self.races:
            return
        granules, warp = self._granules(place, warp, size)
        own_bit = np.uint32(1) << warp.astype(np.uint32)
        # equal numbers do no harm: Triton stores what several warps hold several times
        bits = np.ascontiguousarray(words).view(np.uint16).ravel() if size > 1 else None
        race = (self.written[granules] == self.epoch) & (self.writer[granules] != warp)
        race &= True if bits is None else self.views[2][granules] != bits
        is_read = self.read[granules] == self.epoch
        race |= is_read & ((self.readers[granules] & ~own_bit) != 0)
        self.written[granules], self.writer[granules] = self.epoch, warp
        if bits is not None and len(place) > 32:
            # warps that step together may have written different numbers by this very access
            last = np.zeros(granules.max() + 1, np.uint16)
            last[granules] = bits
            race |= (self.writer[granules] != warp) & (last[granules] != bits)
        self._report(race, text)

    def leave_unfenced(self, place: Array, warp: Array | int) -> None:
        """Note that a warp's stores wait for its fence; warp -1: a copy needs none."""
        if self.proxies:
            self.unfenced.reshape(-1)[place // 16] = warp + 1
            self.stored.reshape(-1)[place // 16] = self.epoch

    def fence(self, block: Array, warp: Array) -> None:
        """Pass all that these warps have stored to the async proxy."""
        for number, writer in {*zip(block.tolist(), warp.tolist(), strict=True)}:
            pieces = self.unfenced[number]
            pieces[pieces == writer + 1] = 0
            self.fences[number, writer] = self.epoch

    def check_fenced(self, place: Array, block: int, warp: int, text: str) -> None:
        """Raise where a warp's product reads what no fence has passed to the async proxy."""
        if not self.proxies:
            return
        pieces = place // 16
        is_late = self.stored.reshape(-1)[pieces] >= self.fences.get((block, warp), 0)
        if (is_late & (self.unfenced.reshape(-1)[pieces] != 0)).any():
            raise Fault(f"{text}: reads what a warp has stored without a fence after it")

    def settle(self, place: Array, size: int) -> None:
        """Forget writes that a barrier other than bar.sync has ordered."""
        if self.races:
            granules, _ = self._granules(place, np.zeros(len(place)), size)
            self.written[granules] = -1

    def _granules(self, place: Array, warp: Array, size: int) -> tuple[Array, Array]:
        count = max(1, size // 2)
        granules = (place[:, None] // 2 + np.arange(count)).ravel()
        return granules, np.repeat(warp, count).astype(np.int32)

    def _report(self, race: Array, text: str) -> None:
        if race.any():
            raise Fault(f"{text}: {int(race.sum())} accesses race with another warp's")

    def load(self, place: Array, size: int, count: int) -> Array:
        """Return [lanes, count] words of `size` bytes."""
        nbytes = size * count
        words = self.views[nbytes][place >> (nbytes.bit_length() - 1)]
        return words.view(f"u{size}").reshape(-1, count)

    def store(self, place: Array, words: Array) -> None:
        """Write words [lanes, count]."""
        nbytes = words.itemsize * words.shape[1]
        view = self.views[nbytes]
        view[place >> (nbytes.bit_length() - 1)] = words.reshape(-1).view(view.dtype)
