"""Which backward runs in this thread, which gradients it wants, from what, and its end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_exec_group: Callable[[], Any] | None = getattr(torch._C, "_get_graph_exec_group", None)
_current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
_will_execute: Callable[[Any], bool] = getattr(
    torch._C, "_will_engine_execute_node", lambda node: True
)
# batches of gradients are made by torch.vmap, and by is_grads_batched=True with an older vmap
_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
_legacy: Any = torch
_is_legacy: Callable[[Tensor], bool] = _functorch.is_legacy_batchedtensor
# whether a profiler runs
is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_PLAIN = frozenset((Tensor, nn.Parameter, type(None)))


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


def begin(ctx: Any, *dys: Tensor | None) -> tuple[list[bool], list[Any], bool] | None:
    """Return what a Function's backward computes and from what; None where nothing is wanted of it.

    That is: for each argument whether its gradient is wanted; the tensors that were saved; and
    whether nothing traces or watches ops, so that they need not be seen.
    """
    needs, given = wanted_gradients(ctx), [dy for dy in dys if dy is not None]
    if not given or not any(needs):
        return None
    saved = list(ctx.saved_tensors)
    if ctx.recall is not None:
        # GEMM outputs come last
        saved[ctx.num_given :] = ctx.recall(saved[ctx.num_given :])
    if torch.compiler.is_compiling() or is_batch(dys) or given[0].device.type == "meta":
        return needs, saved, False
    # hooks may have handed out tensors of any class
    return needs, saved, is_unwatched() and _PLAIN.issuperset(map(type, (*dys, *saved)))


def is_batch(dys: Sequence[Tensor | None]) -> bool:
    """Whether any of a function's gradients is a batch: one that depends on none is not."""
    return any(dy is not None and is_batched(dy) for dy in dys)


def is_batched(dy: Tensor) -> bool:
    """Whether a gradient is a batch of them."""
    return _is_legacy(dy) or _functorch.is_batchedtensor(dy)


def one_by_one(run: Callable[..., Sequence[Any]], dys: Sequence[Tensor | None]) -> list[Any]:
    """Return the gradients that `run(dys)` returns, for a batch of dys: run once for each of it."""
    batch = next(dy for dy in dys if dy is not None and is_batched(dy))
    vmap = _legacy if _is_legacy(batch) else _functorch
    level, size = _batch_of(batch, vmap)
    # what is no batch is repeated
    each = [None if dy is None else vmap._remove_batch_dim(dy, level, size, 0) for dy in dys]
    found = []
    for i in range(size):
        one = [None if dy is None else dy[i] for dy in each]
        # of several vmaps
        found.append(one_by_one(run, one) if is_batch(one) else run(one))
    return [
        None if grads[0] is None else vmap._add_batch_dim(torch.stack(grads), 0, level)
        for grads in zip(*found, strict=True)
    ]


def _batch_of(batch: Tensor, vmap: Any) -> tuple[int, int]:
    """Return the level of the innermost vmap that a batch of gradients is of, and its size."""
    # torch numbers them from 1 to 64; the one of this thread is not that of the caller's
    for level in range(64, 0, -1):
        # at another level it would be repeated as often as asked
        one, two = (vmap._remove_batch_dim(batch, level, size, 0).shape[0] for size in (1, 2))
        if one == two:
            return level, one
    raise AssertionError("a batch without a level")


def is_unwatched() -> bool:
    """Whether nothing traces or watches ops here, so that they need not be seen."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or is_profiled()
    )


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
    executed = []
    for node, _ in ctx.next_functions:
        # one for every argument that requires grad, in their order
        if node is not None:
            try:
                executed.append(_will_execute(node))
            except RuntimeError:
                # a leaf that torch.autograd.grad is asked for, or no node that the engine tells of
                executed.append(True)
    if all(executed) or len(executed) != sum(needed):
        return needed
    # the engine runs a Function for nothing only if it is named itself, in backward(inputs=...);
    # the one of torch.distributed.autograd keeps no record, and says no to all
    if not any(executed) and not _will_execute(ctx):
        return needed
    remaining = iter(executed)
    return [need and next(remaining) for need in needed]
