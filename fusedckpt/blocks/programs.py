"""The programs of every layer, and the checks of its calls.

A layer's options are a record without tensors. `make_call` makes a `LayerCall` of them and of the
shapes and dtypes of a call's tensors; `dispatch.decide` remembers it for calls that are alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fusedckpt.autograd import arguments, dispatch, levels
from fusedckpt.autograd.dispatch import Context, Meta, Operand
from fusedckpt.autograd.levels import LEVELS_OF
from fusedckpt.blocks import compiled, eager, run, validate
from fusedckpt.blocks.builder import GATED, PACKED, Builder, Linears, flat_of
from fusedckpt.blocks.eager import draw_seeds
from fusedckpt.blocks.operands import (
    LinearParts,
    NormSpec,
    count_dropouts,
    norm_rule_of,
    sums_dtype,
)
from fusedckpt.blocks.steps import Add, Hidden, Norm

# of each function: its kernel variant beside "split"
VARIANTS = {"linear_act": "fused", "mlp": "hybrid", "gated_mlp": "hybrid"}
# F.rms_norm takes them
COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))


class LinearOptions(NamedTuple):
    """The options of a call of linears, with the steps before and after them.

    linear_act, norm_linear: x -> norm -> linears -> activation
    mlp, gated_mlp: x -> norm -> linears -> hidden layer -> last linear -> plus x
    """

    # the name in errors about tensors
    name: str
    # the name in errors about options
    caller: str
    # the names of the weights, and their adapters
    linears: Linears
    # the activation, by any of its names; None for none
    activation: str | None = None
    # the norm before, without its tensors
    norm: NormSpec | None = None
    # the types in `norm`, as True equals 1
    kinds: tuple[type, ...] = ()
    # the `normalized_shape` of a module's norm, None for a function's call
    normalized_shape: Any = None
    # whether x is added to the result
    residual: bool = False
    # the level of a call, None for the default
    save: str | None = None
    # the level of its module
    default: str = "inputs"
    # into how many chunks rows are cut, None for as many as shapes say
    chunks: int | None = None
    # the variant that runs, None for the default
    kernel: str | None = None
    # the probability for the hidden layer
    dropout: float = 0.0
    # the probability for the result, before x is added
    output_dropout: float = 0.0
    # whether a module asks, which may run its own forward
    is_module: bool = False
    # how x is kept for backward, None for as it is
    store: str | None = None

    @property
    def num_seeds(self) -> int:
        """How many seeds the layer's own dropouts have."""
        return (self.dropout > 0) + (self.output_dropout > 0)

    @property
    def is_plain(self) -> bool:
        """Whether no linear is adapted and nothing is dropped."""
        return not (self.linears.parts or self.num_seeds)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The tensors of a call."""
        norm = [Operand(key, is_optional=True) for key in ("norm.weight", "norm.bias")]
        return (Operand("x"), *(norm if self.norm is not None else ()), *self.linears.operands)

    def check(self, override: str | None) -> tuple[str, str]:
        """Return activation and save level; refuse invalid options."""
        caller = self.caller
        function = self.linears.function
        level = levels.level_of(caller, self.save, override, self.default, LEVELS_OF[function])
        activation = validate.activation(caller, self.activation)
        validate.check_layer_options(caller, self.residual, self.chunks)
        for key in ("dropout", "output_dropout"):
            arguments.probability(caller, key, getattr(self, key))
        if self.kernel is not None:
            arguments.choice(caller, "kernel", self.kernel, ("split", VARIANTS[function]))
            if not self.is_plain:
                # adapters are GEMMs of their own
                arguments.choice(caller, "kernel", self.kernel, ("split",))
        return activation, level

    def split_packed(self, linears: Sequence[tuple[Any, Any]], saves_half: bool) -> Any:
        """Return the options and linears of a packed weight's halves, None to run it whole.

        So one half can be saved without the other, or h written over a half before its dropout.
        """
        if self.linears.names != PACKED or not (saves_half or self.num_seeds):
            return None
        (weight, bias), last = linears
        pairs = zip(weight.chunk(2), (None, None) if bias is None else bias.chunk(2), strict=True)
        return self._replace(linears=Linears(GATED)), [*pairs, last]

    def reference(self, x: Any, norm: Any, linears: Sequence[tuple[Any, Any]]) -> Any:
        """Return the results by torch's own ops; norm: its tensors; linears: weights and biases."""
        weights = [w for w, _ in linears]
        before = self.dropout
        after = self.output_dropout
        seeds: Any = eager.forced.seeds
        if seeds is None:
            seeds = draw_seeds(x, count_dropouts(weights, before, after))
        numbers = itertools.count(self.num_seeds)
        n = x if self.norm is None else eager.norm(self.norm, x, x.shape[-1:], *norm)
        firsts = linears if self.linears.last is None else linears[:-1]
        zs = [eager.linear(n, *pair, seeds, numbers) for pair in firsts]
        if self.linears.function == "norm_linear":
            return tuple(zs)
        if self.linears.names == PACKED:
            gate, up = zs[0].chunk(2, dim=-1)
            zs = [gate, up]
        y = eager.hidden(zs, self.activation)
        if self.linears.last is not None:
            block_seeds = iter([None, None] if seeds is None else seeds)
            h = eager.dropout(y, before, next(block_seeds) if before else None)
            y = eager.linear(h, *linears[-1], seeds, numbers)
            y = eager.dropout(y, after, next(block_seeds) if after else None)
        return x + y if self.residual else y

    def saved_gemms(self, adapters: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of the eager GEMMs with outputs that the level saves.

        adapters: how many each linear has; their GEMMs are cheap to recompute.
        """
        activation, level = self.check(levels.override.level)
        has_hidden = self.linears.last is not None or activation != "identity"
        if level == "inputs" or not has_hidden:
            return ()
        return (0, 1 + 2 * adapters[0]) if level == "preact" and len(adapters) > 2 else (0,)

    def make_call(self, context: Context, x: Any, *metas: Any) -> Any:
        """Refuse a call with parts that do not fit; return None where only eager may run."""
        activation, level = self.check(context.level)
        name = self.name
        names = self.linears.names
        spec = self.norm
        count = 0 if spec is None else 2
        norm = metas[:count]
        linears = self.linears.of(metas[count:])
        if spec is not None:
            if not isinstance(spec, NormSpec):
                arguments.wrong_type(name, "norm", "a NormSpec", spec)
            spec = spec._replace(weight=norm[0], bias=norm[1])
            validate.check_norm(name, spec, "norm.")
        validate.check_tensors(name, self.operands, (x, *norm, *flat_of(linears)))
        last = self.linears.last
        halves = 2 if names == PACKED else 1
        by_names = dict(zip(names, linears, strict=True))
        validate.check_linears(name, x, by_names, last, halves, adds=bool(self.residual))
        dtype = x.dtype
        shape = tuple(x.shape[-1:])
        if self.normalized_shape is not None:
            shape = validate.normalized_shape(name, self.normalized_shape)
        if spec is not None:
            dtype = validate.norm_dtype(name, x, spec, shape, context, "norm.")
        dtype = context.compute_dtype(dtype)
        validate.check_multiplied(name, context, dtype, by_names)
        validate.check_kernel(name, self.kernel, x, dtype)
        if context.reference_only:
            return None
        b = Builder(context, dtype)
        shape = linears[-1].weight.shape
        hidden = Hidden(activation, self._variant(x, dtype, activation, shape), names == PACKED)
        level = level if context.grad else "inputs"
        chunks = self._chunks(b, x, shape)
        # one weight's gradient after the other, where these are larger than the hidden layers
        is_small = 2 * math.prod(x.shape[:-1]) <= x.shape[-1]
        is_late = is_small and level == "inputs" and chunks == 1 and self.store is None
        call_options = self._steps(b, x, spec, linears, hidden, is_late=is_late)
        call_options |= {"level": level, "chunks": chunks, "store": self.store, "may_round": True}
        return b.build(self.linears.function, {"x": x}, **call_options, casts=spec is None)

    def _variant(self, x: Meta, dtype: torch.dtype, activation: str, last: Sequence[int]) -> str:
        """Return which kernels run: "aten", "split", or the function's other one."""
        function = self.linears.function
        wish = self.kernel if self.is_plain else "split"
        if function == "norm_linear" or not x.shape[-1]:
            return "aten"
        if function == "linear_act":
            # an identity has nothing to fuse
            wish = "split" if activation == "identity" and wish is None else wish
        else:
            # the GEMM that the hybrid variant does itself contracts over the output features
            last = last[::-1]
        sizes: Any = (math.prod(x.shape[:-1]), *last)
        return dispatch.variant_for(function, x, dtype, sizes, wish, VARIANTS[function])

    def _steps(
        self,
        b: Builder,
        x: Meta,
        spec: NormSpec | None,
        linears: Sequence[LinearParts],
        hidden: Hidden,
        *,
        is_late: bool = False,
    ) -> dict[str, Any]:
        """Add the steps; return the arguments of the call.

        is_late: see `Gemm`, for all linears but the last.
        """
        read = "x"
        adds = bool(self.residual) and x.dtype == b.dtype
        has_last = self.linears.last is not None
        function = self.linears.function
        if spec is not None:
            # a layer's sums may add up over chunks
            sums = None if has_last else sums_dtype(x, spec.weight, spec.bias)
            op = Norm(norm_rule_of(spec, x.dtype), b.dtype, sums, kernel_of_norm(x, b.dtype))
            read = b.norm(op, spec.weight, spec.bias)
        numbers = [b.linear(*pair) for pair in zip(self.linears.names, linears, strict=True)]
        firsts = numbers[: len(numbers) - has_last]
        wide = None
        results = [f"y{i}" for i in range(len(firsts))] if firsts[1:] else ["y"]
        products = ()
        if function == "norm_linear":
            wide = torch.promote_types(b.dtype, x.dtype)
        elif has_last or hidden.activation != "identity":
            results = products = ("gate", "up") if firsts[1:] else ("z",)
            if firsts[1:] and not self.linears.parts:
                # two full GEMMs add up in float32
                wide = torch.promote_types(b.dtype, torch.float32)
        # backward adds up in the order of the linears
        for out, number in list(zip(results, firsts, strict=True))[::-1]:
            b.apply(number, wide, read, out, is_late=is_late and has_last)
        if products:
            results = [b.add(hidden, "h" if has_last else "y", products)]
        if has_last:
            # the last step makes y
            h = b.dropout(self.dropout, 0, results[0], "h_dropped")
            y = b.apply(numbers[-1], None, h, "down" if adds or self.output_dropout else "y")
            seed = int(self.dropout > 0)
            y = b.dropout(self.output_dropout, seed, y, "down_dropped" if adds else "y")
            results = [b.add(Add(), "y", (y, "x")) if adds else y]
        fields = {"gemm_outputs": products, "dtype": b.dtype if adds or read == "x" else None}
        is_added_after = bool(self.residual) and not adds
        return {"results": results, "fields": fields, "adds_residual_outside": is_added_after}

    def _chunks(self, b: Builder, x: Meta, last: Sequence[int]) -> int:
        """Return into how many chunks a layer cuts its rows."""
        if self.linears.last is None:
            return 1
        num = 2 if self.linears.function == "mlp" else 3
        rows = math.prod(x.shape[:-1])
        return self.chunks or run.chunks_for(rows, x.shape[-1], last[1], num, b.dtype.itemsize)


def split_norm(norm: Any) -> tuple[Any, tuple[type, ...], tuple[Any, ...]]:
    """Return a record without its tensors, the types in it, and these tensors."""
    if norm is None:
        return None, (), ()
    if not isinstance(norm, NormSpec):
        # refused
        return norm, (), (None, None)
    bare = norm._replace(weight=None, bias=None)
    return bare, tuple(map(type, bare)), (norm.weight, norm.bias)


def kernel_of_norm(x: Meta, dtype: torch.dtype) -> str:
    """Return which kernels normalize tensors like x."""
    return "aten" if dispatch.is_aten(x.device, dtype, *x.shape) else "triton"


class NormOptions(NamedTuple):
    """The options of a norm."""

    # the function, for errors
    name: str
    # "rms" or "layer"
    kind: str
    # as it was given; checked by `make_call`
    normalized_shape: Any
    # None for the default
    eps: float | None
    # added to the weight
    offset: float = 0.0
    # where half precision is rounded
    cast: str = "torch"
    # whether a module asks, which may run its own forward
    is_module: bool = False
    # whether a residual is added to x first; the sum is a result, too
    adds: bool = False
    # how x is kept for backward, None for as it is; a sum is, as the caller has it
    store: str | None = None
    # it has none
    linears = ()

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The tensors of a call."""
        parameters = [Operand(key, is_optional=True) for key in ("weight", "bias")]
        return (Operand("x"), *([Operand("residual")] if self.adds else []), *parameters)

    def check(self, override: str | None, weight: Any = True) -> None:
        """Refuse options that mean nothing."""
        if self.kind == "layer":
            arguments.number(self.name, "eps", self.eps, 0)
        validate.check_norm(self.name, self._spec(weight, None))

    def _spec(self, weight: Any, bias: Any) -> NormSpec:
        return NormSpec(self.kind, weight, bias, self.eps, self.offset, self.cast)

    def reference(self, x: Any, between: Sequence[Any], linears: Any = ()) -> Any:
        """Return the results by torch's own ops; between: a residual, weight and bias."""
        *residuals, weight, bias = between
        shape = self.normalized_shape
        if not dispatch.is_traced(x):
            # torch's own takes no numbers of numpy
            shape = validate.normalized_shape(self.name, shape)
        total = x + residuals[0] if residuals else x
        norm = partial(eager.norm, self, shape=shape, weight=weight, bias=bias)
        y = compiled.run_norm(norm, total)
        return (y, total) if residuals else y

    def make_call(self, context: Context, x: Any, *metas: Any) -> Any:
        """Refuse arguments that the eager norm would refuse."""
        *residuals, weight, bias = metas
        name = self.name
        spec = self._spec(weight, bias)
        self.check(context.level, weight)
        shape = validate.normalized_shape(name, self.normalized_shape)
        if self.is_module and self.kind == "rms" and getattr(x, "dtype", None) in COMPLEX:
            return dispatch.OWN_FORWARD
        validate.check_tensors(name, self.operands, (x, *metas))
        b = Builder(context, x.dtype)
        inputs = {"x": x}
        reads = "x"
        keeps = ()
        for residual in residuals:
            must = "must have the shape of x,"
            validate.check_shape(name, "residual", residual, *x.shape, must=must)
            inputs["residual"] = residual
            if x.dtype != residual.dtype:
                x = x._replace(dtype=torch.promote_types(x.dtype, residual.dtype))
            reads = b.add(Add(), "total", ("x", "residual"))
            keeps = (reads,)
        dtype = validate.norm_dtype(name, x, spec, shape, context)
        if context.reference_only:
            return None
        kernel = kernel_of_norm(x, x.dtype)
        sums = sums_dtype(x, weight, bias)
        op = Norm(norm_rule_of(spec, x.dtype), dtype, sums, kernel, len(shape))
        b.norm(op, weight, bias, reads, out="y")
        return b.build(
            name,
            inputs,
            ["y", *keeps],
            {"saved_results": keeps, "num_dims": len(shape)},
            store=None if self.adds else self.store,
            may_round=not self.adds,
        )
