"""A linear and its activation that save only their input.

`LinearOptions` is also the record of mlp.py and norm_linear.py: linears with a norm before them, a
hidden layer between them, and a residual after them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node

from fusedckpt.autograd import arguments, dispatch, levels
from fusedckpt.autograd.dispatch import Context, Meta, Operand
from fusedckpt.autograd.levels import LEVELS_OF
from fusedckpt.blocks import eager, passes, run, validate
from fusedckpt.blocks.builder import GATED, ONE_LINEAR, PACKED, Builder, Linears, flat_of
from fusedckpt.blocks.layer_function import run_layer
from fusedckpt.blocks.operands import LinearParts, LoRA, count_dropouts
from fusedckpt.blocks.program import Gradient, Op
from fusedckpt.blocks.steps import Add
from fusedckpt.blocks.writer import Writer
from fusedckpt.kernels import linear as kernels
from fusedckpt.layers.norm import (
    Norm,
    NormSpec,
    check_norm,
    eager_norm,
    kernel_of_norm,
    norm_dtype,
    norm_rule_of,
    sums_dtype,
)

# of each function: its kernel variant beside "split"
VARIANTS = {"linear_act": "fused", "mlp": "hybrid", "gated_mlp": "hybrid"}
_LINEAR_NAMES = Linears(ONE_LINEAR)


@dataclass(frozen=True)
class Hidden(Op):
    """h = act(z), times u where gated; or of the two halves of z where packed."""

    # a name in ACTIVATIONS
    activation: str
    # "aten", "split", "hybrid" (its backward takes in the GEMM that gives dh) or "fused" (the GEMM
    # that gives z takes in act)
    kernel: str = "split"
    # whether z has the columns of gate and up
    is_packed: bool = False
    recomputes = is_joint = True
    gradients = (("r0", ("r0", "r1")), ("r1", ("r0", "r1")))

    @property
    def takes_gemm(self) -> bool:  # type: ignore[override]  # of a kernel
        """Whether one kernel computes it with the GEMM before it."""
        return self.kernel == "fused"

    def width(self, read: int, weight: Any) -> int:
        """Return the features of h."""
        return read // 2 if self.is_packed else read

    def forward(self, code: Writer, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write h, over the tensors that it reads; not over half a row.

        A GEMM that reads rows that lie apart may round otherwise.
        """
        if self.is_packed:
            over = {"out": ()}
            fn = passes.packed
            return [code.call(fn, *reads, self.activation, self.kernel, over=over)]
        z, u = reads if len(reads) > 1 else (*reads, None)
        args = (z, u, self.activation, self.kernel)
        return [code.call(kernels.hidden, *args, over={"out": reads[::-1]})]

    def with_gemm(self, code: Writer, x: Node, linear: Sequence[Any], keeps: bool) -> list[Node]:
        """Write h = act(x W' + b), and z if `keeps`, by one kernel."""
        return code.items(code.call(kernels.linear_then_act, x, *linear, self.activation, keeps), 2)

    def backward(self, code: Writer, grad: Gradient) -> dict[str, Node]:
        """Write dz, du and h, and the sums over the columns of dz and du."""
        reads = grad.reads
        sums = ("b0" in grad.sums, "b1" in grad.sums)
        if "x" in reads:
            args = (grad.dy, reads["x"], grad.weight, reads.get("b"), self.activation, sums[0])
            slots = ("r0", "b0")
            node = code.call(kernels.linear_act_dz, *args)
        else:
            args = (
                grad.dy,
                grad.weight,
                reads["r0"],
                reads.get("r1"),
                self.activation,
                self.kernel,
            )
            args = (*args, self.is_packed, sums, "y" in grad.gives)
            slots = ("y", "r0", "r1", "b0", "b1")
            node = code.call(passes.hidden_grads, *args, over=self._places(grad))
        nodes = zip(slots, code.items(node, len(slots)), strict=True)
        return {slot: part for slot, part in nodes if slot in {*grad.gives, *grad.sums}}

    def _places(self, grad: Gradient) -> dict[str, tuple[Node, ...]]:
        """Return the tensors that h, dz and du may be written over, the best first."""
        if self.is_packed:
            wishes = {"y": ("dy",), "r0": ("r0",)}
        elif "r1" in grad.gives:
            wishes = {"y": ("dy", "r1", "r0"), "r1": ("dy", "r1"), "r0": ("r0", "r1")}
        else:
            wishes = {"y": ("r0", "dy"), "r0": ("dy", "r0")}
        nodes = dict(grad.reads)
        if grad.weight is None:
            nodes["dy"] = grad.dy
        keys = {"y": "h", "r1": "du", "r0": "dz"}
        return {
            keys[slot]: tuple([nodes[name] for name in names if name in nodes])
            for slot, names in wishes.items()
            if slot in grad.gives
        }

    def eager(self, reads: Sequence[Tensor], params: Sequence[Any]) -> Tensor:
        """Return h in torch's ops."""
        pair = reads[0].chunk(2, -1) if self.is_packed else reads
        return eager.hidden(pair, self.activation)


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
            seeds = eager.draw_seeds(x, count_dropouts(weights, before, after))
        numbers = itertools.count(self.num_seeds)
        n = x if self.norm is None else eager_norm(self.norm, x, x.shape[-1:], *norm)
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
            check_norm(name, spec, "norm.")
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
            dtype = norm_dtype(name, x, spec, shape, context, "norm.")
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


