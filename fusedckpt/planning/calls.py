"""One call of a unit, made again and again: what it holds, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from fusedckpt.memory import profiled, saved_tensors
from fusedckpt.reporting.timeline import Watch, timeline
from fusedckpt.reporting.trial import aliased, tensors_of

__all__ = ["Bytes", "Call", "NoGraph", "Run", "seconds"]

Run = Callable[[Any, Any], Any]

# rounds of timing go on until the two best of every way to run agree so well; of as many at least
# and at most; and so many seconds per way to run at most. What takes four times as long in fewer
# rounds is not run once more: such a unit may be most of a step
_AGREED, _ROUNDS, _SECONDS = 1.03, (5, 50), 0.15
# more bytes than the caches of one core hold
_CACHES = 2**23


class Bytes(NamedTuple):
    """What a call holds: kept for backward; at worst in forward and in backward beyond that.

    input: bytes of what other units gave it that are among what is kept. keeps_input, keeps_output:
        whether the first thing that it was given, what it returned is.
    """

    kept: int
    forward: int
    backward: int
    input: int
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
    """A module and the arguments that it gets.

    flows: of the arguments that require grad, whether another unit made it for this one; others,
        such as the output of an encoder, belong to several units. None: all are.
    """

    def __init__(self, module: nn.Module, args: Any, kwargs: Any, flows: Sequence[bool] | None):
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        # to others it adds
        self._made = [p for p in self._parameters if p.grad is None]
        self._given = aliased(([*args], {**kwargs}))
        tensors = list(tensors_of(self._given))
        self._flows = (
            [x.requires_grad for x in tensors if x.requires_grad] if flows is None else flows
        )
        own = self._flowing(tensors)
        self._constants = [x for x in tensors if all(x is not y for y in own)]
        self.device = next((x.device for x in (*tensors, *self._parameters)), torch.device("cpu"))
        self.input_bytes = sum(map(_size, own))
        self.output_bytes = 0
        # whether it was seen to write into an argument
        self.writes = False
        self.forward_flops = 0
        self._watch = Watch(module)

    def bytes(self, run: Run) -> Bytes:
        """Return what `run(args, kwargs)` and its backward hold."""
        args, kwargs = self._arguments()
        given = list(tensors_of((args, kwargs)))
        own, kept_input = self._flowing(given), 0
        keeps: list[bool] = []

        def step() -> None:
            self._watch.phase("forward")
            with saved_tensors(self._constants) as saved:
                outputs = self._outputs(run(args, kwargs))
            nonlocal kept_input
            kept_input = sum(_size(x) for x in own if x in saved)
            keeps.append(bool(own) and own[0] in saved)
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

        moments = timeline(profiled(step, self.device), self.device, 0)
        self._clear()
        forward, backward = (
            [moment.live_bytes for moment in moments if moment.phase == phase]
            for phase in ("forward", "backward")
        )
        # what lives between the two, and the input that was there before them
        made = backward[0]
        extra = max(0, max(forward) - made + self.input_bytes - kept_input)
        return Bytes(made + kept_input, extra, max(backward) - made, kept_input, *keeps)

    def dry(self, run: Run) -> None:
        """Run it once without a graph, to see what it writes into; count its FLOPs."""
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            args, kwargs = self._arguments()
            given = [(x, x._version) for x in tensors_of((args, kwargs))]
            run(args, kwargs)
        self.writes = any(x._version != version for x, version in given)
        self.forward_flops = counter.get_total_flops()

    def run(self, run: Run) -> None:
        """Run it once, with a graph."""
        self._outputs(run(*self._arguments()))

    def milliseconds(self, runs: Mapping[str, Run]) -> dict[str, list[tuple[float, float]]]:
        """Return the times of forward and of backward of each run, round by round."""
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        start, enough = time.perf_counter(), _SECONDS * len(runs)
        for count in range(1, _ROUNDS[1] + 1):
            # in turns, so that what slows the machine down slows all of them
            for name, run in runs.items():
                times[name].append(self._timed(run))
            agreed = all(_agree([sum(pair) for pair in rounds]) for rounds in times.values())
            spent = time.perf_counter() - start
            if (count >= _ROUNDS[0] and (agreed or spent > enough)) or spent > 4 * enough:
                break
        return times

    def flops(self, run: Run) -> int:
        """Return the FLOPs of the matrix products of forward and backward."""
        with FlopCounterMode(display=False) as counter:
            self._timed(run)
        return counter.get_total_flops()

    @property
    def left_bytes(self) -> int:
        """Bytes of the gradients that the backward leaves."""
        return sum(map(_size, self._made))

    def _timed(self, run: Run) -> tuple[float, float]:
        args, kwargs = self._arguments()
        start = self._now()
        root: Any = _Source.apply(*self._outputs(run(args, kwargs)))
        middle = self._now()
        _cool(self.device)
        begin = self._now()
        root.backward()
        end = self._now()
        self._clear()
        return (middle - start) * 1e3, (end - begin) * 1e3

    def _arguments(self) -> tuple[Any, Any]:
        fresh = aliased(self._given)
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda x: _Entrance.apply(x) if x.requires_grad else x, fresh
        )
        return tuple(args), kwargs

    def _flowing(self, tensors: list[Tensor]) -> list[Tensor]:
        graded = [x for x in tensors if x.requires_grad]
        return [x for x, flows in zip(graded, self._flows, strict=True) if flows]

    def _outputs(self, output: Any) -> list[Tensor]:
        outputs = [x for x in tensors_of([output]) if x.requires_grad]
        self.output_bytes = sum(map(_size, outputs))
        if not outputs:
            raise NoGraph
        return outputs

    def _now(self) -> float:
        return seconds(self.device)

    def _clear(self) -> None:
        for parameter in self._made:
            parameter.grad = None


def seconds(device: torch.device) -> float:
    """Return the time at which the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    # of one thread what it ran itself, whatever else the machine does
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time() if alone else time.perf_counter()


def _cool(device: torch.device) -> None:
    """Push what a forward left out of a core's caches, as the rest of a step does."""
    if device.type == "cpu":
        torch.zeros(_CACHES, dtype=torch.uint8, device=device)


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _agree(times: list[float]) -> bool:
    best, *others = sorted(times)
    return bool(others) and others[0] <= _AGREED * best
