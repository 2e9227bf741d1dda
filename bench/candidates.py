"""What `python -m bench tune` tries: tiles, cases that launch them, functions under a choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from bench.cases import Function
from fusedckpt.kernels import gemm, tuned
from fusedckpt.kernels.tiles import Tile
from fusedckpt.kernels.tuned import Tuned

__all__ = ["PLAN_CASES", "TILE_CASES", "Guarded", "candidates"]

# slot of the tile tables -> the case whose second plan launches it
TILE_CASES = {
    "long": "linear_act",
    "short": "linear_act",
    "hybrid_long": "gated_mlp",
    "hybrid_short": "gated_mlp",
}
PLAN_CASES = ("linear_act", "mlp", "gated_mlp")

# block_m, block_n, block_k, num_warps
HALF = (
    (128, 256, 64, 8),
    (256, 128, 64, 8),
    (128, 128, 64, 8),
    (128, 128, 32, 8),
    (128, 64, 64, 4),
    (64, 128, 64, 4),
)
SINGLE = ((128, 128, 32, 8), (128, 64, 32, 8), (64, 64, 32, 8), (64, 64, 32, 4))


def candidates(arch: str, itemsize: int) -> Iterator[Tile]:
    """Yield tiles; which of them compile without spills on this chip is found by trying."""
    if arch == "interpreter":
        yield Tile(32, 32, 16, 4, 1, 1)
        return
    shapes = HALF if itemsize == 2 else SINGLE
    for shape, stages in product(shapes, (3, 4)):
        # wide tiles spill without slices
        for slices in (2, 4) if shape[1] >= 128 else (1, 2):
            yield Tile(*shape, stages, slices)


class Recorder:
    """Stands for the GEMM kernel, and notes what its launches compiled to."""

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.compiled: list[Any] = []

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.compiled.append(self.kernel[grid](*args, **kwargs))

        return launch


class Guarded:
    """A function under choices of its own; raises where they compile to kernels that spill."""

    def __init__(self, fn: Function, choices: Tuned):
        self.fn, self.choices = fn, choices

    def __call__(self, *inputs: Any) -> Any:
        """Run forward under the choices, and the backward too."""
        return _Under.apply(self, *inputs)

    def check(self, work: Any) -> None:
        """Run once, and look at what was compiled. Raises ValueError for a spill."""
        recorder = Recorder(gemm.gemm_kernel)
        with patch.object(gemm, "gemm_kernel", recorder):
            work.results(self)
        spills = [getattr(kernel, "n_spills", 0) or 0 for kernel in recorder.compiled]
        if any(spills):
            raise ValueError(f"spills {max(spills)} registers")


class _Under(torch.autograd.Function):
    """Calls a Guarded's function and its backward, both under its choices."""

    @staticmethod
    def forward(ctx: Any, guarded: Guarded, *inputs: Any) -> Any:
        with tuned.using(guarded.choices), torch.enable_grad():
            ctx.inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
            # the cases that are tuned have one output
            output: Any = guarded.fn(*ctx.inputs)
        ctx.output, ctx.choices = output, guarded.choices
        return output.detach()

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:  # type: ignore[override]
        with tuned.using(ctx.choices):
            grads = torch.autograd.grad(ctx.output, ctx.inputs, dy)
        ctx.output = ctx.inputs = None
        return None, *grads
