"""Checkpointing that composes with fused layers: nothing is recomputed twice.

GEMMs of a training step of four fused MLPs, of which 8 are the forward's and 16 the gradients':

    no checkpoint, save="preact"                               24
    no checkpoint, save="inputs"                               28
    fusedckpt.checkpoint, one segment per layer                28
    fusedckpt.checkpoint, one segment                          31
    torch.utils.checkpoint, one segment or one per layer       32
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint as stock_checkpoint

from fusedckpt.autograd.levels import LEVELS, saving
from fusedckpt.checkpointing.determinism import Record
from fusedckpt.checkpointing.holdings import Holdings, callee
from fusedckpt.checkpointing.recompute import is_recomputing
from fusedckpt.checkpointing.replay import Conditions
from fusedckpt.checkpointing.segment import Segment
from fusedckpt.memory import saved_tensors
from fusedckpt.policies import balanced

if TYPE_CHECKING:
    from fusedckpt.plans import Plan

__all__ = ["checkpoint", "checkpoint_sequential", "is_recomputing"]


def checkpoint(
    fn: Callable[..., Any],
    *args: Any,
    preserve_rng_state: bool = True,
    preserve_python_rng: bool = False,
    debug: bool = False,
    **kwargs: Any,
) -> Any:
    """Return fn(*args, **kwargs), keeping its arguments and running it once more in backward.

    What is kept: the tensors among the arguments, in any nesting of lists, tuples and dicts. The
    recompute stops at the last tensor that backward needs, before a fused layer that ends the
    segment, and all that it made is dropped at the end of the backward. Whatever their level, fused
    layers keep nothing in the forward, and in the recompute all that spares their backward a GEMM.

    Args:
        fn: a function or module that computes the same each time it is called.
        args, kwargs: its arguments.
        preserve_rng_state: give the recompute the random numbers of the forward, on the CPU, on
            the devices of the arguments and of what `fn` holds, and of any torch.Generator there.
        preserve_python_rng: and those of `random` and `numpy.random`.
        debug: keep a copy of what every module in `fn` returns, run the recompute to its end, and
            raise where it differs in any bit, naming the first module that does.

    Where the parameters, buffers, arguments or closure of `fn` are written in place between forward
    and backward, backward raises; where they are replaced, it recomputes with those of the forward.
    Buffers that the forward itself writes, such as BatchNorm's, are written once. This goes for
    what `fn` holds: its modules, closure, defaults, and the globals and attributes that its code
    names. What it reaches through other objects, and other state that it writes, it must keep the
    same by itself, see `is_recomputing`; values alone that differ show with `debug`.

    Under torch.compile this is torch.utils.checkpoint's non-reentrant form; under no_grad,
    torch.func transforms and forward-mode AD it is a plain call.

    Raises:
        TypeError: `fn` cannot be called.
        torch.utils.checkpoint.CheckpointError: in backward, where `fn` did not do the same again.
        RuntimeError: in backward, where something it reads was written in place.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
    """
    if torch.compiler.is_compiling():
        return stock_checkpoint(
            fn, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs
        )
    _check_callable("checkpoint", fn)
    if is_plain_call():
        return fn(*args, **kwargs)
    # what a partial holds are arguments like others
    while isinstance(fn, functools.partial):
        fn, args, kwargs = fn.func, (*fn.args, *args), {**fn.keywords, **kwargs}
    flat = pytree.tree_flatten((args, kwargs))
    conditions = conditions_of(fn, flat[0], preserve_rng_state, preserve_python_rng)
    segment = Segment(Record(_holdings(fn, flat[0]).modules) if debug else None)
    return segment.run(fn, args, kwargs, flat, conditions)


def is_plain_call() -> bool:
    """Whether nothing is kept for backward here, or torch.func or forward-mode AD is at work."""
    transformed = torch._C._are_functorch_transforms_active() or _forward_level() >= 0
    return transformed or not torch.is_grad_enabled()


def _forward_level() -> int:
    return getattr(forward_ad, "_current_level", -1)


def conditions_of(
    fn: Callable[..., Any], leaves: Sequence[Any], rng: bool = True, python_rng: bool = False
) -> Conditions:
    """Return what a call with these arguments, flattened, finds now."""
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
    return Conditions(_holdings(fn, leaves), devices, rng=rng, python_rng=python_rng)


def _holdings(fn: Callable[..., Any], leaves: Sequence[Any]) -> Holdings:
    return Holdings(callee(fn), *(leaf for leaf in leaves if not isinstance(leaf, Tensor)))


def checkpoint_sequential(
    functions: Iterable[Callable[..., Any]],
    segments: int | Sequence[int] | str | Plan,
    input: Any,
    **options: Any,
) -> Any:
    """Return the functions applied one after the other to `input`, checkpointed in segments.

    Unlike torch.utils.checkpoint's, every segment is checkpointed, the last one too, and lengths
    differ by one at most.

    Args:
        functions: an nn.Sequential or callables; each is called with what the one before returned.
        segments: how many; or the indices of the functions that start one, but for the first; or
            "sqrt": about the square root of the number of functions, balanced by the bytes that
            they keep, which one forward more per call measures; or what `plan` returned for an
            nn.Sequential of these functions.
        input: of the first function: a tensor, or any nesting of tensors.
        options: those of `checkpoint`.

    Raises:
        ValueError: segments are none of these: less than one, more than functions, not in order.
        TypeError: what is called cannot be called.
    """
    functions = list(functions)
    for function in functions:
        _check_callable("checkpoint_sequential", function)
    for start, stop, level in _spans(functions, segments, input):
        if level is None:
            input = checkpoint(_chain, functions[start:stop], input, **options)
        else:
            with saving(level) if level in LEVELS else nullcontext():
                input = _chain(functions[start:stop], input)
    return input


def _chain(functions: Sequence[Callable[..., Any]], input: Any) -> Any:
    for function in functions:
        input = function(input)
    return input


def _check_callable(name: str, fn: Any) -> None:
    if not callable(fn):
        raise TypeError(f"{name}: expected something to call, got {type(fn).__name__}")


def _spans(functions: list[Any], segments: Any, input: Any) -> list[tuple[int, int, str | None]]:
    """Return stretches of functions as (start, stop, level), level None for a segment."""
    if hasattr(segments, "spans"):
        return segments.spans(len(functions))
    starts = _starts(functions, segments, input)
    return [(a, b, None) for a, b in pairwise([*starts, len(functions)])]


def _starts(functions: list[Any], segments: Any, input: Any) -> list[int]:
    """Return the indices of the functions that start a segment."""
    count = len(functions)
    if isinstance(segments, str) and segments == "sqrt":
        return balanced(_kept_bytes(functions, input)) if torch.is_grad_enabled() else [0]
    if isinstance(segments, int) and 1 <= segments <= count:
        return [count * i // segments for i in range(segments)]
    if isinstance(segments, Sequence) and all(isinstance(start, int) for start in segments):
        starts = [0, *segments]
        if all(a < b for a, b in pairwise([*starts, count])):
            return starts
    raise ValueError(
        f"checkpoint_sequential: segments must be 1 to {count}, ascending indices between, 'sqrt' "
        f"or a Plan, got {segments!r}"
    )


def _kept_bytes(functions: list[Any], input: Any) -> list[int]:
    """Run each function once, as if it had not run, and return what autograd keeps for it."""
    leaves = [leaf for leaf in pytree.tree_leaves(input) if isinstance(leaf, Tensor)]
    devices = {leaf.device for leaf in leaves}
    sizes = []
    held = Holdings(*map(callee, functions))
    with Conditions(held, devices, rng=True, python_rng=True).restored():
        for function in functions:
            # not a leaf, which it could not write in place
            input = pytree.tree_map_only(Tensor, _fresh, input)
            with saved_tensors() as saved:
                input = function(input)
            sizes.append(saved.nbytes)
    return sizes


def _fresh(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()
