"""Which backward runs in this thread, which gradients it wants, and its end."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

_exec_group: Callable[[], Any] | None = getattr(torch._C, "_get_graph_exec_group", None)
_current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
_will_execute: Callable[[Any], bool] = getattr(
    torch._C, "_will_engine_execute_node", lambda node: True
)


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


def wanted_gradients(ctx: Any) -> list[bool]:
    """Return for each argument of a Function whether the backward that runs it wants its gradient.

    Fewer than `ctx.needs_input_grad`, which is about any backward, where `torch.autograd.grad` asks
    for some: what leads to none of them, the engine throws away. Torch's own functions ask it
    likewise. Where it cannot be asked, or its answer makes no sense, all that any may want is.
    """
    needed = list(ctx.needs_input_grad)
    # a compiled backward, and one called by hand inside of another, is not the engine's
    if torch.compiler.is_compiling() or _current_node() is not ctx:
        return needed
    # one for every argument that requires grad, in their order
    nodes = [node for node, _ in ctx.next_functions if node is not None]
    if len(nodes) != sum(needed):
        return needed
    remaining = iter(nodes)
    wanted = [need and _is_executed(next(remaining)) for need in needed]
    # the engine runs a Function for nothing only if it is named itself, in backward(inputs=...);
    # the one of torch.distributed.autograd keeps no record, and says no to all
    return wanted if any(wanted) or _is_executed(ctx) else needed


def _is_executed(node: Any) -> bool:
    """Whether the backward of now goes on to a node."""
    try:
        return _will_execute(node)
    except RuntimeError:
        # a leaf that torch.autograd.grad is asked for, or no node that the engine tells of
        return True
