"""Autograd's graph behind tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor


def graph_of(tensors: Iterable[Tensor], ends: Iterable[Any] = ()) -> Iterator[Any]:
    """Yield the nodes of the graph that made tensors, down to the nodes in `ends`."""
    seen: set[Any] = {None, *ends}
    todo: list[Any] = [tensor.grad_fn for tensor in tensors]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            todo += [child for child, _ in node.next_functions]


def leaves_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves of the graph that made tensors."""
    return [node.variable for node in graph_of(tensors) if hasattr(node, "variable")]
