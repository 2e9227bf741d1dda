"""Correctness, memory and time of several implementations of one thing.

Numbers first: an implementation that is further from float64 than the project's rule allows is not
timed. Then memory, then time, the implementations in turn, so that a disturbance of the machine
slows all of them; then numbers again. An error of one ends that one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import profile

from bench.cases import Function, Tensors
from bench.clock import Step, Stopwatch, capture, turns
from bench.results import Row, rounded
from fusedckpt.fusing.accuracy import FEWEST, allowed, bound
from fusedckpt.memory import peak_bytes, saved_tensors

# rounds that fill caches and tune kernels
WARMUP = 2


# where a capture failed, after which torch may allocate and draw no more in this process
NO_GRAPH = "no CUDA graph"


class DeviceLost(RuntimeError):
    """An error after which a GPU does nothing more for this process."""


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
        """Return the same numbers in float64."""
        inputs = [x.detach().double().requires_grad_() for x in self.inputs]
        return self._replace(inputs=inputs, douts=[dy.double() for dy in self.douts])


@dataclass(eq=False)
class Implementation:
    """A function of a case's inputs, and its failure and measurements so far.

    failure: why it is not measured, or not any more. pack: inputs -> those that the function takes,
    where it wants weights laid out in its own way; unpack: its gradients -> the case's.
    is_launched: not captured; facts: columns of its row; samples: ms of forward, backward and both.
    """

    name: str
    fn: Function
    failure: str | None = None
    pack: Callable[[Tensors], Tensors] | None = None
    unpack: Callable[[Tensors], Tensors] | None = None
    is_wrong: bool = False
    is_launched: bool = False
    errors: list[float] = field(default_factory=list)
    facts: Row = field(default_factory=dict)
    samples: list[list[float]] = field(default_factory=list)
    _own: tuple[Work, Work] | None = None
    _steps: tuple[Step, ...] = ()

    def own(self, work: Work) -> Work:
        """Return the same work, with the inputs laid out as this implementation has them."""
        if self.pack is None:
            return work
        if self._own is None or self._own[0] is not work:
            self._own = work, work._replace(inputs=self.pack(work.inputs))
        return self._own[1]

    def results(self, work: Work) -> list[Tensor]:
        """Return outputs, then the gradients of the case's own inputs."""
        found, count = self.own(work).results(self.fn), len(work.douts)
        return found if self.unpack is None else [*found[:count], *self.unpack(found[count:])]

    def steps(self, work: Work, pool: Any = None) -> tuple[Step, ...]:
        """Return forward and backward, replayed from graphs that share a pool, if one is given."""
        if not self._steps:
            own, made = self.own(work), []

            def forward() -> Any:
                made[:] = own.forward(self.fn)
                return list(made)

            def backward() -> Any:
                outputs, made[:] = list(made), []
                return own.backward(outputs)

            self._steps = (forward, backward)
            if pool is not None and not self.is_launched:
                try:
                    self._steps = capture(partial(own.forward, self.fn), own.backward, pool)
                except Exception as error:
                    raise DeviceLost(f"{NO_GRAPH}: {error}") from error
                self.facts["is_graph"] = True
        return self._steps

    def time(self, work: Work, watch: Stopwatch, pool: Any = None) -> None:
        """Take one sample."""
        self.samples.append(watch.times(*self.steps(work, pool)))

    def drop(self) -> None:
        """Free inputs of its own and graphs."""
        self._own, self._steps = None, ()

    def attempt(self, step: Callable[[Implementation], Any]) -> None:
        """Take a step unless an earlier one failed; note its error, SystemExit too."""
        if self.failure is None:
            try:
                step(self)
            except (Exception, SystemExit) as error:
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Note an error, by its first line. Raises DeviceLost where nothing can run after it."""
        if isinstance(error, DeviceLost):
            raise error
        lines = str(error).strip().splitlines() or [""]
        text = f"{type(error).__name__}: {lines[0]}"
        try:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except RuntimeError:
            raise DeviceLost(text) from error
        self.failure = self.failure or text
        self.drop()

    def row(self) -> Row:
        """Return the measurements, as columns of a result: no time where anything failed."""
        failure = self.failure or (None if self.samples else "not measured")
        times = (None,) * 3 if failure else map(rounded, zip(*self.samples, strict=True))
        return {
            "name": self.name,
            "failure": failure,
            "is_wrong": self.is_wrong,
            **dict(zip(("forward_ms", "backward_ms", "both_ms"), times, strict=True)),
            **dict.fromkeys(("saved_bytes", "peak_bytes", "backward_peak_bytes", "attentions")),
            **{"errors": self.errors, "is_graph": False},
            **self.facts,
        }


class Truth:
    """Eager's results in float64, and how far eager in the work's own dtype is from them."""

    def __init__(self, work: Work, eager: Function):
        self.work = work
        self.results = work.in_float64().results(eager)
        found = work.results(eager)
        self.dtypes = [x.dtype for x in found]
        self.eager_errors = self.errors(found)

    def errors(self, found: Sequence[Tensor]) -> list[float]:
        """Return the root mean square error of each result."""
        pairs = zip(found, self.results, strict=True)
        return [(a.double() - truth).square().mean().sqrt().item() for a, truth in pairs]

    def check(self, one: Implementation) -> None:
        """Hold an implementation to eager's dtypes and to the project's rule of accuracy.

        An implementation that writes to its inputs is wrong too: all others are given the same.
        """
        work, written = one.own(self.work), []
        given = [(f"input {index}", x) for index, x in enumerate(work.inputs)]
        given += [(f"gradient {index}", dy) for index, dy in enumerate(work.douts)]
        before = [x.detach().clone() for _, x in given]
        try:
            found = one.results(self.work)
        finally:
            for (name, x), old in zip(given, before, strict=True):
                if not torch.equal(x, old):
                    written.append(name)
                    x.detach().copy_(old)
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
            limit = allowed(eagers, size, found[index].dtype)
            if found[index].numel() < FEWEST:
                # a loss: the ratio of two errors of one number means nothing
                limit = bound(size, self.work.inputs[0].dtype)
            # so written, a NaN fails
            if not error <= limit:
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
    one.facts["saved_bytes"] = saved.nbytes
    one.facts["peak_bytes"] = peak_bytes(lambda: work.results(one.fn), work.device)
    outputs = work.forward(one.fn)
    backward = partial(work.backward, outputs)
    one.facts["backward_peak_bytes"] = peak_bytes(backward, work.device)
    if work.inputs[0].dim() == 3:
        one.facts["attentions"] = _num_attentions(work, one)


def _num_attentions(work: Work, one: Implementation) -> int:
    """Count the forwards of attention in forward and backward, those of a recompute too."""
    with profile() as profiler:
        one.results(work)
    return sum(
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
) -> None:
    """Check, measure and check again the implementations, which note their results.

    begin: called before each step of one; graphs: replay CUDA graphs.
    """

    def each(fn: Callable[[Implementation], Any], one: Implementation) -> None:
        begin(one)
        one.attempt(fn)

    truth = Truth(work, eager)
    for step in (truth.check, partial(_measure_memory, work)):
        for one in implementations:
            each(step, one)
    pool = torch.cuda.graph_pool_handle() if graphs else None
    watch = Stopwatch(work.device)
    in_turns(implementations, repeat, partial(each, lambda one: one.time(work, watch, pool)))
    # an implementation that computes something else from a later call on has no time either
    for one in implementations:
        one.drop()
        each(truth.check, one)
