"""Linears and activations that save a recipe of their input, where that takes fewer bytes.

A linear that reads a fused norm's output saves the norm's input, which the norm saves anyway. An
activation that reads such a linear's output saves the same, and so does a linear that reads that
activation's: an MLP written inside a layer's forward saves only the input of its norm. A linear
that reads anything else saves its input, as ever; an activation behind it, and a linear behind
that, save nothing more, as one GEMM makes both again from that input. Values are recomputed when
backward reads them, each once: a value that a later node of the backward needs too stays until
then.

The layer's own forward runs, on the same tensors; hooks on saved tensors do the rest. Functions
that an activation calls save recipes as in `recipe_mode`; those that draw random numbers, or that
are not known, save the same tensors as before. A module that reads anything else runs as it did.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedckpt.autograd import dispatch, index, levels, next_call, phases, private, recipes
from fusedckpt.autograd.dispatch import autocast_dtype, cast_by
from fusedckpt.autograd.index import ACTIVATION, CHANNELS, LINEAR, MODULE, NORM
from fusedckpt.autograd.phases import only_count, with_own_hooks
from fusedckpt.autograd.recipes import Count, Leaf, Made, View
from fusedckpt.autograd.replay import PLAIN_TENSORS
from fusedckpt.autograd.rounded import rounded_leaf
from fusedckpt.autograd.tracker import (
    NO_LIMIT,
    Tracker,
    active,
    functions_of,
    outside_mode,
    sees_alone,
)
from fusedckpt.layers.fallbacks import refuse_script
from fusedckpt.layers.notes import NO_NOTES, NOTES, ModuleNotes
from fusedckpt.recipes import recipe_mode
from fusedckpt.recipes.node_recipes import OF_LAYER, found_by_node, note_small, tells_function
from fusedckpt.recipes.recipe_mode import every_function

# in place of a result: the layer's own forward runs
_OWN = object()
_LINEAR = dispatch.own_function(F, "linear")
_LINEAR_FORWARD = dispatch.own_forward(nn.Linear)


def shared_view_of(x: Any, *makers: str) -> View | None:
    """Return how to read a result of a fused norm, or of other makers; None for other tensors."""
    if private.num_function_modes() and sees_alone():
        return outside_mode(shared_view_of, x, *makers)
    return None if torch.compiler.is_compiling() else index.view_of(x, NORM, *makers)


def saving_recipe_of(
    x: Tensor, owner: nn.Module, run: Callable[..., Any], options: Any, *args: Any
) -> Any:
    """Return run(options, *args), which saves x, or the recipe of x in its place, if it has one.

    owner: the module that is run. options: are told whether backward gets x rounded.
    """
    if torch.compiler.is_compiling():
        return run(options, *args)
    if private.num_function_modes() and sees_alone():
        # functions in a checkpoint run as they are
        return outside_mode(saving_recipe_of, x, owner, run, options, *args)
    tracker = active()
    view = recipe_of(x, owner)
    if view is None:
        # how x is kept without a recipe, see `fuse`
        store = owner.__dict__.get(NOTES, NO_NOTES).store
        view = rounded_view_of(x) if store or levels.override.store else None
    if view is not None:
        if view.source.is_rounded:
            options = options._replace(rounds=True)
        y = _saving(view, x, partial(run, options, *args))
        # code of the model has run
        next_call.forget()
        return y
    y = run(options, *args)
    if tracker is not None:
        tracker.note_saved(x)
    return y


def recipe_of(x: Tensor, owner: nn.Module) -> View | None:
    """Return how to read the argument of a module without saving it, None where that is unknown."""
    view = index.view_of(x, NORM, ACTIVATION)
    # not worth a GEMM
    if view is not None and "linear" not in functions_of(view.source):
        return view
    tracker = active()
    if tracker is not None:
        return tracker.view_of(x)
    return found_by_node(x, owner) if x.numel() * x.itemsize >= recipe_mode.FLOOR_BYTES else None


def _saving(view: View, x: Tensor, run: Callable[[], Any], *, samples: bool = False) -> Any:
    # of rows that lie apart, such as those of class tokens, no product saves a copy
    if x.dim() != 2 and not x.is_contiguous():
        return run()
    if private.top_hooks() is None:
        return recipes.saving_recipes(view, x, run, None, samples=samples)
    return with_own_hooks(partial(recipes.saving_recipes, view, x, run, samples=samples), run)


class Shared(nn.Module):
    """Forward of a layer that may save a recipe of its input."""

    # its name and repr stay as they were
    _fusedckpt_prefix = ""
    # the makers of the inputs that it saves recipes of, beside norms
    _fusedckpt_reads: tuple[str, ...] = ()
    # whether it looks for functions of code by their nodes
    _fusedckpt_follows_nodes = False
    _fusedckpt: ModuleNotes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward; save the recipe of the input, if that is known."""
        forward = super().forward
        if len(args) == 1 and not kwargs and not torch.compiler.is_compiling():
            (x,) = args
            if levels.override.is_plain:
                return forward(x)
            hooks = private.top_hooks()
            # where hooks take saved tensors, as in a checkpoint, no recipe is saved
            if hooks is None or only_count(hooks):
                if private.num_function_modes() and sees_alone():
                    y = outside_mode(self._shared, x, forward, True)
                else:
                    y = self._shared(x, forward)
                if y is not _OWN:
                    return y
                return self._from_unknown(x, forward)
        return forward(*args, **kwargs)

    def _shared(self, x: Any, forward: Callable[..., Tensor], is_followed: bool = False) -> Any:
        """Return forward(x), which saves a recipe of x, `_OWN` where that is not known.

        is_followed: outside of the mode of a forward whose functions save recipes, which the layer
        then calls itself. That saves those of a linear whose input is not contiguous.
        """
        view = index.view_of(x, NORM, *self._fusedckpt_reads)
        is_tensor = x.__class__ is Tensor
        # a mode sees functions itself
        if view is None and is_tensor and self._fusedckpt_follows_nodes and not is_followed:
            node = x.grad_fn if x._base is None else x._base.grad_fn
            # without a call of Python's. At other levels functions save their tensors
            is_told = tells_function(node.__class__) and self._fusedckpt.save == "inputs"
            if is_told and x.numel() * x.itemsize >= recipe_mode.FLOOR_BYTES:
                view = found_by_node(x, self)
        if view is None or dispatch.is_recorded():
            return _OWN
        if is_followed and not (x.is_contiguous() or self._copies(x)):
            return _OWN
        return self._with_recipe(x, view, forward)

    def _from_unknown(self, x: Any, forward: Callable[..., Any]) -> Any:
        """Return forward(x) for an input without a recipe."""
        return forward(x)

    def _copies(self, x: Tensor) -> bool:
        """Whether the forward may read a copy of an input with a recipe that is not contiguous."""
        return False

    def _with_recipe(self, x: Tensor, view: View, forward: Callable[..., Tensor]) -> Tensor:
        raise NotImplementedError

    __prepare_scriptable__ = refuse_script


