"""The eager reference of every function: the same arguments, run by torch's own ops.

`seeds` takes the seeds of a call's dropouts, int64, its own first; without them they are drawn.
Layers run these under torch.func transforms, in forward-mode AD, under torch.compile, where a
program is recorded, and everywhere when FUSEDCKPT_DISABLE=1.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import Tensor

from fusedckpt import functional
from fusedckpt.blocks.eager import dropout, forcing

__all__ = ["dropout"]


def __getattr__(name: str) -> Any:
    # those of the approximate activations would be exact, F.gelu and F.silu
    if name not in functional.__all__ or name in ("regelu2", "resilu2"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function = getattr(functional, name)

    @wraps(function)
    def call(*args: Any, seeds: Tensor | None = None, **options: Any) -> Any:
        with forcing(seeds):
            return function(*args, **options)

    globals()[name] = call
    return call
