"""One call of a unit, made again and again: what it holds, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from fusedckpt._timeline import Watch, timeline
from fusedckpt.memory import profiled, saved_tensors
from fusedckpt.trial import aliased, tensors_of

__all__ = ["Bytes", "Call", "NoGraph", "Run"]

Run = Callable[[Any, Any], Any]

# rounds of timing go on for so many seconds per way to run, but for three of them at least
_SECONDS, _MOST_ROUNDS = 0.05, 15


class Bytes(NamedTuple):
    """What a call holds: kept for backward; at worst in forward and in backward beyond that.

    keeps_input, keeps_output: whether what it was given, what it returned is among what is kept.
    """

    kept: int
    forward: int
    backward: int
    keeps_input: bool
    keeps_output: bool


class NoGraph(Exception):
    """The call returns nothing that requires a gradient."""


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


class _Entrance(torch.autograd.Function):
    """Makes an argument something that another unit computed, at no cost in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:  # type: ignore[override]
        return dx


class Call:
    """A module and the arguments that it gets."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any):
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._given = aliased(([*args], {**kwargs}))
        tensors = list(tensors_of(self._given))
        # what the units hand on; the other arguments belong to all of them
        main = next((x for x in tensors if x.requires_grad), None)
        self._constants = [x for x in tensors if x is not main]
        self.device = next((x.device for x in (*tensors, *self._parameters)), torch.device("cpu"))
        self.input_bytes = 0 if main is None else main.numel() * main.element_size()
        self.output_bytes = 0
        # whether it was seen to write into an argument
        self.writes = False
        self._watch = Watch(module)

    def bytes(self, run: Run) -> Bytes:
        """Return what `run(args, kwargs)` and its backward hold."""
        args, kwargs = self._arguments()
        given = list(tensors_of((args, kwargs)))
        keeps: list[bool] = []

        def step() -> None:
            self._watch.phase("forward")
            with saved_tensors(self._constants) as saved:
                outputs = self._outputs(run(args, kwargs))
            keeps.append(any(x in saved for x in given if x.requires_grad))
            root: Any = _Source.apply(*outputs)
            # one that is handed on whole
            handed = StorageWeakRef(outputs[0].untyped_storage())
            seen = len(outputs) == 1 and saved.holds(handed)
            view = any(handed == StorageWeakRef(x.untyped_storage()) for x in given)
            hidden = len(outputs) == 1 and not view
            del outputs
            # torch's selective checkpoints hide what they keep
            keeps.append(seen or (hidden and not handed.expired()))
            self._watch.phase("backward")
            root.backward()
            self._watch.phase("end")

        moments = timeline(profiled(step), self.device, 0)
        self._clear()
        forward, backward = (
            [moment.live_bytes for moment in moments if moment.phase == phase]
            for phase in ("forward", "backward")
        )
        # what lives between the two, and the input that was there before them
        made, own_input = backward[0], self.input_bytes if keeps[0] else 0
        extra = max(0, max(forward) - made + self.input_bytes - own_input)
        return Bytes(made + own_input, extra, max(backward) - made, *keeps)

    def dry(self, run: Run) -> None:
        """Run it once, to see what it writes into."""
        with torch.no_grad():
            args, kwargs = self._arguments()
            given = [(x, x._version) for x in tensors_of((args, kwargs))]
            run(args, kwargs)
        self.writes = any(x._version != version for x, version in given)

    def milliseconds(self, runs: Mapping[str, Run]) -> dict[str, list[tuple[float, float]]]:
        """Return the times of forward and of backward of each run, round by round."""
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        began = time.perf_counter()
        for count in range(_MOST_ROUNDS):
            if count >= 3 and time.perf_counter() - began > _SECONDS * len(runs):
                break
            # in turns, so that what slows the machine down slows all of them
            for name, run in runs.items():
                times[name].append(self._timed(run))
        return times

    @property
    def left_bytes(self) -> int:
        """Bytes of the gradients that the backward leaves."""
        return sum(p.numel() * p.element_size() for p in self._parameters)

    def _timed(self, run: Run) -> tuple[float, float]:
        args, kwargs = self._arguments()
        start = self._now()
        root: Any = _Source.apply(*self._outputs(run(args, kwargs)))
        middle = self._now()
        root.backward()
        end = self._now()
        self._clear()
        return (middle - start) * 1e3, (end - middle) * 1e3

    def _arguments(self) -> tuple[Any, Any]:
        fresh = aliased(self._given)
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda x: _Entrance.apply(x) if x.requires_grad else x, fresh
        )
        return tuple(args), kwargs

    def _outputs(self, output: Any) -> list[Tensor]:
        outputs = [x for x in tensors_of([output]) if x.requires_grad]
        self.output_bytes = sum(x.numel() * x.element_size() for x in outputs)
        if not outputs:
            raise NoGraph
        return outputs

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
