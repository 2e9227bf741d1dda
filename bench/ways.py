"""The ways of computing a case: eager and what torch offers, ours, and other libraries'."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from bench.cases import CASES, Case, Function, Way
from bench.layers import stack
from bench.peers import peers_of
from bench.sizes import Size
from fusedckpt import checkpoint

__all__ = ["BASELINES", "ways_of"]


def _with_budget(budget: float) -> Callable[..., Any]:
    """Return a compiler that lets a graph keep this share of what it would keep for backward."""

    def compiler(graph: Any, inputs: Any) -> Any:
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    return compiler


def _compiled(budget: float) -> Callable[[Function], Function]:
    backend = _with_budget(budget)
    return lambda eager: torch.compile(eager, dynamic=False, backend=backend)


# nothing here draws random numbers: nobody pays for keeping their state
stock = partial(torch_checkpoint, use_reentrant=False, preserve_rng_state=False)
ours = partial(checkpoint, preserve_rng_state=False)

# what everything is held against; the first is the one that ratios refer to
BASELINES: dict[str, Callable[[Function], Function]] = {
    "eager": lambda eager: eager,
    "torch.compile": lambda eager: torch.compile(eager, dynamic=False),
    "torch.compile 0.5": _compiled(0.5),
    "torch.compile 0": _compiled(0.0),
    "checkpoint": lambda eager: partial(stock, eager),
}


def _levels(case: Case, size: Size, has_plans: bool) -> Iterator[tuple[str, Function]]:
    fused = case.fused(size)
    if not case.levels:
        yield "fusedckpt", fused
    for level in case.levels:
        yield f"fusedckpt {level}", partial(fused, save=level)
        for plan in case.plans if has_plans else ():
            yield f"fusedckpt {level} {plan}", partial(fused, save=level, kernel=plan)


def _checkpointed(case: Case, size: Size) -> Iterator[tuple[str, Function]]:
    """A layer under our checkpoint, eager and fused."""
    yield "ours(eager)", partial(ours, case.eager(size))
    yield "ours(fused)", partial(ours, case.fused(size))


def _stacked(case: Case, size: Size) -> Iterator[tuple[str, Function]]:
    """Layers, eager and fused, under either checkpoint, each by itself and all as one segment."""
    for kind, fn in (("eager", case.eager(size)), ("fused", case.fused(size))):
        for name, wrap in (("torch", stock), ("ours", ours)):
            yield f"{name}({kind}) per layer", partial(fn, per_layer=wrap)
            yield f"{name}({kind}) one segment", partial(fn, whole=wrap)


def ways_of(name: str, size: Size, has_plans: bool) -> dict[str, Way]:
    """Name every way of running a case; with each kernel plan where kernels are compiled."""
    case = CASES[name]
    baselines = dict(BASELINES)
    if case.call is stack:
        # _stacked has it
        baselines.pop("checkpoint")
    ways = {label: wrap(case.eager(size)) for label, wrap in baselines.items()}
    ways |= dict(_levels(case, size, has_plans))
    if case.call is stack:
        ways |= dict(_stacked(case, size))
    elif case.sequences:
        ways |= dict(_checkpointed(case, size))
    return {label: Way(fn) for label, fn in ways.items()} | peers_of(name, size)
