"""Whole steps of a model: their times and their peaks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from fusedckpt.memory import phases_of, seconds
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
    step, held = step.fresh()
    phases = phases_of(partial(step.take, held=held), held[0].device, step.resident(held))
    return max(phase.peak for phase in phases)


# measurements, by all that they depend on
_known: dict[Any, Any] = {}


def once(key: Any, measure: Callable[[], T]) -> T:
    """Return the first measurement for this key, so that equal steps have equal plans."""
    if key not in _known:
        if len(_known) > 1000:
            _known.clear()
        _known[key] = measure()
    return _known[key]


def step_kind(step: Step) -> Any:
    """Return a key that steps which take the same time share."""
    tensors = [*step.parameters(), *step.inputs()]
    metas = tuple((x.shape, x.dtype, x.requires_grad, x.grad is None) for x in tensors)
    # classes tell models apart that print the same, such as one whose functions save recipes
    modes = tuple((type(module), module.training) for module in step.model.modules())
    return repr(step.model), modes, metas, step.device, torch.get_num_threads()
