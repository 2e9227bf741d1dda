"""Private touches of torch's ops: their schemas, and tags that some torch lacks.

As in `private`, a name that this torch lacks has a fallback.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def schema_of(op: Any) -> Any:
    """Return an op's schema; an error without it, by which fuse recognises no forward."""
    return op._schema


def written_by(op: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors among its arguments that an op modifies."""
    arguments = schema_of(op).arguments
    by_name = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    values = [by_name.get(name) for name in names]
    # some ops modify lists of tensors
    leaves = [x for value in values for x in (value if isinstance(value, list) else [value])]
    return [x for x in leaves if isinstance(x, Tensor)]


# torch 2.11 does not tag them as functions of single elements
_UNTAGGED = {
    f"aten::{name}"
    for name in ("leaky_relu", "leaky_relu_", "celu_", "elu_", "hardsigmoid_", "hardtanh_", "selu_")
}


def is_pointwise(op: Any) -> bool:
    """Whether an op is a function of single elements."""
    return torch.Tag.pointwise in op.tags or op.name() in _UNTAGGED
