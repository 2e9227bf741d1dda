"""Blocks whose linears have adapters, quantised weights or dropout, as one autograd Function.

A norm, linears of its result, and where there is one the activation and last linear of an MLP. Kept
are x and for each dropout a seed of 8 bytes; at levels gate and preact what the first linears gave,
adapters included. A dense form of a quantised weight is not kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedckpt import reference
from fusedckpt.autograd import arguments, backward, dispatch, donation
from fusedckpt.autograd.backward import is_batch, one_by_one
from fusedckpt.autograd.custom_op import BELOW, Op, below
from fusedckpt.autograd.dispatch import Meta
from fusedckpt.autograd.double_backward import stand_in, twin_gradients
from fusedckpt.autograd.dropout import draw_seeds
from fusedckpt.autograd.lora import Parts, is_adapted, parts_of
from fusedckpt.autograd.norm_spec import NormSpec
from fusedckpt.autograd.phases import Phase
from fusedckpt.autograd.versions import Versioned
from fusedckpt.kernels.runtime import as_matrix
from fusedckpt.layers import norm_sharing
from fusedckpt.layers.adapted_block import Block, Needs
from fusedckpt.layers.adapted_call import AdaptedCall, AdaptedOptions
from fusedckpt.layers.projections import cast, flat, is_wanted, kept, reads_x_of, refilled, shape_of

# x, seeds and the norm's two; then come the constants
NUM_FIRST, NUM_FIXED = 4, 7


def _parts(linears: Sequence[Parts], values: Sequence[Any]) -> list[Parts]:
    """Return the linears with values, in the order of `flat`, in their places."""
    remaining: Iterator[Any] = iter(values)
    return [refilled(parts, remaining) for parts in linears]


def _needs(call: AdaptedCall, linears: Sequence[Parts], flags: Sequence[bool]) -> Needs:
    norm = [flags[0], *flags[2:NUM_FIRST]]
    return Needs(norm, _parts(linears, flags[NUM_FIXED:]), call.has_last)


def _view(t: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a result in shape unseen: autograd forbids writing into a view made in a Function."""
    return torch.ops.aten._unsafe_view(t, (*shape[:-1], t.shape[1]))


def _results(ctx: Any, ys: Sequence[Tensor], shape: Sequence[int], needs: Needs) -> Any:
    """Return what the Function does: one tensor, or several, of which each may have no gradient."""
    ys = [_view(y, shape) for y in ys]
    if len(ys) == 1:
        return ys[0]
    if not needs.dn:
        pairs = zip(ys, needs.linears, strict=True)
        ctx.mark_non_differentiable(*[y for y, need in pairs if not is_wanted(need)])
    return tuple(ys)


