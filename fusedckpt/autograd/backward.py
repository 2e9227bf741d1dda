"""Which backward runs in this thread, and its end."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

_exec_group: Callable[[], Any] | None = getattr(torch._C, "_get_graph_exec_group", None)


def backward_id() -> int:
    """Return what tells one backward from another, -1 outside of any."""
    group = None if _exec_group is None else _exec_group()
    return torch._C._current_graph_task_id() if group is None else id(group)


def at_end_of_backward(callback: Callable[[], Any]) -> None:
    """Have the end of this backward call back; under a GraphExecGroup, the end of the group."""
    group = None if _exec_group is None else _exec_group()
    if group is None:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    else:
        weakref.finalize(group, callback)
