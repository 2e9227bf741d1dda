"""The norm that a block begins with, as a record, and the constants that it comes down to."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt.autograd import dispatch
from fusedckpt.kernels.norm import NormRule

__all__ = ["NormSpec"]

# before, torch's rms_norm was not among the functions that autocast widens
_AUTOCASTS_RMS = torch.__version__ >= "2.12"


class NormSpec(NamedTuple):
    """The norm of a block, over the last dimension of its input.

    kind: "rms" or "layer"; weight, bias: [D] or None (bias: layer only); eps: None means the
    default of F.rms_norm, or 1e-5 for layer; offset, cast: as in `functional.rms_norm`.
    """

    kind: str
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float | None = None
    offset: float = 0.0
    cast: str = "torch"


def widens_norm(autocast: torch.dtype | None, device: torch.device, kind: str) -> bool:
    """Whether autocast runs a norm in float32: not on a CPU, and RMSNorm since torch 2.12."""
    return autocast is not None and device.type != "cpu" and (kind == "layer" or _AUTOCASTS_RMS)


def output_dtype(
    rule: NormRule | NormSpec, x: dispatch.Meta, weight: Any, autocast: torch.dtype | None
) -> torch.dtype:
    """Return the dtype of a norm's result: its input's, but for Llama's cast and GPU autocast."""
    if rule.cast == "llama" and weight is not None:
        return torch.promote_types(x.dtype, weight.dtype)
    if rule.cast != "torch" or x.dtype == torch.float64:
        return x.dtype
    return torch.float32 if widens_norm(autocast, x.device, rule.kind) else x.dtype


def sums_dtype(x: dispatch.Meta, weight: Any, bias: Any) -> torch.dtype:
    """Return the dtype of their gradients: the one that they share, or else at least float32."""
    found = {t.dtype for t in (weight, bias) if t is not None}
    return found.pop() if len(found) == 1 else torch.promote_types(x.dtype, torch.float32)


def rule_of(norm: NormSpec, dtype: torch.dtype) -> NormRule:
    """Return the constants of a checked record for inputs of `dtype`.

    eps None is the machine epsilon of an RMSNorm's statistics.
    """
    if norm.kind == "layer":
        return NormRule("layer", 1e-5 if norm.eps is None else float(norm.eps))
    eps = norm.eps
    if eps is None:
        eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return NormRule("rms", float(eps), float(norm.offset), norm.cast)
