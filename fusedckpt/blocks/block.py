"""The autograd Function of every fused layer: it saves the tensors that its backward reads."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt.autograd import backward as autograd
from fusedckpt.autograd import dispatch, levels, private
from fusedckpt.autograd.backward import Versioned, is_batch, one_by_one, twin_gradients
from fusedckpt.autograd.dispatch import Meta
from fusedckpt.autograd.phases import Phase
from fusedckpt.autograd.private import SEES_BATCHES
from fusedckpt.autograd.tracker import active
from fusedckpt.blocks import compiled, derive, eager, ops, reader, run
from fusedckpt.blocks.builder import GATED, PACKED, Linears
from fusedckpt.blocks.call import Call
from fusedckpt.blocks.eager import draw_seeds
from fusedckpt.blocks.late import WeightRead, hand_over
from fusedckpt.blocks.layer import Layer
from fusedckpt.blocks.operands import (
    Parts,
    adapters_of,
    are_adapted,
    flat,
    refilled,
    taken_apart,
)
from fusedckpt.blocks.writer import Flags, Schedule


class Block(torch.autograd.Function):
    """A call of a fused layer; its arguments after the phase are inputs, then parameters."""

    @staticmethod
    def forward(ctx: Any, call: Call, phase: Phase | None, *tensors: Any) -> Any:
        """Return the results; save the level's tensors that a wanted gradient reads."""
        needs = ctx.needs_input_grad[2:]
        if True not in needs:
            phase = None
        saved = call.saved(needs, None if phase is None else phase.levels)
        inputs = list(map(tensors.__getitem__, saved.inputs))
        params = list(map(tensors.__getitem__, saved.params))
        others = None
        if call.others:
            # a weight that dequantises is no tensor
            others = {n: tensors[call.num_inputs + n] for n in call.others}
            params = [t if isinstance(t, Tensor) else None for t in params]
        if phase is not None and not call.program.keeps:
            phase.enter(inputs + params, saved.likes)
        compute = run.forward if call.direct or others else ops.forward
        found = compute(call, saved.forward, tensors)
        given = inputs + list(map(found.__getitem__, saved.results)) + params
        # a selective checkpoint's recompute finds what its forward made, and no products
        extras = [found[i] if 0 <= i < len(found) else None for i in saved.extras]
        if phase is None:
            ctx.save_for_backward(*given, *extras)
            ctx.recall, ctx.owns_extras = None, True
        else:
            phase.save(ctx, call.name, given, extras, saved.likes)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.saved, ctx.others, ctx.is_free = call, saved, others, phase is None
        ctx.num_given, ctx.unread = len(given), None
        if saved.unread:
            # gradients do not read them, second derivatives do
            ctx.unread = Versioned(*map(tensors.__getitem__, saved.unread))
        if len(call.program.results) == 1:
            return found[0]
        if saved.constant:
            ctx.mark_non_differentiable(*map(found.__getitem__, saved.constant))
        return tuple(found[: len(call.program.results)])

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        """Return the wanted gradients."""
        call: Call = ctx.call
        begun = autograd.begin(ctx, *dys)
        if begun is None:
            return (None,) * (2 + len(call.metas))
        flags, tensors, direct = begun
        wanted, products = tuple(flags[2:]), tensors[ctx.num_given :]
        given = dict(zip(ctx.saved.names, tensors, strict=True))
        if ctx.others:
            given |= ctx.others
        like = dys[0] if dys[0] is not None else _first(dys)
        if torch.is_grad_enabled() or not SEES_BATCHES:
            return (None, None, *_twin_gradients(ctx, given, dys, wanted))
        compute = run.backward if direct or ctx.others else ops.backward
        if not torch.compiler.is_compiling() and is_batch(dys):
            grads = one_by_one(lambda one: run.backward(call, wanted, one, _first(one), given), dys)
        elif any(map(_IS_GIVEN, products)):
            args = (call, wanted, dys, like, given)
            grads = autograd.donating(ctx, products, like, partial(compute, *args))
        elif call.late and not (torch.compiler.is_compiling() or private.num_dispatch_modes()):
            grads = run.backward(call, wanted, dys, like, given, leaves_late=True)
        else:
            grads = compute(call, wanted, dys, like, given)
        for i, dtype in enumerate(call.dtypes):
            # each sum is freed as it is rounded, not after all of them
            grad = grads[i]
            grads[i] = grad if grad is None or grad.dtype == dtype else grad.to(dtype)
        if call.late:
            others = [call.num_inputs + number for number in call.others]
            hand_over(ctx, grads, like, call.metas, others)
        return (None, None, *grads)