def rounded_view_of(x: Any) -> View | None:
    """Return how to read an input that is kept in nine bits, None where it stays as it is."""
    if x.__class__ is not Tensor or not torch.is_grad_enabled():
        return None
    if private.are_transforms_active() or dispatch.is_traced(x) or phases.current() is not None:
        return None
    leaf = rounded_leaf(x)
    return None if leaf is None else recipes.view_in(leaf, x)


class SharedProduct(Shared):
    """Forward of a layer that multiplies its input by a weight of its own."""

    _fusedckpt_reads = ACTIVATION, CHANNELS
    _fusedckpt_follows_nodes = True
    # whether its forward is of other code, which may write to its input
    _fusedckpt_samples = True

    def _from_unknown(self, x: Any, forward: Callable[..., Any]) -> Any:
        """Return forward(x), which saves x, perhaps in nine bits."""
        view = None
        if self._fusedckpt.store or levels.override.store:
            view = rounded_view_of(x)
        return forward(x) if view is None else self._with_recipe(x, view, forward)

    def _with_recipe(self, x: Tensor, view: View, forward: Callable[..., Tensor]) -> Tensor:
        dtype = autocast_dtype(x.device) if private.is_any_autocast_on() else None
        cast = x
        if dtype is not None and x.dtype != torch.float64:
            # as autocast does, on a tensor that is known
            cast = x.to(dtype)
            view = recipes.cast(view, x, cast)
        if not cast.is_contiguous() and self._copies(cast):
            cast = cast.contiguous()
            view = recipes.copied(view, cast)
        y = _saving(view, cast, partial(forward, cast), samples=self._fusedckpt_samples)
        if self._fusedckpt_samples:
            next_call.forget()
        return y


