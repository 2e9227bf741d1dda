"""A recompute that starts before its backward does: `prefetch_recompute`.

Nodes of autograd's graph that a segment returned carry a reference to it, and are looked for in the
order in which the engine runs nodes: the latest first.
"""

from __future__ import annotations

import heapq
from typing import Any

import torch
from torch import Tensor

from fusedckpt.autograd import arguments
from fusedckpt.autograd.private import number_of, pytree
from fusedckpt.checkpointing.module_calls import is_recomputing
from fusedckpt.checkpointing.segment import Segment, segment_of


def prefetch_recompute(outputs: Any, segments: int = 1) -> int:
    """Recompute now the segments that the backward of `outputs` needs first.

        y = stage(x)                  # of checkpointed segments
        send(y)
        prefetch_recompute(y)         # while the gradient is on its way
        y.backward(receive())

    For a stage of a pipeline that waits for its gradient. The recomputed tensors are held until the
    backward that uses them ends, or the graph is freed; that backward does not recompute them.
    Gradients are the same, bit for bit. RNG state, autocast, buffers and the checks for arguments
    and parameters modified in place are those of any recompute. A fused layer that ends a segment
    still recomputes its GEMM outputs in its own backward.

    Does nothing where no segment is found: for tensors without a graph, outputs of a compiled
    function, under torch.compile, and inside a recompute. Nested checkpoints are not prefetched. On
    a GPU, call it on the stream of the forward. For a module sharded by `fully_shard`, call
    `unshard()` first.

    Args:
        outputs: a tensor computed through this library's checkpoints, or any nesting of tensors.
        segments: how many to recompute, in the order in which backward needs them. All are held at
            once.

    Returns:
        How many are held now, including those of earlier calls.

    Raises:
        TypeError: `segments` is not an int.
        ValueError: it is below 1.
        Any exception of the recompute.

    Source: GPipe (Huang et al., arXiv 1811.06965), section 2.3, of recomputes before gradients.
    """
    if isinstance(segments, Tensor):
        arguments.wrong_type("prefetch_recompute", "segments", "an integer", segments)
    segments = arguments.integer("prefetch_recompute", "segments", segments, 1)
    if torch.compiler.is_compiling() or is_recomputing():
        return 0
    tensors = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]
    count = 0
    seen: set[Segment] = set()
    # a recompute makes tensors to save, as a backward does
    with torch.inference_mode(False):
        for segment in _in_order([x.grad_fn for x in tensors if x.grad_fn is not None]):
            if segment not in seen and segment.prefetch():
                count += 1
            seen.add(segment)
            if count == segments:
                break
    return count


def _in_order(nodes: list[Any]) -> Any:
    """Yield the segments behind nodes, in the order in which backward runs their nodes."""
    seen = set(nodes)
    queue = [(-number_of(node), i, node) for i, node in enumerate(seen)]
    heapq.heapify(queue)
    while queue:
        _, _, node = heapq.heappop(queue)
        segment = segment_of(node)
        if segment is not None:
            yield segment
        for after, _ in node.next_functions:
            # leaves have none, and come first of all
            if after is not None and after not in seen and after.next_functions:
                seen.add(after)
                heapq.heappush(queue, (-number_of(after), len(seen), after))
