"""Whole steps of a model: their times and their peaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fusedckpt.memory import nbytes_of, phases_of, seconds
from fusedckpt.reporting.step import Step

T = TypeVar("T")


class Times(NamedTuple):
    """The times of a step, without the optimizer's."""

    # ms of the model's forward
    forward_ms: float
    # ms of forward, loss and backward
    step_ms: float


def times_of(step: Step) -> Times:
    """Run a step and return its times."""
    step, held = step.fresh()
    device = held[0].device
    start = seconds(device)
    output = step.model(*step.args, **step.kwargs)
    middle = seconds(device)
    step.loss(output).backward()
    return Times(1e3 * (middle - start), 1e3 * (seconds(device) - start))


def peak_of(step: Step) -> int:
    """Run a step and return its peak, in bytes."""
    run, held = step.fresh()
    leftover = Leftover(run, held)
    take = partial(run.take, held=held, see_results=leftover.see_results)
    phases = phases_of(take, held[0].device, run.resident(held))
    kept = leftover.nbytes({phase.name: phase.start for phase in phases})
    if kept > step.kept_bytes:
        # an earlier step left less, or other units saved
        return peak_of(step._replace(kept_bytes=kept))
    return max(phase.peak for phase in phases)


class Leftover:
    """The bytes that a step leaves for the next one, beside its gradients and its output.

    In a loop with `output = model(x)` these are attributes that autograd Functions set on `ctx`,
    which live as long as the graph of output or loss, and tensors in attributes of modules. All
    count until the next loss is computed, at most too long.
    """

    def __init__(self, step: Step, held: list[Tensor]):
        self._step = step
        self._held = held
        self._gradient_bytes = nbytes_of(step.gradients.values())
        self._result_bytes = 0

    def see_results(self, tensors: list[Tensor]) -> None:
        """Note the bytes of the output and the loss."""
        new = nbytes_of([*tensors, *self._held]) - nbytes_of(self._held)
        self._result_bytes = max(self._step.output_bytes, new)

    def nbytes(self, live: Mapping[str, int]) -> int:
        """Return these bytes, once the step was run; live: by marker."""
        leaves = [*self._step.parameters(), *self._step.inputs()]
        gradients = nbytes_of(x.grad for x in leaves if x.grad is not None)
        known = gradients - self._gradient_bytes + self._result_bytes
        return max(0, live["end"] - live["begin"] - known)


# measurements, by all that they depend on
_known: dict[Any, Any] = {}


def once(key: Any, measure: Callable[[], T]) -> T:
    """Return the first measurement for this key, so that equal steps have equal plans."""
    if key not in _known:
        if len(_known) > 1000:
            _known.clear()
        _known[key] = measure()
    return _known[key]


def _printed(model: nn.Module) -> Any:
    """Return the text of a model; where its code raises, an object that equals no other."""
    try:
        return repr(model)
    except Exception:  # arbitrary code of others
        return object()


def step_kind(step: Step) -> Any:
    """Return a key that steps which take the same time share."""
    tensors = [*step.parameters(), *step.inputs()]
    metas = tuple((x.shape, x.dtype, x.requires_grad, x.grad is None) for x in tensors)
    # classes tell models apart that print the same, such as one with recipes
    modes = tuple((type(module), module.training) for module in step.model.modules())
    return _printed(step.model), modes, metas, step.device, torch.get_num_threads()
