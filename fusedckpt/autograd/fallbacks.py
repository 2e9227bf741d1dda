"""Why a module ran as its class would without us: noted where it happens, told by reports.

A call that is computed by ours notes nothing. A note is a constant that is written and never read
in a call, so that torch.compile has nothing to guard; words are made of it where it is read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd import dispatch

# where a module keeps the note of its last such call that wanted gradients
NOTE = "_fusedckpt_fallback"

# what was in the way, and which child, attribute, class or dtype that is about
Fallback = tuple[str, Any]


def note(module: nn.Module, fallback: Fallback) -> None:
    """Remember why a call was not computed by ours; without gradients that costs no memory."""
    if torch.is_grad_enabled() and not dispatch.is_recorded(None):
        module.__dict__[NOTE] = fallback


def taken(module: nn.Module) -> Fallback | None:
    """Return a module's note, and forget it."""
    return module.__dict__.pop(NOTE, None)


def unplain(x: Any, **weights: Any) -> Fallback:
    """Say which of a call's tensors, not all of them plain, only ops of its own class can take."""
    for name, weight in weights.items():
        if not dispatch.are_plain(weight):
            return "weight", name
    if not isinstance(x, Tensor):
        return "arguments", ""
    return "input", "nested tensor" if x.is_nested else type(x).__name__
