"""Backward overwrites GEMM outputs that its layer saved, if it is their last reader.

As with torch.compile's donated buffers, not if the graph is retained, if saved-tensor hooks may
have returned shared tensors, or if gradients are batched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedckpt.autograd.backward import is_batched

_keeps_graph: Callable[[], bool] | None = getattr(
    getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", None
)


def run(
    ctx: Any, extras: Sequence[Tensor | None], dy: Tensor, compute: Callable[[bool], Any]
) -> Any:
    """Return compute(donates); where `donates`, it may write over the extras.

    A later reader, such as a backward repeated after a failure or in another thread, raises by
    their version.
    """
    is_ours = ctx.owns_extras and not torch.compiler.is_compiling()
    owned = [t for t in extras if t is not None] if is_ours else []
    donates = len(owned) > 0 and _is_last_read(dy)
    if donates:
        # before a byte is written: autograd then refuses to hand them out again
        torch.autograd.graph.increment_version(owned)
    found = compute(donates)
    for extra in owned:
        # after the last read, and for whoever got it through hooks, where autograd does not look
        if extra._version != donates:
            raise RuntimeError(
                "fusedckpt: an earlier backward overwrote what this layer saved: to run backward "
                "through a layer more than once, pass retain_graph=True to each but the last"
            )
    return found


def _is_last_read(dy: Tensor) -> bool:
    if _keeps_graph is None or _keeps_graph():
        return False
    return not (torch._C._are_functorch_transforms_active() or is_batched(dy))
