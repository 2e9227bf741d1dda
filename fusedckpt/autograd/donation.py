"""Backward writes over GEMM outputs that its layer saved, where it is their last reader.

As with torch.compile's donated buffers, that is not where the graph is retained, where hooks may
have handed out tensors that are someone else's too, or where a batch of gradients is computed in
one backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedckpt.autograd.backward import is_batched
from fusedckpt.autograd.custom_op import Op

_keeps_graph: Callable[[], bool] | None = getattr(
    getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", None
)


def run(
    ctx: Any,
    ops: tuple[Op, Op],
    extras: Sequence[Tensor | None],
    args: Sequence[Any],
    settled: Any,
) -> Any:
    """Call the first op on `args`, or the second, which writes over the extras among them.

    Who reads those all the same, as a backward that is repeated after it failed does, or one in
    another thread, gets an error: their version tells. `settled`: what the implementation takes
    besides, None where something traces or watches the op.
    """
    is_ours = ctx.owns_extras and not torch.compiler.is_compiling()
    owned = [t for t in extras if t is not None] if is_ours else []
    spends = len(owned) > 0 and _is_last_read(args[0])
    if spends:
        # before a byte is written: autograd then refuses to hand them out again
        torch.autograd.graph.increment_version(owned)
    # torch 2.11's compiler takes no bool for an index
    op = ops[1] if spends else ops[0]
    found = op.overload(*args) if settled is None else op.direct(*args, settled)
    for extra in owned:
        # after the last read, and for whoever got it through hooks, where autograd does not look
        if extra._version != spends:
            raise RuntimeError(
                "fusedckpt: another backward wrote over what this layer kept: to run backward "
                "through a layer more than once, pass retain_graph=True to each but the last"
            )
    return found


def _is_last_read(dy: Tensor) -> bool:
    if _keeps_graph is None or _keeps_graph():
        return False
    return not (torch._C._are_functorch_transforms_active() or is_batched(dy))
