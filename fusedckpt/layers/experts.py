"""Mixtures of experts that save only their input, the routing and its scores.

Elements saved and GEMM FLOPs recomputed at each level, per token, for K experts of hidden width F;
eager saves K (2 D + 4 F) and more:

    level      saved            backward recomputes
    inputs     D                gate and up: 4 D F K
    gate       D + K F          up: 2 D F K
    preact     D + 2 K F        nothing but elementwise work

and 12 K bytes of index (int64) and scores (float32). The down GEMM is never recomputed, nor is its
result saved.

The program of a call:

    x -> gather -> gate and up -> act(gate) * up * score -> down -> sum over a token's experts

Between gather and sum a value has K rows for each token, sorted by expert (kernels/routed.py). The
route is a value, too, which backward recomputes from the index. A score multiplies h, not the
result: both are linear in it. So its gradient is a sum of dh * h, and backward neither saves nor
recomputes the results of experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node

from fusedckpt.autograd import arguments, dispatch, levels, private
from fusedckpt.autograd.dispatch import Context, Operand
from fusedckpt.autograd.levels import LEVELS_OF
from fusedckpt.blocks import eager, passes, run, validate
from fusedckpt.blocks.builder import ROUTED, ROUTED_GATED, Builder, Linears, flat_of
from fusedckpt.blocks.compiled import grouped_product
from fusedckpt.blocks.late import late_weight_grad
from fusedckpt.blocks.layer_function import run_layer
from fusedckpt.blocks.operands import LoRA, parts_of_linears
from fusedckpt.blocks.program import Gradient, Op, Program
from fusedckpt.blocks.quantized import EachExpert, QuantizedWeight, quantized
from fusedckpt.blocks.writer import Writer
from fusedckpt.kernels import gating as gating_kernels
from fusedckpt.kernels import grouped, routed
from fusedckpt.kernels.gating import ClampedSwiGLU, Gating

_INPUTS: tuple[str, ...] = ("x", "index", "scores")
_INTEGERS = (torch.int64, torch.int32)


def eager_gated(gate: Tensor, up: Tensor, gating: Gating) -> Tensor:
    """Return act(gate) * up, or a clamped SwiGLU."""
    if isinstance(gating, str):
        return eager.hidden([gate, up], gating)
    alpha, limit, offset, _ = gating
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return (up + offset) * (gate * torch.sigmoid(gate * alpha))


@dataclass(frozen=True)
class RouteRows(Op):
    """How the slots of an index are sorted by expert: see `routed.Route`."""

    num_experts: int
    kernel: str | None
    runs_triton: bool = False

    def forward(self, code: Writer, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write the route."""
        return [code.call(routed.route, reads[0], self.num_experts, self.kernel, self.runs_triton)]

    def eager(self, reads: Sequence[Tensor], params: Sequence[Any]) -> Any:
        """Return the route."""
        if not torch.compiler.is_compiling():
            return routed.route(reads[0], self.num_experts, None)
        private.assert_later((reads[0] >= 0).all(), "experts: index must be at least 0")
        return routed.route(reads[0], self.num_experts, "torch")


