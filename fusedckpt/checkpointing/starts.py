"""Where segments of a chain of functions start: as given, or by a rule from measured sizes."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fusedckpt.autograd.private import disable_current_modes, pytree
from fusedckpt.checkpointing.calls import Surroundings
from fusedckpt.checkpointing.module_calls import Buffers
from fusedckpt.checkpointing.segment import is_plain_call
from fusedckpt.memory import saved_tensors, storages_of


def given_starts(segments: Any, count: int) -> list[int]:
    """Return the indices of the functions that start a segment."""
    # integers of any kind, numpy's too
    if hasattr(segments, "__index__") and 1 <= int(segments) <= count:
        return [count * i // int(segments) for i in range(int(segments))]
    if isinstance(segments, Sequence) and not isinstance(segments, str):
        starts = [0, *(int(x) if hasattr(x, "__index__") else -1 for x in segments)]
        if all(a < b for a, b in pairwise([*starts, count])):
            return starts
    raise ValueError(
        f"checkpoint_sequential: segments must be 1 to {count}, ascending indices between, 'sqrt', "
        f"'recursive' or a Plan, got {segments!r}"
    )


class ChainSizes(NamedTuple):
    """Bytes by function: those saved of its input, those saved besides, and all of its input.

    `handed` is infinite where no segment can start, as the input is written in place from there on.
    """

    inputs: list[int]
    own: list[int]
    handed: list[float]


def chain_sizes(functions: Sequence[Callable[..., Any]], input: Any) -> ChainSizes:
    """Run each function once, as if it had not run, and return the bytes autograd saves for it."""
    parameters = [p for f in functions if isinstance(f, nn.Module) for p in f.parameters()]
    sizes = ChainSizes([], [], [sum(_storages(input).values())])
    # bytes that the function before saved of its output; where the memory of the input comes from
    saved_before, origin = 0, 0
    random_states = Surroundings([*_tensors(input), *parameters], rng=True, python_rng=True)
    with random_states.restored(), Buffers(attributes=True), disable_current_modes():
        for i, function in enumerate(functions):
            given = pytree.tree_map_only(Tensor, _fresh, input)
            versions = [tensor._version for tensor in _tensors(given)]
            with saved_tensors() as saved:
                input = function(given)
            before, after = _storages(given), _storages(input)
            kept = {s: nbytes for s, nbytes in (before | after).items() if saved.holds(s)}
            returned = sum(kept[s] for s in kept.keys() & after.keys())
            sizes.inputs.append(max(saved_before, sum(kept.values()) - returned))
            sizes.own.append(saved.nbytes - sum(kept.values()))
            sizes.handed.append(sum(after.values()))
            if versions != [tensor._version for tensor in _tensors(given)]:
                sizes.handed[origin : i + 1] = [math.inf] * (i + 1 - origin)
            saved_before, origin = returned, origin if before.keys() & after.keys() else i + 1
    sizes.own[-1] += saved_before
    return sizes


Rule = Callable[[ChainSizes], list[int]]
# starts by rule, and by functions and their training modes
_known: dict[Any, list[int]] = {}


def measured_starts(rule: Rule, functions: Sequence[Callable[..., Any]], input: Any) -> list[int]:
    """Return the starts that a rule finds in sizes; the first call measures the functions."""
    count = len(functions)
    if count < 2 or is_plain_call():
        return [0][:count]
    if torch.compiler.is_compiling():
        return given_starts(math.isqrt(count) if rule is least_starts else count, count)
    try:
        key = rule, *((_reference(f), getattr(f, "training", None)) for f in functions)
        starts = _known.get(key)
    except TypeError:
        # a function that has no hash or no weak reference is not known again
        return rule(chain_sizes(functions, input))
    if starts is None:
        if len(_known) > 1000:
            # by functions that are made anew for each call
            _known.clear()
        starts = _known[key] = rule(chain_sizes(functions, input))
    return starts


def _reference(function: Any) -> weakref.ref[Any]:
    # a bound method is made anew each time that it is looked up
    return (weakref.WeakMethod if inspect.ismethod(function) else weakref.ref)(function)


def possible_starts(sizes: ChainSizes) -> list[int]:
    """Return where segments can start."""
    return [0, *(i for i in range(1, len(sizes.own)) if sizes.handed[i] < math.inf)]


def least_starts(sizes: ChainSizes) -> list[int]:
    """Return the starts with the least sum of the bytes handed on and the largest segment."""
    # a segment holds ends[stop] - begins[start]: its own input is one that was handed on
    ends = np.cumsum([0, *map(sum, zip(sizes.inputs, sizes.own, strict=True))])
    begins, handed = ends[:-1] + sizes.inputs, np.array([0, *sizes.handed[1:-1]], float)
    least, best, limit = math.inf, [0], math.inf
    while starts := _cheapest(begins, ends, handed, limit):
        kept = handed[starts].sum()
        largest = max(ends[b] - begins[a] for a, b in pairwise([*starts, len(begins)]))
        if kept + largest < least:
            least, best = kept + largest, starts
        # a lower limit never hands on less; steps of one per cent, for chains of 1,000 functions
        limit = min(largest, least - kept)
        limit -= max(1, limit // 100)
    return best


# by the names that `checkpoint_sequential` takes
RULES: dict[str, Rule] = {"sqrt": least_starts, "recursive": possible_starts}


def _cheapest(begins: Any, ends: Any, handed: Any, limit: float) -> list[int]:
    """Return starts of segments within the limit that hand on the least; none if none can be."""
    costs, starts = np.zeros(len(ends)), [[]]
    for stop in range(1, len(ends)):
        fits = ends[stop] - begins[:stop] <= limit
        totals = np.where(fits, costs[:stop] + handed[:stop], math.inf)
        start = int(totals.argmin())
        costs[stop] = totals[start]
        starts.append([*starts[start], start])
    return starts[-1] if costs[-1] < math.inf else []


def _fresh(tensor: Tensor) -> Tensor:
    # no leaf, which could not be written in place
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _storages(values: Any) -> dict[StorageWeakRef, int]:
    """Return the bytes of the storages of tensors, in any nesting."""
    storages = storages_of(_tensors(values))
    return {StorageWeakRef(storage): storage.nbytes() for storage in storages}
