"""Work to be done, and one way of doing it with what is known of it so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.cases import Function, Way
from bench.clock import Step, capture
from bench.results import Row, Timing

__all__ = ["Contender", "DeviceLost", "Work"]

# what the command stands for: it fails if one of these raises
OWN = ("eager", "fusedckpt", "ours(")


class DeviceLost(RuntimeError):
    """An error after which a GPU does nothing more for this process."""


def _is_device_lost() -> bool:
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


class Work(NamedTuple):
    """Inputs (x first), gradients of the outputs, the device, and how many inputs are like x."""

    inputs: Sequence[Tensor]
    douts: Sequence[Tensor]
    device: torch.device
    num_inputs: int = 1

    def forward(self, fn: Function) -> Sequence[Tensor]:
        """Run `fn` and return its outputs as a sequence."""
        outputs = fn(*self.inputs)
        return (outputs,) if isinstance(outputs, Tensor) else outputs

    def backward(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the gradient of every input."""
        return torch.autograd.grad(outputs, self.inputs, self.douts)

    def results(self, fn: Function) -> list[Tensor]:
        """Return outputs, then gradients."""
        outputs = self.forward(fn)
        grads = self.backward(outputs)
        return [*(y.detach() for y in outputs), *grads]

    def in_float64(self) -> Work:
        """The same numbers in float64."""
        inputs = [x.detach().double().requires_grad_() for x in self.inputs]
        return self._replace(inputs=inputs, douts=[dy.double() for dy in self.douts])

    def halved(self) -> Work | None:
        """The first half of the rows; None of one."""
        half = len(self.inputs[0]) // 2
        rows = [x[:half].detach().requires_grad_() for x in self.inputs[: self.num_inputs]]
        inputs = [*rows, *self.inputs[self.num_inputs :]]
        return (
            self._replace(inputs=inputs, douts=[dy[:half] for dy in self.douts]) if half else None
        )

    @property
    def tokens(self) -> int:
        """How many rows x has."""
        return self.inputs[0].numel() // max(1, self.inputs[0].shape[-1])


class Contender:
    """One way of computing, and what is known of it so far."""

    def __init__(self, name: str, way: Way):
        self.name, self.way = name, way
        self.errors: list[float] = []
        self.memory: tuple[int, int, int] | None = None
        self.samples: list[tuple[float, ...]] = []
        self.failure = way.missing
        self.is_wrong = self.is_broken = False
        self.is_graph = False
        self._work: tuple[Work, Work] | None = None
        self._steps: tuple[Step, ...] = ()

    @property
    def fn(self) -> Function:
        """What it calls."""
        assert self.way.fn is not None
        return self.way.fn

    def own(self, work: Work) -> Work:
        """The same work, with the inputs laid out as this contender has them."""
        if self.way.prepare is None:
            return work
        if self._work is None or self._work[0] is not work:
            self._work = work, work._replace(inputs=self.way.prepare(work.inputs))
        return self._work[1]

    def results(self, work: Work) -> list[Tensor]:
        """Outputs, then the gradients of the inputs as everyone else has them."""
        found = self.own(work).results(self.fn)
        if self.way.restore is None:
            return found
        count = len(work.douts)
        return [*found[:count], *self.way.restore(found[count:])]

    def steps(self, work: Work, pool: Any) -> tuple[Step, ...]:
        """Forward and backward, replayed from graphs that share a pool, if one is given."""
        if not self._steps:
            own, made = self.own(work), []

            def forward() -> Any:
                made[:] = own.forward(self.fn)
                return list(made)

            def backward() -> Any:
                outputs, made[:] = list(made), []
                return own.backward(outputs)

            self._steps = (forward, backward)
            if pool is not None:
                first = partial(own.forward, self.fn)
                try:
                    self._steps, self.is_graph = capture(first, own.backward, pool), True
                except Exception:
                    # it is launched from Python, as without graphs
                    torch.cuda.synchronize(work.device)
        return self._steps

    def drop(self) -> None:
        """Let go of inputs of its own and of graphs."""
        self._work, self._steps = None, ()

    def attempt(self, step: Callable[[Contender], Any]) -> None:
        """Take a step unless an earlier one failed; note what it raises, SystemExit too."""
        if self.failure is not None:
            return
        try:
            step(self)
        except (Exception, SystemExit) as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Note an error, by its first line. Raises DeviceLost where nothing can run after it."""
        lines = str(error).strip().splitlines() or [""]
        text = f"{type(error).__name__}: {lines[0]}"
        if _is_device_lost():
            raise DeviceLost(text) from error
        self.lose(text)

    def lose(self, why: str) -> None:
        """Note why it is out, unless it was before."""
        if self.failure is None:
            self.failure, self.is_broken = why, True
        self.drop()

    @property
    def fails_the_command(self) -> bool:
        """Whether its numbers are wrong, or it raised though nothing but a bug explains that."""
        return self.is_wrong or (self.is_broken and self.name.startswith(OWN))

    def row(self) -> Row:
        """What is known, as a record: no speed where anything failed."""
        failure = self.failure or (None if self.samples else "interrupted")
        timings = [Timing.of(times) for times in zip(*self.samples, strict=True)]
        forward, backward, both = timings if not failure else (None, None, None)
        saved, peak, backward_peak = self.memory or (None, None, None)
        return Row(
            name=self.name,
            failure=failure,
            is_wrong=self.is_wrong,
            forward_ms=forward,
            backward_ms=backward,
            both_ms=both,
            saved_bytes=saved,
            peak_bytes=peak,
            backward_peak_bytes=backward_peak,
            errors=tuple(self.errors),
            is_graph=self.is_graph,
        )
