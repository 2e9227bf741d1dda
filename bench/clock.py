"""Time as the device sees it: CUDA events, with the L2 cache emptied, graphs where possible.

Forward and backward of one graph are timed by marks in one pass, which `triton.testing.do_bench`
and `torch.utils.benchmark` cannot, and once a round, so that implementations take turns.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Step = Callable[[], Any]

# sides of the matrices and bytes of the copy: beyond every cache, done in milliseconds
SIDE = {"cpu": 2048, "cuda": 8192}
COPY_BYTES = {"cpu": 128 << 20, "cuda": 2 << 30}
ROUNDS = 7


def turns(items: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield each item once a round, with its number; each round begins with another one."""
    for turn in range(rounds if items else 0):
        first = turn % len(items)
        for item in (*items[first:], *items[:first]):
            yield turn, item


class Stopwatch:
    """Marks the time on a device; on a GPU the L2 cache is emptied before each measurement."""

    def __init__(self, device: torch.device):
        self.cache: Tensor | None = None
        if device.type == "cuda":
            size = torch.cuda.get_device_properties(device).L2_cache_size
            # some devices report none
            self.cache = torch.empty(max(2 * size, 64 << 20), dtype=torch.uint8, device=device)

    def _mark(self) -> Any:
        if self.cache is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        """Return the milliseconds from one mark to another."""
        if self.cache is None:
            return 1e3 * (end - start)
        end.synchronize()
        return start.elapsed_time(end)

    def times(self, *steps: Step) -> list[float]:
        """Run steps one after the other; return the ms of each, and of all together."""
        if self.cache is not None:
            self.cache.zero_()
        results: list[Any] = []
        marks = [self._mark()]
        for step in steps:
            results.append(step())
            marks.append(self._mark())
        del results
        spans = [self._between(*pair) for pair in pairwise(marks)]
        return [*spans, self._between(marks[0], marks[-1])]


def ceilings(device: torch.device, dtype: torch.dtype, shrink: int = 1) -> tuple[float, float]:
    """Time torch's own large matmul and copy, and return their TFLOP/s and GB/s.

    The copy counts each byte read and each byte written. shrink: divides the sizes, for toys.
    """
    watch = Stopwatch(device)

    def least(step: Step) -> float:
        # a ceiling is never below; the first rounds warm up
        return min([watch.times(step)[0] for _ in range(2 + ROUNDS)][2:])

    side = SIDE[device.type] // shrink
    nbytes = COPY_BYTES[device.type] // shrink
    # a copy that fits beside allocated memory
    if device.type == "cuda":
        nbytes = min(nbytes, torch.cuda.mem_get_info(device)[0] // 8)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    matmul = least(lambda: torch.mm(a, b, out=out))
    # zeros may be cheaper to move
    source = torch.randint(256, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = least(lambda: target.copy_(source))
    return 2 * side**3 / matmul / 1e9, 2 * nbytes / copy / 1e6


def capture(first: Step, second: Callable[[Any], Any], pool: Any) -> tuple[Step, Step]:
    """Record first() and second(its result) as two CUDA graphs, and return their replays.

    The graphs share `pool` with others: the next replay overwrites results of one. After a capture
    that fails, as at a synchronization, torch may allocate and draw no more in this process.
    """
    stream = _side_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # the setup in a first call cannot be captured
        second(first())
        # nodes for the inputs' gradients belong to the stream that they were made on
        gc.collect()
        graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[0], pool=pool, stream=stream):
            result = first()
        with torch.cuda.graph(graphs[1], pool=pool, stream=stream):
            second(result)
    torch.cuda.current_stream().wait_stream(stream)
    return graphs[0].replay, graphs[1].replay


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    # one for all: cuBLAS keeps a workspace for every stream
    return torch.cuda.Stream(device)
