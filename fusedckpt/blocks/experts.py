"""The program of a mixture of experts, and the checks of its calls.

x -> gather -> gate and up -> act(gate) * up * score -> down -> sum over a token's experts

A score multiplies h, not the result: both are linear in it. So its gradient is a sum of dh * h, and
backward neither saves nor recomputes the results of experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedckpt.autograd import arguments, dispatch, levels
from fusedckpt.autograd.dispatch import Context, Operand
from fusedckpt.blocks import run, validate
from fusedckpt.blocks.builder import ROUTED, ROUTED_GATED, Builder, Linears, flat_of
from fusedckpt.blocks.operands import LoRA, parts_of_linears
from fusedckpt.blocks.program import Program
from fusedckpt.blocks.quantized import QuantizedWeight, quantized
from fusedckpt.blocks.routed_steps import Adapted, Gated, Grouped, Move, RouteRows
from fusedckpt.kernels import routed
from fusedckpt.kernels.gating import ClampedSwiGLU, Gating

_INPUTS: tuple[str, ...] = ("x", "index", "scores")
_INTEGERS = (torch.int64, torch.int32)


class ExpertOptions(NamedTuple):
    """The options of a call of experts; its linears are ROUTED, or ROUTED_GATED."""

    # in errors about options
    caller: str
    # the name of an activation, or a ClampedSwiGLU
    gating: Any
    # whether weights are [E, in, out]
    is_transposed: bool = False
    # the level of a call, None for the default
    save: str | None = None
    # the level of the module
    default: str = "inputs"
    # into how many chunks rows are cut, None for as many as shapes say
    chunks: int | None = None
    # whether a module asks, which may run its own forward
    is_module: bool = False
    # the names of the weights
    linears: Linears = Linears(ROUTED)
    # the types in a ClampedSwiGLU, as True equals 1
    kinds: tuple[type, ...] = ()
    # in errors about tensors
    name: str = "experts"
    # adapters that drop are refused
    num_seeds = 0

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The tensors of a call."""
        return (*map(Operand, _INPUTS), *self.linears.operands)

    @property
    def is_split(self) -> bool:
        """Whether gate and up are weights of their own."""
        return self.linears.names == ROUTED_GATED

    @property
    def products(self) -> tuple[str, ...]:
        """The grouped products that a level may save."""
        return ("gate", "up") if self.is_split else ("z",)

    def check(self, override: str | None) -> tuple[Gating, str]:
        """Return gating and save level; refuse invalid options."""
        level = levels.level_of(self.caller, self.save, override, self.default, levels.LEVELS)
        arguments.flag(self.caller, "is_transposed", self.is_transposed)
        validate.check_layer_options(self.caller, False, self.chunks)
        if not isinstance(self.gating, ClampedSwiGLU):
            return validate.activation(self.caller, self.gating), level
        for key in ("alpha", "limit", "offset"):
            arguments.number(self.caller, f"activation.{key}", getattr(self.gating, key))
        return self.gating, level

    def make_call(self, context: Context, x: Any, index: Any, scores: Any, *metas: Any) -> Any:
        """Refuse a call with parts that do not fit; return None where only eager may run."""
        gating, level = self.check(context.level)
        linears = self.linears.of(metas)
        self._check(context, x, index, scores, linears)
        if context.reference_only:
            return None
        dtype = context.compute_dtype(x.dtype)
        num_experts, *sizes = linears[-1].weight.shape
        # temporaries of z, h and three times x, beside float32 sums over chunks
        nbytes = index.shape.numel() * 3 * sum(sizes) * dtype.itemsize
        sums = 4 * 3 * num_experts * math.prod(sizes) if dtype.itemsize == 2 else 0
        chunks = self.chunks or run.cut_for(nbytes, sums)
        b = Builder(context, dtype)
        inputs = dict(zip(_INPUTS, (x, index, scores), strict=True))
        # one weight's gradient after the other, where these are larger than rows that live longer
        rows = index.shape.numel() * x.shape[-1]
        is_late = chunks == 1 and rows < num_experts * math.prod(sizes)
        self._steps(b, gating, x, index, linears, is_late=is_late)
        fields = {"gemm_outputs": self.products, "top_k": index.shape[-1]}
        level = level if context.grad else "inputs"
        return b.build("experts", inputs, ["y"], fields, casts=True, level=level, chunks=chunks)

    def _check(self, context: Context, x: Any, index: Any, scores: Any, linears: Any) -> None:
        """Refuse tensors that do not fit each other."""
        name = self.name
        floating = [operand for operand in self.operands if operand.name != "index"]
        validate.check_tensors(name, floating, (x, scores, *flat_of(linears)))
        validate.check_integers(name, "index", index, x, _INTEGERS)
        leads = list(x.shape[:-1])
        if not x.shape or list(index.shape[:-1]) != leads or 0 in index.shape[-1:]:
            expected = validate.shape_text([*leads, "K"])
            got = list(index.shape)
            raise ValueError(f"{name}: index must be {expected}, K at least 1, got {got}")
        validate.check_shape(name, "scores", scores, *index.shape)
        dtype = context.compute_dtype(x.dtype)
        down = linears[-1].weight.shape
        if len(down) != 3 or not down[0]:
            raise ValueError(f"{name}: down must be [E, D, F], E at least 1, got {list(down)}")
        out, hidden = self._turned(down[1:])
        widths = [(hidden if self.is_split else 2 * hidden, x.shape[-1])] * (len(linears) - 1)
        widths.append((out, hidden))
        sizes = f" (x {list(x.shape)}, down {list(down)})"
        for names, parts, (n, k) in zip(self.linears.names, linears, widths, strict=True):
            key = names.weight
            turned = self._turned((n, k))
            validate.check_shape(name, key, parts.weight, down[0], *turned, beside=sizes)
            validate.check_shape(name, names.bias, parts.bias, down[0], n)
            weight = None if parts.is_quantized else parts.weight
            validate.check_dtypes(name, context, dtype, {key: weight, names.bias: parts.bias})
            for a, b in parts.adapters:
                rank = self._turned(a.shape[1:])[0] if len(a.shape) == 3 else "r"
                validate.check_shape(name, f"{key}.A", a, down[0], *self._turned((rank, k)))
                validate.check_shape(name, f"{key}.B", b, down[0], *self._turned((n, rank)))

    def _turned(self, sizes: Sequence[Any]) -> tuple[Any, Any]:
        """Return a weight's sizes, outputs first, in the order in which they lie, or back."""
        first, last = sizes
        return (last, first) if self.is_transposed else (first, last)

    def _steps(
        self,
        b: Builder,
        gating: Gating,
        x: Any,
        index: Any,
        linears: Any,
        is_late: bool = False,
    ) -> None:
        """Add the parameters and steps; is_late: see `Grouped`, for all weights but the last."""
        dtype = b.dtype
        top_k = index.shape[-1]
        pairs = zip(self.linears.names, linears, strict=True)
        numbers = [b.linear(*pair, num_dims=3) for pair in pairs]
        route = RouteRows(linears[-1].weight.shape[0], *self._kernels(b, x, linears))
        b.add(route, "route", ("index",))
        b.add(Move(top_k, gathers=True, dtype=dtype), "rows", ("x", "route"))
        for out, number in zip(self.products, numbers, strict=False):
            self._apply(b, top_k, number, ("rows", "route"), out, is_late=is_late)
        b.add(Gated(gating, not self.is_split), "h", (*self.products, "scores", "route"))
        reads = ("h", "route") if linears[-1].bias is None else ("h", "route", "scores")
        self._apply(b, top_k, numbers[-1], reads, "down_rows")
        b.add(Move(top_k, gathers=False, dtype=dtype), "y", ("down_rows", "route"))

    def _kernels(self, b: Builder, x: Any, linears: Any) -> tuple[str | None, bool]:
        """Return the kernel of the products, and whether Triton's kernels do the rest.

        The first is None for a loop, which quantized weights take.
        """
        ranks = [self._turned(a.shape[1:])[0] for parts in linears for a, _ in parts.adapters]
        sizes = (x.shape[-1], *linears[-1].weight.shape[1:], *ranks)
        path = dispatch.path_of(x.device, b.dtype)
        runs_triton = not dispatch.is_aten(x.device, b.dtype, *sizes)
        if any(parts.is_quantized for parts in linears):
            return None, runs_triton
        return routed.kernel_for(path, x.device, b.dtype, *sizes), runs_triton

    def _apply(
        self,
        b: Builder,
        top_k: int,
        numbers: Any,
        reads: Any,
        out: str,
        is_late: bool = False,
    ) -> None:
        """Add the steps of a grouped linear: y, then for each adapter a narrow value and a sum."""
        weight, bias, adapters = numbers
        options = top_k, self.is_transposed, b.dtype
        is_quantized = weight in b.quantized_params
        is_late = is_late and not (is_quantized or adapters)
        op = Grouped(*options, is_quantized=is_quantized, is_late=is_late)
        y = b.add(op, f"{out}.base" if adapters else out, reads, (weight, bias))
        for i, (first, last, constants, _) in enumerate(adapters):
            if rate := constants.dropout:
                raise ValueError(f"{self.name}: dropout of adapters must be 0, got {rate}")
            low = b.add(Grouped(*options), f"{out}.low{i}", reads[:2], (first, None))
            total = out if i == len(adapters) - 1 else f"{out}.sum{i}"
            op = Adapted(*options, scale=constants.scale)
            y = b.add(op, total, (low, "route", y), (last, None))

    def reference(self, x: Tensor, routing: Sequence[Tensor], pairs: Sequence[Any]) -> Tensor:
        """Return the result by torch's own ops; routing: index and scores."""
        autocast = dispatch.autocast_dtype(x.device)
        context = Context(
            grad=False,
            autocast=autocast,
            level=None,
            reference_only=True,
            is_unwatched=False,
            forced=(),
        )
        b = Builder(context, context.compute_dtype(x.dtype))
        (gating, _) = self.check(None)
        linears = parts_of_linears(self.name, self.linears.names, pairs, 0)
        if torch.compiler.is_compiling():
            # for adapted ones nothing was decided
            whole = self._replace(linears=Linears(self.linears.names, tuple(linears)))
            whole._check(context, x, routing[0], routing[1], linears)
        self._steps(b, gating, x, routing[0], linears)
        rows = [t.reshape(-1, t.shape[-1]) for t in (x, *routing)]
        program = Program(_INPUTS, tuple(b.steps), ("y",), tuple(b.params))
        # the steps cast
        with torch.autocast(x.device.type, enabled=False):
            (y,) = program.eager(dict(zip(_INPUTS, rows, strict=True)), flat_of(linears))
        return y.view(*x.shape[:-1], y.shape[-1])

    def saved_gemms(self, adapters: Sequence[int]) -> tuple[int, ...]:
        """Return the number of the first grouped product, of gate and up, where it is saved."""
        return (0,) if self.check(levels.override.level)[1] == "preact" else ()

    def split_packed(self, pairs: Sequence[Any], saves_half: bool) -> Any:
        """Return the options and weights of gate and up apart, None to run them packed."""
        if self.is_split or not saves_half:
            return None
        (weight, bias), last = pairs
        dim = 2 if self.is_transposed else 1
        firsts = zip(_halves(weight, self.gating, dim), _halves(bias, self.gating, 1), strict=True)
        return self._replace(linears=Linears(ROUTED_GATED)), [*firsts, last]


