"""Which block a recorded forward is: its matrix products, and the activation between them.

What stands between the products is a function of single elements, whatever ops it is made of. It is
evaluated from the recording, on numbers from 1e-30 to 1e30, and looked up in the table of
activations: one that clamps is another function, at whatever limit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fusedckpt.fusing import parity
from fusedckpt.fusing.graph import Node, function, leaves
from fusedckpt.fusing.held import Block, Path, Weight
from fusedckpt.fusing.recording import Recording
from fusedckpt.kernels.activations import ACTIVATIONS

# activations are told apart by it: another threshold of a softplus shows only here
_TOL = 1e-8
# a block is probed on slices of its weights: what it computes does not depend on its size
_D, _F = 24, 40
NONE = "is no activation that can be fused"


def block_of(recording: Recording) -> Block | str:
    """Return the block that a recorded forward is, or why it is none."""
    y = recording.y
    if y is None:
        return str(recording.reason)
    shape, result = recording.shapes
    if len(shape) != len(result) or shape[:-1] != result[:-1]:
        return f"its result has the shape {[*result]} for an input of {[*shape]}"
    if len({*recording.dtypes}) > 1:
        return f"its result is {recording.dtypes[1]} for an input of {recording.dtypes[0]}"
    if y.kind == "x":
        return "it returns its input"
    if y.kind != "product":
        found = leaves(y)
        if y.kind == "point" and len(found) == 1 and _reads_x(found[0]):
            return _with_activation("linear_act", [], y, found[0])
        if (
            y.kind == "point"
            and len(found) == 2
            and all(one.kind in ("product", "part") for one in found)
        ):
            return "it ends with its gate: no linear comes after"
        return _strange(y) or f"after its last linear it computes {_ops(y)}"
    rows = y.of[0]
    found = leaves(rows)
    products = [leaf.of[0] if leaf.kind == "part" else leaf for leaf in found]
    if rows.kind == "point" and found and all(map(_reads_x, products)):
        if len(found) == 1 and found == products:
            return _with_activation("mlp", [y], rows, found[0])
        if len(found) == 2:
            return _gated(y, rows, found, products)
    strange = _strange(y)
    if strange is None and rows.kind == "product":
        return "it has no activation between its linears"
    return strange or "its linears do not follow each other as those of an MLP do"


def _reads_x(node: Node) -> bool:
    return node.kind == "product" and node.of[0].kind == "x"


def _with_activation(kind: str, last: list[Node], h: Node, z: Node) -> Block | str:
    name = _looked_up(h, z)
    if name in (None, "identity"):
        return f"{_ops(h)} {NONE}"
    return Block(kind, tuple(map(_weight, [z, *last])), str(name))


def _gated(y: Node, h: Node, found: list[Node], products: list[Node]) -> Block | str:
    for gate, up in (found, found[::-1]):
        name = _looked_up(h, gate, up)
        if name in (None, "identity"):
            continue
        if found == products:
            return Block("gated_mlp", tuple(map(_weight, [gate, up, y])), name)
        half = gate.span[1] - gate.span[0]
        halves = sorted([gate.span, up.span])
        if products[0] is products[1] and halves == [(0, half), (half, 2 * half)]:
            first = "gate" if gate.span == halves[0] else "up"
            return Block("gated_mlp", (_weight(products[0]), _weight(y)), name, first)
        return "its gate and up are no halves of one weight, one after the other"
    return f"{_ops(h)} {NONE}"


def activation_by(recording: Recording) -> str | None:
    """Return the activation that a recorded forward is, None for any other."""
    y = recording.y
    if y is None or y.kind not in ("x", "point") or any(one.kind != "x" for one in leaves(y)):
        return None
    return _looked_up(y, *leaves(y))


def _looked_up(h: Node, *inputs: Node) -> str | None:
    """Return the activation that a node is of its inputs, the second of which it is times."""
    f = function(h, [*inputs])
    return activation_of(f) if len(inputs) == 1 else gate_of(f)


def _weight(product: Node) -> Weight:
    _, weight, *bias = product.of
    return Weight(weight.path, bias[0].path if bias else None, product.is_transposed)


def _ops(node: Node) -> str:
    """Name the ops on single elements that make a node, the first one first."""
    names: dict[str, None] = {}

    def visit(one: Node) -> None:
        if one.kind == "point":
            for before in one.of:
                visit(before)
            names[one.op.overloadpacket.__name__.rstrip("_")] = None

    visit(node)
    return ", ".join(names)


def _strange(y: Node) -> str | None:
    """Return what a forward computes that no block has, None where all of it is known."""
    seen = _before(y)
    others = [node for node in seen if node.kind == "other"]
    if others:
        # the first ones: what they make is strange, too
        sources = [node for node in others if all(one.kind != "other" for one in node.of)]
        if any(isinstance(node.op, str) for node in sources):
            return "its forward reads a tensor that is neither its input nor a parameter"
        names = dict.fromkeys(_described(node) for node in reversed(sources))
        return f"its forward computes {', '.join(names)}"
    for node in seen:
        if node.kind != "product" and any(one.kind == "x" for one in node.of):
            return "its forward uses its input beside its linears"
    return None


def _before(y: Node) -> dict[Node, None]:
    """Return a node and all that it was made from."""
    seen: dict[Node, None] = {}
    todo = [y]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen[node] = None
            todo += node.of
    return seen


def _described(node: Node) -> str:
    paths = [".".join(one.path) for one in node.of if one.kind == "weight"]
    return f"{node.name} of {', '.join(paths)}" if paths else node.name


@cache
def _grid() -> Tensor:
    """Return numbers of all sizes, dense where activations bend."""
    with torch.device("cpu"):
        near = torch.linspace(-30, 30, 1201, dtype=torch.float64)
        large = torch.logspace(-30, 30, 601, dtype=torch.float64)
        return torch.cat([near, large, -large])


def activation_of(f: Callable[..., Any]) -> str | None:
    """Return the table's name for a function of one tensor, None where it is not in the table."""
    z = _grid()
    h = _evaluated(f, z)
    equal = (name for name, act in ACTIVATIONS.items() if _are_equal(h, act.eager, z, None))
    return next(equal, None)


