"""Measure training steps of whole models of all groups: eager, fused, and with recipes.

A model is measured with one and with two of its repeated parts, and its cost is extended to the
number of parts that its checkpoint has. It is in bfloat16 and in training mode, with its dropouts
but those of attention, which a CPU cannot fuse. Peaks are of forward and backward, above parameters
and gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from bench.work import work_of
from bench.zoo.model import Inputs, Model
from fusedckpt import fuse
from fusedckpt.memory import peak_bytes, saved_tensors
from fusedckpt.recipes import recipe_mode
from fusedckpt.reporting.step import default_loss

DTYPE = torch.bfloat16
_NO_LAYERS = dict.fromkeys(("norm", "mlp", "linear", "attention", "experts"), False)
# a way's name -> a function that changes a model; recipes alone swap no layer
WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "eager": lambda model: None,
    "fuse": fuse,
    "recipes": partial(fuse, recompute_elementwise=True, **_NO_LAYERS),
    "fuse+recipes": partial(fuse, recompute_elementwise=True),
}


class Cost(NamedTuple):
    """The cost of a training step."""

    # bytes
    saved: float
    peak: float
    # FLOPs of GEMMs, convolutions and attention, and elements that all other operators write
    flops: float
    written: float

    def extended(self, other: Cost, repeats: int) -> Cost:
        """Return the cost of `repeats` parts, from those of one and, as `other`, of two."""
        pairs = zip(self, other, strict=True)
        return Cost(*[single + (repeats - 1) * (double - single) for single, double in pairs])


def obstacle(model: Model) -> str | None:
    """Return why a model cannot be built here, None if it can."""
    return None if find_spec(model.package) is not None else f"needs {model.package}"


def measured_step(model: Model) -> dict[str, Cost]:
    """Return a step's cost by the way of running the model."""
    counts = (1, 2) if model.repeats else (1,)
    with _no_floor():
        by_count = [_measured(model, count) for count in counts]
    if len(by_count) == 1:
        return by_count[0]
    single, double = by_count
    return {name: single[name].extended(double[name], model.repeats) for name in WAYS}


def _measured(model: Model, count: int) -> dict[str, Cost]:
    torch.manual_seed(0)
    built, inputs = model.build(count)
    built = built.to(DTYPE).train()
    inputs = tree_map_only(Tensor, lambda x: x.to(DTYPE) if x.is_floating_point() else x, inputs)
    costs: dict[str, Cost] = {}
    for name, change in WAYS.items():
        changed = copy.deepcopy(built)
        change(changed)
        costs[name] = _cost_of(changed, inputs)
    return costs


def _cost_of(model: nn.Module, inputs: Inputs) -> Cost:
    """Return the cost of a step that finds gradients, as all steps but the first do."""

    def step() -> None:
        default_loss(model(**inputs)).backward()

    step()
    tensors: list[Tensor] = []
    tree_map_only(Tensor, tensors.append, inputs)
    with saved_tensors(exclude=[*tensors, *model.parameters(), *model.buffers()]) as saved:
        output = model(**inputs)
    del output
    # a first call that is counted may compare values once
    work_of(step)
    return Cost(saved.nbytes, peak_bytes(step), *work_of(step))


@contextmanager
def _no_floor() -> Iterator[None]:
    """Give functions of small tensors recipes, as the models are reduced."""
    floor = recipe_mode.FLOOR_BYTES
    recipe_mode.FLOOR_BYTES = 0
    try:
        yield
    finally:
        recipe_mode.FLOOR_BYTES = floor
