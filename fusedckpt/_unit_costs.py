"""What one unit of a model costs, measured by calling it again and again: time and bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fusedckpt import _roles
from fusedckpt._timeline import Watch, timeline
from fusedckpt.chain import Level, Unit
from fusedckpt.checkpointing import checkpoint
from fusedckpt.levels import LEVELS
from fusedckpt.memory import profiled, saved_tensors
from fusedckpt.trial import aliased, tensors_of
from fusedckpt.units import has_levels

__all__ = ["PLAIN", "PRODUCTS", "kind_of", "measured"]

# the level of a module without fused layers, and that which keeps the outputs of matrix products
PLAIN, PRODUCTS = "plain", "products"
# a time is the median of as many runs as take this long, in seconds, but of three at least
_SECONDS, _MOST_RUNS = 0.05, 15


def kind_of(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return what units that cost the same have in common."""
    shapes = [(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters()]
    leaves, spec = pytree.tree_flatten((args, kwargs))
    given = [
        (tuple(x.shape), x.stride(), x.dtype, x.requires_grad) if isinstance(x, Tensor) else type(x)
        for x in leaves
    ]
    return repr(module), tuple(shapes), tuple(given), str(spec)


class _Source(torch.autograd.Function):
    """Ends a graph: its backward makes the outputs' gradients, which nobody else holds then."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.likes = [(x.shape, x.dtype, x.device) for x in outputs]
        return outputs[0].new_zeros((), requires_grad=False)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        # zeros would be too easy on some kernels
        return tuple(torch.ones(s, dtype=d, device=on) for s, d, on in ctx.likes)


class _Bytes(NamedTuple):
    """What a call holds: kept for backward; at worst in forward and in backward beyond that."""

    kept: int
    forward: int
    backward: int


class _Entrance(torch.autograd.Function):
    """Makes an argument something that the unit's graph computed, at no cost in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:  # type: ignore[override]
        return dx


Run = Callable[[Any, Any], Any]


class _Call:
    """One call of a unit, to be made again and again."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any):
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._given = aliased(([*args], {**kwargs}))
        tensors = list(tensors_of(self._given))
        # what the units hand on; the other arguments belong to all of them
        main = next((x for x in tensors if x.requires_grad), None)
        self._constants = [x for x in tensors if x is not main]
        self._main = main
        self.device = next((x.device for x in (*tensors, *self._parameters)), torch.device("cpu"))
        self.watch = Watch(module)
        self.input_bytes = 0 if main is None else main.numel() * main.element_size()
        self.output_bytes = 0

    def bytes(self, run: Run) -> _Bytes:
        """Return what `run(args, kwargs)` and its backward hold."""
        args, kwargs = self._arguments()
        entered = list(tensors_of((args, kwargs)))
        own: list[bool] = []

        def step() -> None:
            self.watch.phase("forward")
            with saved_tensors(self._constants) as saved:
                root = self._root(run(args, kwargs))
            own.append(any(x in saved for x in entered if x.requires_grad))
            self.watch.phase("backward")
            root.backward()
            self.watch.phase("end")

        moments = timeline(profiled(step), self.device, 0)
        self._clear()
        forward, backward = (
            [moment.live_bytes for moment in moments if moment.phase == phase]
            for phase in ("forward", "backward")
        )
        # what lives between the two, and the input that was there before them
        made, own_input = backward[0], self.input_bytes if own[0] else 0
        extra_forward = max(forward) - made + self.input_bytes - own_input
        return _Bytes(made + own_input, max(0, extra_forward), max(backward) - made)

    def milliseconds(self, run: Run) -> tuple[float, float]:
        """Return the medians of the times that forward and backward take."""
        times: list[tuple[float, float]] = []
        began = time.perf_counter()
        while len(times) < 3 or (
            time.perf_counter() - began < _SECONDS and len(times) < _MOST_RUNS
        ):
            args, kwargs = self._arguments()
            start = self._now()
            root = self._root(run(args, kwargs))
            middle = self._now()
            root.backward()
            times.append(((middle - start) * 1e3, (self._now() - middle) * 1e3))
            self._clear()
        forward, backward = (statistics.median(column) for column in zip(*times, strict=True))
        return forward, backward

    @property
    def left_bytes(self) -> int:
        """Bytes of the gradients that the backward leaves."""
        return sum(p.numel() * p.element_size() for p in self._parameters)

    def _arguments(self) -> tuple[Any, Any]:
        fresh = aliased(self._given)
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda x: _Entrance.apply(x) if x.requires_grad else x, fresh
        )
        return tuple(args), kwargs

    def _root(self, output: Any) -> Tensor:
        outputs = [x for x in tensors_of([output]) if x.requires_grad]
        self.output_bytes = sum(x.numel() * x.element_size() for x in outputs)
        return _Source.apply(*outputs)  # type: ignore[no-any-return]

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def measured(
    module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, selective: bool
) -> Unit:
    """Measure one call of a unit at each of its levels; if `selective`, at PRODUCTS too."""
    call = _Call(module, args, kwargs)
    runs = {
        level or PLAIN: partial(_roles.Keeping(level).call, forward)
        for level in (LEVELS if has_levels(module) else (None,))
    }
    if selective:
        runs[PRODUCTS] = partial(_roles.Selecting().call, forward)
    taken = {name: call.bytes(run) for name, run in runs.items()}
    # of levels that keep the same, the first one
    distinct = {found.kept: name for name, found in reversed(taken.items())}
    times = {name: call.milliseconds(runs[name]) for name in distinct.values()}
    fastest = min(backward for _, backward in times.values())
    forward_ms = statistics.median(ms for ms, _ in times.values())
    again = call.milliseconds(lambda a, k: checkpoint(forward, *a, **k))[1] - fastest
    return Unit(
        name="",
        levels=tuple(
            Level(name, taken[name].kept, backward - fastest, taken[name].backward)
            for name, (_, backward) in times.items()
        ),
        forward=forward_ms,
        input=call.input_bytes,
        output=call.output_bytes,
        # what a segment that ends here does not run again
        tail=min(forward_ms, max(0.0, forward_ms - again)),
        forward_transient=max(found.forward for found in taken.values()),
        left=call.left_bytes,
    )
