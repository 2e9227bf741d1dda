"""Which block a recorded forward is: its matrix products, and the activation between them.

Between the products stands a function of single elements, which may be made of any ops. It is
evaluated from the recording, on numbers from 1e-30 to 1e30, and looked up in the table of
activations: one that clamps is another function, at any limit.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fusedckpt.autograd.private import is_pointwise, pytree, schema_of
from fusedckpt.fusing.mlp_match import MatchedBlock, Weight
from fusedckpt.fusing.recording import Node, Recording, record, walk
from fusedckpt.fusing.replica import takes_one, undisturbed
from fusedckpt.kernels.activations import ACTIVATIONS
from fusedckpt.layers.fallbacks import NotFused

# activations are told apart by it: another threshold of a softplus shows only here
_TOL = 1e-8
# functions of single elements that are lines
_LINES = frozenset(("_to_copy", "add", "clone", "copy", "div", "mul", "neg", "rsub", "sub"))


def block_of(recording: Recording) -> MatchedBlock | NotFused:
    """Return the block that a recorded forward is, or why it is none."""
    y = recording.y
    if y is None:
        assert recording.reason is not None
        return recording.reason
    (shape, result), dtypes = recording.shapes, recording.dtypes
    if (shape[:-1], dtypes[0]) != (result[:-1], dtypes[1]):
        sizes = f"{dtypes[1]} {[*result]} for an input of {dtypes[0]} {[*shape]}"
        return NotFused("result", sizes)
    rows, last = (y.of[0], [y]) if y.kind == "product" else (y, [])
    leaves = _leaves(rows)
    products = [leaf.of[0] if leaf.kind == "part" else leaf for leaf in leaves]
    if rows.kind == "point" and all(p.kind == "product" and p.of[0].kind == "x" for p in products):
        block = None
        if len(leaves) == 1 and leaves == products:
            block = _with_activation(rows, leaves[0], last)
        elif len(leaves) == 2 and last:
            block = _gated(rows, leaves, products, last)
        if block is not None:
            return block
    ops = [node for node in recording.nodes if node.kind in ("point", "other")]
    names = dict.fromkeys(node.name.rstrip("_") for node in ops)
    return NotFused("ops", ", ".join(names) or "linears alone")


def _with_activation(h: Node, z: Node, last: list[Node]) -> MatchedBlock | None:
    name = _looked_up(h, z)
    if name in (None, "identity"):
        return None
    kind = "mlp" if last else "linear_act"
    return MatchedBlock(kind, tuple(map(_weight, [z, *last])), str(name))


def _gated(
    h: Node, leaves: list[Node], products: list[Node], last: list[Node]
) -> MatchedBlock | None:
    for gate, up in (leaves, leaves[::-1]):
        name = _looked_up(h, gate, up)
        if name in (None, "identity"):
            continue
        if leaves == products:
            return MatchedBlock("gated_mlp", tuple(map(_weight, [gate, up, *last])), name)
        half = gate.span[1] - gate.span[0]
        halves = sorted([gate.span, up.span])
        if products[0] is products[1] and halves == [(0, half), (half, 2 * half)]:
            first = "gate" if gate.span == halves[0] else "up"
            return MatchedBlock("gated_mlp", (_weight(products[0]), _weight(last[0])), name, first)
        return None
    return None


def is_bent(recording: Recording) -> bool:
    """Whether a recorded forward computes a function of single elements that is no line.

    False if it computes anything but such functions, products and parts.
    """
    kinds = ("point", "other")
    ops = [n for n in recording.nodes if n.kind in kinds and not isinstance(n.op, str)]
    if not all(is_pointwise(node.op) for node in ops if node.kind == "other"):
        return False
    return any(node.name.rstrip("_") not in _LINES for node in ops)


def is_activation(module: nn.Module) -> bool:
    """Whether a module is a function of single elements, as its recorded forward shows."""
    if module._modules or any(is_lazy(p) or p.dim() > 1 for p in module.parameters()):
        return False
    return takes_one(module) and is_bent(record(module, (2, 3, 8)))


def _weight(product: Node) -> Weight:
    _, weight, *bias = product.of
    return Weight(weight.path, bias[0].path if bias else None, product.is_transposed)


def _leaves(y: Node) -> list[Node]:
    """Return the nodes that make a node by ops on single elements: products, parts and others."""
    return [node for node in walk(y, "point") if node.kind not in ("point", "number")]


@cache
def _grid() -> tuple[Tensor, Tensor]:
    """Return numbers of all sizes, dense where activations bend, and as many in another order."""
    with torch.device("cpu"):
        near = torch.linspace(-30, 30, 1201, dtype=torch.float64)
        large = torch.logspace(-30, 30, 601, dtype=torch.float64)
        z = torch.cat([near, large, -large])
        return z, z[torch.arange(len(z)) * 997 % len(z)]


def _looked_up(h: Node, *inputs: Node) -> str | None:
    """Return the activation that a node is of its input, times a second one where it has two."""
    z, other = _grid()
    up = other if len(inputs) == 2 else torch.ones_like(z)
    with undisturbed("cpu"), torch.no_grad():
        try:
            values = _evaluated(h, dict(zip(inputs, (z, up), strict=False)))
        except Exception:  # arbitrary code of others
            return None
        if not isinstance(values, Tensor) or values.shape != z.shape:
            return None
        for name, act in ACTIVATIONS.items():
            expected = act.eager(z.clone()) * up
            room = _TOL * up.abs().clamp_min(1) + _TOL * expected.abs()
            if ((values.double() - expected).abs() <= room).all():
                return name
    return None


def _evaluated(h: Node, known: dict[Node, Tensor]) -> Any:
    """Return a node's value for the `known` values of others, by ops on single elements."""
    values: dict[Any, Any] = dict(known)
    like = next(iter(known.values()))

    def value(argument: Any) -> Any:
        return values[argument] if isinstance(argument, Node) else argument

    for node in walk(h, "point"):
        if node in values:
            continue
        args, kwargs = pytree.tree_map(value, (node.args, node.kwargs or {}))
        if node.kind == "number":
            kwargs = {**kwargs, "dtype": like.dtype, "device": like.device}
        elif schema_of(node.op).is_mutable:
            args = [args[0].clone(), *args[1:]]
        values[node] = node.op(*args, **kwargs)
    return values[h]
