"""The one rule of accuracy, of `fuse`, of the tests and of the benchmarks."""

from __future__ import annotations

import torch

__all__ = ["largest_error"]


def largest_error(
    eager: float, truth: float, dtype: torch.dtype, slack: float = 2.0, floor: float = 8.0
) -> float:
    """Return how far a result may be from float64: 2 x eager's error + 8 eps max(1, rms(truth)).

    eager, truth: root mean squares, of eager's error in the same dtype and of the float64 result.
    eps is that of float32 for half precision too, as we accumulate in float32. A NaN is no error
    that fits: test `error <= largest_error(...)`.
    """
    wide = torch.promote_types(dtype, torch.float32)
    return slack * eager + floor * torch.finfo(wide).eps * max(1.0, truth)
