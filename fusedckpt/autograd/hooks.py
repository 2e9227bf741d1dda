"""Whether a layer may be computed without calling it."""

from __future__ import annotations

from torch import nn


def has_hooks(layer: nn.Module) -> bool:
    """Whether someone counts on the layer's own call: a hook, or a forward put in its place."""
    return bool(
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or "forward" in layer.__dict__
    )
