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
    """The tensors of a case."""

    # x first, then parameters
    inputs: Sequence[Tensor]
    # the gradients of the outputs
    douts: Sequence[Tensor]
    device: torch.device
    # the number of inputs of x's shape, which come first
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
    """A function of a case's inputs, and its failure and measurements so far."""

    # as tables show it
    name: str
    # called with the case's inputs, packed
    fn: Function
    # the reason why it is not measured, or no longer
    failure: str | None = None
    # maps the case's inputs to those of the function, which may lay out weights in another way
    pack: Callable[[Tensors], Tensors] | None = None
    # maps the function's gradients to those of the case's inputs
    unpack: Callable[[Tensors], Tensors] | None = None
    # whether its numbers break the rule of accuracy
    is_wrong: bool = False
    # whether its kernels are launched from Python, because no CUDA graph captures them
    is_launched: bool = False
    # root mean square errors against float64, by result
    errors: list[float] = field(default_factory=list)
    # columns of its row
    facts: Row = field(default_factory=dict)
    # ms of forward, backward and both
    samples: list[list[float]] = field(default_factory=list)
    # the case's work, and the same with packed inputs
    _packed: tuple[Work, Work] | None = None
    # forward and backward
    _steps: tuple[Step, ...] = ()

    def packed(self, work: Work) -> Work:
        """Return the same work, with the inputs laid out as this implementation has them."""
        if self.pack is None:
            return work
        if self._packed is None or self._packed[0] is not work:
            self._packed = work, work._replace(inputs=self.pack(work.inputs))
        return self._packed[1]

    def results(self, work: Work) -> list[Tensor]:
        """Return outputs, then the gradients of the case's inputs."""
        results = self.packed(work).results(self.fn)
        if self.unpack is None:
            return results
        count = len(work.douts)
        return [*results[:count], *self.unpack(results[count:])]

    def steps(self, work: Work, pool: Any = None) -> tuple[Step, ...]:
        """Return forward and backward, replayed from graphs that share a pool, if one is given."""
        if not self._steps:
            packed = self.packed(work)
            # of the last forward
            outputs: list[Tensor] = []

            def forward() -> Any:
                outputs[:] = packed.forward(self.fn)
                return list(outputs)

            def backward() -> Any:
                last = list(outputs)
                outputs.clear()
                return packed.backward(last)

            self._steps = (forward, backward)
            if pool is not None and not self.is_launched:
                try:
                    self._steps = capture(partial(packed.forward, self.fn), packed.backward, pool)
                except Exception as error:
                    raise DeviceLost(f"{NO_GRAPH}: {error}") from error
                self.facts["is_graph"] = True
        return self._steps

    def time(self, work: Work, watch: Stopwatch, pool: Any = None) -> None:
        """Take one sample."""
        self.samples.append(watch.times(*self.steps(work, pool)))

    def drop(self) -> None:
        """Free packed inputs and graphs."""
        self._packed = None
        self._steps = ()

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
        results = work.results(eager)
        self.dtypes = [x.dtype for x in results]
        self.eager_errors = self.errors(results)

    def errors(self, results: Sequence[Tensor]) -> list[float]:
        """Return the root mean square error of each result."""
        pairs = zip(results, self.results, strict=True)
        return [(a.double() - truth).square().mean().sqrt().item() for a, truth in pairs]

    def check(self, implementation: Implementation) -> None:
        """Hold an implementation to eager's dtypes and to the project's rule of accuracy.

        An implementation that writes to its inputs is wrong too: all others get the same tensors.
        """
        work = implementation.packed(self.work)
        tensors = [(f"input {index}", x) for index, x in enumerate(work.inputs)]
        tensors += [(f"gradient {index}", dy) for index, dy in enumerate(work.douts)]
        before = [x.detach().clone() for _, x in tensors]
        written: list[str] = []
        try:
            results = implementation.results(self.work)
        finally:
            for (name, x), old in zip(tensors, before, strict=True):
                if not torch.equal(x, old):
                    written.append(name)
                    x.detach().copy_(old)
        if problem := self._problem(implementation, results, written):
            implementation.is_wrong = True
            implementation.failure = f"wrong: {problem}"

    def _problem(
        self, implementation: Implementation, results: Sequence[Tensor], written: Sequence[str]
    ) -> str | None:
        if written:
            return f"it overwrites {written[0]}"
        for index, (x, dtype) in enumerate(zip(results, self.dtypes, strict=True)):
            if x.dtype != dtype:
                return f"result {index} is {x.dtype}, eager's {dtype}"
        implementation.errors = self.errors(results)
        pairs = zip(implementation.errors, self.eager_errors, strict=True)
        for index, (error, eagers) in enumerate(pairs):
            size = self.results[index].square().mean().sqrt().item()
            limit = allowed(eagers, size, results[index].dtype)
            if results[index].numel() < FEWEST:
                # a loss: the ratio of two errors of one number means nothing
                limit = bound(size, self.work.inputs[0].dtype)
            # so written, a NaN fails
            if not error <= limit:
                return f"result {index} is off by {error:.1e}, eager by {eagers:.1e}"
        return None


def _measure_memory(case_work: Work, implementation: Implementation) -> None:
    work = implementation.packed(case_work)
    # x counts as an intermediate of a model
    count = work.num_inputs
    inner = work._replace(inputs=[*(x * 1 for x in work.inputs[:count]), *work.inputs[count:]])
    with saved_tensors(exclude=work.inputs) as saved:
        outputs = inner.forward(implementation.fn)
    del outputs, inner
    implementation.facts["saved_bytes"] = saved.nbytes
    implementation.facts["peak_bytes"] = peak_bytes(
        lambda: work.results(implementation.fn), work.device
    )
    outputs = work.forward(implementation.fn)
    backward = partial(work.backward, outputs)
    implementation.facts["backward_peak_bytes"] = peak_bytes(backward, work.device)
    if work.inputs[0].dim() == 3:
        implementation.facts["attentions"] = _num_attentions(work, implementation)


def _num_attentions(work: Work, implementation: Implementation) -> int:
    """Count the forwards of attention in forward and backward, those of a recompute too."""
    with profile() as profiler:
        implementation.results(work)
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
    for turn, implementation in turns(implementations, WARMUP + repeat):
        step(implementation)
        if turn < WARMUP:
            implementation.samples.clear()


def measure(
    work: Work,
    implementations: Sequence[Implementation],
    eager: Function,
    repeat: int,
    begin: Callable[[Implementation], None],
    graphs: bool = False,
) -> None:
    """Check, measure and check again the implementations, which note their results.

    begin: called before each step of an implementation; graphs: replay CUDA graphs.
    """

    def each(fn: Callable[[Implementation], Any], implementation: Implementation) -> None:
        begin(implementation)
        implementation.attempt(fn)

    truth = Truth(work, eager)
    for step in (truth.check, partial(_measure_memory, work)):
        for implementation in implementations:
            each(step, implementation)
    pool = torch.cuda.graph_pool_handle() if graphs else None
    watch = Stopwatch(work.device)
    in_turns(
        implementations,
        repeat,
        partial(each, lambda implementation: implementation.time(work, watch, pool)),
    )
    # an implementation that computes something else from a later call on has no time either
    for implementation in implementations:
        implementation.drop()
        each(truth.check, implementation)
