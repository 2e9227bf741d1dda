"""The bytes that a forward would save with `fuse(model, recompute_elementwise=True)`.

Recipes are off by default, so a report says how many bytes they would save. It measures them in a
forward of its own: no count of functions tells which of their inputs other functions save anyway.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd import private
from fusedckpt.autograd.private import pytree
from fusedckpt.fusing.mixers import shared_in_copies
from fusedckpt.fusing.recipe_models import has_recipes, obstacle_of_recipes, recipes_on
from fusedckpt.fusing.replica import undisturbed
from fusedckpt.memory import saved_tensors
from fusedckpt.state import rng


def gain_on_batch(model: nn.Module, args: Any, kwargs: Any) -> str | None:
    """Return the line on what recipes would bring to a fused model, None for nothing.

    A copy of the model runs, as it does to find attention.
    """
    inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    states = rng.states_in(model)
    try:
        copied = copy.deepcopy(model, shared_in_copies(model)).train()
        held = [*copied.parameters(), *copied.buffers(), *inputs]
        after = _saved_by(copied, args, kwargs, held, recipes=True)
        now = None if after is None else _saved_by(copied, args, kwargs, held)
    except Exception:  # arbitrary code of others; a report claims nothing then
        return None
    finally:
        states.restore()
    return None if now is None or after is None else words_of_gain(now, after)


def _saved_by(
    model: nn.Module, args: Any, kwargs: Any, held: Iterable[Tensor], *, recipes: bool = False
) -> int | None:
    """Return the bytes that a forward saves."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with undisturbed(device):
        if recipes:
            return saved_with_recipes(model, args, kwargs, held)
        with saved_tensors(held) as saved:
            model(*args, **kwargs)
        return saved.nbytes


def saved_with_recipes(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    held: Iterable[Tensor],
    then: Callable[[Any], Any] = id,
) -> int | None:
    """Return the bytes that a forward saves with recipes; None where functions save none.

    held: tensors that do not count; then: is called with the result, and has no recipes.
    """
    modules = [*model.modules()]
    if any(map(has_recipes, modules)) or any(map(private.is_fsdp_module, modules)):
        return None
    if any(private.compiled_call(m) or private.COMPILED_CHILD in m._modules for m in modules):
        return None
    with torch.enable_grad(), saved_tensors(held) as saved:
        if obstacle_of_recipes(args) is not None:
            return None
        # a compiled function inside would be compiled again for the mode, and saves other bytes
        with recipes_on(model), torch.compiler.set_stance("fail_on_recompile"):
            output = model(*args, **kwargs)
        then(output)
    return saved.nbytes


def words_of_gain(now: int, after: int) -> str | None:
    """Return the clause on the bytes that a step saves now, and with recipes; None if none go."""
    share = f"{1 - after / now:.0%}" if now else "0%"
    if after >= now or share == "0%":
        return None
    return f"recompute_elementwise=True: {share} less is saved, {now:,} -> {after:,} bytes a step"
