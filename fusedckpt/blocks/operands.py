"""The parameters of a call: a norm's record; weights, dense or dequantized, and their adapters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fusedckpt.autograd import arguments
from fusedckpt.blocks.quantized import QuantizedWeight, quantized


class LoRA(NamedTuple):
    """A weight with a low-rank adapter: a linear layer of it computes

        F.linear(x, weight, bias) + scale * F.linear(F.linear(F.dropout(x, dropout), A), B)

    A and B may have another dtype than weight: x is cast to it, and the sum is cast back, as peft
    does. For experts see `functional.experts`.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685; over
    quantized weights Dettmers et al., "QLoRA", arXiv 2305.14314.
    """

    # [N, K], dense or quantized, frozen or not; or another LoRA: its adapter is added, too
    weight: Any
    # [r, K]
    A: Tensor
    # [N, r]
    B: Tensor
    # peft's `scaling`
    scale: float = 1.0
    # the probability for the adapter's input, 0 in evaluation
    dropout: float = 0.0


class LinearNames(NamedTuple):
    """The names of a linear layer's operands."""

    weight: str
    bias: str


class Constants(NamedTuple):
    """An adapter's constants; seed: which of a call's seeds its dropout has, None for none."""

    scale: float
    dropout: float
    seed: int | None


class LinearParts(NamedTuple):
    """A linear layer taken apart: its tensors, or a value about each in its place."""

    # without its adapters
    weight: Any
    # None where absent
    bias: Any
    # pairs of A and B, innermost first
    adapters: tuple[tuple[Any, Any], ...] = ()
    # of each adapter
    constants: tuple[Constants, ...] = ()
    # whether the weight is a record that dequantizes, or the Meta of one
    is_quantized: bool = False

    def half(self, index: int) -> LinearParts:
        """Return the linear of the first or second half of the outputs; as views."""

        def rows(t: Any) -> Any:
            if isinstance(t, QuantizedWeight):
                return t.half(index)
            return None if t is None else t.chunk(2)[index]

        adapters = tuple([(a, rows(b)) for a, b in self.adapters])
        return self._replace(weight=rows(self.weight), bias=rows(self.bias), adapters=adapters)


def linear_parts_of(
    name: str, key: str, weight: Any, bias: Any, seeds: Iterator[int]
) -> LinearParts:
    """Take a weight apart, numbering its dropouts; refuse constants that mean nothing."""
    adapters = []
    constants = []
    for lora in adapters_of(weight):
        weight = lora.weight
        arguments.number(name, f"{key}.scale", lora.scale)
        arguments.probability(name, f"{key}.dropout", lora.dropout)
        adapters.insert(0, (lora.A, lora.B))
        seed = next(seeds) if lora.dropout else None
        constants.insert(0, Constants(float(lora.scale), float(lora.dropout), seed))
    base = quantized(weight)
    if base is not None:
        source = f"{key}.dense" if base is weight else f"dequantize({key})"
        weight = base.checked(name, key, source)
    return LinearParts(weight, bias, tuple(adapters), tuple(constants), base is not None)


def adapters_of(weight: Any) -> list[LoRA]:
    """Return the records of a weight, outermost first."""
    adapters = []
    while isinstance(weight, LoRA):
        adapters.append(weight)
        weight = weight.weight
    return adapters


def count_dropouts(weights: Sequence[Any], *dropouts: float) -> int:
    """Return how many seeds a call needs."""
    count = sum(p > 0 for p in dropouts)
    return count + sum(lora.dropout > 0 for weight in weights for lora in adapters_of(weight))


def flat(parts: LinearParts) -> list[Any]:
    """Return weight, bias, and A and B of every adapter."""
    return [parts.weight, parts.bias, *(t for pair in parts.adapters for t in pair)]


def with_values(parts: LinearParts, values: Iterator[Any]) -> LinearParts:
    """Return the parts with the next of an iterator's values in the order of `flat`.

    A quantized weight stays: its value is None.
    """
    weight = next(values)
    bias = next(values)
    weight = parts.weight if parts.is_quantized else weight
    adapters = tuple([(next(values), next(values)) for _ in parts.adapters])
    return parts._replace(weight=weight, bias=bias, adapters=adapters)


def parts_of_linears(
    name: str,
    names: Sequence[LinearNames],
    linears: Sequence[tuple[Any, Any]],
    num_seeds: int,
) -> list[LinearParts]:
    """Return pairs of weight and bias taken apart; the first seeds are the call's own."""
    seed = itertools.count(num_seeds)
    pairs = zip(names, linears, strict=True)
    return [linear_parts_of(name, key, w, b, seeds=seed) for (key, _), (w, b) in pairs]


def are_adapted(linears: Sequence[tuple[Any, Any]]) -> bool:
    """Whether any weight is a record or dequantizes."""
    return any(isinstance(w, LoRA) or quantized(w) is not None for w, _ in linears)
