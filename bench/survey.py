"""Measure saved bytes and peaks of whole models of all groups: eager, fused, and with recipes.

A model is measured with one and with two of its repeated parts, and told with the number that its
checkpoint has. It is in bfloat16 and in training mode, with its dropouts but those of attention,
which a CPU cannot fuse. Peaks are of forward and backward, above parameters and gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from bench.zoo import Inputs, Model
from fusedckpt import fuse
from fusedckpt.fusing import recipe_mode
from fusedckpt.memory import peak_bytes, saved_tensors
from fusedckpt.reporting.step import default_loss

DTYPE = torch.bfloat16
# in order: what changes a model
WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "eager": lambda model: None,
    "fuse": fuse,
    "recipes": lambda model: fuse(model, recipes=True),
}


class Bytes(NamedTuple):
    """Bytes of a training step."""

    saved: float
    peak: float

    def extended(self, other: Bytes, repeats: int) -> Bytes:
        """Return the bytes of `repeats` parts, from those of one and, as `other`, of two."""
        pairs = zip(self, other, strict=True)
        return Bytes(*[single + (repeats - 1) * (double - single) for single, double in pairs])


def obstacle(model: Model) -> str | None:
    """Return why a model cannot be built here, None if it can."""
    return None if find_spec(model.package) is not None else f"needs {model.package}"


def measured_step(model: Model) -> dict[str, Bytes]:
    """Return a step's bytes by the way of running the model."""
    counts = (1, 2) if model.repeats else (1,)
    with _no_floor():
        by_count = [_measured(model, count) for count in counts]
    if len(by_count) == 1:
        return by_count[0]
    single, double = by_count
    return {name: single[name].extended(double[name], model.repeats) for name in WAYS}


def _measured(model: Model, count: int) -> dict[str, Bytes]:
    torch.manual_seed(0)
    made, inputs = model.build(count)
    made = made.to(DTYPE).train()
    inputs = tree_map_only(Tensor, lambda x: x.to(DTYPE) if x.is_floating_point() else x, inputs)
    bytes_by_way: dict[str, Bytes] = {}
    for name, change in WAYS.items():
        changed = copy.deepcopy(made)
        change(changed)
        bytes_by_way[name] = _bytes_of(changed, inputs)
    return bytes_by_way


def _bytes_of(model: nn.Module, inputs: Inputs) -> Bytes:
    """Return the bytes of a step behind the first, which is as others are."""

    def step() -> None:
        default_loss(model(**inputs)).backward()

    step()
    tensors: list[Tensor] = []
    tree_map_only(Tensor, tensors.append, inputs)
    with saved_tensors(exclude=[*tensors, *model.parameters(), *model.buffers()]) as saved:
        output = model(**inputs)
    del output
    return Bytes(saved.nbytes, peak_bytes(step))


@contextmanager
def _no_floor() -> Iterator[None]:
    """Give functions of small tensors recipes, as the models are reduced."""
    floor = recipe_mode.FLOOR_BYTES
    recipe_mode.FLOOR_BYTES = 0
    try:
        yield
    finally:
        recipe_mode.FLOOR_BYTES = floor
