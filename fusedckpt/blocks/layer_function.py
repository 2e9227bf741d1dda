"""The autograd Function of every fused layer: it saves the tensors that its backward reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt.autograd import accumulation, dispatch, levels, private, tracker
from fusedckpt.autograd import backward as autograd
from fusedckpt.autograd.backward import Versioned, is_batch, one_by_one, reference_gradients
from fusedckpt.autograd.dispatch import Meta
from fusedckpt.autograd.phases import SavePhase
from fusedckpt.autograd.private import SEES_BATCHES
from fusedckpt.blocks import compiled, derive, eager, ops, reader, run
from fusedckpt.blocks.builder import GATED, PACKED, Linears
from fusedckpt.blocks.call import LayerCall
from fusedckpt.blocks.eager import draw_seeds
from fusedckpt.blocks.late import WeightRead, hand_over
from fusedckpt.blocks.layer import Layer, LinearLayer, Pairs
from fusedckpt.blocks.operands import (
    LinearNames,
    LinearParts,
    adapters_of,
    are_adapted,
    flat,
    parts_of_linears,
    with_values,
)
from fusedckpt.blocks.run import IS_PRESENT
from fusedckpt.blocks.writer import Flags, Schedule


class LayerFunction(torch.autograd.Function):
    """A call of a fused layer; its arguments after the phase are inputs, then parameters.

    phase: how it saves where hooks see its saved tensors, as in a checkpoint (autograd/phases.py);
    None where there are no hooks, or hooks that only count.
    """

    @staticmethod
    def forward(ctx: Any, call: LayerCall, phase: SavePhase | None, *tensors: Any) -> Any:
        """Return the results; save the level's tensors that a wanted gradient reads."""
        needs = ctx.needs_input_grad[2:]
        if True not in needs:
            phase = None
        levels_now = None if phase is None else phase.levels
        # without a Python call where it was made before
        saved = call.save_specs.get((needs, levels_now)) or call.save_spec(needs, levels_now)
        inputs = list(map(tensors.__getitem__, saved.inputs))
        params = list(map(tensors.__getitem__, saved.params))
        quantized = None
        if call.quantized_params:
            # a weight that dequantizes is no tensor
            quantized = {n: tensors[call.num_inputs + n] for n in call.quantized_params}
            params = [t if isinstance(t, Tensor) else None for t in params]
        if phase is not None and not call.program.saved_results:
            phase.enter(inputs + params, saved.product_metas)
        compute = run.forward if call.is_unwatched or quantized else ops.forward_op
        results = compute(call, saved.forward, tensors)
        to_save = inputs + list(map(results.__getitem__, saved.results)) + params
        # a selective checkpoint's recompute finds the results of its forward, and no products
        products = [results[i] if 0 <= i < len(results) else None for i in saved.product_places]
        if phase is None:
            ctx.save_for_backward(*to_save, *products)
            ctx.recall = None
            ctx.owns_products = True
        else:
            phase.save(ctx, call.name, to_save, products, saved.product_metas)
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.saved = saved
        ctx.quantized = quantized
        # whether no hook may change the saved tensors
        ctx.is_free = phase is None
        ctx.first_product = len(to_save)
        ctx.for_second_derivatives = None
        if saved.for_second_derivatives:
            # gradients do not read them, second derivatives do
            ctx.for_second_derivatives = Versioned(
                *map(tensors.__getitem__, saved.for_second_derivatives)
            )
        if len(call.program.results) == 1:
            return results[0]
        if saved.constant:
            ctx.mark_non_differentiable(*map(results.__getitem__, saved.constant))
        return tuple(results[: len(call.program.results)])

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        """Return the wanted gradients."""
        call: LayerCall = ctx.call
        begun = autograd.begin(ctx, *dys)
        if begun is None:
            return (None,) * (2 + len(call.metas))
        flags, tensors, is_unwatched = begun
        wanted = tuple(flags[2:])
        products = tensors[ctx.first_product :]
        values = dict(zip(ctx.saved.names, tensors, strict=True))
        if ctx.quantized:
            values |= ctx.quantized
        like = dys[0] if dys[0] is not None else _first(dys)
        if torch.is_grad_enabled() or not SEES_BATCHES:
            return (None, None, *_reference_gradients(ctx, values, dys, wanted))
        compute = run.backward if is_unwatched or ctx.quantized else ops.backward_op
        dtypes = call.dtypes
        if not is_unwatched and not torch.compiler.is_compiling() and is_batch(dys):
            grads = one_by_one(
                lambda element: run.backward(call, wanted, element, _first(element), values), dys
            )
        elif accumulation.is_used and (sums := accumulation.sums_of(ctx, 2)) is not None:
            # not by the op, which returns new tensors of the parameters' dtypes
            compute = partial(run.backward, call, wanted, dys, like, values, totals=sums.totals)
            grads = sums.returned(autograd.donating(ctx, products, like, compute))
            dtypes = sums.dtypes(dtypes)
        elif any(map(IS_PRESENT, products)):
            args = (call, wanted, dys, like, values)
            grads = autograd.donating(ctx, products, like, partial(compute, *args))
        elif (
            call.late
            and not torch.compiler.is_compiling()
            # estimates look into ops
            and (like.is_meta or not private.num_dispatch_modes())
        ):
            grads = run.backward(call, wanted, dys, like, values, leaves_late=True)
        else:
            grads = compute(call, wanted, dys, like, values)
        for i, dtype in enumerate(dtypes):
            # each sum is freed as it is rounded, not after all of them
            grad = grads[i]
            grads[i] = grad if grad is None or grad.dtype == dtype else grad.to(dtype)
        if call.late:
            quantized = [call.num_inputs + number for number in call.quantized_params]
            hand_over(ctx, grads, like, call.metas, quantized)
        return (None, None, *grads)