class SharedReader(SharedProduct):
    """Forward of a module with a weight of its own, such as a router of experts.

    It may cast its input, or call other functions, which save recipes, too.
    """

    _fusedckpt_reads = ()
    _fusedckpt_follows_nodes = False

    def _from_unknown(self, x: Any, forward: Callable[..., Any]) -> Any:
        """Return forward(x): a router chooses by the bits of its input."""
        return forward(x)

    def _with_recipe(self, x: Tensor, view: View, forward: Callable[..., Tensor]) -> Tensor:
        return _with_functions(self, x, view, forward)[0]


class SharedLinear(SharedProduct):
    """Forward of nn.Linear: its readers recompute its result, or save it at another level."""

    _fusedckpt_samples = False

    def _with_recipe(self, x: Tensor, view: View, forward: Callable[..., Tensor]) -> Tensor:
        y = super()._with_recipe(x, view, forward)
        if y.dim() == 2:
            note_small(y)
        if y.grad_fn is not None and self._is_torchs(forward):
            layout = view.place, view.size, view.stride, view.offset
            source = weakref.ref(view.source), view.check
            self._note(y, partial(_recipe_of_linear, source, layout, y.dtype))
            tracker = active() if self._fusedckpt.readers == "code" else None
            if tracker is not None and "linear" not in functions_of(view.source):
                self._let_know(tracker, y)
        return y

    def lets_readers_compute(self, x: Any) -> bool:
        """Whether readers of this call's result may compute it again from x."""
        hooks = private.top_hooks()
        # in the recompute of a checkpoint, readers save their inputs as ever
        is_free = private.current_node() is None if hooks is None else only_count(hooks)
        is_free = is_free and self._fusedckpt.save == "inputs"
        return is_free and self._is_known(x, super(Shared, self).forward)

    def _is_known(self, x: Any, forward: Callable[..., Any]) -> bool:
        """Whether the readers of a result of this input may know how it was made."""
        weight = self._parameters.get("weight")
        is_plain = x.__class__ in PLAIN_TENSORS and weight.__class__ in PLAIN_TENSORS
        if not (is_plain and self._fusedckpt.readers and torch.is_grad_enabled()):
            return False
        return self._is_torchs(forward)

    def _from_unknown(self, x: Any, forward: Callable[..., Any]) -> Any:
        """Return forward(x), which its readers make again from x: autograd saves x anyway."""
        if self._fusedckpt.store or levels.override.store:
            view = rounded_view_of(x)
            if view is not None:
                y = super()._with_recipe(x, view, forward)
                return self._noted(x, y, rounds=True) if self._is_known(x, forward) else y
        if not self._is_known(x, forward):
            y = forward(x)
            if y.__class__ is Tensor and y.dim() == 2:
                note_small(y)
            return y
        weight: Any = self._parameters["weight"]
        # as torch does, to tensors that are known
        dtype = autocast_dtype(x.device) if private.is_any_autocast_on() else None
        if dtype is not None and x.dtype != torch.float64:
            x = x.to(dtype)
        if _is_copied(x, weight):
            x = x.contiguous()
        y = forward(x)
        if y.__class__ is Tensor and y.dim() == 2:
            note_small(y)
        if private.num_function_modes() and sees_alone():
            return outside_mode(self._noted, x, y)
        return self._noted(x, y)

    def _copies(self, x: Tensor) -> bool:
        return x.dim() > 2 and not dispatch.has_hooks(self)

    def _noted(self, x: Tensor, y: Any, *, rounds: bool = False) -> Any:
        """Note that a result is made of an input that autograd saves, and return the result."""
        if y.__class__ is not Tensor or y.grad_fn is None or private.are_transforms_active():
            return y
        tracker = active()
        if tracker is not None and not rounds and tracker.view_of(x) is not None:
            # another GEMM would make the input
            index.put(y, LINEAR, _recipe_of_saved)
            return y
        reference = weakref.ref(x)
        if private.top_hooks() is not None:
            # hooks that count may save another tensor of the same memory
            reference = partial(_itself, x)
        self._note(y, partial(_recipe_of_input, reference, x._version, rounds))
        if self._fusedckpt.readers == "code":
            self._let_know(tracker, y)
        return y

    def _is_torchs(self, forward: Callable[..., Any]) -> bool:
        """Whether the forward is torch's, of the parameters as they are."""
        # hooks may compute the weight, as those of weight_norm do, or gather it for the call alone
        if self._parameters.get("weight") is None or dispatch.has_hooks(self):
            return False
        # another one may be assigned since, to the class or to torch
        is_own = getattr(forward, "__func__", None) is _LINEAR_FORWARD is nn.Linear.forward
        return is_own and F.linear is _LINEAR

    def _let_know(self, tracker: Tracker | None, y: Tensor) -> None:
        """Let functions that the code of the layer around calls know how a result is made."""
        if tracker is None:
            return
        known = index.known_of(y)
        if known is not None and known.source is not None:
            tracker.know(known, known.source(y, known.parameters))

    def _note(self, y: Tensor, source: index.Source) -> None:
        if self._fusedckpt.save == "inputs":
            index.put(y, LINEAR, source, self._parameters["weight"], self._parameters.get("bias"))
        else:
            index.put(y, LINEAR, _recipe_of_saved)