# without a call of Python's
_IS_GIVEN = partial(operator.is_not, None)


def _first(dys: Sequence[Tensor | None]) -> Tensor:
    return next(dy for dy in dys if dy is not None)


def apply(call: Call, phase: Phase | None, x: Tensor, *tensors: Any) -> Any:
    """Run a call on its tensors, x first."""
    if call.num_seeds:
        tensors = (*tensors, draw_seeds(x, call.num_seeds))
    if call.late and phase is None and torch.is_grad_enabled():
        tensors = tuple(
            [
                WeightRead.apply(t) if place in call.late and t.requires_grad else t
                for place, t in enumerate(tensors, 1)
            ]
        )
    read = x if call.read is None else x.to(call.read)
    function = partial(Block.apply, call, phase)
    if phase is None and (x.grad_fn is not None or active() is not None):
        y = reader.apply(function, call, x, read, tensors)
    else:
        y = function(read, *tensors)
    return x + y if call.adds_after else y


def run_linears(
    layer: Layer, x: Tensor, between: Sequence[Any], linears: Sequence[tuple[Any, Any]]
) -> Any:
    """Run a layer, its linears as pairs of weight and bias.

    Returns None where the layer's module is to call its own children.

    between: the tensors between x and the linears: a norm's, a head's target, experts' routing.
    """
    if eager.forced.is_on:
        return layer.reference(x, between, linears)
    if torch.compiler.is_compiling() and not dispatch.is_recorded(x):
        return _compiled(layer, x, between, linears)
    described, tensors = layer, list(chain.from_iterable(linears))
    dense = tensors
    if not _DENSE.issuperset(map(type, tensors)) and layer.linears and are_adapted(linears):
        described, tensors, dense = _taken_apart(layer, x, between, linears)
    call, phase, _ = dispatch.decide(described, x, *between, *dense)
    if call is None:
        return None if layer.is_module else layer.reference(x, between, linears)
    # a checkpoint's forward and recompute save alike, at every level
    saves_half = call.level == "gate" and (phase is None or phase.levels is None)
    halves = described.split_packed(linears, saves_half)
    if halves is not None:
        split, pairs = halves
        return run_linears(split, x, between, pairs)
    return apply(call, phase, x, *between, *tensors)


class Operands(NamedTuple):
    """The tensors of a layer's linears, in order, adapters and quantised weights apart."""

    # whose record describes the adapters and quantised weights
    layer: Layer
    # what a call computes on
    tensors: list[Any]
    # what a decision sees: None for a quantised weight, which the layer's record describes
    dense: list[Any]


def _taken_apart(
    layer: Layer, x: Tensor, between: Sequence[Any], linears: Sequence[tuple[Any, Any]]
) -> Operands:
    """Return the operands of linears of which some are adapted or quantised."""
    keys = layer.linears.keys
    layer.check(levels.override.level)
    parts = taken_apart(layer.name, keys, linears, layer.num_seeds)
    operands = _adapted(layer, keys, parts)
    if keys != PACKED:
        return operands
    # decided as a whole first, so that an error names the packed weight
    if dispatch.decide(operands.layer, x, *between, *operands.dense).call is None:
        return operands
    gate_up, down = parts
    # views: autograd puts their gradients together again
    return _adapted(layer, GATED, [gate_up.half(0), gate_up.half(1), down])