@dataclass(frozen=True)
class Move(Op):
    """Each token's row of x once for every slot, or the sum of each token's rows.

    Each is the other's gradient. Reads x and a route.
    """

    top_k: int
    gathers: bool
    dtype: torch.dtype | None = None
    gradients = (("r0", ("r1",)),)

    def width(self, read: int, weight: Any) -> int:
        """Return the features of K rows, or of one."""
        return self.top_k * read if self.gathers else read // self.top_k

    def forward(self, code: Writer, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write the rows, or the sum."""
        return [code.call(routed.gather if self.gathers else routed.combine, *reads)]

    def backward(self, code: Writer, grad: Gradient) -> dict[str, Node]:
        """Write the gradient of x."""
        fn = routed.combine if self.gathers else routed.gather
        dy = code.cast(grad.dy, self.dtype)
        return {"r0": code.call(fn, dy, grad.reads["r1"], dtype=self.dtype)}

    def eager(self, reads: Sequence[Any], params: Sequence[Any]) -> Tensor:
        """Return the rows, or the sum, by torch's ops."""
        x, route = reads
        if self.gathers:
            return routed.gather(x.to(self.dtype), route)
        return routed.as_rows(x, route)[route.places].sum(1)


@dataclass(frozen=True)
class Grouped(Op):
    """y = x W_e' + b_e for the rows of every expert e; b_e times the score where one is read.

    Reads x, a route and perhaps scores.
    """

    # how many experts each token has
    top_k: int
    # whether the weight is [E, in, out]
    is_transposed: bool
    # of the product
    dtype: torch.dtype | None = None
    # whether an expert's weight is dense only while a GEMM reads it
    is_quantized: bool = False
    # of the product
    scale: float = 1.0
    # whether the weight's gradient is computed after that of the last weight, see `late`
    is_late: bool = False
    has_gemm = casts = True
    # x is freed before its gradient is computed
    gradients = (
        ("p1", ("r1", "r2")),
        ("r2", ("p1", "r1")),
        ("p0", ("r0", "r1")),
        ("r0", ("p0", "r1")),
    )

    def width(self, read: int, weight: Any) -> int:
        """Return the features of K rows."""
        return self.top_k * weight[2 if self.is_transposed else 1]

    def _product(self, code: Writer, weight: Node, turns: bool, x: Node, *args: Any) -> Node:
        """Write the product with a weight, or, where it turns, with its transpose."""
        if self.is_quantized:
            weight = code.call(EachExpert, weight, self.is_transposed == turns, self.dtype)
        elif self.is_transposed == turns:
            weight = code.call("transpose", weight, 1, 2)
        if self.scale != 1:
            # of an adapter: smaller than any product with it
            weight = code.call(torch.mul, weight, self.scale)
        return code.call(grouped.product, x, weight, *args, dtype=self.dtype)

    def forward(self, code: Writer, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write y."""
        weight, bias = params
        return [self._product(code, weight, False, reads[0], bias, *reads[1:])]

    def backward(self, code: Writer, grad: Gradient) -> dict[str, Node]:
        """Write the gradient of x, the weight, the bias or the scores."""
        (slot,) = grad.gives
        dy = code.cast(grad.dy, self.dtype)
        reads = grad.reads
        route = reads["r1"]
        if slot == "r0":
            args = (dy, None, route, None, grad.total)
            return {slot: self._product(code, reads["p0"], True, *args)}
        if slot == "p1":
            return {slot: code.call(grouped.bias_grad, dy, route, reads.get("r2"))}
        if slot == "r2":
            return {slot: code.call(grouped.bias_scores_grad, dy, reads["p1"], route)}
        pair = (reads["r0"], dy) if self.is_transposed else (dy, reads["r0"])
        if self.scale != 1:
            # scaled in float32, so that no factor overflows
            slots_and_nodes = code.call(grouped.weight_sum, None, *pair, route)
            return {slot: code.call("mul_", slots_and_nodes, self.scale)}
        if "sum" in reads:
            return {slot: code.call(grouped.weight_sum, reads["sum"], *pair, route)}
        if self.is_late:
            return {slot: code.call(late_weight_grad, *pair, route)}
        return {slot: code.call(grouped.weight_grad, *pair, route)}

    def eager(self, reads: Sequence[Any], params: Sequence[Any]) -> Tensor:
        """Return y by torch's ops, with zeros for the rows of no expert."""
        x, route, scores = [*reads, None][:3]
        weight, bias = params
        if isinstance(weight, QuantizedWeight):
            weight = weight.dense(None)
        weight, bias = [None if p is None else p.to(self.dtype) for p in (weight, bias)]
        assert weight is not None
        rows = routed.as_rows(x, route)
        y = _products(rows, weight if self.is_transposed else weight.mT, route)
        if bias is not None:
            s = (
                rows.new_ones(len(rows), 1)
                if scores is None
                else routed.scores_by_row(scores, route)
            )
            wide = torch.promote_types(s.dtype, y.dtype)
            y = y + _products(s.to(wide), bias[:, None].to(wide), route).to(y.dtype)
        return routed.per_token(y, route)


@dataclass(frozen=True)
class Adapted(Grouped):
    """y = total + scale x W_e', of an adapter; reads x, a route and the total, written over."""

    gradients = (("p0", ("r0", "r1")), ("r0", ("p0", "r1")))

    def forward(self, code: Writer, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write the sum."""
        x, route, total = reads
        return [self._product(code, params[0], False, x, None, route, None, total)]

    def eager(self, reads: Sequence[Any], params: Sequence[Any]) -> Tensor:
        """Return the sum by torch's ops."""
        return reads[2] + super().eager(reads[:2], params) * self.scale


def _products(rows: Tensor, weight: Tensor, route: routed.Route) -> Tensor:
    """Return rows times the weight [E, K, N] of their expert."""
    if route.pieces is None:
        return grouped_product(rows, weight, route.ends)
    # of no rows, one expert's, so that the result depends on the weight
    pieces = route.pieces or ((0, slice(0, 0)),)
    parts = [rows[part] @ weight[expert] for expert, part in pieces]
    return torch.cat([*parts, rows.new_zeros(len(rows) - route.count, weight.shape[2])])


@dataclass(frozen=True)
class Gated(Op):
    """h = act(gate) * up times the score of each row; reads z, or gate and up, scores, a route.

    is_packed: whether z has both.
    """

    gating: Gating
    is_packed: bool
    recomputes = is_joint = True

    @property
    def gradients(self) -> tuple[tuple[str, tuple[str, ...]], ...]:  # type: ignore[override]  # fixed
        """Read all slots; the scores' gradient comes first, added to that of a bias's scores."""
        slots = [slot for slot in self._slots() if slot is not None]
        return tuple([(slot, tuple(slots)) for slot in (slots[-2], *slots[:-2])])

    def width(self, read: int, weight: Any) -> int:
        """Return the features of K rows of h."""
        return read // 2 if self.is_packed else read

    def _slots(self) -> list[str | None]:
        """Return the slots of z, up, the scores and the route."""
        return ["r0", None, "r1", "r2"] if self.is_packed else ["r0", "r1", "r2", "r3"]

    def forward(self, code: Writer, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write h."""
        z, *others = reads
        up = [None] if self.is_packed else []
        return [code.call(gating_kernels.gated, z, *up, *others, self.gating)]

    def backward(self, code: Writer, grad: Gradient) -> dict[str, Node]:
        """Write h, and the gradients of z, up and the scores."""
        slots = self._slots()
        args = [None if slot is None else grad.reads[slot] for slot in slots]
        needs = "y" in grad.gives, slots[2] in grad.gives
        over = {"h": [grad.dy], "dz": [args[0]], "du": [args[1]]}
        if not needs[0]:
            del over["h"]
        if self.is_packed:
            del over["du"]
        node = code.call(gating_kernels.gated_grad, grad.dy, *args, self.gating, needs, over=over)
        h, dz, du, ds = code.items(node, 4)
        if grad.total is not None:
            ds = code.call(passes.summed, grad.total, ds)
        slots_and_nodes = zip(["y", *slots[:3]], (h, dz, du, ds), strict=True)
        return {
            slot: part for slot, part in slots_and_nodes if slot is not None and slot in grad.gives
        }

    def eager(self, reads: Sequence[Any], params: Sequence[Any]) -> Tensor:
        """Return h by torch's ops."""
        *zs, scores, route = reads
        rows = [routed.as_rows(z, route) for z in zs]
        gate, up = gating_kernels.gate_and_up(
            rows[0], None if self.is_packed else rows[1], self.gating
        )
        h = eager_gated(gate, up, self.gating)
        return routed.per_token((h * routed.scores_by_row(scores, route)).to(h.dtype), route)


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


def experts(
    x: Tensor,
    index: Tensor,
    scores: Tensor,
    gate_up: Tensor | LoRA,
    down: Tensor | LoRA,
    *,
    activation: str | ClampedSwiGLU = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    is_transposed: bool = False,
    save: str | None = None,
    chunks: int | None = None,
) -> Tensor:
    """Return the sum of each token's experts, gated MLPs, times their scores.

        for e, s in zip(index[t], scores[t]):
            gate, up = F.linear(x[t], gate_up[e], gate_up_bias[e]).chunk(2)
            y[t] += s * F.linear(act(gate) * up, down[e], down_bias[e])

    Saves x, index and scores; see the table in fusedckpt/layers/experts.py for the levels.

    Args:
        x: [..., D], float32, bfloat16, float16 or float64.
        index: [..., K], int64 or int32: the experts of each token. An expert of E or more, as
            expert parallelism marks experts of other ranks, adds nothing.
        scores: [..., K], floating point; they get a gradient. They multiply the hidden layer: in
            float16 one above 1 may overflow where eager, which multiplies the result, does not.
        gate_up: [E, 2 F, D] of x's dtype, under autocast of any dtype but float64; gate's rows
            first. Or a weight that dequantizes, or a `LoRA` record with A [E, r, D], B [E, 2 F, r]
            and no dropout, see `mlp`; A and B are cast to the dtype of the weight, as by peft.
        down: [E, D_out, F], as gate_up.
        activation: a name as in `linear_act`, or a `ClampedSwiGLU` record.
        gate_up_bias, down_bias: [E, 2 F] and [E, D_out], or None.
        is_transposed: whether the weights lie as [E, D, 2 F] and [E, F, D_out], and A and B
            accordingly, as [E, D, r] and [E, r, 2 F].
        save: "inputs" (the default), "gate" or "preact".
        chunks: into how many chunks forward and backward cut the tokens, which divides their
            temporaries: 3 F and 3 D elements for each of a token's K experts. Weight gradients then
            accumulate in float32. The default is one, unless the temporaries exceed 512 MiB and
            chunks save more than the accumulators take.

    Returns:
        [..., D_out]. Each chunk waits for the device once, to learn where each expert's rows end;
        not where a kernel multiplies, on a GPU. Weights that dequantize are multiplied in a loop.

    Raises:
        ValueError: invalid shapes, devices, activation, level or chunks; a negative index; an
            adapter with dropout.
        TypeError: tensors are not dense, or of dtypes that do not fit.

    Source: Guo et al., "SonicMoE", arXiv 2512.14080: the gradient of a score is a sum of dh * h.
    """
    kinds = kinds_in(activation)
    options = ExpertOptions("experts", activation, is_transposed, save, chunks=chunks, kinds=kinds)
    weights = [(gate_up, gate_up_bias), (down, down_bias)]
    return run_layer(options, x, (index, scores), weights)


class Experts(nn.Module):
    """A mixture of gated MLPs; only the input, the routing and its scores are saved for backward.

    Args:
        num_experts, in_features, hidden_features: E, D and F.
        activation: see `functional.experts`.
        bias, device, dtype: of both weights, as nn.Linear has them.
        save, chunks: see `functional.experts`.

    Parameters, as in transformers: `gate_up_proj` [E, 2 F, D], `down_proj` [E, D, F] and, with
    bias, `gate_up_proj_bias` and `down_proj_bias`, all drawn as nn.Linear's.
    """

    save_levels = LEVELS_OF["experts"]

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        hidden_features: int,
        activation: str | ClampedSwiGLU = "silu",
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        save: str = "inputs",
        chunks: int | None = None,
    ):
        name = type(self).__name__
        sizes = {"num_experts": num_experts}
        sizes |= {"in_features": in_features, "hidden_features": hidden_features}
        arguments.linear_sizes(name, sizes, bias, device, dtype)
        self._options(activation, save, chunks).check(None)
        super().__init__()
        self.activation = activation
        self.save = save
        self.chunks = chunks
        shapes = {
            "gate_up_proj": (num_experts, 2 * hidden_features, in_features),
            "down_proj": (num_experts, in_features, hidden_features),
        }
        for key, shape in shapes.items():
            weight = torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(key, nn.Parameter(weight))
            bias_of_weight = (
                nn.Parameter(torch.empty(shape[:2], device=device, dtype=dtype)) if bias else None
            )
            self.register_parameter(f"{key}_bias", bias_of_weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters of each expert as nn.Linear draws its own."""
        for weight, bias in self._pairs():
            bound = max(1, weight.shape[2]) ** -0.5
            for parameter in (weight, bias):
                if parameter is not None:
                    nn.init.uniform_(parameter, -bound, bound)

    def _pairs(self) -> list[tuple[Any, Any]]:
        """Return pairs of weight and bias."""
        keys = ("gate_up_proj", "down_proj")
        return [(getattr(self, key), getattr(self, f"{key}_bias")) for key in keys]

    @staticmethod
    def _options(activation: Any, save: str, chunks: int | None) -> ExpertOptions:
        return ExpertOptions(
            "Experts",
            activation,
            default=save,
            chunks=chunks,
            is_module=True,
            kinds=kinds_in(activation),
        )

    def forward(self, input: Tensor, index: Tensor, scores: Tensor) -> Tensor:
        """Map [..., D] to [..., D] by the experts `index` [..., K], weighted by `scores`."""
        options = self._options(self.activation, self.save, self.chunks)
        routing = (index, scores)
        pairs = self._pairs()
        y = run_layer(options, input, routing, pairs)
        return options.reference(input, routing, pairs) if y is None else y

    def extra_repr(self) -> str:
        """Describe the sizes and settings."""
        (first, _), (down, _) = self._pairs()
        settings = [f"{first.shape[0]}, {first.shape[2]}, {down.shape[2]}"]
        settings += [f"{key}={getattr(self, key)}" for key in ("activation", "save")]
        return ", ".join([*settings, *([] if self.chunks is None else [f"chunks={self.chunks}"])])
