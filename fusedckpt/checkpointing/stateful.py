"""The arguments that a call may have changed, which an error of its recompute names.

Nothing of it runs before there is an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.checkpointing.calls import Argument, Call, objects_in
from fusedckpt.state.holders import ATOMS

# how deep objects are looked into: a cache has layers, and these have keys and values
_DEPTH_OF_TENSORS = 4
_CONTAINER_TYPES = (list, dict, tuple, set, deque)


def advice_for(calls: Iterable[Call]) -> str:
    """Return a sentence that names stateful arguments of calls; "" where they have none."""
    stateful = [argument for call in calls for argument in _stateful(call)]
    if not stateful:
        return ""
    return (
        f" Its argument {', '.join(dict.fromkeys(stateful))} holds tensors: if a call adds to "
        "them, as to a cache of keys and values, the recompute adds them again. Pass no cache in "
        "training (use_cache=False)"
    )


def _stateful(call: Call) -> Iterable[str]:
    """Yield descriptions of the arguments that hold tensors which a call can replace."""
    known: set[int] = set()
    with suppress(RuntimeError):
        known = {id(argument.tensor()) for argument in call.inner}
    for name, value in call.named():
        if isinstance(value, Argument) or type(value) in ATOMS:
            continue
        for part in objects_in(value):
            # a container's own tensors: of those that it has now, some are not the forward's
            is_new = isinstance(part, Tensor) and id(part) not in known
            if is_new or (not isinstance(part, Tensor) and _holds_tensors(part, _DEPTH_OF_TENSORS)):
                yield f"{name} ({type(value if is_new else part).__name__})"
                break


def _holds_tensors(value: Any, depth: int) -> bool:
    if isinstance(value, Tensor):
        return True
    if depth == 0 or type(value) in ATOMS or isinstance(value, (nn.Module, type, torch.Generator)):
        return False
    if isinstance(value, dict):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, _CONTAINER_TYPES):
        parts = value
    else:
        parts = getattr(value, "__dict__", {}).values()
    return any(_holds_tensors(part, depth - 1) for part in list(parts))
