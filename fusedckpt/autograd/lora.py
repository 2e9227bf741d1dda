"""A weight with a low-rank adapter beside it, as a record; and a linear layer taken apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fusedckpt.autograd import arguments
from fusedckpt.autograd.quantised import QuantisedWeight, quantised

__all__ = ["LoRA"]


class LoRA(NamedTuple):
    """A weight with a low-rank adapter: a linear layer of it computes

        F.linear(x, weight, bias) + scale * F.linear(F.linear(F.dropout(x, dropout), A), B)

    weight: [N, K], dense or quantised, frozen or not; or another LoRA, whose adapter is added too.
    A: [r, K]; B: [N, r]; scale: a number, peft's `scaling`; dropout: the dropout probability of the
    adapter's input, 0 in eval. A and B may have another dtype than weight: x is cast to it, and the
    sum is cast back, as peft does.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685; over
    quantised weights Dettmers et al., "QLoRA", arXiv 2305.14314.
    """

    weight: Any
    A: Tensor
    B: Tensor
    scale: float = 1.0
    dropout: float = 0.0


class Constants(NamedTuple):
    """An adapter's constants; seed: which of a call's seeds its dropout has, None for none."""

    scale: float
    dropout: float
    seed: int | None


class Parts(NamedTuple):
    """A linear layer taken apart, or what is known or wanted of its parts.

    base: what dequantises to the weight, which is None then; adapters: pairs of A and B, innermost
    first.
    """

    weight: Any
    base: Any
    bias: Any
    adapters: tuple[tuple[Any, Any], ...]
    constants: tuple[Constants, ...]

    def half(self, index: int) -> Parts:
        """Return the linear of the first or second half of the outputs; as views."""

        def rows(t: Any) -> Any:
            return None if t is None else t.chunk(2)[index]

        base = None if self.base is None else self.base.half(index)
        adapters = tuple([(a, rows(b)) for a, b in self.adapters])
        return Parts(rows(self.weight), base, rows(self.bias), adapters, self.constants)


def is_adapted(weight: Any) -> bool:
    """Whether a weight is no dense tensor but a record, or dequantises."""
    return isinstance(weight, (LoRA, QuantisedWeight)) or quantised(weight) is not None


def parts_of(name: str, key: str, weight: Any, bias: Any, seeds: Iterator[int]) -> Parts:
    """Take a weight apart, numbering its dropouts; refuse constants that mean nothing."""
    adapters, constants = [], []
    while isinstance(weight, LoRA):
        lora, weight = weight, weight.weight
        arguments.number(name, f"{key}.scale", lora.scale)
        arguments.probability(name, f"{key}.dropout", lora.dropout)
        adapters.insert(0, (lora.A, lora.B))
        seed = next(seeds) if lora.dropout else None
        constants.insert(0, Constants(float(lora.scale), float(lora.dropout), seed))
    base = quantised(weight)
    dense = weight if base is None else None
    if base is not None:
        source = f"{key}.dense" if base is weight else f"dequantise({key})"
        base = base.checked(name, key, source)
    return Parts(dense, base, bias, tuple(adapters), tuple(constants))


def count_dropouts(weights: Sequence[Any], *dropouts: float) -> int:
    """Return how many seeds a call needs."""
    count = sum(p > 0 for p in dropouts)
    for weight in weights:
        while isinstance(weight, LoRA):
            count, weight = count + (weight.dropout > 0), weight.weight
    return count
