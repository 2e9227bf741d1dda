"""Builds a call's program, step by step, with the layouts of parameters; names its linears.

A layer's `make_call` makes a `Builder`, adds steps and ends with `build`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fusedckpt.autograd.dispatch import Context, Operand
from fusedckpt.blocks.call import LayerCall, Layout
from fusedckpt.blocks.operands import LinearNames, LinearParts, flat, with_values
from fusedckpt.blocks.program import Op, Program, ProgramStep
from fusedckpt.blocks.steps import Dropout, Gemm

# the linears of each function; those of norm_linear are numbered
ONE_LINEAR = (LinearNames("weight", "bias"),)
TWO_LINEARS = (LinearNames("fc1_weight", "fc1_bias"), LinearNames("fc2_weight", "fc2_bias"))
_GATE = LinearNames("gate_weight", "gate_bias")
_UP = LinearNames("up_weight", "up_bias")
_DOWN = LinearNames("down_weight", "down_bias")
GATED = (_GATE, _UP, _DOWN)
# gate and up in one weight
PACKED = (_GATE, _DOWN)
# of experts, with gate and up in one weight or in two
_ROUTED_DOWN = LinearNames("down", "down_bias")
ROUTED = (LinearNames("gate_up", "gate_up_bias"), _ROUTED_DOWN)
_ROUTED_HALVES = [LinearNames(f"gate_up.{i}", f"gate_up.{i}_bias") for i in (0, 1)]
ROUTED_GATED = (*_ROUTED_HALVES, _ROUTED_DOWN)
_FUNCTION_OF = {
    ONE_LINEAR: "linear_act",
    TWO_LINEARS: "mlp",
    GATED: "gated_mlp",
    PACKED: "gated_mlp",
}


class Linears(NamedTuple):
    """The linear layers of a call, without their tensors.

    names: of the weight and bias of each. parts: metas of the weight, bias and adapters of each;
    empty where no weight is a `LoRA` record or quantized.
    """

    names: tuple[LinearNames, ...]
    parts: tuple[LinearParts, ...] = ()

    @property
    def function(self) -> str:
        """The name of the function that has these linears."""
        return _FUNCTION_OF.get(self.names, "norm_linear")

    @property
    def last(self) -> LinearNames | None:
        """The linear that reads the hidden layer, None if there is none."""
        return self.names[-1] if self.function in ("mlp", "gated_mlp") else None

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The tensors of each linear, in the order of `flat`."""
        operands = []
        for names, parts in zip(self.names, self.parts or (None,) * len(self.names), strict=True):
            key = names.weight
            operands += [Operand(key), Operand(names.bias, is_optional=True)]
            if parts is not None:
                operands += [Operand(f"{key}.{name}") for _ in parts.adapters for name in "AB"]
        return tuple(operands)

    def of(self, metas: Sequence[Any]) -> list[LinearParts]:
        """Return the linears with the metas of their tensors."""
        values = iter(metas)
        bare = self.parts or [LinearParts(None, None)] * len(self.names)
        return [with_values(parts, values) for parts in bare]


def _numbered(i: int) -> LinearNames:
    return LinearNames(f"weights[{i}]", f"biases[{i}]")


# made once, for calls of a few linears
_FIRST_NUMBERED = tuple(map(_numbered, range(8)))


def numbered(count: int) -> tuple[LinearNames, ...]:
    """Return the linears of norm_linear."""
    if count <= len(_FIRST_NUMBERED):
        return _FIRST_NUMBERED[:count]
    return tuple(map(_numbered, range(count)))


