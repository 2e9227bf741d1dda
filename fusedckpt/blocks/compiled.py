"""A layer under torch.compile: its eager reference, which saves only tensors of its level.

The reference runs in torch's checkpoint, which torch.compile traces; a policy saves the GEMM
outputs that the level names. "inputs" needs none, so that inside an outer compiled checkpoint it
saves nothing, where a policy saves its outputs.

A norm runs in a checkpoint of its own, of which nothing is saved. torch saves the result of a
checkpointed region that a later region reads; the region of a norm is numbered after all others, so
that the blocks that read its result save its input alone, as they do in eager.

Grouped products are torch ops here, each the gradient of the other; elsewhere a loop over experts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fusedckpt.autograd import dispatch, private
from fusedckpt.blocks import eager
from fusedckpt.kernels import grouped, routed


def _route(x: Tensor, ends: Tensor) -> routed.Route:
    """Return a route of rows that are sorted already."""
    numbers = torch.arange(len(x), device=x.device)
    pieces = routed.pieces_of(ends.tolist())
    return routed.Route(numbers, numbers, numbers[:, None], ends, pieces)


@torch.library.custom_op("fusedckpt::grouped_product", mutates_args=())
def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return x [R, K] times the weight [E, K, N] of each row's expert, zero for no expert's."""
    return grouped.product(x, weight, None, _route(x, ends))


@torch.library.custom_op("fusedckpt::grouped_weight_grad", mutates_args=())
def grouped_weight_grad(x: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    """Return x' dy of each expert's rows, [E, K, N]."""
    return grouped.weight_grad(x, dy, _route(x, ends))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _of_product(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, ends = ctx.saved_tensors
    return grouped_product(dy, weight.mT, ends), grouped_weight_grad(x, dy, ends), None


def _of_weight_grad(ctx: Any, dw: Tensor) -> tuple[Tensor, Tensor, None]:
    x, dy, ends = ctx.saved_tensors
    return grouped_product(dy, dw.mT, ends), grouped_product(x, dw, ends), None


grouped_product.register_fake(lambda x, weight, ends: x.new_empty(x.shape[0], weight.shape[2]))
grouped_weight_grad.register_fake(
    lambda x, dy, ends: x.new_empty(ends.shape[0], x.shape[1], dy.shape[1])
)
grouped_product.register_autograd(_of_product, setup_context=_save)
grouped_weight_grad.register_autograd(_of_weight_grad, setup_context=_save)


_aten = torch.ops.aten
_GEMM_OPS = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    torch.ops.fusedckpt.grouped_product.default,
)
# adapters have two GEMMs each
MOST_ADAPTERS = 8


def _contexts(saved: tuple[int, ...]) -> Any:
    """Return a checkpoint's contexts, in which the GEMMs of these numbers are saved."""
    seen = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op not in _GEMM_OPS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        number = seen[context.is_recompute]
        seen[context.is_recompute] = seen[context.is_recompute] + 1
        is_saved = number in saved
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.MUST_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _norm_contexts() -> Any:
    """Return a checkpoint's contexts, in which nothing is saved."""
    contexts = create_selective_checkpoint_contexts([])
    contexts[0].__class__ = _LastRegion
    return contexts


class _LastRegion(type(create_selective_checkpoint_contexts([])[0])):
    """The context of a region that is numbered after all others.

    torch numbers regions in the order in which they are traced, and saves a value that a region
    with a larger number reads (`cleanup_recompute_tags` of its partitioner): a norm's result, which
    every linear reads. No region has a larger number than this one. Before torch 2.13 the number
    is not asked for, and the result is saved. torch 2.14 has the rule still; without it this class
    can go.
    """

    @property
    def ac_graph_id(self) -> int:
        """The number of the region."""
        return 1 << 62

    @ac_graph_id.setter
    def ac_graph_id(self, number: int) -> None:
        """Keep the last number."""


# made here, as a function made while torch.compile traces is none that it can call then
_CONTEXTS: dict[tuple[int, ...], Any] = {
    saved: partial(_contexts, saved)
    for saved in [(0,), *((0, 1 + 2 * n) for n in range(MOST_ADAPTERS + 1))]
}
_NORM_CONTEXTS: Any = partial(_norm_contexts)

# by these torch.compile finds graphs in its cache
_CODE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
for _key, _made in [("norm", _NORM_CONTEXTS), *_CONTEXTS.items()]:
    _made.cache_hash = f"fusedckpt {_key} {_CODE}"


def run(fn: Callable[..., Any], saved: tuple[int, ...], *args: Any) -> Any:
    """Run a layer's reference; saved: the numbers of the GEMMs with saved outputs."""
    if not _saves():
        return fn(*args)
    if not saved:
        return checkpoint(fn, *args, use_reentrant=False)
    return checkpoint(fn, *args, use_reentrant=False, context_fn=_CONTEXTS[saved])


def run_norm(fn: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Run the reference of a norm, from which torch.compile saves the tensors that it reads.

    Backward recomputes its result for every reader.
    """
    is_compiling = torch.compiler.is_compiling() and not eager.forced.is_on
    if not is_compiling or dispatch.is_traced(tensors[0]) or not dispatch.are_plain(*tensors):
        return fn(*tensors)
    if not _saves():
        return fn(*tensors)
    return checkpoint(fn, *tensors, use_reentrant=False, context_fn=_NORM_CONTEXTS)


def _saves() -> bool:
    """Whether autograd saves tensors; torch.func, which does not take checkpoints, apart."""
    return torch.is_grad_enabled() and not private.are_transforms_active()
