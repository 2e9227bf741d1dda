"""A part of a forward whose functions save their tensors, in a model that is fused with recipes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fusedckpt.autograd import private
from fusedckpt.autograd.tracker import tracking
from fusedckpt.fusing.recipe_mode import RecipeMode
from fusedckpt.fusing.recipe_models import WithRecipes


def has_recipes(model: nn.Module) -> bool:
    """Whether functions in a model's forward save recipes."""
    return isinstance(model, WithRecipes)


@contextmanager
def without_recipes() -> Iterator[None]:
    """Let functions called inside save their tensors; where no forward has recipes, do nothing."""
    if not isinstance(private.function_mode(), RecipeMode):
        yield
        return
    with private.without_function_mode(), tracking(None):
        yield
