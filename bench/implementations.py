"""The implementations of a case: eager and others of torch, ours, and other libraries'."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from bench.cases import CASES, Case, Function, Size, stack
from bench.measure import Implementation
from bench.peers import peers_of
from fusedckpt import checkpoint


def _with_budget(budget: float) -> Callable[..., Any]:
    """Return a compiler that lets a graph save this share of its bytes for backward."""

    def compiler(graph: Any, inputs: Any) -> Any:
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    return compiler


def compiled(budget: float) -> Callable[[Any], Any]:
    """Return torch.compile with this share of a graph's bytes to save for backward."""
    backend = _with_budget(budget)
    return lambda eager: torch.compile(eager, dynamic=False, backend=backend)


# nothing here draws random numbers: no checkpoint pays for keeping their state
stock = partial(torch_checkpoint, use_reentrant=False, preserve_rng_state=False)
ours = partial(checkpoint, preserve_rng_state=False)

# the first is the one that errors and ratios refer to
BASELINES: dict[str, Callable[[Function], Function]] = {
    "eager": lambda eager: eager,
    "torch.compile": lambda eager: torch.compile(eager, dynamic=False),
    "torch.compile 0.5": compiled(0.5),
    "torch.compile 0": compiled(0.0),
    "checkpoint": lambda eager: partial(stock, eager),
}


def _levels(case: Case, size: Size, has_variants: bool) -> Iterator[tuple[str, Function]]:
    fused = case.fused(size)
    if not case.levels:
        yield "fusedckpt", fused
    for level in case.levels:
        yield f"fusedckpt {level}", partial(fused, save=level)
        for variant in case.variants if has_variants else ():
            yield f"fusedckpt {level} {variant}", partial(fused, save=level, kernel=variant)


def _saves_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_saved = "_scaled_dot_product_" in str(op)
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed(case: Case, size: Size) -> Iterator[tuple[str, Function]]:
    """A layer under our checkpoint; layers under either, each by itself and all as one segment."""
    if case.has_context:
        contexts = partial(create_selective_checkpoint_contexts, _saves_attention)
        yield "checkpoint, attention saved", partial(stock, case.eager(size), context_fn=contexts)
    for kind, fn in (("eager", case.eager(size)), ("fused", case.fused(size))):
        if case.call is not stack:
            yield f"ours({kind})", partial(ours, fn)
            if case.has_context:
                yield f"ours({kind}) regions", partial(ours, fn, save_regions="attention")
            continue
        for name, wrap in (("torch", stock), ("ours", ours)):
            yield f"{name}({kind}) per layer", partial(fn, per_layer=wrap)
            yield f"{name}({kind}) one segment", partial(fn, whole=wrap)


def implementations_of(name: str, size: Size, has_variants: bool) -> list[Implementation]:
    """Return all implementations of a case, each kernel variant too where kernels are compiled."""
    case = CASES[name]
    functions = {label: wrap(case.eager(size)) for label, wrap in BASELINES.items()}
    # the slowest to start come last
    labels = [label for label in functions if label.startswith("torch.compile")]
    compiled = {label: functions.pop(label) for label in labels}
    if case.call is stack:
        # _checkpointed has it
        functions.pop("checkpoint", None)
    functions |= dict(_levels(case, size, has_variants))
    if case.sequences:
        if "torch.compile" in compiled:
            compiled["torch.compile fused"] = torch.compile(case.fused(size), dynamic=False)
        functions |= dict(_checkpointed(case, size))
    first = [Implementation(label, fn) for label, fn in functions.items()]
    last = [Implementation(label, fn) for label, fn in compiled.items()]
    return [*first, *peers_of(name, size), *last]
