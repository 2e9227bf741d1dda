"""Ways to run a unit that are measured, and what was timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fusedckpt.planning import roles
from fusedckpt.planning.calls import Call, Run

__all__ = ["Times", "alone", "end", "middle", "once", "packed", "timed"]


def alone(level: str, forward: Callable[..., Any]) -> Run:
    """Return the run of a unit that is a segment of its own."""
    chained = roles.Chained((roles.inner_level(level),))
    return partial(roles.Member(chained, 0).call, forward)


def packed(run: Run, args: Any, kwargs: Any) -> Any:
    """Run where saved tensors go through hooks, as inside a segment."""
    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x):
        return run(args, kwargs)


class _Needed(torch.autograd.Function):
    """Hands on a tensor that its backward needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:  # type: ignore[override]  # one tensor
        _ = ctx.saved_tensors
        return dx


def _needed(output: Any) -> Any:
    return pytree.tree_map_only(
        Tensor, lambda x: _Needed.apply(x) if x.requires_grad else x, output
    )


def middle(level: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a unit as the first of a segment that goes on."""
    chained = roles.Chained((roles.inner_level(level), "preact"))
    return chained.run(1, _needed, (chained.run(0, forward, args, kwargs),), {})


def end(run: Run, args: Any, kwargs: Any) -> Any:
    """Run a unit with the end of such a segment behind it."""
    return roles.Chained(("preact",)).run(0, _needed, (run(args, kwargs),), {})


T = TypeVar("T")

# what was timed, by all that it depends on
_known: dict[Any, Any] = {}


def once(key: Any, measure: Callable[[], T]) -> T:
    """Return what was measured first for this key."""
    if key not in _known:
        if len(_known) > 1000:
            _known.clear()
        _known[key] = measure()
    return _known[key]


def timed(kind: Any, call: Call, runs: Mapping[str, Run]) -> dict[str, list[tuple[float, float]]]:
    """Return what `Call.milliseconds` returned first for units of this kind."""
    key = kind, call.device, torch.get_num_threads(), tuple(runs)
    return once(key, lambda: call.milliseconds(runs))


class Times:
    """What was timed, round by round: ms of forward and backward of each way to run a unit.

    forwards: FLOPs of each way, in those of the forward.
    """

    def __init__(
        self, rounds: Mapping[str, list[tuple[float, float]]], forwards: Mapping[str, float]
    ):
        self._rounds, self._forwards = rounds, forwards

    def forward(self, names: Iterable[str]) -> float:
        """Return the ms of the forward of these ways."""
        return median(ms for name in names for ms, _ in self._rounds[name])

    def slower(self, name: str, than: str) -> float:
        """Return the ms by which one way is slower than another, not below 0."""
        # round by round: what slows the machine down slows all ways
        both = zip(self._rounds[name], self._rounds[than], strict=True)
        found = median(sum(ours) - sum(theirs) for ours, theirs in both)
        # on a noisy machine a product may seem to be free: not below half of what it should take
        more = self._forwards.get(name, 0.0) - self._forwards.get(than, 0.0)
        return max(0.0, found, more * self.forward([than]) / 2)