class _Adapted(torch.autograd.Function):
    """Keeps x, seeds, and the first linears' outputs as the level has it; where they are read."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        seeds: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        call: AdaptedCall,
        phase: Phase | None,
        structure: Sequence[Parts],
        *tensors: Tensor | None,
    ) -> Any:
        linears, norm = _parts(structure, tensors), (norm_weight, norm_bias)
        needs = _needs(call, structure, ctx.needs_input_grad)
        reads_hidden = needs.hidden and call.activation is not None
        phase = phase if any(ctx.needs_input_grad) else None
        keeps = runs = call.level if reads_hidden else "inputs"
        likes = ()
        if phase is not None and reads_hidden:
            keeps, runs = phase.levels or (keeps, runs)
            rows = x.numel() // max(1, x.shape[-1])
            likes = [((rows, shape_of(linears[0])[0]), call.dtype)] * len(needs.first)
        kept = keeps if reads_hidden else ""
        given = _read(call, needs, kept, x, seeds=seeds, norm=norm, linears=linears)
        if phase is not None:
            phase.enter(given, likes)
        # where writes in place count no version up, see `donation`
        with below(BELOW):
            block = Block(call, linears, norm, seeds, needs=needs)
            ys, zs = block.forward(as_matrix(x), runs)
        extras = zs if reads_hidden else []
        if phase is None:
            ctx.save_for_backward(*given, *extras)
            ctx.recall, ctx.owns_extras = None, True
        else:
            phase.save(ctx, "adapted", given, extras, likes)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.structure, ctx.num_extras = call, structure, len(extras)
        pairs = zip(given[2:], (*norm, *tensors), strict=True)
        ctx.unread = Versioned(*[t if keep is None else None for keep, t in pairs])
        return _results(ctx, ys, x.shape, needs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        call: AdaptedCall = ctx.call
        count = NUM_FIXED + sum(len(flat(parts)) for parts in ctx.structure)
        begun = backward.begin(ctx, *dys)
        if begun is None:
            return (None,) * count
        flags, saved, direct = begun
        needs = _needs(call, ctx.structure, flags)
        given = saved[: len(saved) - ctx.num_extras]
        extras = saved[len(given) :]
        if call.norm is not None:
            call = call._replace(norm=call.norm._replace(direct=direct))
        if torch.is_grad_enabled():
            found = _twin_gradients(ctx, given, dys, flags)
        elif is_batch(dys):
            found = one_by_one(partial(_one, call, ctx.structure, needs, given, extras), dys)
        else:
            like = next(dy for dy in dys if dy is not None)
            args = (like, call, ctx.structure, needs, given, extras, dys)
            with below(BELOW):
                found = donation.run(ctx, _BACKWARD, extras, args, settled=True)
        (x, norm_weight, norm_bias, *tensors) = [
            grad if grad is None or dtype is None else grad.to(dtype)
            for grad, dtype in zip(found, call.dtypes, strict=True)
        ]
        return (x, None, norm_weight, norm_bias, None, None, None, *tensors)


def _read(
    call: AdaptedCall,
    needs: Needs,
    keeps: str,
    x: Tensor,
    seeds: Tensor | None,
    norm: Sequence[Tensor | None],
    linears: Sequence[Parts],
) -> tuple[Tensor | None, ...]:
    """Return x, seeds and the tensors, None for what no gradient reads.

    keeps: at which level what the first linears gave is; "" where no gradient reads that.
    """
    makes = [keeps == "inputs" or (keeps == "gate" and i == 1) for i in range(len(needs.first))]
    reads_n = any(makes) or any(map(reads_x_of, needs.first))
    reads_x = reads_n or (call.norm is not None and needs.dn)
    found = []
    for i, (parts, need) in enumerate(zip(linears, needs.linears, strict=True)):
        is_last = i == len(needs.first)
        computes, needs_dx = (False, needs.dz) if is_last else (makes[i], needs.dn)
        found += flat(kept(parts, need, computes, needs_dx))
    norm_weight, norm_bias = norm
    return (
        x if reads_x else None,
        seeds,
        norm_weight if reads_x else None,
        norm_bias if reads_n else None,
        *found,
    )


def _backward(
    like: Tensor,
    call: AdaptedCall,
    structure: Sequence[Parts],
    needs: Needs,
    given: Sequence[Tensor | None],
    extras: Sequence[Tensor | None],
    dys: Sequence[Tensor | None],
    settled: bool = True,
    donates: bool = False,
) -> list[Tensor | None]:
    """Return the wanted gradients of x, the norm's two, and every tensor."""
    x, seeds, norm_weight, norm_bias, *tensors = given
    linears = _parts(structure, tensors)
    block = Block(call, linears, (norm_weight, norm_bias), seeds, needs=needs)
    rows = [None if dy is None else as_matrix(dy) for dy in dys]
    zs = list(extras) or [None] * len(needs.first)
    dx = block.backward(rows, None if x is None else as_matrix(x), zs, donates)
    if dx is not None:
        dx = dx.view(*like.shape[:-1], dx.shape[1])
    sums = block.sums.found
    found = [dx if needs.norm[0] else None, sums.get((-1, 0)), sums.get((-1, 1))]
    for i, parts in enumerate(structure):
        found += [sums.get((i, place)) for place in range(len(flat(parts)))]
    return found


def _one(*args: Any) -> list[Tensor | None]:
    """Take the arguments of `_backward` but the first."""
    like = next(dy for dy in args[-1] if dy is not None)
    with below(BELOW):
        return _backward(like, *args)


_DONATING = partial(_backward, donates=True)
_BACKWARD = Op(_backward, _backward), Op(_DONATING, _DONATING)


