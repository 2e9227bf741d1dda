"""A Sequential with an MLP of any kind behind other layers: a norm, then gate and up in one linear.

`layers/sequential.py` cuts a Sequential by the classes of its layers, and knows those of torch
alone. A gating or activation of another class shows where the MLP's layers are recorded alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from fusedckpt.fusing.fused_mlps import FusedMLP
from fusedckpt.fusing.swap import Swap, subclass
from fusedckpt.layers import fallbacks
from fusedckpt.layers.children import letter_of
from fusedckpt.layers.fallbacks import NotFused


class Tail(NamedTuple):
    """The names of a Sequential's layers, in order."""

    # called before the MLP
    before: tuple[str, ...]
    # of the MLP, its first linear first
    mlp: tuple[str, ...]
    # called after it
    after: tuple[str, ...]


def tail_of(parent: nn.Sequential) -> tuple[Tail, nn.Sequential] | None:
    """Return the layers from one linear to the next and its dropout, also as a module of their own.

    None where they are all layers, or a linear is not one of two.
    """
    names = tuple(parent._modules)
    layers = list(parent._modules.values())
    linears = [place for place, layer in enumerate(layers) if isinstance(layer, nn.Linear)]
    if len(linears) != 2 or not linears[0] or linears[1] - linears[0] < 2:
        return None
    first, last = linears
    end = last + 1 + (last + 1 < len(layers) and letter_of(layers[last + 1]) == "d")
    mlp = nn.Sequential()
    # by their own names, which a match holds
    mlp._modules.update(list(parent._modules.items())[first:end])
    mlp.training = parent.training
    return Tail(names[:first], names[first:end], names[end:]), mlp


def tail_swap(parent: nn.Sequential, tail: Tail, swap: Swap) -> Swap:
    """Return the swap of a Sequential whose layers `tail.mlp`, as a module, have this swap."""
    match = swap.notes["match"]
    # the parent has more children than the module of the MLP
    match = match._replace(guards=match.guards.without_root())
    return Swap(
        "mlp",
        swap.change,
        subclass(FusedTail, type(parent)),
        swap.attributes,
        {**swap.notes, "match": match, "tail": tail},
        parts={tail.mlp[0]: swap.parts[""]},
    )


class FusedTail(FusedMLP):
    """Forward of a Sequential with an MLP behind other layers; that runs fused."""

    def _fused(self, x: Tensor) -> Tensor | NotFused:
        tail = self._fusedckpt.tail
        if tuple(self._modules) != (*tail.before, *tail.mlp, *tail.after):
            return NotFused("child", "a layer")
        n: Any = self._called(tail.before, x)
        y: Any = super()._fused(n) if isinstance(n, Tensor) else NotFused("arguments")
        if isinstance(y, NotFused):
            # noted here, as the layers before have run
            fallbacks.note_fallback(self, y)
            y = self._original(n)
        return self._called(tail.after, y)

    def _original(self, x: Any) -> Any:
        return self._called(self._fusedckpt.tail.mlp, x)

    def _called(self, names: Sequence[str], x: Any) -> Any:
        for name in names:
            layer: Any = self._modules[name]
            x = layer(x)
        return x

    def linears_to_shard(self) -> list[nn.Module] | str:
        """Return why its weights must stay whole."""
        return "an MLP behind other layers of a Sequential stays whole"
