"""Times of steps, taken once for steps that are alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from fusedckpt.reporting.step import Step

__all__ = ["Times", "once", "seconds", "step_kind", "times_of"]

T = TypeVar("T")


class Times(NamedTuple):
    """The ms of a forward, and of that and its backward."""

    forward: float
    both: float


def seconds(device: torch.device) -> float:
    """Return the time at which the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    # of one thread its own time, free of other work of the machine
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time() if alone else time.perf_counter()


def times_of(step: Step) -> Times:
    """Return the times of a step, without the optimizer's."""
    step, held = step.fresh()
    device = held[0].device
    start = seconds(device)
    output = step.model(*step.args, **step.kwargs)
    middle = seconds(device)
    step.loss(output).backward()
    return Times(1e3 * (middle - start), 1e3 * (seconds(device) - start))


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
    likes = tuple((x.shape, x.dtype, x.requires_grad, x.grad is None) for x in tensors)
    modes = tuple(module.training for module in step.model.modules())
    return repr(step.model), modes, likes, tensors[0].device, torch.get_num_threads()
