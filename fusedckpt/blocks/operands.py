"""Weights of a linear step taken apart: dense, dequantised where used, with adapters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from fusedckpt.autograd.dispatch import Meta
from fusedckpt.autograd.lora import LoRA, Parts, is_adapted, parts_of

__all__ = ["flat", "refilled", "taken_apart"]


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
) -> tuple[list[Parts], int]:
    """Return pairs of weight and bias taken apart, and the number of seeds that a call draws."""
    seed = itertools.count(num_seeds)
    pairs = zip(keys, linears, strict=True)
    parts = [parts_of(name, key, w, b, seeds=seed) for key, (w, b) in pairs]
    return parts, next(seed)


def structure_of(parts: Sequence[Parts]) -> tuple[Parts, ...]:
    """Return linears without their tensors, and with the Meta of a quantised weight."""
    found = []
    for linear in parts:
        bare = refilled(linear, itertools.repeat(None))
        found.append(bare if bare.base is None else bare._replace(base=Meta(*bare.base[:3])))
    return tuple(found)


def are_adapted(linears: Sequence[tuple[Any, Any]]) -> bool:
    """Whether any weight is a record or dequantises."""
    return any(is_adapted(weight) for weight, _ in linears)


def num_adapters(weight: Any) -> int:
    """Return how many adapters a weight has."""
    count = 0
    while isinstance(weight, LoRA):
        count, weight = count + 1, weight.weight
    return count
