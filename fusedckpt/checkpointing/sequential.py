"""A chain of functions, checkpointed in segments: `checkpoint_sequential`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from fusedckpt.checkpointing import starts
from fusedckpt.checkpointing.segment import OPTIONS, checkpoint

__all__ = ["checkpoint_sequential"]


def checkpoint_sequential(
    functions: Iterable[Callable[..., Any]],
    segments: int | Sequence[int] | str | Any,
    input: Any,
    use_reentrant: bool | None = None,
    **options: Any,
) -> Any:
    """Return the functions applied one after the other to `input`, checkpointed in segments.

    Unlike torch.utils.checkpoint's, every segment is checkpointed, the last one too, and lengths
    differ by one at most.

    Args:
        functions: an nn.Sequential or callables; each is called with what the one before returned.
        segments: how many; or the indices of the functions that start one, but for the first; or
            "sqrt", "recursive"; or the Plan of an nn.Sequential of these functions.
        input: of the first function: a tensor, or any nesting of tensors.
        use_reentrant, options: those of `checkpoint`.

    "sqrt" makes what is handed on between segments and what the largest of them keeps in its
    backward the fewest bytes together: about sqrt(n) segments of n functions that are alike.
    "recursive" checkpoints the first half, the first half of the rest and so on, and the same
    within each: it keeps log2(n) inputs and runs a function log2(n) / 2 times more. Neither starts
    at a function that writes its input in place. The first call for the same functions in the same
    training modes runs them once more to measure this, one by one, with their hooks; random states,
    and modules that have buffers, are then as before.

    Raises:
        ValueError: segments are none of these, an option is none of `checkpoint`'s, or
            `use_reentrant` is True.
        TypeError: one of the functions cannot be called.
    """
    functions = list(functions)
    if others := [function for function in functions if not callable(function)]:
        kind = type(others[0]).__name__
        raise TypeError(f"checkpoint_sequential: expected something to call, got {kind}")
    options["use_reentrant"] = use_reentrant
    if unknown := {*options} - OPTIONS:
        names = ", ".join(sorted(unknown))
        raise ValueError(f"checkpoint_sequential: Unexpected keyword arguments: {names}")
    spans = _spans(functions, segments, input)
    # a plan's MLPs are cut into chunks
    parts: list[Any] = getattr(segments, "cut", list)(functions)
    if isinstance(segments, str) and segments == "recursive":
        # with nothing after it the last one is checkpointed, too
        return _halves([*(parts[a:b] for a, b, _ in spans), []], input, options)
    for start, stop, context in spans:
        if context is None:
            input = checkpoint(_chain, parts[start:stop], input, **options)
        else:
            with context:
                input = _chain(parts[start:stop], input)
    return input


def _chain(functions: Sequence[Callable[..., Any]], input: Any) -> Any:
    for function in functions:
        input = function(input)
    return input


def _halves(parts: list[list[Any]], input: Any, options: dict[str, Any]) -> Any:
    while len(parts) > 1:
        half = len(parts) // 2
        input = checkpoint(_halves, parts[:half], input, options, **options)
        parts = parts[half:]
    return _chain(parts[0], input)


def _spans(functions: list[Any], segments: Any, input: Any) -> list[tuple[int, int, Any]]:
    """Return stretches of functions as (start, stop, context), context None for a segment."""
    count = len(functions)
    if hasattr(segments, "spans"):
        return segments.spans(count)
    rule = starts.RULES.get(segments) if isinstance(segments, str) else None
    if rule is None:
        first = starts.given_starts(segments, count)
    else:
        first = starts.measured_starts(rule, functions, input)
    return [(a, b, None) for a, b in pairwise([*first, count])]