def _adapted(layer: Layer, keys: tuple[str, ...], parts: Sequence[Parts]) -> Operands:
    """Return a layer whose record describes the parts of its linears, and their tensors."""
    described, tensors, dense = list[Parts](), list[Any](), list[Any]()
    for linear in parts:
        meta = Meta(*linear.weight[:3]) if linear.is_quantised else None
        described.append(refilled(linear._replace(weight=meta), itertools.repeat(None)))
        tensors += flat(linear)
        dense += flat(linear._replace(weight=None) if linear.is_quantised else linear)
    return Operands(layer._replace(linears=Linears(keys, tuple(described))), tensors, dense)


def _compiled(
    layer: Layer, x: Tensor, between: Sequence[Any], linears: Sequence[tuple[Any, Any]]
) -> Any:
    """Trace a call as its eager reference; None where a module's children are to be called."""
    tensors = [t for pair in linears for t in pair]
    is_adapted = bool(layer.linears) and are_adapted(linears)
    adapted = [is_adapted and are_adapted([pair]) for pair in linears]
    dense = [t for pair, skips in zip(linears, adapted, strict=True) for t in pair[skips:]]
    if layer.is_module and not dispatch.are_plain(x, *between, *dense):
        return None
    if not is_adapted:
        dispatch.decide(layer, x, *between, *tensors)
    saved = layer.saved_gemms([len(adapters_of(weight)) for weight, _ in linears])
    return compiled.run(lambda x: layer.reference(x, between, linears), saved, x)


_DENSE = frozenset((Tensor, torch.nn.Parameter, type(None)))


def _check_twice(call: Call, given: dict[Any, Any], whole: Schedule) -> None:
    """Refuse second derivatives without a value that `whole` reads."""
    for name in whole.names("value"):
        if name not in given:
            raise RuntimeError(
                f"{call.name}: create_graph=True needs {name}, which save='preact' does not save "
                "where the first weights are frozen: use save='inputs'"
            )


def _twin_gradients(
    ctx: Any, given: dict[Any, Any], dys: Sequence[Tensor | None], wanted: Flags
) -> list[Tensor | None]:
    """Return gradients by the eager reference, as a graph that can be differentiated again."""
    call: Call = ctx.call
    program, like, count = call.program, _first(dys), call.num_inputs
    if ctx.unread is not None:
        numbers = [index - count for index in ctx.saved.unread]
        given = given | dict(zip(numbers, ctx.unread.read(), strict=True))
    there = tuple([dy is not None for dy in dys])
    whole = derive.backward(program, wanted, call.flags_of("inputs"), there)
    _check_twice(call, given, whole)
    # a saved sum is differentiated in place of its summands
    firsts = program.keeps or program.inputs
    names = (*firsts, *range(len(program.params)))
    flags = [any(wanted[:count])] if program.keeps else list(wanted[:count])
    flags += wanted[count:]
    tensors = []
    for name in names:
        tensor = given.get(name)
        if tensor is None:
            # no gradient depends on it
            tensor = call.stand_in(name)
        tensors.append(tensor if isinstance(tensor, Tensor) else None)

    def twin(*tensors: Any) -> tuple[Tensor, ...]:
        values = dict(zip(firsts, tensors, strict=False))
        others = ctx.others or {}
        params = [others.get(number, t) for number, t in enumerate(tensors[len(firsts) :])]
        if call.num_dims > 1:
            return program.eager(values, params)
        # steps of experts know rows alone
        rows = {name: t.flatten(0, -2) if t.dim() > 1 else t[None] for name, t in values.items()}
        found = program.eager(rows, params)
        return tuple([y.view(*like.shape[:-1], y.shape[-1]) for y in found])

    with torch.autocast(like.device.type, enabled=False):
        found = twin_gradients(twin, tensors, flags, dys)
    if program.keeps:
        found = [found[0] if want else None for want in wanted[:count]] + found[1:]
    return found
