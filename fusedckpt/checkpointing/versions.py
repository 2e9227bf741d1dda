"""Whether a tensor was written in place since, which its version counts."""

from __future__ import annotations

from torch import Tensor


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written; 0 for an inference tensor, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


def stale(what: str, tensor: Tensor | None = None) -> str:
    """Say that something was written in place between forward and backward."""
    which = "" if tensor is None else f" ({tensor.dtype} {list(tensor.shape)})"
    return (
        f"checkpoint: {what}{which} was changed in place between forward and backward, so that "
        "recomputing would give other values"
    )
