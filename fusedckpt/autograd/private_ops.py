"""Private touches of torch's ops: their schemas, and tags that some torch lacks.

As in `private`, a name that this torch lacks has a fallback.
"""

from __future__ import annotations

from typing import Any

import torch


def schema_of(op: Any) -> Any:
    """Return an op's schema; an error without it, by which fuse recognises no forward."""
    return op._schema


# torch 2.11 does not tag them as functions of single elements
_UNTAGGED = {
    f"aten::{name}"
    for name in ("leaky_relu", "leaky_relu_", "celu_", "elu_", "hardsigmoid_", "hardtanh_", "selu_")
}


def is_pointwise(op: Any) -> bool:
    """Whether an op is a function of single elements."""
    return torch.Tag.pointwise in op.tags or op.name() in _UNTAGGED
