"""Why a swapped module ran the forward of its own class: noted per call, for reports.

Fused calls note nothing. A note is a constant that a call writes and never reads, so that
torch.compile needs no guard; reports turn it into words.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd import dispatch

# attribute of a module with the note of its last such call with gradients
NOTE = "_fusedckpt_fallback"

# the reason, and the child, attribute, class or dtype it is about
Fallback = tuple[str, Any]


def note(module: nn.Module, fallback: Fallback) -> None:
    """Note why a call did not run fused; calls without gradients save nothing and are not noted."""
    if torch.is_grad_enabled() and not dispatch.is_recorded(None):
        module.__dict__[NOTE] = fallback


def taken(module: nn.Module) -> Fallback | None:
    """Return a module's note, and forget it."""
    return module.__dict__.pop(NOTE, None)


def unplain(x: Any, **weights: Any) -> Fallback:
    """Return which of a call's tensors is a subclass that only its own ops support."""
    for name, weight in weights.items():
        if not dispatch.are_plain(weight):
            return "weight", name
    if not isinstance(x, Tensor):
        return "arguments", ""
    return "input", "nested tensor" if x.is_nested else type(x).__name__
