"""Layers with code that calls the functions between the linears of an MLP.

    x = x + self.fc2(F.gelu(self.fc1(self.norm(x))))

`shared_layers` lets modules save recipes; here a function mode sees the functions that the layer's
forward calls between two modules. Only functions of a linear's result save recipes: others run as
they are, for the price of a look at their arguments. One GEMM at most makes a tensor again: a
linear behind such a function has no recipe of its result.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from fusedckpt.autograd import dispatch, private, tracker
from fusedckpt.autograd.replay import PLAIN_TENSORS
from fusedckpt.autograd.tracker import NO_LIMIT, Tracker, outside_mode, tracking
from fusedckpt.layers.fallbacks import refuse_script
from fusedckpt.layers.notes import NO_NOTES, NOTES, set_notes
from fusedckpt.recipes.cheap_functions import KINDS, obstacle_of_recipes
from fusedckpt.recipes.recipe_mode import RecipeMode

# the attribute of such a layer: False where no function read such a result in its first call


class ProductMode(RecipeMode):
    """The functions of results of linears that are called inside save recipes.

    around: the mode of a forward in which other functions save recipes, too; None for none.
    """

    def __init__(self, tracker: Tracker, copies_parameters: bool, around: RecipeMode | None):
        super().__init__(tracker, 0)
        self._around = around
        self._copies_parameters = copies_parameters
        # whether a function read a linear's result
        self.has_read = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function, and save recipes for it if it reads a linear's result."""
        kind = KINDS.get(func)
        if kind is not None and self._reads_product(args, kind == "gemm"):
            self.has_read = True
            if self._around is None:
                return super().__torch_function__(func, types, args, kwargs)
            with self.tracker.unlimited(copies_parameters=self._copies_parameters, is_product=True):
                return super().__torch_function__(func, types, args, kwargs)
        if self._around is not None:
            return self._around.__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))

    def _reads_product(self, args: Any, is_gemm: bool) -> bool:
        """Whether a function reads the result of a linear, or of a cheap function behind it.

        A product of a linear's very result, as of queries and keys, is none of an MLP.
        """
        for x in args:
            if x.__class__ in PLAIN_TENSORS:
                made = self.tracker.recipe_of(x)
                if made is not None and not (is_gemm and made.name == "linear"):
                    return True
            elif x.__class__ in (list, tuple) and self._reads_product(x, is_gemm):
                return True
        return False


class SharedCode(nn.Module):
    """Forward of a layer with code that calls functions of its linears' results."""

    # its name and repr stay as they were
    _fusedckpt_prefix = ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward; functions of its linears' results save recipes."""
        run = super().forward
        if torch.compiler.is_compiling() or not self.__dict__.get(NOTES, NO_NOTES).shares_code:
            return run(*args, **kwargs)
        around = private.function_mode()
        if isinstance(around, RecipeMode) and tracker.sees_alone():
            return outside_mode(self._followed, run, args, kwargs, around)
        if obstacle_of_recipes(args) is not None:
            return run(*args, **kwargs)
        return self._followed(run, args, kwargs, None)

    def _followed(
        self, run: Callable[..., Any], args: Any, kwargs: Any, around: RecipeMode | None
    ) -> Any:
        copies = dispatch.has_hooks(self)
        if around is None:
            hooks = private.top_hooks()
            count = None if hooks is None else hooks[0]
            note_remade = getattr(getattr(count, "__self__", None), "note_remade", None)
            known = Tracker(
                count,
                limit=NO_LIMIT,
                copies_parameters=copies,
                note_remade=note_remade,
                takes_samples=True,
            )
        else:
            known = around.tracker
        mode = ProductMode(known, copies, around)
        with tracking(known) if around is None else nullcontext(), mode:
            y = run(*args, **kwargs)
        if not mode.has_read:
            # later calls take no mode
            set_notes(self, shares_code=False)
        return y

    __prepare_scriptable__ = refuse_script
