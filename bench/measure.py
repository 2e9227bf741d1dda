"""Correctness, memory and time of several implementations of one thing.

Numbers first: an implementation that is further from float64 than the project's rule allows is not
timed. Then memory, then time, the implementations in turn, so that a disturbance of the machine
slows all of them; then numbers again. An error of one ends that one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import profile

from bench.cases import Function, Tensors
from bench.clock import Step, Stopwatch, capture, turns
from bench.results import Row, rounded
from fusedckpt.fusing.accuracy import allowed
from fusedckpt.memory import peak_bytes, saved_tensors

MEMORY = ("saved_bytes", "peak_bytes", "backward_peak_bytes")
# rounds that fill caches and tune kernels
WARMUP = 2
# of one implementation, beside the timed ones: numbers, memory, warm-up, numbers again
OTHER_STEPS = 2 + WARMUP + 1


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
        x = self.inputs[0]
        # one sequence is causal: its first half stands for itself
        axis = int(x.dim() == 3 and len(x) == 1)
        half = x.shape[axis] // 2
        if not half:
            return None
        rows = [x.detach().narrow(axis, 0, half) for x in self.inputs[: self.num_inputs]]
        inputs = [*(x.requires_grad_() for x in rows), *self.inputs[self.num_inputs :]]
        return self._replace(inputs=inputs, douts=[dy.narrow(axis, 0, half) for dy in self.douts])

    @property
    def tokens(self) -> int:
        """How many rows x has."""
        return self.inputs[0].numel() // max(1, self.inputs[0].shape[-1])

    def given(self) -> dict[str, Tensor]:
        """Name the tensors that all implementations are given."""
        given = {f"input {index}": x for index, x in enumerate(self.inputs)}
        return given | {f"gradient {index}": dy for index, dy in enumerate(self.douts)}


@dataclass(eq=False)
class Implementation:
    """A function of a case's inputs, and its failure and measurements so far.

    failure: why it is not measured, or not any more. prepare: inputs -> those that the function
    takes, where it wants weights laid out in its own way; restore: its gradients -> the case's.
    memory: saved bytes, peak, peak of the backward; attentions: forwards of attention in a step;
    samples: ms of forward, backward and both.
    """

    name: str
    fn: Function
    failure: str | None = None
    prepare: Callable[[Tensors], Tensors] | None = None
    restore: Callable[[Tensors], Tensors] | None = None
    is_wrong: bool = False
    is_graph: bool = False
    errors: list[float] = field(default_factory=list)
    memory: tuple[int | None, int | None, int | None] = (None, None, None)
    attentions: int | None = None
    samples: list[list[float]] = field(default_factory=list)
    _own: tuple[Work, Work] | None = None
    _steps: tuple[Step, ...] = ()

    def own(self, work: Work) -> Work:
        """The same work, with the inputs laid out as this implementation has them."""
        if self.prepare is None:
            return work
        if self._own is None or self._own[0] is not work:
            self._own = work, work._replace(inputs=self.prepare(work.inputs))
        return self._own[1]

    def results(self, work: Work) -> list[Tensor]:
        """Outputs, then the gradients of the case's own inputs."""
        found = self.own(work).results(self.fn)
        if self.restore is None:
            return found
        count = len(work.douts)
        return [*found[:count], *self.restore(found[count:])]

    def steps(self, work: Work, pool: Any = None) -> tuple[Step, ...]:
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

    def time(self, work: Work, watch: Stopwatch, pool: Any = None) -> None:
        """Take one sample."""
        self.samples.append(watch.times(*self.steps(work, pool)))

    def drop(self) -> None:
        """Let go of inputs of its own and of graphs."""
        self._own, self._steps = None, ()

    def attempt(self, step: Callable[[Implementation], Any]) -> None:
        """Take a step unless an earlier one failed; note its error, SystemExit too."""
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
        self.failure = self.failure or text
        self.drop()

    def row(self) -> Row:
        """The measurements, as columns of a result: no time where anything failed."""
        failure = self.failure or (None if self.samples else "interrupted")
        times = (None,) * 3 if failure else map(rounded, zip(*self.samples, strict=True))
        return {
            "name": self.name,
            "failure": failure,
            "is_wrong": self.is_wrong,
            **dict(zip(("forward_ms", "backward_ms", "both_ms"), times, strict=True)),
            **dict(zip(MEMORY, self.memory, strict=True)),
            "errors": self.errors,
            "is_graph": self.is_graph,
            "attentions": self.attentions,
        }