def _twin_gradients(
    ctx: Any, given: Sequence[Tensor | None], dys: Sequence[Tensor | None], flags: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients by the eager reference, as a graph that can be differentiated again."""
    call: AdaptedCall = ctx.call
    x, seeds, *tensors = given
    like = next(dy for dy in dys if dy is not None)
    pairs = zip(tensors, ctx.unread.read(), strict=True)
    tensors = [other if t is None else t for t, other in pairs]
    if x is None:
        needs = _needs(call, ctx.structure, flags)
        if needs.hidden and call.activation is not None:
            raise RuntimeError(
                "fusedckpt: create_graph=True needs x, which save='preact' does not save where the "
                "first weights are frozen: use save='inputs'"
            )
        # no gradient depends on it
        _, features = shape_of(_parts(ctx.structure, tensors[2:])[0])
        x = stand_in((*like.shape[:-1], features), call.dtypes[0] or like.dtype, like.device)
    wanted = [flags[0], *flags[2:NUM_FIRST], *flags[NUM_FIXED:]]
    twin = partial(_twin, call, ctx.structure, seeds)
    with dispatch.no_autocast(like.device):
        return twin_gradients(twin, (x, *tensors), wanted, dys)


def _twin(
    call: AdaptedCall,
    structure: Sequence[Parts],
    seeds: Tensor | None,
    x: Tensor,
    norm_weight: Any,
    norm_bias: Any,
    *tensors: Any,
) -> Any:
    """Return what the Function computes, from torch's own differentiable operations."""
    n, norm = x, call.norm
    if norm is not None:
        kind, eps, offset, casts = norm.rule
        spec = NormSpec(kind, norm_weight, norm_bias, eps, offset=offset, cast=casts)
        n = reference.apply_norm(x, spec).to(call.dtype)
    pairs = zip(_parts(structure, tensors), call.adapter_dtypes, strict=True)
    given = [cast(parts, call.dtype, dtypes) for parts, dtypes in pairs]
    linears = [partial(reference.linear_of, parts=parts, seeds=seeds) for parts in given]
    first = linears[:-1] if call.has_last else linears
    ys = [linear(n) for linear in first]
    if call.activation is None:
        return tuple(ys) if len(ys) > 1 else ys[0]
    h = reference.hidden(ys, call.activation)
    if not call.has_last:
        return h
    p, index = call.dropout
    y = linears[-1](reference.dropout(h, p, seeds[index] if p and seeds is not None else None))
    p, index = call.output_dropout
    y = reference.dropout(y, p, seeds[index] if p and seeds is not None else None)
    return x + y if call.adds else y


def run(
    plain: Any,
    keys: tuple[str, ...],
    x: Tensor,
    norm: Sequence[Any],
    linears: Sequence[tuple[Any, Any]],
    dropouts: Sequence[float] = (),
) -> Any:
    """Run the Function on x, a norm's weight and bias, and pairs of weight and bias.

    plain: the options of the call as it is without adapters; keys: the names of weights; dropouts:
    those of the call itself. None where nothing is adapted, or where the eager reference is to run.
    """
    if torch.compiler.is_compiling():
        return None
    for key, rate in zip(("dropout", "output_dropout"), dropouts, strict=False):
        arguments.probability(plain.name, key, rate)
    num_dropouts = sum(rate > 0 for rate in dropouts)
    if not num_dropouts and not any(is_adapted(weight) for weight, _ in linears):
        return None
    seed = itertools.count(num_dropouts)
    pairs = zip(keys, linears, strict=True)
    parts = [parts_of(plain.name, key, w, b, seeds=seed) for key, (w, b) in pairs]
    options, structure, tensors = _described(plain, keys, parts)
    if keys == ("gate_weight", "down_weight"):
        # what does not fit is refused before it is taken apart
        if dispatch.settled(options, x, *norm, *tensors)[0] is None:
            return None
        # views: autograd puts their gradients together again
        plain = plain._replace(linears=("gate", "up", "down"))
        keys = ("gate_weight", "up_weight", "down_weight")
        parts = [parts[0].half(0), parts[0].half(1), parts[1]]
        options, structure, tensors = _described(plain, keys, parts)
    call, phase = dispatch.settled(options, x, *norm, *tensors)
    if call is None:
        return None
    if type(x) is not Tensor:
        call = call._replace(on_aten=True)
    args = (draw_seeds(x, next(seed)), *norm, call, phase, structure, *tensors)
    return _applied(call, x, args)


def _described(
    plain: Any, keys: tuple[str, ...], parts: Sequence[Parts]
) -> tuple[AdaptedOptions, list[Parts], list[Any]]:
    """Return a call's options, its linears without tensors, and the tensors."""
    structure = [refilled(linear, itertools.repeat(None)) for linear in parts]
    known = [p if p.base is None else p._replace(base=Meta(*p.base[:3])) for p in structure]
    options = AdaptedOptions(plain, tuple(map(type, plain)), keys, tuple(known))
    return options, structure, [t for linear in parts for t in flat(linear)]


def _applied(call: AdaptedCall, x: Tensor, args: tuple[Any, ...]) -> Any:
    # a norm casts as it writes
    read = x.to(call.dtype) if call.norm is None else x
    phase, has_one = args[4], call.has_last or len(call.adapter_dtypes) == 1
    if phase is None and call.norm is None and has_one and hasattr(x.grad_fn, "source"):
        y = norm_sharing.apply(_Adapted, x, read, *args)
    else:
        y = _Adapted.apply(read, *args)
    return x + y if call.adds_after else y