def _first(dys: Sequence[Tensor | None]) -> Tensor:
    return next(dy for dy in dys if dy is not None)


def apply(call: LayerCall, phase: SavePhase | None, x: Tensor, *tensors: Any) -> Any:
    """Run a call on its tensors, x first."""
    if call.num_seeds:
        tensors = (*tensors, draw_seeds(x, call.num_seeds))
    if call.late and phase is None and torch.is_grad_enabled():
        tensors = tuple(
            [
                WeightRead.apply(t)
                if place in call.late and t.requires_grad and not accumulation.is_marked(t)
                else t
                for place, t in enumerate(tensors, 1)
            ]
        )
    read = x if call.input_dtype is None else x.to(call.input_dtype)
    function = partial(LayerFunction.apply, call, phase)
    # `tracker.active()`, without a call
    tracker_of_forward = tracker.reference()()
    if phase is None and (x.grad_fn is not None or tracker_of_forward is not None):
        y = reader.apply_with_view(tracker_of_forward, function, call, x, read, tensors)
    else:
        y = function(read, *tensors)
    return x + y if call.adds_residual_outside else y


def run_layer(
    layer: Layer,
    x: Any,
    between: Sequence[Any],
    linears: Pairs = (),
    prepare: Callable[..., Sequence[Any]] | None = None,
) -> Any:
    """Run a layer, the one way into kernels, compiled code and the eager reference.

    Returns None where the layer's module is to compute the call itself.

    between: the tensors between x and the linears: a norm's, a head's target, experts' routing.
    linears: pairs of weight and bias.
    prepare: is called with the tensors between when all fits, before any work. It refuses values,
    and returns the tensors as the program takes them.
    """
    if private.num_function_modes() and tracker.sees_alone():
        return tracker.outside_mode(run_layer, layer, x, between, linears, prepare)
    if eager.forced.is_on:
        return layer.reference(x, between, linears)
    described: Any = layer
    tensors: Sequence[Any] = ()
    dense = tensors
    if linears:
        if torch.compiler.is_compiling() and not dispatch.is_traced(x):
            return _compiled(described, x, between, linears)
        dense = tensors = list(chain.from_iterable(linears))
        is_dense = autograd.DENSE.issuperset(map(type, tensors))
        if not is_dense and layer.linears and are_adapted(linears):
            described, tensors, dense = _operands_of(described, x, between, linears)
    call, phase, _ = dispatch.decide(described, x, *between, *dense)
    prepared = between if prepare is None else prepare(*between)
    if call is None:
        return None if layer.is_module else layer.reference(x, between, linears)
    # a checkpoint's forward and recompute save alike, at every level
    saves_half = call.level == "gate" and (phase is None or phase.levels is None)
    if saves_half or call.num_seeds:
        halves = described.split_packed(linears, saves_half)
        if halves is not None:
            split, pairs = halves
            return run_layer(split, x, between, pairs)
    return apply(call, phase, x, *prepared, *tensors)


