"""Which nn.Sequential holds layers that fusedckpt.Sequential computes as one block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fusedckpt.fusing.swapped import Swap
from fusedckpt.kernels.activations import name_of
from fusedckpt.layers.sequential import Run, Sequential, runs


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


def _swap(run: Run, layers: list[Any], save: str) -> Swap:
    parts = [name_of(layer) or f"nn.{type(layer).__name__}" for layer in run.of(layers)]
    linear = next(layer for layer in run.of(layers) if isinstance(layer, nn.Linear))
    kind = "mlp" if run.kind == "mlp" else "linear"
    change = f"{' + '.join(parts)} -> {run.kind}"
    return Swap(kind, change, Sequential, {"save": save}, (linear.in_features,))
