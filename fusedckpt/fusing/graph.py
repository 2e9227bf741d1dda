"""What a recorded forward computes, as a graph, and functions of single elements in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from fusedckpt.fusing.held import Path


@dataclass(eq=False)
class Node:
    """What a tensor of the recorded forward is; `of` has the nodes it was made from.

    kind: "x"; "weight", a parameter, its name in `op`; "product", of rows and a weight, with the
    bias added; "part", columns `span` of what it was made from; "point", an op on single elements;
    "number"; "other", any op.
    """

    kind: str
    of: tuple[Node, ...] = ()
    op: Any = None
    args: Any = ()
    kwargs: Any = None
    path: Path = ()
    is_transposed: bool = False
    span: tuple[int, int] = (0, 0)

    @property
    def name(self) -> str:
        """Say what it is, for reasons."""
        if self.kind == "other" and not isinstance(self.op, str):
            return self.op.overloadpacket.__name__
        return str(self.op) if self.kind == "other" else self.kind


def leaves(node: Node) -> list[Node]:
    """Return the products and parts, and whatever is no op on single elements, that make a node."""
    found: dict[Node, None] = {}
    seen, todo = set(), [node]
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        if one.kind == "point":
            todo += one.of
        elif one.kind != "number":
            found[one] = None
    return list(found)


def function(node: Node, inputs: list[Node]) -> Callable[..., Tensor]:
    """Return the function of single elements that a node is of some others."""

    def compute(*values: Tensor) -> Tensor:
        known = dict(zip(inputs, values, strict=True))

        def value(one: Any) -> Any:
            if not isinstance(one, Node):
                return one
            if one not in known:
                args, kwargs = tree_map(value, (one.args, one.kwargs or {}))
                if one.kind == "number":
                    kwargs = {**kwargs, "dtype": values[0].dtype, "device": values[0].device}
                elif one.op._schema.is_mutable:
                    args = [args[0].clone(), *args[1:]]
                known[one] = one.op(*args, **kwargs)
            return known[one]

        return value(node)

    return compute
