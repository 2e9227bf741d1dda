"""A layer that reads a norm's output n keeps the norm's input, and normalises once more.

So does one that reads what was gathered from several ranks: it keeps a part, and gathers again. The
norm keeps its input x anyway, so that n is kept by nobody. The layer saves n as ever; then
hooks on that one saved tensor put x in its place, and make n again where backward reads it. What
they make, autograd puts where n was in the graph: gradients through n of any order, hooks on n and
other readers of n are what they were. Nothing about the model is assumed: a norm notes on its node
what it used, and a reader goes by that while n is what the norm made.

A write to n or x through `.data` is not seen, as autograd does not see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from fusedckpt.autograd import backward, phases
from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.autograd.phases import Hooks
from fusedckpt.autograd.versions import Versioned, versions_of


class Source(NamedTuple):
    """What makes a result again, of its input and the parameters, and the versions of three then.

    These are the result's and the parameters'; the input is the first tensor that the node keeps.
    """

    again: Callable[..., Tensor]
    weight: Tensor | None
    bias: Tensor | None
    versions: tuple[int, ...]


class Recipe(NamedTuple):
    """What a result is made again from: x, weight and bias; by what; then cast."""

    made_from: Versioned
    again: Callable[..., Tensor]
    dtype: torch.dtype


def remember(norm: nn.Module, n: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Note on the node of n that a norm module made it, and return n.

    Not for a module with hooks, which may gather its weights for as long as its own call, nor for
    one over several dimensions, nor inside a checkpoint: to ask for its input would recompute it.
    """
    if torch.compiler.is_compiling():
        return n
    node: Any = n.grad_fn
    # an eager twin's node has no call
    call = getattr(node, "call", None)
    if getattr(call, "num_dims", 0) == 1 and node.is_free and not has_hooks(norm):
        node.source = Source(partial(_normalised, call), weight, bias, versions_of(n, weight, bias))
    return n


def _normalised(call: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    call = call._replace(direct=backward.is_unwatched())
    return call.normalised(x, None, weight, bias)[0]


def apply(function: Any, n: Tensor, read: Tensor, *args: Any) -> Any:
    """Run an autograd Function on `read`, which is n in the dtype that it computes in.

    Where saved tensors go through no hooks but counting ones. The Function has one output, and
    saves `read`, or None in its place, before all else.
    """
    found = made_from(n)
    if found is None:
        return function.apply(read, *args)
    with _uncounted() as count:
        # hooks can be set only on what was saved without any
        if phases.top_hooks() is None:
            y = function.apply(read, *args)
            saved = y.grad_fn.saved_tensors
            if saved[0] is not None:
                recipe = Recipe(Versioned(*found), n.grad_fn.source.again, read.dtype)  # type: ignore[union-attr]  # noted
                # the first is called at once, and n let go of
                y.grad_fn._raw_saved_tensors[0].register_hooks(lambda _: recipe, _remake)
                saved = *found, *saved[1:]
            for tensor in saved:
                if tensor is not None and count is not None:
                    count(tensor)
            return y
    return function.apply(read, *args)


def _remake(recipe: Recipe) -> Tensor:
    # compiled autograd cannot trace a look at versions
    return _uncompiled(recipe) if torch.compiler.is_compiling() else _made_again(recipe)


@_disable_dynamo
def _uncompiled(recipe: Recipe) -> Tensor:
    return _made_again(recipe)


def _made_again(recipe: Recipe) -> Tensor:
    with torch.no_grad():
        return recipe.again(*recipe.made_from.read()).to(recipe.dtype)


def made_from(n: Tensor) -> tuple[Tensor | None, ...] | None:
    """Return x, weight and bias that a norm made n from, None if unknown, gone or changed."""
    node: Any = n.grad_fn
    source: Source | None = getattr(node, "source", None)
    # who hooks n may give the norm its weights for as long as the gradient of n is on its way
    if source is None or not torch.is_grad_enabled() or n._backward_hooks:
        return None
    if source.versions != versions_of(n, source.weight, source.bias):
        return None
    try:
        x = node.saved_tensors[0]
    except RuntimeError:
        # the norm's node has run already, or x was changed in place
        return None
    # the norm keeps x where a gradient needs it
    return None if x is None else (x, source.weight, source.bias)


@contextmanager
def _uncounted() -> Iterator[Callable[[Tensor], Any] | None]:
    """Lift the hooks that only count, and give what counts a tensor as they would."""
    lifted: list[Hooks] = []
    while (hooks := phases.top_hooks()) is not None and phases.only_count(hooks):
        lifted.append(hooks)
        torch.autograd.graph.saved_tensors_hooks(*hooks).__exit__()
    try:
        yield lifted[0][0] if lifted else None
    finally:
        for hooks in reversed(lifted):
            torch.autograd.graph.saved_tensors_hooks(*hooks).__enter__()
