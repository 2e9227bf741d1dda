"""A layer that reads a tensor with a recipe saves the recipe in its place.

A fused norm saves its input x anyway, so a layer that reads its result n saves the recipe of n:
the norm of x. Hooks on the layer's saved tensor replace n, so gradients of any order, hooks on n
and other readers of n are unchanged. A write that raises no version, as through `.data`, is an
error of backward where 64 elements show it; `autograd.next_call` tells where none can have
happened. A write behind the last reader is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd import index, levels
from fusedckpt.autograd.backward import is_unwatched
from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.autograd.phases import with_own_hooks
from fusedckpt.autograd.private import SEES_BATCHES, raw_saved
from fusedckpt.autograd.private_nodes import Operation, PackedArgument
from fusedckpt.autograd.recipes import FINDERS, Count, Leaf, Made, View, cast, unpack, view_in
from fusedckpt.autograd.rounded import RoundedLeaf, rounded_leaf
from fusedckpt.autograd.tracker import Tracker
from fusedckpt.blocks import ops, run
from fusedckpt.blocks.call import LayerCall
from fusedckpt.kernels.norm import NormRule

# the makers of results of which norms (True) and other layers (False) save recipes. A module that
# backward runs again makes its result only for a norm, as this may take one more GEMM
_MAKERS = {False: (index.NORM, index.GATHERED_ROWS), True: (index.MODULE,)}


def note_norm(norm: nn.Module, n: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Note that a norm module made n, and return n.

    Not for a module with hooks, which may gather its weights only during the call, nor inside a
    checkpoint, where reading its input would recompute it.
    """
    if torch.compiler.is_compiling():
        return n
    node: Any = n.grad_fn
    # an eager reference's node has no call
    call = getattr(node, "call", None)
    if getattr(call, "num_dims", 0) == 1 and node.is_free and not has_hooks(norm):
        index.put(n, index.NORM, _recipe_of_norm, weight, bias)
    return n


def _recipe_of_norm(n: Tensor, parameters: Sequence[Tensor | None]) -> Made | None:
    """Return the source of a norm's result, see `index.Source`."""
    node: Any = n.grad_fn
    again = partial(_normalized, node.call, [p is not None for p in parameters])
    made = index.of_first_saved("norm", again, n, parameters)
    if made is not None and made.is_rounded and _hook_for(made.inputs[0], node.call) is _packed:
        return _NormOfRounded(made.name, again, made.inputs, [n])
    return made


def in_order(n: Tensor, order: Sequence[int]) -> Tensor:
    """Return a copy of a norm's result with its axes in another order in memory, and its recipe."""
    known = index.known_of(n)
    copy = n.permute(*order).contiguous()
    if known is not None and known.maker == index.NORM:
        index.put(copy, index.NORM, partial(_recipe_in_order, order), *known.parameters)
    return copy


def _recipe_in_order(
    order: Sequence[int], copy: Tensor, parameters: Sequence[Tensor | None]
) -> Made | None:
    """Return the source of a copy of a norm's result, see `index.Source`."""
    node: Any = copy.grad_fn
    while not hasattr(node, "call"):
        ((node, _),) = node.next_functions
    x = index.saved_view(node)
    if x is None:
        return None
    norm = partial(_normalized, node.call, [p is not None for p in parameters])
    leaves = [Leaf(p) for p in parameters if p is not None]
    return Made("norm", lambda *xs: norm(*xs).permute(*order).contiguous(), [x, *leaves], [copy])


def made_of_plain_norm(node: Any, n: Tensor) -> Made | None:
    """Return the recipe of a norm's result by its node, None for other nodes.

    A norm with parameters has none: its module may have hooks that gather them for the call alone.
    n: the result, or a tensor of its layout.
    """
    call = getattr(node, "call", None)
    if getattr(call, "num_dims", 0) != 1 or not node.is_free or len(raw_saved(node)) != 1:
        return None
    x = index.saved_view(node)
    return None if x is None else Made("norm", partial(_normalized, call, (False, False)), [x], [n])


def operation_of_norm(node: Any) -> Operation | None:
    """Return the function of a norm's node; None for other nodes."""
    call: Any = getattr(node, "call", None)
    if getattr(call, "num_dims", 0) != 1 or not call.is_norm:
        return None
    names = node.saved.names
    are_given = [meta is not None for meta in call.metas]
    sources = []
    for name, is_given in zip(call.names, are_given, strict=True):
        if is_given:
            sources.append(PackedArgument(place=names.index(name)) if name in names else None)
    return Operation(partial(_normalized, call, are_given[1:]), sources)


class _NormOfRounded(Made):
    """A norm's result, which its kernel makes from an input in nine bits as it is."""

    __slots__ = ()

    def _run(self) -> Sequence[Tensor]:
        x, *parameters = self.inputs
        source: Any = x.source
        return [self.again(source.packed(), *[leaf.read() for leaf in parameters])]