def linear_act(
    x: Tensor,
    weight: Tensor | LoRA,
    bias: Tensor | None = None,
    activation: str | None = "gelu",
    *,
    save: str | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Return act(F.linear(x, weight, bias)), saving only x for backward.

    Args:
        x: [..., in_features], float32, bfloat16, float16 or float64.
        weight: [out_features, in_features], of x's dtype; under autocast of any dtype but float64.
            Or a `LoRA` record, or a quantized weight, as in `mlp`.
        bias: [out_features] or None.
        activation: identity (or None), relu, relu2, leaky_relu, gelu (erf), gelu_tanh, quick_gelu,
            silu, sigmoid, tanh, softplus, mish, or their names in torch and transformers.
        save: "inputs" (the default) saves x, in_features elements per token, and recomputes the
            pre-activation in backward: one more GEMM. "preact" saves the pre-activation too,
            out_features elements per token, and recomputes no GEMM.
        kernel: "fused" (one Triton GEMM with the activation in its epilogue) or "split" (the
            vendor's GEMM, then an elementwise kernel in place); by default split.

    Returns:
        [..., out_features], in the dtype that F.linear would give.

    Raises:
        ValueError: invalid shapes, devices, activation, level or kernel, or kernel="fused" where
            Triton cannot run.
        TypeError: a tensor is not dense or not floating point (DTensors and nested tensors are not
            dense), F.linear rejects the dtypes, or an argument has another type.

    Other tensor subclasses, and inference tensors where gradients are needed, run in eager.
    """
    name = "linear_act"
    options = LinearOptions(name, name, _LINEAR_NAMES, activation, save=save, kernel=kernel)
    return run_layer(options, x, (), [(weight, bias)])


class Linear(nn.Linear):
    """nn.Linear followed by an activation, which saves only its input [..., in_features].

        y = act(F.linear(x, weight, bias))

    Constructor, parameters and state_dict are nn.Linear's; `activation` and `save`
    are those of `functional.linear_act`, with no activation by default, and so are the errors.
    With an activation, backward recomputes the GEMM, or only the activation with save="preact".
    """

    save_levels = LEVELS_OF["linear_act"]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
        save: str = "inputs",
    ):
        activation = validate.activation("Linear", activation)
        levels.check("Linear", save, LEVELS_OF["linear_act"])
        sizes = {"in_features": in_features, "out_features": out_features}
        arguments.linear_sizes("Linear", sizes, bias, device, dtype)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation
        self.save = save

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        options = LinearOptions(
            name="Linear",
            caller="Linear",
            linears=_LINEAR_NAMES,
            activation=self.activation,
            default=self.save,
            is_module=True,
        )
        pair = self.weight, self.bias
        y = run_layer(options, input, (), [pair])
        return options.reference(input, (), [pair]) if y is None else y

    def extra_repr(self) -> str:
        """Describe the layer as nn.Linear does, with the activation and level after it."""
        return f"{super().extra_repr()}, activation={self.activation}, save={self.save}"