def _is_copied(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's linear copies an input that is not contiguous, and saves the copy."""
    if x.is_contiguous() or x.dim() < 3 or not weight.requires_grad:
        return False
    try:
        x.view(-1, x.shape[-1])
    except RuntimeError:
        return True
    return False


def _itself(x: Tensor) -> Tensor:
    return x


def _recipe_of_saved(y: Tensor, _: Sequence[Any]) -> Leaf:
    """Return the recipe of a result that is saved itself."""
    return Leaf(y)


def _recipe_of_input(
    reference: Callable[[], Tensor | None],
    version: int,
    rounds: bool,
    y: Tensor,
    parameters: Sequence[Tensor | None],
) -> Leaf | Made:
    """Return the recipe of a linear's result: its input, which autograd saves.

    The result itself is saved where the input is freed or was written since, or where the input is
    not smaller and would be saved only for this recipe.
    """
    x = reference()
    weight, bias = parameters
    assert weight is not None
    if x is None or x._version != version:
        return Leaf(y)
    if not weight.requires_grad and x.untyped_storage().nbytes() >= y.nbytes:
        return Leaf(y)
    leaf = rounded_leaf(x) if rounds else None
    inputs = [Leaf(x) if leaf is None else recipes.view_in(leaf, x), Leaf(weight)]
    if bias is not None:
        inputs.append(Leaf(bias))
    return Made("linear", partial(_linear, y.dtype), inputs, [y])


def _recipe_of_linear(
    source_and_check: tuple[weakref.ref[Any], Any],
    layout: tuple[Any, ...],
    dtype: torch.dtype,
    y: Tensor,
    parameters: Sequence[Tensor | None],
) -> Made | None:
    """Return the recipe of a linear's result, if the recipe of its input is alive."""
    reference, check = source_and_check
    source = reference()
    if source is None:
        return None
    weight, bias = parameters
    assert weight is not None
    x = View(source, *layout)
    x.check = check
    inputs = [x, Leaf(weight)]
    if bias is not None:
        inputs.append(Leaf(bias))
    return Made("linear", partial(_linear, dtype), inputs, [y])


def _linear(dtype: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    with cast_by(x.device, None):
        bias = None if bias is None else bias.to(dtype)
        return F.linear(x.to(dtype), weight.to(dtype), bias)


class SharedFunctions(Shared):
    """Forward of a layer of cheap functions."""

    def _with_recipe(self, x: Tensor, view: View, forward: Callable[..., Tensor]) -> Tensor:
        y, made = _with_functions(self, x, view, forward)
        # hooks may gather parameters for the call alone
        if made is not None and not dispatch.has_hooks(self):
            # it is known already
            index.put(y, ACTIVATION, None)
            # where the index forgets it, code has got its memory
            y.grad_fn.metadata[OF_LAYER] = True
        return y


class SharedActivation(SharedFunctions):
    """Forward of a function of single elements, which may have parameters and buffers."""

    _fusedckpt_reads = (LINEAR,)


class SharedCheap(SharedFunctions):
    """Forward of a dropout, or of a layer with vectors as parameters, behind an activation."""

    _fusedckpt_reads = (ACTIVATION,)


class SharedNorm(SharedFunctions):
    """Forward of a norm of other code, over channels for example: it saves its input alone."""

    _fusedckpt_reads = (ACTIVATION, MODULE)

    def _from_unknown(self, x: Any, forward: Callable[..., Any]) -> Any:
        """Return forward(x); its functions save recipes that begin at x."""
        if x.__class__ is not Tensor or not (torch.is_grad_enabled() and x.requires_grad):
            return forward(x)
        if private.are_transforms_active() or dispatch.is_traced(x):
            return forward(x)
        tracker = active()
        view = None if tracker is None else tracker.view_of(x)
        return self._with_recipe(x, view or recipes.view_in(Leaf(x), x), forward)


def _with_functions(
    module: nn.Module, x: Tensor, view: View, forward: Callable[..., Tensor]
) -> tuple[Any, Made | None]:
    """Return forward(x), with recipes saved by its functions, and the recipe of the result.

    In a forward of which all functions save recipes, these are the same recipes. The recipe lives
    until that forward ends, and as long as tensors that the functions have saved.
    """
    copies = dispatch.has_hooks(module)

    def run(count: Count) -> tuple[Any, Made | None]:
        tracker = active()
        if tracker is not None:
            with tracker.unlimited(copies_parameters=copies):
                return _followed(tracker, x, view, forward)
        tracker = Tracker(count, limit=NO_LIMIT, copies_parameters=copies)
        try:
            y, made = _followed(tracker, x, view, forward)
        finally:
            tracker.end()
        if tracker.saved is None or made is None:
            return y, None
        tracker.saved.alive = made
        return y, made

    y, made = with_own_hooks(run, lambda: (forward(x), None))
    # code of the model has run
    next_call.forget()
    return y, made


def _followed(
    tracker: Tracker, x: Tensor, view: View, forward: Callable[..., Tensor]
) -> tuple[Any, Made | None]:
    """Return forward(x), and the recipe of the result, if a function has made it."""
    with tracker.knowing(x, view), every_function(tracker):
        y = forward(x)
    result = tracker.find(y) if isinstance(y, Tensor) else None
    if result is None or isinstance(result.source, Leaf) or result.source is view.source:
        return y, None
    return y, result.source
