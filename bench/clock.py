"""Time as the device sees it: CUDA events, with the L2 cache emptied, graphs where possible."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["Stopwatch", "capture"]

Step = Callable[[], Any]


class Stopwatch:
    """Marks the time on a device; on a GPU the L2 cache is emptied before each measurement."""

    def __init__(self, device: torch.device):
        self.cache: Tensor | None = None
        if device.type == "cuda":
            size = torch.cuda.get_device_properties(device).L2_cache_size
            # some devices report none
            size = max(2 * size, 64 << 20)
            self.cache = torch.empty(size, dtype=torch.uint8, device=device)

    def start(self) -> Any:
        """Empty the cache and mark the time."""
        if self.cache is not None:
            self.cache.zero_()
        return self.mark()

    def mark(self) -> Any:
        """Mark the time."""
        if self.cache is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Milliseconds from one mark to another."""
        if self.cache is None:
            return 1e3 * (end - start)
        end.synchronize()
        return start.elapsed_time(end)

    def times(self, *steps: Step) -> list[float]:
        """Run steps one after the other, and return how long each took and all together, in ms."""
        marks = [self.start()]
        results = []
        for step in steps:
            results.append(step())
            marks.append(self.mark())
        del results
        spans = [self.between(*pair) for pair in pairwise(marks)]
        return [*spans, self.between(marks[0], marks[-1])]


def capture(first: Step, second: Callable[[Any], Any], pool: Any) -> tuple[Step, Step]:
    """Record first() and second(its result) as two CUDA graphs, and return what replays them.

    The graphs share `pool` with others: what a replay writes is gone with the next one. Raises
    whatever cannot be captured, such as a synchronisation; torch is then as it was before.
    """
    stream = _side_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    # torch.cuda.graph leaves its stream behind as the current one when a capture fails
    with torch.cuda.stream(stream):
        # what is set up in a first call cannot be captured
        second(first())
        # nodes for the inputs' gradients belong to the stream that they were made on
        gc.collect()
        try:
            with torch.cuda.graph(graphs[0], pool=pool, stream=stream):
                made = first()
            with torch.cuda.graph(graphs[1], pool=pool, stream=stream):
                second(made)
        except BaseException:
            _recover(pool, stream)
            raise
    torch.cuda.current_stream().wait_stream(stream)
    return graphs[0].replay, graphs[1].replay


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    # one for all: cuBLAS keeps a workspace for every stream
    return torch.cuda.Stream(device)


def _recover(pool: Any, stream: torch.cuda.Stream) -> None:
    """Clean up behind a capture that failed.

    Where CUDA itself refused, the allocator goes on to take `pool` for being recorded into, and the
    random number generator to take itself for captured: no later capture and no draw would work.
    """
    torch.cuda.synchronize()
    # raises where the capture ended in order
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        torch.zeros(1, device="cuda")
