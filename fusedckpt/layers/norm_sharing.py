"""A layer that reads a norm's output n keeps the norm's input, and normalises once more.

The norm keeps its input x anyway, so that n is kept by nobody. The layer saves n as ever; then
hooks on that one saved tensor put x in its place, and make n again where backward reads it. What
they make, autograd puts where n was in the graph: gradients through n of any order, hooks on n and
other readers of n are what they were. Nothing about the model is assumed: a norm notes on its node
what it used, and a reader goes by that while n is what the norm made.

A write to n or x through `.data` is not seen, as autograd does not see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from fusedckpt.autograd import dispatch
from fusedckpt.autograd.hooks import has_hooks
from fusedckpt.autograd.norm_spec import NormSpec
from fusedckpt.autograd.phases import Hooks, can_see_hooks, top_hooks
from fusedckpt.autograd.versioned import Versioned, versions_of
from fusedckpt.kernels.norm import NormRule
from fusedckpt.layers.norm_ops import norm_op


class Source(NamedTuple):
    """The norm that made a result, and the versions of what belongs to it then."""

    spec: NormSpec
    versions: tuple[int, ...]


class Recipe(NamedTuple):
    """What a norm's result is made again from: x, weight and bias; made in a dtype, cast to one."""

    made_from: Versioned
    rule: NormRule
    made: torch.dtype
    dtype: torch.dtype


def remember(norm: nn.Module, n: Tensor, spec: NormSpec) -> Tensor:
    """Note on the node of n that a norm module made it, and return n.

    Not for a module with hooks, which may gather its weights for as long as its own call, nor for
    one over several dimensions, nor inside a checkpoint: to ask for its input would recompute it.
    """
    if dispatch.is_recorded(n) or torch.compiler.is_compiling():
        return n
    # an eager twin's node has no rule
    if not isinstance(_of(n, "rule"), NormRule):
        return n
    if _of(n, "num_dims") == 1 and not has_hooks(norm) and _nobody_packs():
        n.grad_fn.source = Source(spec, versions_of(n, spec.weight, spec.bias))  # type: ignore[union-attr]  # a Function's node
    return n


def apply(function: Any, n: Tensor, read: Tensor, *args: Any) -> Any:
    """Run an autograd Function on `read`, which is n in the dtype that it computes in.

    The Function has one output, and saves `read`, or None in its place, before all else.
    """
    made_from = _made_from(n)
    if made_from is None:
        return function.apply(read, *args)
    with _uncounted() as count:
        # hooks can be set only on what was saved without any
        if top_hooks() is None:
            y = function.apply(read, *args)
            saved = _of(y, "saved_tensors")
            if saved[0] is not None:
                recipe = Recipe(Versioned(*made_from), _of(n, "rule"), n.dtype, read.dtype)
                # the first is called at once, and n let go of
                _of(y, "_raw_saved_tensors")[0].register_hooks(lambda _: recipe, _remake)
                saved = *made_from, *saved[1:]
            for tensor in saved:
                if tensor is not None:
                    count(tensor)
            return y
    return function.apply(read, *args)


def _remake(recipe: Recipe) -> Tensor:
    # compiled autograd cannot trace a look at versions
    return _uncompiled(recipe) if torch.compiler.is_compiling() else _normalised(recipe)


@_disable_dynamo
def _uncompiled(recipe: Recipe) -> Tensor:
    return _normalised(recipe)


def _normalised(recipe: Recipe) -> Tensor:
    x, weight, bias = recipe.made_from.read()
    assert x is not None
    with torch.no_grad():
        return norm_op(x, None, weight, bias, 1, *recipe.rule, recipe.made)[0].to(recipe.dtype)


def _made_from(n: Tensor) -> tuple[Tensor | None, ...] | None:
    """Return x, weight and bias that a norm made n from, None if unknown, gone or changed."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    source = _of(n, "source")
    # who hooks n may give the norm its weights for as long as the gradient of n is on its way
    if not isinstance(source, Source) or n._backward_hooks or not _nobody_packs():
        return None
    _, weight, bias, *_ = source.spec
    if source.versions != versions_of(n, weight, bias):
        return None
    try:
        x = _of(n, "saved_tensors")[0]
    except RuntimeError:
        # the norm's node has run already, or x was changed in place
        return None
    # the norm keeps x where a gradient needs it
    return None if x is None else (x, weight, bias)


def _of(tensor: Tensor, name: str) -> Any:
    """Return an attribute of a tensor's node, None where it has none or there is no node."""
    return getattr(tensor.grad_fn, name, None)


def _nobody_packs() -> bool:
    """Whether saved tensors go through no hooks, or those that only count."""
    if not can_see_hooks():
        return False
    hooks = top_hooks()
    return hooks is None or _counts(hooks)


def _counts(hooks: Hooks) -> bool:
    return getattr(getattr(hooks[0], "__self__", None), "only_counts", False)


@contextmanager
def _uncounted() -> Iterator[Callable[[Tensor], Any]]:
    """Lift the hooks that only count, and give what counts a tensor as they would."""
    lifted: list[Hooks] = []
    while (hooks := top_hooks()) is not None and _counts(hooks):
        lifted.append(hooks)
        torch.autograd.graph.saved_tensors_hooks(*hooks).__exit__()
    try:
        yield lifted[0][0] if lifted else lambda tensor: None
    finally:
        for hooks in reversed(lifted):
            torch.autograd.graph.saved_tensors_hooks(*hooks).__enter__()
