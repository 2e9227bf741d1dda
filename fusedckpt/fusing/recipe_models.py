"""Models with a forward that saves recipes: `fuse(model, recompute_elementwise=True)`.

Recipes are off by default, so a report says how many bytes they would save. It measures them in a
forward of its own: no count of functions tells which of their inputs other functions save anyway.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd import private
from fusedckpt.autograd.private import pytree
from fusedckpt.autograd.recipes import KERNELS
from fusedckpt.autograd.tracker import Tracker, tracking
from fusedckpt.fusing.replica import copied_inputs, running_copy_of, shared_in_copies, undisturbed
from fusedckpt.fusing.search import Search
from fusedckpt.fusing.swap import Swap, subclass
from fusedckpt.layers.notes import set_notes
from fusedckpt.memory import saved_tensors
from fusedckpt.recipes import recipe_kernels, recipe_mode
from fusedckpt.recipes.cheap_functions import obstacle_of_recipes
from fusedckpt.recipes.recipe_mode import RecipeMode

KERNELS.append(recipe_kernels.run_recipes)


@contextmanager
def recipes_on(model: nn.Module) -> Iterator[None]:
    """Let the functions that a model's forward calls inside save recipes."""
    hooks = private.top_hooks()
    floor = recipe_mode.FLOOR_BYTES
    count = None if hooks is None else hooks[0]
    tracker = Tracker(
        count,
        is_whole=not any(map(_may_gather, model.modules())),
        floor=floor,
        note_remade=getattr(getattr(count, "__self__", None), "note_remade", None),
    )
    with tracking(tracker), recipe_mode.RecipeMode(tracker, floor):
        yield


def _may_gather(module: nn.Module) -> bool:
    """Whether a module may gather its parameters for its call alone, as sharded ones do."""
    hooks = module._forward_pre_hooks or module._forward_hooks
    return bool(hooks) or "_fsdp_wrapped_module" in module._modules


class WithRecipes(nn.Module):
    """Forward of a model: its functions save recipes."""

    # a Trainer looks a model up by the name of its class
    _fusedckpt_prefix = ""

    @staticmethod
    def _fusedckpt_members(original: type[nn.Module]) -> dict[str, Any]:
        """Return a forward with the signature of the model's."""

        @functools.wraps(original.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original.forward(self, *args, **kwargs)
            obstacle = obstacle_of_recipes(args)
            if torch.is_grad_enabled():
                set_notes(self, recipes_obstacle=obstacle)
            if obstacle is not None:
                return original.forward(self, *args, **kwargs)
            with recipes_on(self):
                return original.forward(self, *args, **kwargs)

        return {"forward": forward}


def find_recipe_model(model: nn.Module, search: Search) -> None:
    """Let the forward of a model, which may be a block itself, save recipes."""
    if isinstance(model, WithRecipes):
        return
    without_obstacle = {"recipes_obstacle": None}
    for place, (module, swap) in enumerate(search.swaps):
        if module is model:
            swap = replace(
                swap,
                new_class=subclass(WithRecipes, swap.new_class),
                notes={**swap.notes, **without_obstacle},
            )
            search.swaps[place] = module, swap
            return
    new_class = subclass(WithRecipes, type(model))
    search.swaps.append((model, Swap("recipes", "", new_class, notes=without_obstacle)))


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


def gain_on_batch(model: nn.Module, args: Any, kwargs: Any) -> str | None:
    """Return the line on the bytes that recipes would save in a fused model, or None.

    A copy of the model runs, as it does to find attention.
    """
    try:
        copied = copy.deepcopy(model, shared_in_copies(model)).train()
        with running_copy_of(model):
            return _gain_of(copied, args, kwargs)
    except Exception:  # arbitrary code of others; a report claims nothing then
        return None


# leaves of arguments that a report may keep
_PLAIN_LEAVES = (int, float, complex, bool, str, type(None), torch.dtype, torch.device)


def gain_of_call(model: nn.Module, args: Any, kwargs: Any) -> Callable[[], str | None] | None:
    """Return a function of the line on what recipes would bring to calls like this one.

    It holds neither the model nor a tensor; None for arguments that may hold some, and under
    autocast, which meta tensors do not know.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    is_plain = all(isinstance(x, (Tensor, *_PLAIN_LEAVES)) for x in leaves)
    if private.is_any_autocast_on() or not is_plain:
        return None
    leaves = [_as_meta(x) if isinstance(x, Tensor) else x for x in leaves]
    return partial(_gain_by_shapes, weakref.ref(model), pytree.tree_unflatten(leaves, spec))


def _as_meta(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="meta").requires_grad_(x.requires_grad)


def _gain_by_shapes(reference: weakref.ref[nn.Module], call: tuple[Any, Any]) -> str | None:
    """Return the line on the gain by recipes: a copy of the model runs on meta tensors."""
    model = reference()
    if model is None:
        return None
    args, kwargs = call
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    memo.update({id(b): torch.empty_like(b, device="meta") for b in model.buffers()})
    try:
        copied = copy.deepcopy(model, memo)
        with running_copy_of(model):
            return _gain_of(copied, args, kwargs)
    except Exception:  # arbitrary code of others; a report claims nothing then
        return None


def _gain_of(model: nn.Module, args: Any, kwargs: Any) -> str | None:
    after = _saved_by(model, args, kwargs, recipes=True)
    now = None if after is None else _saved_by(model, args, kwargs)
    return None if now is None or after is None else words_of_gain(now, after)


def _saved_by(model: nn.Module, args: Any, kwargs: Any, *, recipes: bool = False) -> int | None:
    """Return the bytes that a forward saves beside its inputs."""
    args, kwargs = copied_inputs(args, kwargs)
    inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    held = [*model.parameters(), *model.buffers(), *inputs]
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