def gate_of(f: Callable[..., Any]) -> str | None:
    """Return the activation where f(gate, up) is activation(gate) * up, None where it is not."""
    gate = _grid()
    # as large and as small, of either sign, in another order
    up = gate[torch.arange(len(gate), device="cpu") * 997 % len(gate)]
    h = _evaluated(f, gate, up)
    equal = (n for n, act in ACTIVATIONS.items() if _are_equal(h, act.eager, gate, up))
    return next(equal, None)


def _evaluated(f: Callable[..., Any], *values: Tensor) -> Any:
    with parity.undisturbed(torch.device("cpu")), torch.no_grad():
        try:
            return f(*(value.clone() for value in values))
        except Exception:  # arbitrary code of others
            return None


def _are_equal(h: Any, act: Callable[[Tensor], Tensor], z: Tensor, up: Tensor | None) -> bool:
    if not isinstance(h, Tensor) or h.shape != z.shape:
        return False
    with parity.undisturbed(torch.device("cpu")), torch.no_grad():
        expected = act(z.clone())
        if up is None:
            return torch.allclose(h.double(), expected, rtol=_TOL, atol=_TOL)
        expected = expected * up
        room = _TOL * up.abs().clamp_min(1)
        return bool(((h.double() - expected).abs() <= room + _TOL * expected.abs()).all())


def sizes_of(block: Block, shapes: dict[Path, tuple[int, ...]]) -> dict[Path, tuple[int, ...]]:
    """Return small shapes for a block's parameters, that fit each other as theirs do."""
    real = [_out_in(linear, shapes) for linear in block.linears]
    found: dict[Path, tuple[int, ...]] = {}
    for linear, (out, features) in zip(block.linears, _small(real, block.packed), strict=True):
        found[linear.weight] = (features, out) if linear.transposed else (out, features)
        if linear.bias is not None:
            found[linear.bias] = (out,)
    return found


def features_of(block: Block, shapes: dict[Path, tuple[int, ...]]) -> int:
    """Return how many features a block reads where its parameters have these shapes."""
    return _out_in(block.linears[0], shapes)[1]


def _out_in(linear: Weight, shapes: dict[Path, tuple[int, ...]]) -> tuple[int, int]:
    out, features = shapes[linear.weight]
    return (features, out) if linear.transposed else (out, features)


def _small(shapes: list[tuple[int, int]], packed: str) -> list[tuple[int, int]]:
    """Return small (out, in) that fit each other as the shapes do."""
    f = shapes[-1][1] if len(shapes) > 1 else shapes[0][0]
    d, out = shapes[0][1], shapes[-1][0]
    small_d, small_f = min(d, _D), min(f, _F)
    if len(shapes) == 1:
        return [(small_f, small_d)]
    small_out = small_d if out == d else min(out, _D)
    first = (2 * small_f if packed else small_f, small_d)
    return [first] * (len(shapes) - 1) + [(small_out, small_f)]
