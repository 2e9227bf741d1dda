"""torch.utils.checkpoint's non-reentrant checkpoint, composing with fused layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as stock
from torch.autograd import forward_ad

from fusedckpt.checkpointing.calls import Call, Contexts, Options
from fusedckpt.checkpointing.segment import Segment

__all__ = ["checkpoint"]


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], Contexts] = stock.noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    preserve_python_rng: bool = False,
    **kwargs: Any,
) -> Any:
    """Return function(*args, **kwargs), keeping its arguments and running it again in backward.

    What runs under torch.utils.checkpoint.checkpoint(..., use_reentrant=False) runs under this with
    the same result, and arguments of that name mean the same. What differs:

    - Fused layers, whatever their level, keep nothing in the forward, and in the recompute all that
      spares their backward a GEMM; a recompute that ends in one ends before it computes anything.
    - A recompute runs only where backward needs a tensor that it brings back, and all that it made
      is dropped at the end of that backward. Saved tensors may be read twice.
    - Random number generators are restored on every device of the tensors in args and kwargs, and
      any torch.Generator there.
    - Buffers of a module that is called in the recompute are put back after its call, so that
      BatchNorm updates once.
    - A tensor argument, or a parameter that autograd saved, that was written in place between
      forward and backward raises, as it does without a checkpoint.

    Args:
        function: a function or module that computes the same each time it is called.
        args, kwargs: its arguments, the same objects each time. What else it reaches is neither
            looked at nor brought back.
        use_reentrant: False or None; True is torch's other implementation.
        context_fn: returns two context managers, for the forward and for the recompute, such as
            torch.utils.checkpoint.create_selective_checkpoint_contexts makes.
        determinism_check: "default" compares shape, dtype and device of recomputed tensors with the
            forward's, "none" nothing.
        debug: keep a copy of what every module in `function` returns, run the recompute to its end,
            and raise where it differs in any bit, naming the first module that does, with the
            operations of both runs.
        early_stop: end the recompute with the last tensor that backward needs.
        preserve_rng_state: give the recompute the random numbers of the forward.
        preserve_python_rng: and those of `random` and `numpy.random`.

    torch's set_checkpoint_debug_enabled and set_checkpoint_early_stop override these. This is
    torch's own operator under torch.compile, a plain call under no_grad, torch.func and forward AD.

    Raises:
        ValueError: use_reentrant is True, determinism_check is unknown, or debug comes with a
            context_fn.
        TypeError: `function` cannot be called.
        torch.utils.checkpoint.CheckpointError: in backward: `function` did something else.
        RuntimeError: in backward: an argument or a parameter was written in place.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
    """
    if use_reentrant:
        raise ValueError(
            "checkpoint: use_reentrant=True is not supported: pass use_reentrant=False, or call "
            "torch.utils.checkpoint.checkpoint"
        )
    if torch.compiler.is_compiling():
        if context_fn is not stock.noop_context_fn:
            # Dynamo does not take the default where it is named
            kwargs["context_fn"] = context_fn
        return stock.checkpoint(
            function,
            *args,
            use_reentrant=False,
            determinism_check=determinism_check,
            debug=debug,
            early_stop=early_stop,
            preserve_rng_state=preserve_rng_state,
            **kwargs,
        )
    rng = preserve_rng_state, preserve_python_rng
    options = Options(*rng, determinism_check, early_stop, debug, context_fn)
    return _run(options, function, args, kwargs)


# the names that a call of `checkpoint` takes for itself
OPTIONS = frozenset(checkpoint.__kwdefaults__ or ())


def _run(options: Options, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not callable(function):
        raise TypeError(f"checkpoint: expected something to call, got {type(function).__name__}")
    # torch's switches, where they are set
    debug = getattr(stock, "_checkpoint_debug_enabled", None)
    early_stop = getattr(stock, "_enable_checkpoint_early_stop", None)
    debug = options.debug if debug is None else debug
    early_stop = options.early_stop if early_stop is None else early_stop
    if debug and options.context_fn is not stock.noop_context_fn:
        raise ValueError("checkpoint: debug=True is incompatible with non-default context_fn")
    if options.determinism_check not in ("default", "none"):
        expected = "checkpoint: determinism_check should be one of 'default', 'none'"
        raise ValueError(f"{expected}, got {options.determinism_check!r}")
    if is_plain_call():
        return function(*args, **kwargs)
    # what a partial holds are arguments like others
    while isinstance(function, functools.partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    options = options._replace(debug=debug, early_stop=early_stop)
    return Segment(options).run(Call(function, args, kwargs, options), args, kwargs)


def is_plain_call() -> bool:
    """Whether nothing is kept for backward here, or torch.func or forward-mode AD is at work."""
    forward_mode = getattr(forward_ad, "_current_level", -1) >= 0
    transformed = torch._C._are_functorch_transforms_active() or forward_mode
    # a trace runs no backward, and checks itself by running again
    return transformed or not torch.is_grad_enabled() or torch._C._get_tracing_state() is not None
