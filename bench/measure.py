"""Correctness, memory and time of several ways to compute one thing.

Numbers first: who is further from float64 than eager rounding explains gets no speed. Then memory,
then time, the contenders in turn, so that whatever slows the machine down slows all of them; then
numbers again. What one contender raises ends that contender alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.cases import Function
from bench.clock import Stopwatch
from bench.contender import Contender, Work
from fusedckpt.memory import peak_bytes, saved_tensors

__all__ = ["OTHER_STEPS", "Truth", "measure"]

# rounds that fill caches and tune kernels
WARMUP = 2
# of one contender, counted by the progress bar: numbers, memory, warm-up, numbers again
OTHER_STEPS = 2 + WARMUP + 1


@contextmanager
def _put_back(given: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Restore what is written to meanwhile, and name it in the list that is yielded."""
    before = {name: x.detach().clone() for name, x in given.items()}
    written: list[str] = []
    try:
        yield written
    finally:
        for name, x in given.items():
            if not torch.equal(x, before[name]):
                written.append(name)
                x.detach().copy_(before[name])


def _given(work: Work) -> dict[str, Tensor]:
    given = {f"input {index}": x for index, x in enumerate(work.inputs)}
    return given | {f"gradient {index}": dy for index, dy in enumerate(work.douts)}


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

    def check(self, contender: Contender) -> None:
        """Hold a contender to eager's dtypes, twice its error, and a floor of 8 float32 epsilons.

        Whoever writes to what it is given is wrong too: all others are given the same.
        """
        with _put_back(_given(contender.own(self.work))) as written:
            found = contender.results(self.work)
        if problem := self._problem(contender, found, written):
            contender.is_wrong, contender.failure = True, f"wrong: {problem}"

    def _problem(
        self, contender: Contender, found: Sequence[Tensor], written: Sequence[str]
    ) -> str | None:
        if written:
            return f"it overwrites {written[0]}"
        for index, (x, dtype) in enumerate(zip(found, self.dtypes, strict=True)):
            if x.dtype != dtype:
                return f"result {index} is {x.dtype}, eager's {dtype}"
        contender.errors = self.errors(found)
        pairs = zip(contender.errors, self.eager_errors, strict=True)
        for index, (error, eagers) in enumerate(pairs):
            wide = torch.promote_types(found[index].dtype, torch.float32)
            scale = self.results[index].square().mean().sqrt().item()
            limit = 2 * eagers + 8 * torch.finfo(wide).eps * max(1.0, scale)
            # so written, a NaN fails
            if not error <= limit:
                return f"result {index} is off by {error:.1e}, eager by {eagers:.1e}"
        return None


def _note_memory(given: Work, contender: Contender) -> None:
    work = contender.own(given)
    # x counts as an intermediate of a model
    count = work.num_inputs
    inner = work._replace(inputs=[*(x * 1 for x in work.inputs[:count]), *work.inputs[count:]])
    with saved_tensors(exclude=work.inputs) as saved:
        outputs = inner.forward(contender.fn)
    del outputs, inner
    peak = peak_bytes(lambda: work.results(contender.fn), work.device)
    outputs = work.forward(contender.fn)
    backward_peak = peak_bytes(lambda: work.backward(outputs), work.device)
    contender.memory = saved.nbytes, peak, backward_peak


def _time_once(work: Work, watch: Stopwatch, pool: Any, contender: Contender) -> None:
    forward, backward, both = watch.times(*contender.steps(work, pool))
    contender.samples.append((forward, backward, both))


def _check(
    work: Work, eager: Function, contenders: Sequence[Contender], step: Callable[..., None]
) -> int:
    """Check everyone's numbers; returns at how many tokens."""
    truth = Truth.that_fits(work, eager)
    for contender in contenders:
        step(contender, truth.check)
    return truth.work.tokens


def _time(
    work: Work,
    contenders: Sequence[Contender],
    repeat: int,
    graphs: bool,
    step: Callable[..., None],
) -> None:
    """Time everyone in turns, and let go of graphs."""
    pool = torch.cuda.graph_pool_handle() if graphs and work.device.type == "cuda" else None
    watch = Stopwatch(work.device)
    for turn in range(WARMUP + repeat):
        first = turn % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            step(contender, partial(_time_once, work, watch, pool))
            if turn < WARMUP:
                contender.samples.clear()
    for contender in contenders:
        contender.drop()


def measure(
    work: Work,
    contenders: Sequence[Contender],
    eager: Function,
    repeat: int,
    begin: Callable[[Contender], None],
    graphs: bool = False,
) -> int:
    """Check, weigh, time and check again the contenders, which note what is found.

    begin: called before each step of a contender; graphs: replay CUDA graphs where a contender can
    be captured. Returns at how many tokens the numbers were checked: all, or as many as fit in
    float64.
    """

    def step(contender: Contender, fn: Callable[[Contender], Any]) -> None:
        begin(contender)
        contender.attempt(fn)

    checked = _check(work, eager, contenders, step)
    with _put_back(_given(work)) as written:
        for contender in contenders:
            step(contender, partial(_note_memory, work))
        _time(work, contenders, repeat, graphs, step)
    timed = [contender for contender in contenders if contender.failure is None]
    # who computes something else from a later call on has no speed either
    _check(work, eager, contenders, step)
    if written and all(contender.failure is None for contender in timed):
        raise ValueError(f"{written[0]} was overwritten in the meantime, by nobody in particular")
    return checked
