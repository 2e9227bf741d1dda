"""A schedule as text: one line a call, with the tensors whose memory nothing reads after it.

    d_down_weight = mm(d_y.t(), h)                                         frees h

A view, such as a transpose or one of the seeds, has no memory and no line of its own. A keyword is
a tensor that a result is written over: its memory goes on as the result's, so it is not freed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch.fx import Graph, Node

_VIEWS = ("t", "transpose")
# columns before the tensors that are freed
_WIDTH = 70


def lines(graph: Graph) -> Iterator[str]:
    """Write a graph as lines, one for each call and one for the results."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    last_reads: dict[Node, int] = {}
    for node, place in order.items():
        if not _is_part(node):
            last_reads |= dict.fromkeys(map(_owner, node.all_input_nodes), place)
    for node, place in order.items():
        if node.op == "output":
            yield f"return {', '.join(map(str, node.args[0]))}"
        elif node.op != "placeholder" and not _is_part(node):
            freed = [owner for owner in _freed_by(node) if last_reads[owner] == place]
            text = _call(node)
            yield f"{text:{_WIDTH}} frees {', '.join(map(str, freed))}" if freed else text


def _is_part(node: Node) -> bool:
    """Whether a node is a view of another one, or one of its results."""
    is_view = node.op == "call_method" and node.target in _VIEWS
    return is_view or node.target is operator.getitem


def _owner(node: Node) -> Node:
    """Return the node that owns the memory of a node: its own, unless it is a view."""
    while _is_part(node) and not _is_result(node):
        node = node.all_input_nodes[0]
    return node


def _is_result(node: Node) -> bool:
    """Whether a node is one of the results of a call."""
    return node.target is operator.getitem and node.all_input_nodes[0].op != "placeholder"


def _freed_by(node: Node) -> list[Node]:
    """Return the tensors that a call reads and writes no result over."""
    written = {arg for arg in node.kwargs.values() if isinstance(arg, Node)}
    if "alias" in node.meta:
        written.add(node.meta["alias"])
    if node.op == "call_method" and str(node.target).endswith("_"):
        written.add(node.all_input_nodes[0])
    owners = dict.fromkeys(map(_owner, node.all_input_nodes))
    return [owner for owner in owners if owner.op != "placeholder" and owner not in written]


def _call(node: Node) -> str:
    """Write a call and its results."""
    results = [user for user in node.users if _is_result(user)]
    keywords = [f"{key}={_text(arg)}" for key, arg in node.kwargs.items() if isinstance(arg, Node)]
    if node.op == "call_method":
        call = _method(node)
    else:
        args = [_text(arg) for arg in node.args if isinstance(arg, Node)]
        name: Any = node.target
        call = f"{name.__name__}({', '.join([*args, *keywords])})"
    return f"{', '.join(map(str, results)) or node} = {call}" if node.users else call


def _method(node: Node) -> str:
    """Write a call of a tensor's method, with its numbers and dtypes."""
    tensor, *args = node.args
    texts = [_text(arg).removeprefix("torch.") for arg in args]
    return f"{_text(tensor)}.{node.target}({', '.join(texts)})"


def _text(arg: Any) -> str:
    """Write an argument: a view as the expression that makes it."""
    if not isinstance(arg, Node) or not _is_part(arg) or _is_result(arg):
        return str(arg)
    if arg.op == "call_method":
        return _method(arg)
    return f"{arg.args[0]}[{arg.args[1]}]"
