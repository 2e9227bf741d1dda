"""A chain of functions, checkpointed in segments: `checkpoint_sequential`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

from torch import Tensor

from fusedckpt.autograd import phases
from fusedckpt.autograd.backward import versions_of
from fusedckpt.autograd.private import pytree
from fusedckpt.checkpointing import starts
from fusedckpt.checkpointing.calls import storage_of
from fusedckpt.checkpointing.segment import OPTIONS, Segment, checkpoint, is_plain_call

__all__ = ["checkpoint_sequential"]


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

    "sqrt" minimises the bytes of all segments' inputs and of the tensors saved by the largest
    segment in its backward: about sqrt(n) segments of n equal functions. "recursive" checkpoints
    the first half, the first half of the rest and so on, and the same within each: it saves log2(n)
    inputs and runs a function log2(n) / 2 times more. The first call for the same functions and
    training modes runs each of them once more, with its hooks, to measure this; RNG states and
    buffers are restored.

    No segment starts at a function that modifies its input in place, unless its index is given.
    Of a number of segments, one that would start there starts after that function, and the tensors
    that the function saves are kept.

    Raises:
        ValueError: `segments` is invalid, `checkpoint` has no such option, or `use_reentrant` is
            True.
        TypeError: one of the functions is not callable.
    """
    functions = list(functions)
    if others := [function for function in functions if not callable(function)]:
        kind = type(others[0]).__name__
        raise TypeError(f"checkpoint_sequential: expected something to call, got {kind}")
    options["use_reentrant"] = use_reentrant
    if hasattr(segments, "spans"):
        # a plan's, as of the modules that it is applied to
        options.setdefault("preserve_python_rng", True)
    if unknown := {*options} - OPTIONS:
        names = ", ".join(sorted(unknown))
        raise ValueError(f"checkpoint_sequential: Unexpected keyword arguments: {names}")
    if hasattr(segments, "__index__"):
        first = starts.given_starts(segments, len(functions))
        return _run_evenly(functions, first, options, input)
    parts, spans = _spans(functions, segments, input)
    return _run(parts, spans, options, input)


# functions from start to stop, counted within the span around, as a segment: None, or a list of
# spans where segments are nested in it; or the context in which they run, as no segment
Span: TypeAlias = tuple[int, int, Any]


def halves(count: int, is_inside: bool = False) -> list[Span]:
    """Return as segments the first half, the first half of the rest and so on, halved likewise.

    Inside a segment the last one runs as it is: its backward comes next. At the top it is a segment
    of its own: code that keeps something, too, comes next.
    """
    spans: list[Span] = []
    start = 0
    while (half := (count - start + (not is_inside)) // 2) > 0:
        spans.append((start, start + half, halves(half, True) if half > 1 else None))
        start += half
    return [*spans, (start, count, nullcontext())] if is_inside else spans


def _run(parts: Sequence[Any], spans: Sequence[Span], options: dict[str, Any], input: Any) -> Any:
    for start, stop, within in spans:
        if within is None or isinstance(within, list):
            input = _checkpointed(parts[start:stop], within, options, input)
        else:
            with within:
                input = _chain(parts[start:stop], input)
    return input


def _checkpointed(
    parts: Sequence[Any], spans: Sequence[Span] | None, options: dict[str, Any], input: Any
) -> Any:
    # a segment around drops tensors that are arguments, not those in containers
    is_tensor = isinstance(input, Tensor)
    leaves, spec = ([input], None) if is_tensor else pytree.tree_flatten(input)
    return checkpoint(_run_again, parts, spans, options, spec, *leaves, **options)


def _run_evenly(
    functions: Sequence[Any], first: list[int], options: dict[str, Any], input: Any
) -> Any:
    for start, stop in pairwise([*first, len(functions)]):
        while start < stop:
            stretch = _Stretch(functions[start:stop])
            input = _checkpointed([stretch], None, options, input)
            start += stretch.count
    return input


class _Stretch:
    """Functions that run as one segment; if the first modify its input in place, those alone.

    They cannot run again then, so the segment keeps the tensors that they save.
    """

    def __init__(self, functions: Sequence[Any]):
        self.functions, self.count = functions, len(functions)

    def __call__(self, input: Any) -> Any:
        segment = None if is_plain_call() else phases.current()
        if not isinstance(segment, Segment):
            # in the recompute as in the forward
            return _chain(self.functions[: self.count], input)
        given = [x for x in pytree.tree_leaves(input) if isinstance(x, Tensor)]
        # a tensor that needs no gradient may go through the whole chain, as masks do
        followed = {storage_of(x) for x in given if x.requires_grad} or {*map(storage_of, given)}
        before, segment.held = versions_of(*given), []
        for number, function in enumerate(self.functions, 1):
            input = function(input)
            if segment.held is None:
                continue
            if versions_of(*given) != before:
                self.count = number
                return input
            found = {storage_of(x) for x in pytree.tree_leaves(input) if isinstance(x, Tensor)}
            if number == self.count or not followed & found - {0}:
                segment.held = None
        return input


def _run_again(
    parts: Sequence[Any],
    spans: Sequence[Span] | None,
    options: dict[str, Any],
    spec: pytree.TreeSpec | None,
    *leaves: Any,
) -> Any:
    input = leaves[0] if spec is None else pytree.tree_unflatten(leaves, spec)
    return _chain(parts, input) if spans is None else _run(parts, spans, options, input)


def _chain(functions: Sequence[Callable[..., Any]], input: Any) -> Any:
    for function in functions:
        input = function(input)
    return input


def _spans(functions: list[Any], segments: Any, input: Any) -> tuple[list[Any], list[Span]]:
    """Return the functions to call one after the other, and the spans of that list."""
    count = len(functions)
    if hasattr(segments, "spans"):
        # MLPs are cut into chunks
        return segments.cut(functions), segments.spans(count)
    rule = starts.RULES.get(segments) if isinstance(segments, str) else None
    if rule is None:
        first = starts.given_starts(segments, count)
    else:
        first = starts.measured_starts(rule, functions, input)
    stretches = list(pairwise([*first, count]))
    if rule is starts.possible_starts:
        parts = [partial(_chain, functions[a:b]) for a, b in stretches]
        return parts, halves(len(parts))
    return functions, [(a, b, None) for a, b in stretches]