def _packed(view: View) -> Tensor:
    """Return codes and scales in place of the values, to a backward that no graph is made of."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not SEES_BATCHES:
        return unpack(view)
    source: Any = view.source
    return source.packed()


def _hook_for(view: View | Leaf, call: LayerCall) -> Callable[[View], Tensor]:
    """Return what unpacks a view of a rounded tensor for a call: its kernels may read the codes."""
    if isinstance(view, View) and isinstance(view.source, RoundedLeaf) and call.reads_packed:
        return _packed if view.source.holds(view) else unpack
    return unpack


def _normalized(call: Any, are_given: Sequence[bool], x: Tensor, *parameters: Tensor) -> Tensor:
    """Return a norm's result again; are_given: which of its parameters there are."""
    remaining = iter(parameters)
    tensors: list[Tensor | None] = [x]
    for is_given in are_given:
        tensors.append(next(remaining) if is_given else None)
    compute = run.forward if is_unwatched() else ops.forward_op
    return compute(call, call.forward(()), tensors)[0]


def rule_of_recipe(made: Made) -> tuple[NormRule, Sequence[bool]] | None:
    """Return the rule of a fused norm that a recipe runs again, None for another recipe.

    Beside it: whether the norm has a weight, and a bias; the recipe's inputs are x and these.
    """
    again = made.again
    if not isinstance(again, partial) or again.func is not _normalized:
        return None
    call, are_given = again.args
    return call.program.steps[0].op.rule, are_given


def apply_with_view(
    tracker: Tracker | None,
    function: Callable[..., Any],
    call: LayerCall,
    x: Tensor,
    read: Tensor,
    tensors: Sequence[Any],
) -> Any:
    """Run a layer on `read`, which is x in its compute dtype; save the recipe of x, if any.

    tracker: of the forward, if it has one: the layer's saved inputs are noted there, and a norm's
    result.
    """
    makers = _MAKERS[call.is_norm] if call.shares or call.is_norm else ()
    view = index.view_of(read, *makers) if makers else None
    if view is None and tracker is not None:
        view = tracker.view_of(read)
    if view is None and read is not x and makers:
        view = index.view_of(x, *makers)
        view = view and cast(view, x, read)
    if view is None and call.shares and tracker is None and read is x and FINDERS:
        find, tells, floor = FINDERS[0]
        # without a call of Python's
        if x.numel() * x.itemsize >= floor():
            node = x.grad_fn if x._base is None else x._base.grad_fn
            owner = next((t for t in tensors if t.__class__ is nn.Parameter), None)
            if owner is not None and tells(node.__class__):
                view = find(x, owner)
    leaf = None
    if view is None and (call.store or (levels.override.store and call.may_round)):
        leaf = rounded_leaf(x)
        if leaf is not None and not (tracker is not None and tracker.saves(x)):
            view = cast(view_in(leaf, x), x, read)
    if view is None:
        y = function(read, *tensors)
    else:
        run = partial(function, read, *tensors)
        y = with_own_hooks(partial(_saving, view, run), run)
    if tracker is not None:
        _note(tracker, call, (read, *tensors), y, 1 if view is not None else 0)
        if view is not None and leaf is not None and leaf.is_packed:
            tracker.note_rounded(x, leaf)
    return y


def _saving(view: View, run: Callable[[], Any], count: Count) -> Any:
    """Run a layer; save a view in place of its first input. count: a hook that counts the rest."""
    y = run()
    node: Any = (y if isinstance(y, Tensor) else y[0]).grad_fn
    if node is None:
        return y
    saved = node.saved_tensors
    inputs = node.saved.inputs
    hook = _hook_for(view, node.call) if view.source.is_rounded else unpack
    if 0 in inputs and index.save_view(node, place := inputs.index(0), view, hook):
        view.source.add_reader(count)
        saved = *saved[:place], *saved[place + 1 :]
    if count is not None:
        for tensor in saved:
            if tensor is not None:
                count(tensor)
    return y


def _note(tracker: Tracker, call: LayerCall, inputs: Sequence[Any], y: Any, first: int) -> None:
    """Note the inputs that a layer has saved, but for one with a recipe, and a norm's result."""
    if not isinstance(y, Tensor) or y.grad_fn is None:
        return
    node: Any = y.grad_fn
    for place in node.saved.inputs:
        if place >= first and isinstance(inputs[place], Tensor):
            tracker.note_saved(inputs[place])
    if call.is_norm:
        x, *parameters = inputs
        again = partial(_normalized, call, [isinstance(t, Tensor) for t in parameters])
        present = [t for t in parameters if isinstance(t, Tensor)]
        tracker.make("norm", again, [x, *present], [y], saves_parameters=True)
