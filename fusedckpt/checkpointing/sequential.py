"""Functions in sequence, checkpointed in segments: `checkpoint_sequential`.

Where segments start is given, or chosen by a rule from measured sizes.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fusedckpt.autograd import arguments, phases
from fusedckpt.autograd.backward import versions_of
from fusedckpt.autograd.private import disable_current_modes, pytree
from fusedckpt.autograd.storages import storage_of
from fusedckpt.checkpointing.entry import OPTIONS, checkpoint
from fusedckpt.checkpointing.module_calls import Buffers
from fusedckpt.checkpointing.segment import Segment, is_plain_call
from fusedckpt.checkpointing.surroundings import Surroundings
from fusedckpt.memory import saved_tensors, storages_of


def checkpoint_sequential(
    functions: Iterable[Callable[..., Any]],
    segments: int | Sequence[int] | str | Any,
    input: Any,
    use_reentrant: bool | None = None,
    **options: Any,
) -> Any:
    """Return the functions applied one after the other to `input`, checkpointed in segments.

    Unlike in torch.utils.checkpoint's, the last segment is checkpointed too, and lengths differ by
    one at most.

    Args:
        functions: an nn.Sequential or callables; each gets the result of the one before.
        segments: their number; or the indices of the functions that start one, without 0; or "sqrt"
            or "recursive"; or the Plan of an nn.Sequential of these functions.
        input: the input of the first function: a tensor, or any nesting of tensors.
        use_reentrant, options: those of `checkpoint`.

    "sqrt" minimizes the bytes of all segments' inputs and of the tensors saved by the largest
    segment in its backward: about sqrt(n) segments of n equal functions. "recursive" checkpoints
    the first half, the first half of the rest and so on, and the same within each: it saves log2(n)
    inputs and runs a function log2(n) / 2 times more. The first call for the same functions and
    training modes runs each of them once more, with its hooks, to measure this; RNG states and
    buffers are restored.

    No segment starts at a function that modifies its input in place: it starts after that function,
    and the tensors that the function saves stay saved.

    Raises:
        ValueError: `segments` is invalid, `checkpoint` has no such option, or `use_reentrant` is
            True.
        TypeError: `functions` are not a sequence of callables.
    """
    name = "checkpoint_sequential"
    if not (hasattr(functions, "__iter__") or hasattr(functions, "__getitem__")):
        arguments.wrong_type(name, "functions", "an nn.Sequential or a list", functions)
    functions = list(functions)
    for i, function in enumerate(functions):
        if not callable(function):
            arguments.wrong_type(name, f"functions[{i}]", "callable", function)
    options["use_reentrant"] = use_reentrant
    if unknown := {*options} - OPTIONS:
        raise ValueError(
            f"{name}: unknown options {', '.join(sorted(unknown))}: "
            f"pass options of checkpoint, {', '.join(sorted(OPTIONS))}"
        )
    return _run(*_spans(functions, segments, input), options, input)


# functions from start to stop, counted within the span around, and how they run: None in a segment,
# OFFLOADED in a segment with its input in host memory, a list of spans in a segment with others
# nested in it; or, in no segment, a function that returns the context of their calls
Span: TypeAlias = tuple[int, int, Any]
OFFLOADED = "offloaded"


def halves(count: int, is_inside: bool = False) -> list[Span]:
    """Return as segments the first half, the first half of the rest and so on, halved likewise.

    Inside a segment the last one runs as it is: its backward comes next. At the top it is a segment
    of its own, as code after it may save tensors as well.
    """
    spans: list[Span] = []
    start = 0
    while (half := (count - start + (not is_inside)) // 2) > 0:
        spans.append((start, start + half, halves(half, True) if half > 1 else None))
        start += half
    return [*spans, (start, count, nullcontext)] if is_inside else spans


def _run(parts: Sequence[Any], spans: Sequence[Span], options: dict[str, Any], input: Any) -> Any:
    for start, stop, within in spans:
        if isinstance(within, list):
            input = _checkpointed(options, input, _run, parts[start:stop], within, options)
            continue
        if within is not None and within != OFFLOADED:
            with within():
                input = _run_in_order(parts[start:stop], input)
            continue
        segment_options = options if within is None else {**options, "offload": True}
        while start < stop:
            stretch = _Stretch(parts[start:stop])
            input = _checkpointed(segment_options, input, stretch)
            start += stretch.count
    return input


def _checkpointed(options: dict[str, Any], input: Any, run: Callable[..., Any], *args: Any) -> Any:
    # a segment around drops tensors that are arguments, not those in containers
    is_tensor = isinstance(input, Tensor)
    leaves, spec = ([input], None) if is_tensor else pytree.tree_flatten(input)
    return checkpoint(_run_again, run, args, spec, *leaves, **options)


def _run_again(
    run: Callable[..., Any], args: Any, spec: pytree.TreeSpec | None, *leaves: Any
) -> Any:
    return run(*args, leaves[0] if spec is None else pytree.tree_unflatten(leaves, spec))


class _Stretch:
    """Functions that run as one segment; if the first modify its input in place, those alone.

    They cannot run again then, so the segment saves their tensors.
    """

    def __init__(self, functions: Sequence[Any]):
        self.functions = functions
        self.count = len(functions)

    def __call__(self, input: Any) -> Any:
        segment = None if is_plain_call() else phases.current()
        if not isinstance(segment, Segment):
            # in the recompute as in the forward
            return _run_in_order(self.functions[: self.count], input)
        arguments = _tensors(input)
        # a tensor that needs no gradient may go through all functions, as masks do
        followed = {storage_of(x) for x in arguments if x.requires_grad}
        followed = followed or {*map(storage_of, arguments)}
        versions = versions_of(*arguments)
        segment.provisional = []
        for number, function in enumerate(self.functions, 1):
            input = function(input)
            if segment.provisional is None:
                continue
            if versions_of(*arguments) != versions:
                self.count = number
                return input
            storages = {storage_of(x) for x in _tensors(input)}
            if number == self.count or not followed & storages - {0}:
                segment.provisional = None
        return input


def _run_in_order(functions: Sequence[Callable[..., Any]], input: Any) -> Any:
    for function in functions:
        input = function(input)
    return input


def _spans(functions: list[Any], segments: Any, input: Any) -> tuple[list[Any], list[Span]]:
    """Return the functions to call one after the other, and the spans of that list."""
    count = len(functions)
    if hasattr(segments, "spans"):
        return functions, segments.spans(count)
    rule = RULES.get(segments) if isinstance(segments, str) else None
    first = measured_starts(rule, functions, input) if rule else given_starts(segments, count)
    stretches = list(pairwise([*first, count]))
    if rule is possible_starts:
        parts = [partial(_run_in_order, functions[a:b]) for a, b in stretches]
        return parts, halves(len(parts))
    return functions, [(a, b, None) for a, b in stretches]


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
        f"checkpoint_sequential: segments must be an integer from 1 to {count}, ascending indices "
        f"from 1 to {count - 1}, 'sqrt', 'recursive' or a Plan, got {segments!r}"
    )


class FunctionBytes(NamedTuple):
    """Bytes by function."""

    # saved of its input
    saved_inputs: list[int]
    # saved besides
    saved_inside: list[int]
    # of its whole input; infinite where no segment can start, as the input is written in place from
    # there on
    inputs: list[float]


def function_bytes(functions: Sequence[Callable[..., Any]], input: Any) -> FunctionBytes:
    """Run each function once, as if it had not run, and return the bytes autograd saves for it."""
    parameters = [p for f in functions if isinstance(f, nn.Module) for p in f.parameters()]
    sizes = FunctionBytes([], [], [sum(_storages(input).values())])
    # bytes that the function before saved of its output
    saved_before = 0
    # the first function whose input has the memory of the present input
    origin = 0
    random_states = Surroundings([*_tensors(input), *parameters], torch_rng=True, python_rng=True)
    with random_states.restored(), Buffers(attributes=True), disable_current_modes():
        for i, function in enumerate(functions):
            fresh = pytree.tree_map_only(Tensor, _fresh, input)
            versions = [tensor._version for tensor in _tensors(fresh)]
            with saved_tensors() as saved:
                input = function(fresh)
            before = _storages(fresh)
            after = _storages(input)
            # of input and output, the storages that the function saved
            outer = {s: nbytes for s, nbytes in (before | after).items() if saved.holds(s)}
            saved_output = sum(outer[s] for s in outer.keys() & after.keys())
            sizes.saved_inputs.append(max(saved_before, sum(outer.values()) - saved_output))
            sizes.saved_inside.append(saved.nbytes - sum(outer.values()))
            sizes.inputs.append(sum(after.values()))
            if versions != [tensor._version for tensor in _tensors(fresh)]:
                sizes.inputs[origin : i + 1] = [math.inf] * (i + 1 - origin)
            saved_before = saved_output
            origin = origin if before.keys() & after.keys() else i + 1
    sizes.saved_inside[-1] += saved_before
    return sizes


Rule = Callable[[FunctionBytes], list[int]]
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
        return rule(function_bytes(functions, input))
    if starts is None:
        if len(_known) > 1000:
            # by functions that are made anew for each call
            _known.clear()
        starts = _known[key] = rule(function_bytes(functions, input))
    return starts


def _reference(function: Any) -> weakref.ref[Any]:
    # a bound method is made anew each time that it is looked up
    return (weakref.WeakMethod if inspect.ismethod(function) else weakref.ref)(function)


def possible_starts(sizes: FunctionBytes) -> list[int]:
    """Return where segments can start."""
    return [0, *(i for i in range(1, len(sizes.saved_inside)) if sizes.inputs[i] < math.inf)]


def least_starts(sizes: FunctionBytes) -> list[int]:
    """Return the starts with the least sum of the segments' inputs and of the largest segment."""
    # a segment saves ends[stop] - begins[start] bytes: its own input is one of the segments' inputs
    ends = np.cumsum([0, *map(sum, zip(sizes.saved_inputs, sizes.saved_inside, strict=True))])
    begins = ends[:-1] + sizes.saved_inputs
    inputs = np.array([0, *sizes.inputs[1:-1]], float)
    least = math.inf
    best = [0]
    limit = math.inf
    while starts := _cheapest(begins, ends, inputs, limit):
        input_bytes = inputs[starts].sum()
        largest = max(ends[b] - begins[a] for a, b in pairwise([*starts, len(begins)]))
        if input_bytes + largest < least:
            least = input_bytes + largest
            best = starts
        # a lower limit never has smaller inputs; steps of 1 %, for 1,000 functions
        limit = min(largest, least - input_bytes)
        limit -= max(1, limit // 100)
    return best


# by the names that `checkpoint_sequential` takes
RULES: dict[str, Rule] = {"sqrt": least_starts, "recursive": possible_starts}


def _cheapest(begins: Any, ends: Any, inputs: Any, limit: float) -> list[int]:
    """Return starts of segments within the limit with the least inputs; [] if there are none."""
    costs = np.zeros(len(ends))
    starts = [[]]
    for stop in range(1, len(ends)):
        fits = ends[stop] - begins[:stop] <= limit
        totals = np.where(fits, costs[:stop] + inputs[:stop], math.inf)
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
