"""Record the ops of a forward as a graph of nodes.

Ops are recorded when they reach ATen, whatever the Python code. A node is a tensor that the forward
made; its kind says how, as far as a match needs it (see `Node.kind`). Only products with a weight
are recognized by the names of their ops.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt.autograd.private import (
    TorchDispatchMode,
    is_pointwise,
    pytree,
    storage_key,
    written_by,
)
from fusedckpt.fusing.replica import Path
from fusedckpt.fusing.spies import ForwardLog

_READS_VALUES = ("_local_scalar_dense", "equal", "is_nonzero", "item", "nonzero")
# kinds of nodes with a value for every row of the input, or for some of its columns
_ROW_KINDS = ("x", "product", "columns", "elementwise")
_COPIES = ("_unsafe_view", "clone")
# the op of a tensor that the forward did not create: a buffer, or any other
BUFFER_OP = "a buffer"
FOREIGN_OP = "a tensor of its own"


@dataclass(eq=False)
class Node:
    """A tensor of the recorded forward."""

    # how it was made:
    #   "x"            the input, also seen through casts and views that keep its rows
    #   "weight"       a parameter
    #   "product"      rows times a weight, plus a bias if there is one
    #   "columns"      some columns of its input
    #   "elementwise"  an op on each element of tensors of one shape
    #   "scalar"       a tensor without dimensions, made from no tensor
    #   "other"        any other op, and tensors that the forward did not create
    kind: str
    # the nodes that it was made of; of a product: rows, the weight and the bias, if there is one
    inputs: tuple[Node, ...] = ()
    # the op that made it, or a tensor described in words
    op: Any = None
    # the op's arguments, with nodes in place of tensors
    args: Any = ()
    # its arguments by name
    kwargs: Any = None
    # of a parameter, the attributes that lead to it
    path: Path = ()
    # of a parameter or product, whether the weight lies as [in, out]
    is_transposed: bool = False
    # of columns, the first and the one behind the last
    span: tuple[int, int] = (0, 0)
    # nodes are numbered in the order in which they were made
    number: int = field(default_factory=count().__next__)

    @property
    def name(self) -> str:
        """Return the op's name, for reasons."""
        return self.op if isinstance(self.op, str) else self.op.overloadpacket.__name__


def nodes_behind(y: Node, through: str | None = None) -> list[Node]:
    """Return a node and the nodes that made it, in the order in which they were made.

    through: the kind of nodes whose inputs are followed, None for all kinds.
    """
    seen: set[Node] = set()
    todo = [y]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.inputs if through in (None, node.kind) else ()
    return sorted(seen, key=lambda node: node.number)


class _OpCall(NamedTuple):
    """A call of an op."""

    # the op
    func: Any
    # its arguments by position
    args: Any
    # its arguments by name
    kwargs: Any
    # the tensors among the arguments
    tensors: list[Tensor]
    # their nodes
    nodes: tuple[Node, ...]

    @property
    def name(self) -> str:
        return self.func.overloadpacket.__name__


