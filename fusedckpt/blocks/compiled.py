"""A block under torch.compile: its eager reference, which saves only tensors of its level.

The compiler makes the kernels, and fuses them with the code around the block. The reference runs in
torch's checkpoint, which torch.compile traces; a policy saves the GEMM outputs that the level
names. "inputs" needs none. Inside an outer compiled checkpoint "inputs" saves nothing of its own,
but a policy saves its outputs there too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_ATEN = torch.ops.aten
_GEMMS = (_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default)
# adapters have two GEMMs each
MOST_ADAPTERS = 8


def _contexts(saved: tuple[int, ...]) -> Any:
    """Return a checkpoint's contexts, in which the GEMMs of these numbers are saved."""
    seen = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op not in _GEMMS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        number, seen[context.is_recompute] = (
            seen[context.is_recompute],
            seen[context.is_recompute] + 1,
        )
        is_saved = number in saved
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.MUST_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


# made here, as a function made while torch.compile traces is none that it can call then
_CONTEXTS: dict[tuple[int, ...], Callable[[], Any]] = {
    saved: partial(_contexts, saved)
    for saved in [(0,), *((0, 1 + 2 * n) for n in range(MOST_ADAPTERS + 1))]
}


def run(fn: Callable[..., Any], saved: tuple[int, ...], *args: Any) -> Any:
    """Run a block's reference; saved: the numbers of the GEMMs whose outputs are saved."""
    if not torch.is_grad_enabled():
        return fn(*args)
    if not saved:
        return checkpoint(fn, *args, use_reentrant=False)
    return checkpoint(fn, *args, use_reentrant=False, context_fn=_CONTEXTS[saved])