class Builder:
    """Collects the steps and parameters of a program; `build` makes the call of it."""

    def __init__(self, context: Context, dtype: torch.dtype) -> None:
        self.context = context
        # the dtype that linears multiply in
        self.dtype = dtype
        self.steps: list[ProgramStep] = []
        # names of the parameters
        self.params: list[str] = []
        # how kernels take each parameter
        self.layouts: list[Layout] = []
        # shape, dtype and device of each parameter, None for an absent one
        self.metas: list[Any] = []
        # numbers of the parameters that are quantized weights
        self.quantized_params: list[int] = []
        # how many dropouts draw from seeds of the call
        self.num_seeds = 0

    def param(self, name: str, layout: Layout, meta: Any) -> int | None:
        """Add a parameter, and return its number, None if it is absent."""
        self.params.append(name)
        self.layouts.append(layout)
        self.metas.append(meta)
        return None if meta is None else len(self.params) - 1

    def add(
        self,
        op: Any,
        out: str,
        reads: Sequence[str],
        params: Sequence[Any] = (),
    ) -> str:
        """Add a step, and return the name of its output."""
        self.steps.append(ProgramStep(op, out, tuple(reads), tuple(params)))
        return out

    def norm(self, op: Op, weight: Any, bias: Any, reads: str = "x", out: str = "n") -> str:
        """Add a norm and its parameters."""
        pairs = (("norm.weight", weight), ("norm.bias", bias))
        return self.add(op, out, (reads,), [self.param(k, Layout(1), t) for k, t in pairs])

    def linear(self, names: LinearNames, parts: LinearParts, num_dims: int = 2) -> tuple[Any, ...]:
        """Add the parameters of a linear layer: its weight, bias, and pairs of adapters.

        num_dims: of the weight; adapters of experts, three, multiply in its dtype, as peft's do.
        """
        weight_layout = Layout(0) if parts.is_quantized else Layout(num_dims, self.dtype)
        key = names.weight
        weight = self.param(key, weight_layout, parts.weight)
        if parts.is_quantized:
            self.quantized_params.append(len(self.params) - 1)
        bias = self.param(names.bias, Layout(num_dims - 1, self.dtype), parts.bias)
        adapters = []
        for i, ((a, b), constants) in enumerate(zip(parts.adapters, parts.constants, strict=True)):
            dtype = self.dtype if num_dims == 3 else self.context.compute_dtype(a.dtype)
            layout = Layout(num_dims, dtype)
            pairs = ((f"{key}.A{i or ''}", a), (f"{key}.B{i or ''}", b))
            numbers = [self.param(name, layout, t) for name, t in pairs]
            adapters.append((*numbers, constants, layout.dtype))
        return weight, bias, adapters

    def apply(
        self,
        numbers: Any,
        wide: torch.dtype | None,
        read: str,
        out: str,
        *,
        is_late: bool = False,
    ) -> str:
        """Add the steps of a linear layer: adapters' narrow outputs first, then y, then the sum.

        numbers: the parameters, as `linear` returned them. wide: the dtype of the gradient of the
        value read. is_late: see `Gemm`.
        """
        weight, bias, adapters = numbers
        narrow = []
        dtypes = [None if meta is None else meta.dtype for meta in self.metas]
        for i, (a, _, constants, dtype) in enumerate(adapters):
            low = read
            if constants.dropout:
                low = self.dropout(constants.dropout, constants.seed, read, f"{out}.x{i}", dtype)
            down = Gemm(dtype, sums=dtypes[a])
            narrow.append(self.add(down, f"{out}.low{i}", (low,), (a, None)))
        is_quantized = weight in self.quantized_params
        is_late = is_late and not (is_quantized or adapters)
        op = Gemm(self.dtype, 1.0, wide, dtypes[weight], is_quantized, is_late=is_late)
        y = self.add(op, f"{out}.base" if adapters else out, (read,), (weight, bias))
        for i, (_, b, constants, dtype) in enumerate(adapters):
            is_last = i == len(adapters) - 1
            rounded = self.dtype if is_last else None
            up = Gemm(dtype, constants.scale, sums=dtypes[b], out=rounded)
            y = self.add(up, out if is_last else f"{out}.sum{i}", (narrow[i], y), (b, None))
        return y

    def dropout(
        self, p: float, seed: int, read: str, out: str, dtype: torch.dtype | None = None
    ) -> str:
        """Add a dropout, which draws from one of the call's seeds, if there is one."""
        if not p:
            return read
        self.num_seeds = max(self.num_seeds, seed + 1)
        return self.add(Dropout(p, seed, dtype), out, (read,), ("seeds",))

    def build(
        self,
        name: str,
        inputs: dict[str, Any],
        results: Sequence[str],
        fields: Any,
        casts: bool = False,
        **options: Any,
    ) -> LayerCall:
        """Return a call of the program that was built. Seeds are its last parameter.

        inputs: metas by name; results: names of values; fields: fields of the `Program`; casts:
        whether x is cast to the dtype of the linears first; options: of the `LayerCall`.
        """
        if casts and inputs["x"].dtype != self.dtype:
            options["input_dtype"] = self.dtype
            inputs["x"] = inputs["x"]._replace(dtype=self.dtype)
        if self.num_seeds:
            self.param("seeds", Layout(0), None)
        last = len(self.params) - 1
        steps = [
            step._replace(params=tuple([last if p == "seeds" else p for p in step.params]))
            for step in self.steps
        ]
        program = Program(tuple(inputs), tuple(steps), tuple(results), tuple(self.params), **fields)
        options |= {"quantized_params": tuple(self.quantized_params), "num_seeds": self.num_seeds}
        options["is_unwatched"] = self.context.is_unwatched
        metas = (*inputs.values(), *self.metas)
        return LayerCall(name, program, tuple(self.layouts), metas, **options)


def flat_of(linears: Sequence[LinearParts]) -> list[Any]:
    """Return the metas of the linears' tensors, with quantized weights in their places."""
    return [meta for parts in linears for meta in flat(parts)]
