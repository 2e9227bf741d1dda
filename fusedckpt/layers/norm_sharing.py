"""A layer that reads a norm's output keeps the norm's input instead, and normalises once more.

The norm keeps its input x anyway, so that its output n is kept by nobody. Gradients go through n
and the norm as they always did: hooks on n, other readers of n and gradients with respect to n see
what they would. Nothing about the model is assumed: a norm remembers which tensor it made its
result from, and a reader uses that while both are unchanged.
"""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fusedckpt import reference
from fusedckpt.autograd.hooks import has_hooks
from fusedckpt.autograd.phases import can_see_hooks, top_hooks
from fusedckpt.kernels.norm import NormRule
from fusedckpt.layers.norm_ops import norm_op
from fusedckpt.layers.norm_spec import NormSpec, rule_of
from fusedckpt.memory import is_counting


class Source(NamedTuple):
    """The norm that made a result, and the versions of what belongs to it then."""

    spec: NormSpec
    versions: tuple[int, ...]


# by the result; not an attribute of it, which would be saved to files with the tensor
_sources = WeakTensorKeyDictionary()


def _versions(n: Tensor, spec: NormSpec) -> tuple[int, ...]:
    given = (n, spec.weight, spec.bias)
    return tuple(tensor._version for tensor in given if tensor is not None)


def remember(norm: nn.Module, n: Tensor, spec: NormSpec) -> Tensor:
    """Note that a norm module made n, and return n.

    Not for a module with hooks, which may gather its weights for as long as its own call, nor for
    one over several dimensions, nor inside a checkpoint: to ask for its input would recompute it.
    """
    if torch.compiler.is_compiling() or not n.requires_grad or has_hooks(norm):
        return n
    if (spec.weight is None or spec.weight.dim() == 1) and _nobody_packs():
        _sources[n] = Source(spec, _versions(n, spec))
    return n


def _source_of(n: Tensor) -> tuple[Tensor, NormSpec] | None:
    """Return what n was made from, None where that is unknown, gone or changed."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not can_see_hooks():
        return None
    source = _sources.get(n)
    # someone else's hooks, a checkpoint's first of all, decide themselves what is kept
    if source is None or source.versions != _versions(n, source.spec) or not _nobody_packs():
        return None
    try:
        # the norm's node keeps its input, unless no gradient needs it
        x = n.grad_fn.saved_tensors[0]  # type: ignore[union-attr]  # a Function's node
    except (AttributeError, RuntimeError):
        # an eager twin's node; or it has run already, or x was changed in place
        return None
    return None if x is None else (x, source.spec)


def _nobody_packs() -> bool:
    hooks = top_hooks()
    return hooks is None or is_counting(hooks[0])


def apply(function: Any, n: Tensor, read: Tensor, *args: Any) -> Any:
    """Run an autograd Function on `read`, which is n in the dtype that it computes in.

    The Function must save its first input, or None in its place, before all else that it saves.
    """
    found = _source_of(n)
    if found is None:
        return function.apply(read, *args)
    x, spec = found
    norm = rule_of(spec, x.dtype), n.dtype
    return _Joined.apply(read, x, spec.weight, spec.bias, function, norm, *args)


class _Inner:
    """The context of the Function inside: it saves into a tuple of its own."""

    def __init__(self, needs_input_grad: tuple[bool, ...]):
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


class _Joined(torch.autograd.Function):
    """Another Function of n that keeps what n was made from in n's place."""

    @staticmethod
    def forward(
        ctx: Any,
        n: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        function: Any,
        norm: tuple[NormRule, torch.dtype],
        *args: Any,
    ) -> Any:
        needs = ctx.needs_input_grad
        inner = _Inner((needs[0], *needs[6:]))
        y = function.forward(inner, n, *args)
        first, *others = inner.saved_tensors
        inner.saved_tensors = ()
        keeps = first is not None
        ctx.save_for_backward(*((x, weight, bias) if keeps else (None,) * 3), *others)
        ctx.inner, ctx.function, ctx.norm, ctx.dtype = inner, function, norm, n.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> tuple[Any, ...]:  # type: ignore[override]
        x, weight, bias, *others = ctx.saved_tensors
        n = None if x is None else _normalised(ctx, x, weight, bias)
        # of its own for every backward
        inner = copy(ctx.inner)
        inner.saved_tensors = (n, *others)
        dn, *grads = ctx.function.backward(inner, *dys)
        return (dn, *(None,) * 5, *grads)


def _normalised(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return n again; as a function of x where gradients of gradients are wanted."""
    rule, made = ctx.norm
    if torch.is_grad_enabled():
        spec = NormSpec(rule.kind, weight, bias, rule.eps, rule.offset, rule.cast)
        with torch.autocast(x.device.type, enabled=False):
            return reference.apply_norm(x, spec).to(made).to(ctx.dtype)
    return norm_op(x, None, weight, bias, 1, *rule, made)[0].to(ctx.dtype)
