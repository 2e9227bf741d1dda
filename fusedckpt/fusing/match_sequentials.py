"""Which layers of an nn.Sequential fusedckpt.Sequential computes as one block."""

from __future__ import annotations

from typing import Any

from torch import nn

from fusedckpt.fusing.forwards import Swap, of_chunks
from fusedckpt.kernels.activations import name_of
from fusedckpt.layers.sequential import Sequential, runs


def blocks_of(
    parent: nn.Sequential, save: str, chunks: int | None = None
) -> dict[str, tuple[list[Any], Swap]]:
    """Return the layers of every block, and the swap of a Sequential of these alone.

    A block goes by its linear's name, as its norm may be swapped too.
    """
    names, layers = list(parent._modules), list(parent._modules.values())
    found = {}
    for run in runs(layers):
        if run.kind == "layer":
            continue
        inside = run.of(layers)
        place = next(i for i, layer in enumerate(inside) if isinstance(layer, nn.Linear))
        parts = [name_of(layer) or f"nn.{type(layer).__name__}" for layer in inside]
        kind = "mlp" if run.kind == "mlp" else "linear"
        change = f"{' + '.join(parts)} -> {run.kind}"
        change += f" ({of_chunks(chunks)[0]})" if chunks is not None and kind == "mlp" else ""
        features = (inside[place].in_features,)
        swap = Swap(kind, change, Sequential, {"save": save, "chunks": chunks}, features=features)
        found[names[run.start + place]] = inside, swap
    return found