def kinds_in(gating: Any) -> tuple[type, ...]:
    """Return the types in a ClampedSwiGLU."""
    return tuple(map(type, gating)) if isinstance(gating, ClampedSwiGLU) else ()


def _halves(weight: Any, gating: Any, dim: int) -> Any:
    """Return gate's and up's part of a weight or bias, as views, or as records."""
    if weight is None:
        return None, None
    if isinstance(weight, LoRA):
        pairs = zip(*(_halves(t, gating, dim) for t in (weight.weight, weight.B)), strict=True)
        return [weight._replace(weight=half, B=b) for half, b in pairs]
    base = quantized(weight)
    if base is not None:
        base = base.checked("experts", "gate_up", "dequantize(gate_up)")
        return [_half(base, gating, dim, i) for i in (0, 1)]
    if isinstance(gating, ClampedSwiGLU) and gating.is_interleaved:
        return weight.unflatten(dim, (-1, 2)).unbind(dim + 1)
    return weight.chunk(2, dim)


def _half(weight: QuantizedWeight, gating: Any, dim: int, index: int) -> QuantizedWeight:
    shape = [*weight.shape]
    shape[dim] //= 2

    def dense(experts: slice | None) -> Tensor:
        return _halves(weight.dense(experts), gating, dim)[index]

    return weight._replace(shape=torch.Size(shape), dense=dense)
