"""The norm that a block begins with, as a record."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["NormSpec"]


class NormSpec(NamedTuple):
    """A norm over the last dimension of what a block reads.

    kind: "rms" or "layer"; weight, bias: [D] or None (bias: layer only); eps: None means the
    default of F.rms_norm, or 1e-5 for layer; offset, cast: as in `functional.rms_norm`.
    """

    kind: str
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float | None = None
    offset: float = 0.0
    cast: str = "torch"