class Operands(NamedTuple):
    """The tensors of a layer's linears, in order, adapters and quantized weights apart."""

    # a record that describes the adapters and quantized weights
    layer: LinearLayer
    # the tensors that a call computes on
    tensors: list[Any]
    # the tensors that a decision sees: None for a quantized weight, which the record describes
    dense: list[Any]


def _operands_of(layer: LinearLayer, x: Tensor, between: Sequence[Any], linears: Pairs) -> Operands:
    """Return the operands of linears of which some are adapted or quantized."""
    names = layer.linears.names
    layer.check(levels.override.level)
    parts = parts_of_linears(layer.name, names, linears, layer.num_seeds)
    operands = _adapted(layer, names, parts)
    if names != PACKED:
        return operands
    # decided as a whole first, so that an error names the packed weight
    if dispatch.decide(operands.layer, x, *between, *operands.dense).call is None:
        return operands
    gate_up, down = parts
    # views: autograd puts their gradients together again
    return _adapted(layer, GATED, [gate_up.half(0), gate_up.half(1), down])


def _adapted(
    layer: LinearLayer, names: tuple[LinearNames, ...], parts: Sequence[LinearParts]
) -> Operands:
    """Return a layer with a record of the parts of its linears, and their tensors."""
    described = list[LinearParts]()
    tensors = list[Any]()
    dense = list[Any]()
    for linear in parts:
        meta = Meta(*linear.weight[:3]) if linear.is_quantized else None
        described.append(with_values(linear._replace(weight=meta), itertools.repeat(None)))
        tensors += flat(linear)
        dense += flat(linear._replace(weight=None) if linear.is_quantized else linear)
    return Operands(layer._replace(linears=Linears(names, tuple(described))), tensors, dense)


def _compiled(layer: LinearLayer, x: Tensor, between: Sequence[Any], linears: Pairs) -> Any:
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


def _check_twice(call: LayerCall, values: dict[Any, Any], backward: Schedule) -> None:
    """Refuse second derivatives without a value that a backward without products reads."""
    for name in backward.names("value"):
        if name not in values:
            raise RuntimeError(
                f"{call.name}: create_graph=True needs {name}, which save='preact' does not save "
                "where the first weights are frozen: use save='inputs'"
            )


def _reference_gradients(
    ctx: Any, saved: dict[Any, Any], dys: Sequence[Tensor | None], wanted: Flags
) -> list[Tensor | None]:
    """Return gradients by the eager reference, as a graph that can be differentiated again."""
    call: LayerCall = ctx.call
    program = call.program
    like = _first(dys)
    count = call.num_inputs
    if ctx.for_second_derivatives is not None:
        numbers = [index - count for index in ctx.saved.for_second_derivatives]
        saved = saved | dict(zip(numbers, ctx.for_second_derivatives.read(), strict=True))
    has_dys = tuple([dy is not None for dy in dys])
    without_products = call.flags_of("inputs")
    _check_twice(call, saved, derive.backward_schedule(program, wanted, without_products, has_dys))
    # a saved sum is differentiated in place of its summands
    firsts = program.saved_results or program.inputs
    names = (*firsts, *range(len(program.params)))
    flags = [any(wanted[:count])] if program.saved_results else list(wanted[:count])
    flags += wanted[count:]
    tensors = []
    for name in names:
        tensor = saved.get(name)
        if tensor is None:
            # no gradient depends on it
            tensor = call.stand_in(name)
        tensors.append(tensor if isinstance(tensor, Tensor) else None)

    def reference(*tensors: Any) -> tuple[Tensor, ...]:
        values = dict(zip(firsts, tensors, strict=False))
        quantized = ctx.quantized or {}
        params = [quantized.get(number, t) for number, t in enumerate(tensors[len(firsts) :])]
        if call.num_dims > 1:
            return program.eager(values, params)
        # steps of experts know rows alone
        rows = {name: t.flatten(0, -2) if t.dim() > 1 else t[None] for name, t in values.items()}
        results = program.eager(rows, params)
        return tuple([y.view(*like.shape[:-1], y.shape[-1]) for y in results])

    with torch.autocast(like.device.type, enabled=False):
        grads = reference_gradients(reference, tensors, flags, dys)
    if program.saved_results:
        grads = [grads[0] if want else None for want in wanted[:count]] + grads[1:]
    return grads
