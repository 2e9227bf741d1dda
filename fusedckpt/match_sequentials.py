"""Which nn.Sequential holds layers that fusedckpt.Sequential computes as one block."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn
from torch.nn.modules import activation as activations

from fusedckpt.autograd.hooks import has_hooks
from fusedckpt.kernels.activations import name_of
from fusedckpt.layers.linear import Linear
from fusedckpt.layers.sequential import Run, Sequential, runs
from fusedckpt.swapped import Swap, unfit_layer

# every activation of torch, so that those which cannot be fused are reported
_ACTIVATIONS = tuple(getattr(activations, name) for name in activations.__all__)


@dataclass(frozen=True)
class Block:
    """Layers of a Sequential that form a block: its linear's name, and the block on its own."""

    name: str
    layers: tuple[nn.Module, ...]
    swap: Swap


def blocks_of(parent: nn.Sequential, save: str) -> list[Block]:
    """Return the blocks that a fusedckpt.Sequential would compute."""
    names, layers = list(parent._modules), list(parent._modules.values())
    found = []
    for run in runs(layers):
        if run.kind != "layer":
            # a block goes by its linear, as its norm may be swapped too
            linear = run.start + (not isinstance(layers[run.start], nn.Linear))
            found.append(Block(names[linear], tuple(run.of(layers)), _swap(run, layers, save)))
    return found


def apart(parent: nn.Sequential) -> dict[str, str]:
    """Say why a linear and the activation after it form no block."""
    names, layers = list(parent._modules), list(parent._modules.values())
    inside = {
        index
        for run in runs(layers)
        if run.kind != "layer"
        for index in range(run.start, run.start + run.length)
    }
    return {
        names[index]: _inseparable(linear, follower)
        for index, (linear, follower) in enumerate(pairwise(layers))
        if index not in inside
        and isinstance(linear, nn.Linear)
        and not isinstance(linear, Linear)
        and isinstance(follower, _ACTIVATIONS)
    }


def _swap(run: Run, layers: list[Any], save: str) -> Swap:
    parts = [name_of(layer) or f"nn.{type(layer).__name__}" for layer in run.of(layers)]
    linear = next(layer for layer in run.of(layers) if isinstance(layer, nn.Linear))
    kind = "mlp" if run.kind == "mlp" else "linear"
    change = f"{' + '.join(parts)} -> {run.kind}"
    return Swap(kind, change, Sequential, {"save": save}, (linear.in_features,))


def _inseparable(linear: nn.Linear, follower: nn.Module) -> str:
    if name_of(follower) is None:
        return f"{follower} is no activation that can be fused"
    if type(linear) is not nn.Linear:
        return f"{type(linear).__name__} is a subclass of nn.Linear"
    unfit = unfit_layer(linear)
    if unfit is not None:
        return unfit
    assert has_hooks(linear) or has_hooks(follower)
    return "a hook watches it or its activation, or a forward was replaced"
