"""Correctness, memory and time of several ways to compute one thing.

Numbers first: who is further from float64 than eager rounding explains gets no speed. Then memory,
then time, the contenders in turn, so that whatever slows the machine down slows all of them. What
one contender raises ends that contender alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.cases import Function
from bench.results import Row, Timing
from fusedckpt.memory import peak_bytes, saved_tensors

__all__ = ["STEPS_BEFORE_TIMING", "Contender", "Work", "measure"]

# rounds that fill caches and tune kernels
WARMUP = 2
# of one contender, counted by the progress bar: numbers, memory, warm-up
STEPS_BEFORE_TIMING = 2 + WARMUP


class Work(NamedTuple):
    """Inputs (x first), gradients of the outputs, and the device."""

    inputs: Sequence[Tensor]
    douts: Sequence[Tensor]
    device: torch.device

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
        return Work(inputs, [dy.double() for dy in self.douts], self.device)


class Contender:
    """One way of computing, and what is known of it so far."""

    def __init__(self, name: str, fn: Function):
        self.name, self.fn = name, fn
        self.errors: list[float] = []
        self.memory: tuple[int, int, int] | None = None
        self.samples: list[tuple[float, float, float]] = []
        self.failure: str | None = None
        self.is_wrong = False

    def attempt(self, step: Callable[[Contender], Any]) -> None:
        """Take a step unless an earlier one failed; note what it raises."""
        if self.failure is not None:
            return
        try:
            step(self)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Note an error, by its first line."""
        lines = str(error).strip().splitlines() or [""]
        self.failure = f"{type(error).__name__}: {lines[0]}"

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
        )


class Truth:
    """Eager's results in float64, and how far eager in the work's own dtype is from them."""

    def __init__(self, work: Work, eager: Function):
        self.work = work
        self.results = work.in_float64().results(eager)
        self.eager_errors = self.errors(work.results(eager))

    def errors(self, found: Sequence[Tensor]) -> list[float]:
        """Root mean square error of each result."""
        pairs = zip(found, self.results, strict=True)
        return [(a.double() - truth).square().mean().sqrt().item() for a, truth in pairs]

    def check(self, contender: Contender) -> None:
        """Hold a contender to twice eager's error, and a floor of 8 float32 epsilons."""
        found = self.work.results(contender.fn)
        contender.errors = self.errors(found)
        pairs = zip(contender.errors, self.eager_errors, strict=True)
        for index, (error, eagers) in enumerate(pairs):
            wide = torch.promote_types(found[index].dtype, torch.float32)
            scale = self.results[index].square().mean().sqrt().item()
            limit = 2 * eagers + 8 * torch.finfo(wide).eps * max(1.0, scale)
            # so written, a NaN fails
            if not error <= limit:
                contender.is_wrong = True
                contender.failure = (
                    f"wrong: result {index} is off by {error:.1e}, eager by {eagers:.1e}"
                )
                return


class Stopwatch:
    """Time as the device sees it; on a GPU the L2 cache is emptied before each measurement."""

    def __init__(self, device: torch.device):
        self.cache: Tensor | None = None
        if device.type == "cuda":
            size = torch.cuda.get_device_properties(device).L2_cache_size
            self.cache = torch.empty(2 * size, dtype=torch.uint8, device=device)

    def start(self) -> Any:
        """Empty the cache and mark the time."""
        if self.cache is not None:
            self.cache.zero_()
        return self.mark()

    def mark(self) -> Any:
        """Mark the time."""
        if self.cache is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Milliseconds from one mark to another."""
        if self.cache is None:
            return 1e3 * (end - start)
        end.synchronize()
        return start.elapsed_time(end)


def _note_memory(work: Work, contender: Contender) -> None:
    # x counts as an intermediate of a model
    inner = work._replace(inputs=[work.inputs[0] * 1, *work.inputs[1:]])
    with saved_tensors(exclude=work.inputs) as saved:
        outputs = inner.forward(contender.fn)
    del outputs, inner
    peak = peak_bytes(lambda: work.results(contender.fn), work.device)
    outputs = work.forward(contender.fn)
    backward_peak = peak_bytes(lambda: work.backward(outputs), work.device)
    contender.memory = saved.nbytes, peak, backward_peak


def _time_once(work: Work, watch: Stopwatch, contender: Contender) -> None:
    start = watch.start()
    outputs = work.forward(contender.fn)
    middle = watch.mark()
    grads = work.backward(outputs)
    end = watch.mark()
    del outputs, grads
    marks = ((start, middle), (middle, end), (start, end))
    forward, backward, both = (watch.between(*pair) for pair in marks)
    contender.samples.append((forward, backward, both))


def measure(
    work: Work,
    contenders: Sequence[Contender],
    eager: Function,
    repeat: int,
    tick: Callable[[], None],
) -> None:
    """Check, weigh and time the contenders, which note what is found; call `tick` at each step."""

    def step(contender: Contender, fn: Callable[[Contender], Any]) -> None:
        contender.attempt(fn)
        tick()

    truth = Truth(work, eager)
    for contender in contenders:
        step(contender, truth.check)
    # its tensors are large
    del truth
    for contender in contenders:
        step(contender, lambda contender: _note_memory(work, contender))
    watch = Stopwatch(work.device)
    for turn in range(WARMUP + repeat):
        first = turn % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            step(contender, lambda contender: _time_once(work, watch, contender))
            if turn < WARMUP:
                contender.samples.clear()
