"""The error rule: twice as far from float64 as eager in the same dtype, plus 8 epsilons.

`fuse` verifies by it, tests compare by it and benchmarks judge by it. It compares two root mean
squares, which need enough elements to mean something: of a single number, such as a loss, eager's
error may be next to nothing by luck. Fewer than FEWEST elements are held to `bound` instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SLACK = 2.0
FLOOR = 8.0
# elements, over all draws, from which on the error of a result is compared with eager's
FEWEST = 16


def allowed(
    eager: float,
    truth: float,
    dtype: torch.dtype,
    *,
    slack: float = SLACK,
    floor: float = FLOOR,
    least: float = 1.0,
) -> float:
    """Return the largest error that a result of this dtype may have.

        slack * eager + floor * eps * max(least, truth)

    All are root mean squares, eager's error and the truth's size among them; eps is that of float32
    for half precision too.
    """
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return slack * eager + floor * eps * max(least, truth)


def bound(truth: float, dtype: torch.dtype, *, floor: float = FLOOR) -> float:
    """Return the largest error of a result of few elements that was computed in this dtype.

        floor * eps * max(1, |truth|)

    eps is the dtype's own: a loss in float32 of a model in bfloat16 was computed in bfloat16.
    """
    return floor * torch.finfo(dtype).eps * max(1.0, abs(truth))


class ErrorSizes(NamedTuple):
    """Root mean squares of one result over draws."""

    # the size of our error
    ours: float
    # the size of eager's error in the same dtype
    eager: float
    # the size of the true values
    truth: float

    @property
    def ratio(self) -> float:
        """Our error relative to eager's, 0 where eager is exact."""
        return self.ours / self.eager if self.eager else 0.0


@dataclass
class Errors:
    """Squared errors of one result against float64, summed over draws."""

    # the dtype of the result; its rounding is allowed
    dtype: torch.dtype
    # the sum of squares of our errors
    ours: float = 0.0
    # the sum of squares of eager's errors in the same dtype
    eager: float = 0.0
    # the sum of squares of the true values
    truth: float = 0.0
    # elements that were compared
    count: int = 0
    # how many draws they come from
    draws: int = 0
    # elements that are finite in only one of both results, and results of another shape or dtype
    strays: int = 0

    def add(self, ours: Tensor, eager: Tensor, truth: Tensor) -> None:
        """Add a draw: our result, eager's in the same dtype, and eager's in float64."""
        self.count += truth.numel()
        self.draws += 1
        if ours.shape != eager.shape or ours.dtype != eager.dtype:
            self.strays += 1
            return
        errors = ours - truth, eager - truth, truth
        sums = [x.double().square().sum().item() for x in errors]
        if all(map(math.isfinite, sums)):
            # and so is each element: mostly, and in half of the operations
            self.ours += sums[0]
            self.eager += sums[1]
            self.truth += sums[2]
            return
        finite = ours.isfinite() & eager.isfinite()
        self.strays += int((ours.isfinite() != eager.isfinite()).sum())
        sums = [_squared(x.where(finite, 0)) for x in errors]
        self.ours += sums[0]
        self.eager += sums[1]
        self.truth += sums[2]

    @property
    def is_few(self) -> bool:
        """Whether there are elements, and too few of them for the rule."""
        return 0 < self.count < FEWEST

    def sizes(self) -> ErrorSizes:
        """Return the root mean squares of both errors and of the truth."""
        sums = (self.ours, self.eager, self.truth)
        return ErrorSizes(*[math.sqrt(x / max(1, self.count)) for x in sums])

    def problem(
        self, *, slack: float = SLACK, floor: float = FLOOR, least: float = 1.0
    ) -> str | None:
        """Return how the rule is broken, None if it holds.

        Raises ValueError for 1 to 15 elements: a ratio of their errors means nothing.
        """
        if self.is_few:
            text = f"the error rule needs {FEWEST} elements, not {self.count}: use `bound`"
            raise ValueError(text)
        ours, eager, truth = self.sizes()
        limit = allowed(eager, truth, self.dtype, slack=slack, floor=floor, least=least)
        # so written, a NaN fails
        if not self.strays and ours <= limit:
            return None
        return f"error {ours:.3g} where the original's is {eager:.3g}"


def _squared(x: Tensor) -> float:
    return x.double().nan_to_num(0, 0, 0).square().sum().item()
