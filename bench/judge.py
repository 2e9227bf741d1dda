"""Whether a way of training computes the gradients that eager does, by the project's error rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.results import Row
from bench.workload import Way, Workload
from fusedckpt.fusing.accuracy import allowed

# gradients that are nothing but rounding, such as those of a key's bias, count by the others' size
LEAST = 1e-3
# share of a gradient that changes where random numbers do
RANDOM = 0.05


class Judge:
    """Eager's gradients of the first batch: in float64, and how far the model's own are off.

    An error is that of all gradients together, each relative to its own size: root mean squares.
    """

    def __init__(self, work: Workload):
        self.work = work
        # why nothing can be judged
        self.reason: str | None = None
        self.truth: list[Tensor] = []
        eager = work.gradients(work.model)
        try:
            exact = work.in_float64()
            self.truth = exact.gradients(exact.model)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            self.reason = f"eager does not run in float64 ({type(error).__name__}: {lines[0]})"
            return
        if _draws(work, eager):
            self.reason = "the model draws random numbers"
            return
        sizes = [rms(truth) for truth in self.truth]
        least = LEAST * max(sizes, default=0.0)
        self.sizes = [max(size, least) or 1.0 for size in sizes]
        self.eager_error = self.error(eager)

    def error(self, gradients: Sequence[Tensor]) -> float:
        """Return the error of gradients relative to their size."""
        if not gradients:
            return 0.0
        columns = zip(gradients, self.truth, self.sizes, strict=True)
        errors = [rms(mine.double() - truth) / size for mine, truth, size in columns]
        return rms(torch.tensor(errors, dtype=torch.float64))

    def verdict(self, way: Way) -> Row:
        """Return the columns of a row: the error, and the failure where it is too large."""
        if self.reason is not None:
            return {"unjudged": self.reason}
        if not way.is_exact:
            return {"unjudged": "its derivatives are approximate on purpose"}
        gradients = self.work.gradients(way.run)
        error = self.error(gradients)
        row: Row = {"errors": [error]}
        dtype = gradients[0].dtype if gradients else torch.float32
        # so written, a NaN fails
        if not error <= allowed(self.eager_error, 1.0, dtype):
            text = f"gradients are off by {error:.1e}, eager's by {self.eager_error:.1e}"
            row |= {"failure": f"wrong: {text}", "is_wrong": True}
        return row


def rms(x: Tensor) -> float:
    """Return the root mean square of a tensor, 0 of an empty one."""
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def _draws(work: Workload, eager: Sequence[Tensor]) -> bool:
    """Whether other random numbers make other gradients; the random state stays as it is."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(torch.initial_seed() + 1)
        others = work.gradients(work.model)
    largest = max((rms(x) for x in eager), default=0.0)
    # some kernels of a GPU add up in another order each time
    return any(
        rms(a - b) > RANDOM * max(rms(a), LEAST * largest)
        for a, b in zip(eager, others, strict=True)
    )