@contextmanager
def _put_back(given: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Restore tensors that are written to meanwhile, and name them in the list that is yielded."""
    before = {name: x.detach().clone() for name, x in given.items()}
    written: list[str] = []
    try:
        yield written
    finally:
        for name, x in given.items():
            if not torch.equal(x, before[name]):
                written.append(name)
                x.detach().copy_(before[name])


class Truth:
    """Eager's results in float64, and how far eager in the work's own dtype is from them."""

    @classmethod
    def that_fits(cls, work: Work, eager: Function) -> Truth:
        """Take as many rows as fit in memory, halving them while they do not."""
        try:
            return cls(work, eager)
        except torch.OutOfMemoryError:
            half = work.halved()
            if half is None:
                raise
        return cls.that_fits(half, eager)

    def __init__(self, work: Work, eager: Function):
        self.work = work
        self.results = work.in_float64().results(eager)
        found = work.results(eager)
        self.dtypes = [x.dtype for x in found]
        self.eager_errors = self.errors(found)

    def errors(self, found: Sequence[Tensor]) -> list[float]:
        """Root mean square error of each result."""
        pairs = zip(found, self.results, strict=True)
        return [(a.double() - truth).square().mean().sqrt().item() for a, truth in pairs]

    def check(self, one: Implementation) -> None:
        """Hold an implementation to eager's dtypes and to the project's rule of accuracy.

        An implementation that writes to its inputs is wrong too: all others are given the same.
        """
        with _put_back(one.own(self.work).given()) as written:
            found = one.results(self.work)
        if problem := self._problem(one, found, written):
            one.is_wrong, one.failure = True, f"wrong: {problem}"

    def _problem(
        self, one: Implementation, found: Sequence[Tensor], written: Sequence[str]
    ) -> str | None:
        if written:
            return f"it overwrites {written[0]}"
        for index, (x, dtype) in enumerate(zip(found, self.dtypes, strict=True)):
            if x.dtype != dtype:
                return f"result {index} is {x.dtype}, eager's {dtype}"
        one.errors = self.errors(found)
        pairs = zip(one.errors, self.eager_errors, strict=True)
        for index, (error, eagers) in enumerate(pairs):
            size = self.results[index].square().mean().sqrt().item()
            # so written, a NaN fails
            if not error <= allowed(eagers, size, found[index].dtype):
                return f"result {index} is off by {error:.1e}, eager by {eagers:.1e}"
        return None


def _measure_memory(given: Work, one: Implementation) -> None:
    work = one.own(given)
    # x counts as an intermediate of a model
    count = work.num_inputs
    inner = work._replace(inputs=[*(x * 1 for x in work.inputs[:count]), *work.inputs[count:]])
    with saved_tensors(exclude=work.inputs) as saved:
        outputs = inner.forward(one.fn)
    del outputs, inner
    peak = peak_bytes(lambda: work.results(one.fn), work.device)
    outputs = work.forward(one.fn)
    backward_peak = peak_bytes(lambda: work.backward(outputs), work.device)
    one.memory = saved.nbytes, peak, backward_peak
    if work.inputs[0].dim() == 3:
        _count_attention(work, one)


def _count_attention(work: Work, one: Implementation) -> None:
    """Count the forwards of attention in forward and backward, those of a recompute too."""
    with profile() as profiler:
        one.results(work)
    one.attentions = sum(
        "_scaled_dot_product_" in event.name
        and not event.name.endswith(("_backward", "_math"))
        # a dispatch mode calls the kernel in an event inside, or returns a saved output
        and all(child.name != "PythonDispatchMode" for child in event.cpu_children)
        for event in profiler.events() or ()
    )


def in_turns(
    implementations: Sequence[Implementation], repeat: int, step: Callable[[Implementation], None]
) -> None:
    """Let each take `step` once a round; samples of the first rounds are not kept."""
    for turn, one in turns(implementations, WARMUP + repeat):
        step(one)
        if turn < WARMUP:
            one.samples.clear()


def measure(
    work: Work,
    implementations: Sequence[Implementation],
    eager: Function,
    repeat: int,
    begin: Callable[[Implementation], None],
    graphs: bool = False,
) -> int:
    """Check, measure and check again the implementations, which note their results.

    begin: called before each step of one; graphs: replay CUDA graphs where it can be captured.
    Returns at how many tokens the numbers were checked: all, or as many as fit in float64.
    """

    def step(fn: Callable[[Implementation], Any], one: Implementation) -> None:
        begin(one)
        one.attempt(fn)

    def check() -> int:
        truth = Truth.that_fits(work, eager)
        for one in implementations:
            step(truth.check, one)
        return truth.work.tokens

    checked = check()
    with _put_back(work.given()) as written:
        for one in implementations:
            step(partial(_measure_memory, work), one)
        pool = torch.cuda.graph_pool_handle() if graphs and work.device.type == "cuda" else None
        watch = Stopwatch(work.device)
        in_turns(implementations, repeat, partial(step, lambda one: one.time(work, watch, pool)))
        for one in implementations:
            one.drop()
    timed = [one for one in implementations if one.failure is None]
    # an implementation that computes something else from a later call on has no time either
    check()
    if written and all(one.failure is None for one in timed):
        raise ValueError(f"{written[0]} was overwritten in the meantime, source unknown")
    return checked
