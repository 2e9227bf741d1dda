"""A recompute that starts before its backward does: `prefetch_recompute`.

Nodes of autograd's graph that a segment returned carry a reference to it, and are looked for in the
order in which the engine runs nodes: the latest first.
"""

from __future__ import annotations

import heapq
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fusedckpt.autograd import arguments
from fusedckpt.autograd.module_calls import is_recomputing
from fusedckpt.checkpointing.segment import NODE_KEY, Segment

__all__ = ["prefetch_recompute"]


def prefetch_recompute(outputs: Any, segments: int = 1) -> int:
    """Recompute now what the backward of `outputs` will need first; that takes it from there.

        y = stage(x)                  # of checkpointed segments
        send(y)
        prefetch_recompute(y)         # while the gradient is on its way
        y.backward(receive())

    For a stage of a pipeline, which else waits with nothing to do. What the last segment brings
    back is held from here until the backward that takes it ends, or the graph dies; that backward
    does not recompute it. Gradients are the same, bit for bit, and so are all recomputes together:
    random numbers, autocast, buffers, and what raises where an argument or a parameter was written
    in place, up to that backward, are those of any recompute. A fused layer that ends a segment
    makes its GEMM outputs in its own backward, as ever.

    Does nothing where no segment is found: for tensors without a graph, for outputs of a compiled
    function, under torch.compile, and inside a recompute. Checkpoints within a checkpoint are not
    looked for. On a GPU, call it on the stream of the forward; of a module that `fully_shard`
    shards, gather the parameters before, by its `unshard()`.

    Args:
        outputs: a tensor that checkpoints of this library led to, or any nesting of tensors.
        segments: how many to recompute, in the order in which the backward needs them. All are held
            at once.

    Returns:
        How many are recomputed now, those of an earlier call that are still held among them.

    Raises:
        TypeError: `segments` is no int.
        ValueError: it is below 1.
        What the recompute raises.

    Source: GPipe (Huang et al., arXiv 1811.06965), section 2.3, of recomputes before gradients.
    """
    segments = arguments.integer("prefetch_recompute", "segments", segments, 1)
    if torch.compiler.is_compiling() or is_recomputing():
        return 0
    tensors = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]
    found = 0
    seen: set[Segment] = set()
    # a recompute makes tensors to save, as a backward does
    with torch.inference_mode(False):
        for segment in _in_order([x.grad_fn for x in tensors if x.grad_fn is not None]):
            if segment not in seen and segment.prefetch():
                found += 1
            seen.add(segment)
            if found == segments:
                break
    return found


def _in_order(nodes: list[Any]) -> Any:
    """Yield the segments behind nodes, the one first whose nodes run first."""
    seen = set(nodes)
    queue = [(-node._sequence_nr(), i, node) for i, node in enumerate(seen)]
    heapq.heapify(queue)
    while queue:
        _, _, node = heapq.heappop(queue)
        known = node.metadata.get(NODE_KEY)
        if known is not None and (segment := known()) is not None:
            yield segment
        for after, _ in node.next_functions:
            # leaves have none, and come first of all
            if after is not None and after not in seen and after.next_functions:
                seen.add(after)
                heapq.heappush(queue, (-after._sequence_nr(), len(seen), after))
