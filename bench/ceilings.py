"""What a device can do at all, measured beside everything else: a copy, and a large matmul."""

from __future__ import annotations

import torch

from bench.clock import Step, Stopwatch
from bench.results import Ceilings

__all__ = ["measure_ceilings"]

# of the matrices' sides and of what is copied: beyond every cache, done in milliseconds
SIDE = {"cpu": 2048, "cuda": 8192}
COPY_BYTES = {"cpu": 128 << 20, "cuda": 2 << 30}
ROUNDS = 7


def _least(watch: Stopwatch, step: Step) -> float:
    """Return the least time in ms, after a few rounds that warm up: a ceiling is never below."""
    times = [watch.times(step)[0] for _ in range(2 + ROUNDS)]
    return min(times[2:])


def measure_ceilings(device: torch.device, dtype: torch.dtype, shrink: int = 1) -> Ceilings:
    """Time torch's own copy and matmul; `shrink` divides the sizes, for tests.

    The copy counts each byte read and each byte written.
    """
    watch = Stopwatch(device)
    side, nbytes = SIDE[device.type] // shrink, COPY_BYTES[device.type] // shrink
    # a copy that fits beside what is there
    if device.type == "cuda":
        nbytes = min(nbytes, torch.cuda.mem_get_info(device)[0] // 8)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    matmul = _least(watch, lambda: torch.mm(a, b, out=out))
    # zeros may be cheaper to move
    given = torch.randint(256, (nbytes,), dtype=torch.uint8, device=device)
    made = torch.empty_like(given)
    copy = _least(watch, lambda: made.copy_(given))
    return Ceilings(2 * side**3 / matmul / 1e9, 2 * nbytes / copy / 1e6)
