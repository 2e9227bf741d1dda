"""The saved tensors and the backward of a call, as text: the schedules of every fused layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedckpt.autograd.private import pytree, raw_saved
from fusedckpt.autograd.recipes import View
from fusedckpt.blocks.call import LayerCall


@dataclass(frozen=True)
class LayerSchedule:
    """How one fused layer runs. A line of a schedule is a call of a kernel."""

    # the function or the class
    name: str
    # the bytes of the tensors that are saved for backward, by name, parameters apart
    saves: dict[str, int]
    # those of them that are saved as a recipe, of no bytes: backward makes them again from tensors
    # that other layers save
    recipes: tuple[str, ...]
    # into how many chunks of rows forward and backward are cut
    chunks: int
    # the schedule of the forward, one call a line
    forward: str
    # the schedule of the backward
    backward: str

    def __str__(self) -> str:
        saved = [
            f"a recipe of {name}" if name in self.recipes else f"{name}, {nbytes:,} bytes"
            for name, nbytes in self.saves.items()
        ]
        each = f", for each of {self.chunks} chunks of rows" if self.chunks > 1 else ""
        again = "".join([f", after {name} is made again by its recipe" for name in self.recipes])
        parts = [f"{self.name} saves {'; '.join(saved) or 'nothing'}"]
        for title, text in (("forward", self.forward), (f"backward{again}", self.backward)):
            parts += [f"{title}{each}", *[f"    {line}" for line in text.splitlines()]]
        return "\n".join(parts)


@dataclass(frozen=True)
class CallSchedules:
    """The schedules of the fused layers of a call, in the order of their forwards."""

    layers: tuple[LayerSchedule, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.layers))


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> CallSchedules:
    """Run fn(*args, **kwargs) once; return the saves and schedules of its fused layers.

        print(fusedckpt.explain(mlp, x))

    A line is a call of a kernel: its results, its inputs that are tensors, results that are written
    over a tensor (`h=d_h`), and the tensors that are freed after it. `d_x` is the gradient of x. Of
    chunks, `all_y` is the tensor of all rows, and `sum_d_w` the gradient of the earlier chunks. The
    schedules are those of the gradients that are wanted: of parameters and of inputs that require
    grad.

    Args:
        fn: a function or module; no backward runs.
        args, kwargs: its arguments.

    Returns:
        A record with `layers`, which prints itself. A layer's `saves` has the bytes of each tensor
        that it saves besides parameters; a tensor that several layers save is counted for each. One
        of `recipes` has no bytes: the result of a norm, which backward makes again.

    Raises:
        TypeError: fn cannot be called.
        ValueError: no result of fn came from a fused layer with a gradient that is wanted. Layers
            inside of a checkpoint, or of a function that torch.compile compiled, are not seen.
    """
    if not callable(fn):
        raise TypeError(f"explain: fn must be a function or a module, got {type(fn).__name__}")
    with torch.enable_grad():
        result = fn(*args, **kwargs)
    nodes = [t.grad_fn for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
    layers = [_layer_of(node) for node in _layers_before(nodes)]
    if not layers:
        raise ValueError(
            "explain: fn must return the result of a fused layer of which an input or a weight "
            "requires grad: call the layer outside of checkpoints and compiled functions"
        )
    return CallSchedules(tuple(layers))


def _layers_before(nodes: list[Any]) -> Iterator[Any]:
    """Yield the nodes of the fused layers that lead to nodes, in the order of their forwards."""
    seen: set[Any] = set()
    stack = [(node, False) for node in reversed(nodes) if node is not None]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            if isinstance(getattr(node, "call", None), LayerCall):
                yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            below = [parent for parent, _ in node.next_functions if parent is not None]
            stack += [(parent, False) for parent in reversed(below)]


def _layer_of(node: Any) -> LayerSchedule:
    """Return the schedules of a layer by its node."""
    call = node.call
    saved = node.saved
    program = call.program
    products = tuple([place >= 0 for place in saved.product_places])
    wanted = tuple(node.needs_input_grad[2:])
    dys = (True,) * len(program.results)
    has_beside = not set(program.saved_beside).isdisjoint(saved.names)
    backward = call.backward(wanted, products, dys, any(products), has_beside)
    recipes = _recipes_of(node)
    names = [
        *[name for name in program.inputs if name in saved.names],
        *[name for name in (*program.saved_results, *program.saved_beside) if name in saved.names],
        *itertools.compress(program.gemm_outputs, products),
    ]
    saves = {name: 0 if name in recipes else _bytes_of(call, name) for name in names}
    if call.num_seeds:
        saves["seeds"] = call.num_seeds * torch.int64.itemsize
    return LayerSchedule(
        call.name, saves, recipes, call.chunks, forward=str(saved.forward), backward=str(backward)
    )


def _recipes_of(node: Any) -> tuple[str, ...]:
    """Return the names of the tensors that a layer has saved as a recipe."""
    pairs = zip(node.saved.names, raw_saved(node), strict=False)
    return tuple([name for name, tensor in pairs if isinstance(tensor.data, View)])


def _bytes_of(call: LayerCall, name: str) -> int:
    """Return the bytes of a value: of the row dimensions of the call, and of its own features."""
    if name in call.program.inputs:
        meta = call.metas[call.program.inputs.index(name)]
        return math.prod(meta.shape) * meta.dtype.itemsize
    rows = math.prod(call.metas[0].shape[: -call.num_dims])
    width, dtype = call.described[name]
    return rows * width * dtype.itemsize
