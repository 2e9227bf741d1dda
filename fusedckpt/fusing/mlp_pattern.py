"""The pattern of a recorded forward: its products with weights, and the activation between them.

An activation is a function of single elements that may be made of any ops. It is evaluated from the
recording, on numbers from 1e-30 to 1e30, and looked up in the table of activations: a function that
clamps is another function, at any limit.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fusedckpt.autograd.private import pytree, schema_of
from fusedckpt.fusing.mlp_reader import LinearPaths, MLPPattern
from fusedckpt.fusing.recording import Node, Recording, nodes_behind
from fusedckpt.fusing.replica import undisturbed
from fusedckpt.kernels.activations import ACTIVATIONS
from fusedckpt.layers.fallbacks import NotFused

# activations are told apart by it: another threshold of a softplus shows only here
_TOL = 1e-8


def pattern_of(recording: Recording) -> MLPPattern | NotFused:
    """Return the pattern of a recorded forward, or why it has none."""
    y = recording.y
    if y is None:
        assert recording.reason is not None
        return recording.reason
    input_shape, result_shape = recording.shapes
    input_dtype, result_dtype = recording.dtypes
    if (input_shape[:-1], input_dtype) != (result_shape[:-1], result_dtype):
        sizes = f"{result_dtype} {[*result_shape]} for an input of {input_dtype} {[*input_shape]}"
        return NotFused("result", sizes)
    # the hidden layer, and the last linear if the pattern has one
    hidden, last = (y.inputs[0], [y]) if y.kind == "product" else (y, [])
    pattern = _hidden_pattern(hidden, last)
    if pattern is not None:
        return pattern
    ops = [node for node in recording.nodes if node.kind in ("elementwise", "other")]
    names = dict.fromkeys(node.name.rstrip("_") for node in ops)
    return NotFused("ops", ", ".join(names) or "linears alone")


def _hidden_pattern(hidden: Node, last: list[Node]) -> MLPPattern | None:
    """Return the pattern with this hidden layer, None if it is no activation of products of x."""
    leaves = _leaves(hidden)
    products = [leaf.inputs[0] if leaf.kind == "columns" else leaf for leaf in leaves]
    are_of_x = all(p.kind == "product" and p.inputs[0].kind == "x" for p in products)
    if hidden.kind != "elementwise" or not are_of_x:
        return None
    if len(leaves) == 1 and leaves == products:
        return _with_activation(hidden, leaves[0], last)
    if len(leaves) == 2 and last:
        return _gated(hidden, leaves, products, last)
    return None


def _with_activation(hidden: Node, z: Node, last: list[Node]) -> MLPPattern | None:
    """Return the pattern of a linear and its activation, and of a last linear if there is one."""
    name = _activation_of(hidden, z)
    if name in (None, "identity"):
        return None
    kind = "mlp" if last else "linear_act"
    return MLPPattern(kind, tuple(map(_paths_of, [z, *last])), str(name))


def _gated(
    hidden: Node, leaves: list[Node], products: list[Node], last: list[Node]
) -> MLPPattern | None:
    """Return the gated MLP whose gate is one of two leaves, products or halves of one product."""
    for gate, up in (leaves, leaves[::-1]):
        name = _activation_of(hidden, gate, up)
        if name in (None, "identity"):
            continue
        if leaves == products:
            return MLPPattern("gated_mlp", tuple(map(_paths_of, [gate, up, *last])), name)
        half = gate.span[1] - gate.span[0]
        spans = sorted([gate.span, up.span])
        if products[0] is products[1] and spans == [(0, half), (half, 2 * half)]:
            first = "gate" if gate.span == spans[0] else "up"
            linears = _paths_of(products[0]), _paths_of(last[0])
            return MLPPattern("gated_mlp", linears, name, first)
        return None
    return None


def _paths_of(product: Node) -> LinearPaths:
    """Return the places of the weight and bias of a product."""
    _, weight, *biases = product.inputs
    return LinearPaths(weight.path, biases[0].path if biases else None, product.is_transposed)


def _leaves(y: Node) -> list[Node]:
    """Return the nodes of which elementwise ops make a node, scalars excepted."""
    nodes = nodes_behind(y, through="elementwise")
    return [node for node in nodes if node.kind not in ("elementwise", "scalar")]


@cache
def _grid() -> tuple[Tensor, Tensor]:
    """Return numbers of all sizes, dense where activations bend, and as many in another order."""
    with torch.device("cpu"):
        near = torch.linspace(-30, 30, 1201, dtype=torch.float64)
        large = torch.logspace(-30, 30, 601, dtype=torch.float64)
        z = torch.cat([near, large, -large])
        return z, z[torch.arange(len(z)) * 997 % len(z)]


def _activation_of(hidden: Node, z: Node, up: Node | None = None) -> str | None:
    """Return the activation for which a node is act(z), or act(z) * up; None for others."""
    z_values, other_values = _grid()
    up_values = torch.ones_like(z_values) if up is None else other_values
    known = {z: z_values} if up is None else {z: z_values, up: up_values}
    with undisturbed("cpu"), torch.no_grad():
        try:
            values = _evaluated(hidden, known)
        except Exception:  # arbitrary code of others
            return None
        if not isinstance(values, Tensor) or values.shape != z_values.shape:
            return None
        for name, act in ACTIVATIONS.items():
            expected = act.eager(z_values.clone()) * up_values
            tolerance = _TOL * up_values.abs().clamp_min(1) + _TOL * expected.abs()
            if ((values.double() - expected).abs() <= tolerance).all():
                return name
    return None


def _evaluated(y: Node, known: dict[Node, Tensor]) -> Any:
    """Return a node's value, made by elementwise ops from the `known` values of others."""
    values: dict[Any, Any] = dict(known)
    like = next(iter(known.values()))

    def value_of(argument: Any) -> Any:
        return values[argument] if isinstance(argument, Node) else argument

    for node in nodes_behind(y, through="elementwise"):
        if node in values:
            continue
        args, kwargs = pytree.tree_map(value_of, (node.args, node.kwargs or {}))
        if node.kind == "scalar":
            kwargs = {**kwargs, "dtype": like.dtype, "device": like.device}
        elif schema_of(node.op).is_mutable:
            args = [args[0].clone(), *args[1:]]
        values[node] = node.op(*args, **kwargs)
    return values[y]
