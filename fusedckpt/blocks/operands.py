"""Weights of a linear step: dense, dequantised where used, with adapters; whole and taken apart."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fusedckpt.autograd import arguments
from fusedckpt.autograd.dispatch import Meta
from fusedckpt.blocks.quantised import quantised

__all__ = ["LoRA", "flat", "refilled", "taken_apart"]


class LoRA(NamedTuple):
    """A weight with a low-rank adapter: a linear layer of it computes

        F.linear(x, weight, bias) + scale * F.linear(F.linear(F.dropout(x, dropout), A), B)

    weight: [N, K], dense or quantised, frozen or not; or another LoRA: its adapter is added too.
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
    """A linear layer taken apart: its tensors, or a value about each in its place.

    base: the record that dequantises to the weight, which is None then; adapters: pairs of A
    and B, innermost first.
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


def parts_of(name: str, key: str, weight: Any, bias: Any, seeds: Iterator[int]) -> Parts:
    """Take a weight apart, numbering its dropouts; refuse constants that mean nothing."""
    adapters, constants = [], []
    for lora in adapters_of(weight):
        weight = lora.weight
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


def adapters_of(weight: Any) -> list[LoRA]:
    """Return the records of a weight, outermost first."""
    found = []
    while isinstance(weight, LoRA):
        found.append(weight)
        weight = weight.weight
    return found


def count_dropouts(weights: Sequence[Any], *dropouts: float) -> int:
    """Return how many seeds a call needs."""
    count = sum(p > 0 for p in dropouts)
    return count + sum(lora.dropout > 0 for weight in weights for lora in adapters_of(weight))


def flat(parts: Parts) -> list[Any]:
    """Return weight, bias, and A and B of every adapter."""
    weight = parts.weight if parts.base is None else parts.base
    return [weight, parts.bias, *(t for pair in parts.adapters for t in pair)]


def refilled(parts: Parts, values: Any) -> Parts:
    """Return the parts with the next of an iterator's values in the order of `flat`."""
    weight, bias = next(values), next(values)
    adapters = tuple([(next(values), next(values)) for _ in parts.adapters])
    weight = weight if parts.base is None else None
    return parts._replace(weight=weight, bias=bias, adapters=adapters)


def taken_apart(
    name: str, keys: Sequence[str], linears: Sequence[tuple[Any, Any]], num_seeds: int
) -> list[Parts]:
    """Return pairs of weight and bias taken apart; the first seeds are the call's own."""
    seed = itertools.count(num_seeds)
    pairs = zip(keys, linears, strict=True)
    return [parts_of(name, key, w, b, seeds=seed) for key, (w, b) in pairs]


def structure_of(parts: Sequence[Parts]) -> tuple[Parts, ...]:
    """Return linears without their tensors, and with the Meta of a quantised weight."""
    found = []
    for linear in parts:
        bare = refilled(linear, itertools.repeat(None))
        found.append(bare if bare.base is None else bare._replace(base=Meta(*bare.base[:3])))
    return tuple(found)


def are_adapted(linears: Sequence[tuple[Any, Any]]) -> bool:
    """Whether any weight is a record or dequantises."""
    return any(isinstance(w, LoRA) or quantised(w) is not None for w, _ in linears)