class OpRecorder(TorchDispatchMode):
    """Knows the node of every tensor that the ops inside make."""

    def __init__(self, log: ForwardLog, xs: list[Tensor]):
        super().__init__()
        self.log = log
        self.dtype = xs[0].dtype
        # by the tensor's id; the tensors live as long as their ids are looked up
        self.nodes: dict[int, tuple[Tensor, Node]] = {id(x): (x, Node("x")) for x in xs}
        for path, parameter in log.parameters.values():
            self.nodes[id(parameter)] = parameter, Node("weight", path=path)
        for buffer in log.buffers:
            self.nodes[id(buffer)] = buffer, Node("other", op=BUFFER_OP)

    def node_of(self, tensor: Tensor) -> Node:
        """Return a tensor's node; a tensor that the forward did not create is of unknown kind."""
        known = self.nodes.get(id(tensor))
        return Node("other", op=FOREIGN_OP) if known is None else known[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _READS_VALUES:
            raise self.log.stopped("values")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise self.log.stopped("random")
        written = written_by(func, args, kwargs)
        for node in map(self.node_of, written):
            if node.kind in ("x", "weight") or node.op in (BUFFER_OP, FOREIGN_OP):
                raise self.log.stopped("writes", "a tensor that it did not create")
        tensors = _tensors_in((args, kwargs))
        call = _OpCall(func, args, kwargs, tensors, nodes=tuple(map(self.node_of, tensors)))
        result = func(*args, **kwargs)
        if written:
            self._overwrite(call, written[0])
            return result
        for made in _tensors_in(result):
            self.nodes[id(made)] = made, self._made_by(call, made)
        return result

    def _overwrite(self, call: _OpCall, target: Tensor) -> None:
        """Give a tensor modified in place, and its aliases, the new node."""
        before = self.node_of(target)
        node = self._elementwise(call, target) or Node("other", call.nodes, call.func)
        storage = storage_key(target.untyped_storage())
        for key, (tensor, old) in self.nodes.items():
            if storage_key(tensor.untyped_storage()) == storage:
                # a view of a part of it, or the tensor that it is a part of, is of unknown kind
                is_whole = old is before
                self.nodes[key] = tensor, node if is_whole else Node("other", (old,), call.func)

    def _made_by(self, call: _OpCall, made: Tensor) -> Node:
        """Return the node of a tensor that a call made."""
        if not call.tensors:
            kind = "scalar" if made.dim() == 0 else "other"
            return Node(kind, (), call.func, call.args, kwargs=call.kwargs)
        node = None
        if len(call.tensors) == 1 and call.name != "detach":
            node = self._view(call, made)
        elif call.name in ("mm", "addmm", "linear"):
            node = _product(call)
        elif call.name == "add" and not call.kwargs and len(call.nodes) == 2:
            node = _product_with_bias(*call.nodes)
        return node or self._elementwise(call, made) or self._node_with_args(call, "other")

    def _view(self, call: _OpCall, made: Tensor) -> Node | None:
        """Return the node of a view, cast or copy of a tensor, or of some of its columns."""
        (source,) = call.tensors
        (node,) = call.nodes
        if call.name == "_to_copy":
            floats = source.is_floating_point() and made.is_floating_point() and source.dim() > 0
            is_wide = made.dtype.itemsize > self.dtype.itemsize or made.dtype == self.dtype
            return node if floats and is_wide else None
        is_view = call.func.is_view or call.name in _COPIES
        if not is_view or 0 in (made.dim(), source.dim()):
            return None
        if node.kind == "weight":
            return _weight_view(node, source, made)
        is_in_order = source.is_contiguous() and made.is_contiguous()
        if made.shape[-1] == source.shape[-1] and made.numel() == source.numel():
            is_same = made.shape == source.shape and (
                call.name == "clone" or made.stride() == source.stride()
            )
            return node if is_in_order or is_same else None
        if made.shape[:-1] != source.shape[:-1] or made.stride() != source.stride():
            return None
        start = int(made.storage_offset()) - int(source.storage_offset())
        return Node("columns", (node,), span=(start, start + made.shape[-1]))

    def _elementwise(self, call: _OpCall, made: Tensor) -> Node | None:
        """Return the node of an elementwise op on tensors of one shape."""
        if not is_pointwise(call.func) or {node.kind for node in call.nodes} == {"scalar"}:
            return None
        are_rows = (
            node.kind == "scalar" or (tensor.shape == made.shape and node.kind in _ROW_KINDS)
            for tensor, node in zip(call.tensors, call.nodes, strict=True)
        )
        return self._node_with_args(call, "elementwise") if all(are_rows) else None

    def _node_with_args(self, call: _OpCall, kind: str) -> Node:
        """Return the node of a call that keeps its arguments, with nodes in place of tensors."""
        args, kwargs = pytree.tree_map(
            lambda value: self.node_of(value) if isinstance(value, Tensor) else value,
            (call.args, call.kwargs),
        )
        return Node(kind, call.nodes, call.func, args, kwargs=kwargs)


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _weight_view(node: Node, source: Tensor, made: Tensor) -> Node | None:
    """Return the node of a view of a whole parameter: the same, or transposed."""
    if made.shape == source.shape and made.stride() == source.stride():
        return node
    is_turned = made.shape == source.shape[::-1] and made.stride() == source.stride()[::-1]
    if source.dim() == 2 and is_turned:
        return Node("weight", path=node.path, is_transposed=not node.is_transposed)
    return None


def _product(call: _OpCall) -> Node | None:
    """Return the node of a product of rows with a weight."""
    if call.kwargs or (call.name == "addmm" and len(call.args) > 3):
        return None
    # addmm has the bias first, linear may have one last
    rows, weight, *biases = call.nodes if call.name != "addmm" else (*call.nodes[1:], call.nodes[0])
    if any(node.kind != "weight" for node in (weight, *biases)):
        return None
    # F.linear's weight is [out, in], which mm reads transposed
    is_transposed = weight.is_transposed == (call.name == "linear")
    return Node("product", (rows, weight, *biases), is_transposed=is_transposed)


def _product_with_bias(a: Node, b: Node) -> Node | None:
    """Return a product with a bias, of a product without one and a parameter, in any order."""
    product, bias = (b, a) if a.kind == "weight" else (a, b)
    if product.kind != "product" or bias.kind != "weight" or len(product.inputs) == 3:
        return None
    return Node("product", (*product.inputs, bias), is_transposed=product.is_transposed)
