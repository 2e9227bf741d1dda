"""The eager reference of every function: the same arguments, run by torch's own ops.

`seeds` takes the seeds of a call's dropouts, int64, its own first; without them they are drawn.
Layers run these under torch.func transforms, in forward-mode AD, under torch.compile, where a
program is recorded, and everywhere when FUSEDCKPT_DISABLE=1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from fusedckpt import functional
from fusedckpt.blocks.eager import dropout, forcing, layer_norm, rms_norm

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "dropout",
    "experts",
    "gated_mlp",
    "layer_norm",
    "linear_act",
    "linear_cross_entropy",
    "mlp",
    "norm_linear",
    "rms_norm",
    "token_logprobs",
]


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, seeds: Tensor | None = None, **options: Any) -> Any:
        with forcing(seeds):
            return function(*args, **options)

    return call


add_layer_norm, add_rms_norm = _eager(functional.add_layer_norm), _eager(functional.add_rms_norm)
linear_act, norm_linear = _eager(functional.linear_act), _eager(functional.norm_linear)
mlp, gated_mlp = _eager(functional.mlp), _eager(functional.gated_mlp)
experts = _eager(functional.experts)
linear_cross_entropy = _eager(functional.linear_cross_entropy)
token_logprobs = _eager(functional.token_logprobs)
