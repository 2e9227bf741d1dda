"""The program of an MLP, plain or gated, and the checks of its calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fusedckpt import reference
from fusedckpt.autograd import arguments, dispatch, levels
from fusedckpt.autograd.dispatch import Around, Path
from fusedckpt.blocks import run, validate
from fusedckpt.blocks.builder import Builder, Linears, metas_of, pair_of
from fusedckpt.blocks.call import Call, Layout
from fusedckpt.blocks.norm_spec import NormSpec, output_dtype, rule_of
from fusedckpt.blocks.operands import Parts
from fusedckpt.blocks.program import Program
from fusedckpt.blocks.steps import Add, Hidden, Linear, Norm

# gate and up in one weight
PACKED = ("gate_weight", "down_weight")
GATED = ("gate_weight", "up_weight", "down_weight")


class MLPOptions(NamedTuple):
    """The options of an MLP; norm: a NormSpec without its tensors, of `kinds`; over: its shape."""

    caller: str
    linears: Linears
    activation: str
    residual: bool
    save: str | None
    levels: tuple[str, ...]
    chunks: int | None
    kernel: str | None = None
    norm: NormSpec | None = None
    kinds: tuple[type, ...] = ()
    over: Any = None
    default: str = "inputs"
    is_module: bool = False
    dropout: float = 0.0
    output_dropout: float = 0.0

    @property
    def name(self) -> str:
        """The name in errors about tensors: the function's, or that of a module with a norm."""
        if self.over is not None:
            return self.caller
        return self.function

    @property
    def function(self) -> str:
        """The name of the function."""
        return "mlp" if self.linears.keys[0] == "fc1_weight" else "gated_mlp"

    @property
    def num_seeds(self) -> int:
        """How many seeds the block's own dropouts have."""
        return (self.dropout > 0) + (self.output_dropout > 0)

    @property
    def is_plain(self) -> bool:
        """Whether no linear is adapted and nothing is dropped."""
        return not (self.linears.parts or self.num_seeds)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors of a call."""
        return ("x", "norm.weight?", "norm.bias?", *self.linears.names)

    def chosen(self, override: str | None) -> tuple[str, str]:
        """Return activation and save level; refuse invalid options."""
        level = levels.chosen(self.caller, (self.save, override, self.default), self.levels)
        activation = validate.activation(self.caller, self.activation)
        validate.block(self.caller, self.residual, self.chunks)
        validate.kernel(self.caller, self.kernel, "hybrid")
        for key in ("dropout", "output_dropout"):
            arguments.probability(self.caller, key, getattr(self, key))
        return activation, level

    def reference(self, x: Any, norm: Any, linears: Sequence[tuple[Any, Any]]) -> Any:
        """Return the result by the eager reference."""
        spec = self.norm if self.norm is None else self.norm._replace(weight=norm[0], bias=norm[1])
        extras = {"norm": spec, "residual": self.residual, "dropout": self.dropout}
        extras["output_dropout"] = self.output_dropout
        first, *up, (down, down_bias) = linears
        if self.function == "mlp":
            return reference.mlp(x, *first, down, down_bias, self.activation, **extras)
        (up_weight, up_bias) = up[0] if up else (None, None)
        biases = {"gate_bias": first[1], "up_bias": up_bias, "down_bias": down_bias}
        return reference.gated_mlp(
            x, first[0], up_weight, down, self.activation, **biases, **extras
        )

    def saved_gemms(self, adapters: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of the reference's GEMMs whose outputs the level saves."""
        _, level = self.chosen(levels.override.level)
        if level == "inputs":
            return ()
        # adapters have two GEMMs each, which are cheap to recompute
        return (0, 1 + 2 * adapters[0]) if level == "preact" and len(adapters) > 2 else (0,)

    def checked(self, around: Around, x: Any, metas: Any) -> tuple[list[Parts], torch.dtype]:
        """Refuse a block whose parts do not fit; return its linears, and their dtype."""
        name, norm, (weight, bias, *rest) = self.name, self.norm, metas
        if norm is not None:
            if isinstance(norm, NormSpec):
                norm = norm._replace(weight=weight, bias=bias)
            validate.norm_spec(name, norm)
        linears = self.linears.of(rest)
        validate.tensors(name, self.names, (x, weight, bias, *metas_of(rest, linears)))
        if not self.is_plain and self.kernel is not None:
            # adapters are GEMMs of their own
            arguments.choice(name, "kernel", self.kernel, ("split",))
        if self.over is not None:
            shape = validate.normalized_shape(name, self.over)
            validate.norm(name, x, shape, weight, bias=bias)
        read = x.dtype
        if norm is not None:
            read = output_dtype(norm, x, weight, around.autocast)
        pairs = [pair_of(parts, around.compute_dtype(read)) for parts in linears]
        keys = self.linears.keys
        named: Any = {
            key.removesuffix("_weight"): pair for key, pair in zip(keys, pairs, strict=True)
        }
        validate.mlp(name, x, named, bool(self.residual), packed=keys == PACKED)
        given = {}
        for key, pair in named.items():
            given |= {f"{key}_weight": pair[0], f"{key}_bias": pair[1]}
        dtype = validate.multiplied(name, around, validate.normed(name, x, norm, around), given)
        self.linears.check(name, linears, around)
        validate.runs(name, self.kernel, "hybrid", x, dtype=dtype)
        return linears, dtype

    def settle(self, around: Around, x: Any, *metas: Any) -> Call | Path:
        """Refuse a block whose parts do not fit."""
        activation, level = self.chosen(around.level)
        linears, dtype = self.checked(around, x, metas)
        if around.twin:
            return Path.REFERENCE
        shapes = [(parts.weight or parts.base).shape for parts in linears]
        (f, d), rows = (shapes[-1][1], x.shape[-1]), math.prod(x.shape[:-1])
        chunks = self.chunks
        if self.is_module and around.chunks is not None:
            chunks = around.chunks
        num = 2 if self.function == "mlp" else 3
        chunks = chunks or run.chunks_for(rows, d, f, num, itemsize=dtype.itemsize)
        kernel = self.variant(linears[0], dtype, (rows, f, shapes[-1][0]), d)
        adds = bool(self.residual) and x.dtype == dtype
        b, read = Builder(), "x"
        weight, bias, *_ = metas
        if self.norm is None:
            b.param("norm.weight", Layout(1), None)
            b.param("norm.bias", Layout(1), None)
        else:
            body = "aten" if kernel == "aten" else "triton"
            read = b.norm(Norm(rule_of(self.norm, x.dtype), dtype, None, body), weight, bias)
        program = self._built(b, linears, Hidden(activation, kernel), read, dtype, around, adds)
        cast = None if self.norm is not None or x.dtype == dtype else dtype
        known = x if cast is None else x._replace(dtype=dtype)
        return b.call(
            self.function,
            program,
            (known, weight, bias, *metas_of(metas[2:], linears)),
            level=level if around.grad else "inputs",
            chunks=chunks,
            direct=around.direct,
            read=cast,
            adds_after=bool(self.residual) and not adds,
        )

    def variant(self, first: Parts, dtype: torch.dtype, sizes: tuple[int, int, int], d: int) -> str:
        """Return which kernels run: "split", "hybrid" or "aten"."""
        like = first.weight or first.base
        wish = self.kernel if self.is_plain else "split"
        # the GEMM that the hybrid variant does itself contracts over the output features
        kernel = dispatch.variant_for(
            self.function, like, dtype, sizes, kernel=wish, fused="hybrid"
        )
        return kernel if d else "aten"

    def _built(
        self,
        b: Builder,
        linears: Sequence[Parts],
        hidden: Hidden,
        read: str,
        dtype: torch.dtype,
        around: Around,
        adds: bool,
    ) -> Program:
        """Return the program after the norm."""
        numbers = [
            b.linear(key, parts, dtype, around)
            for key, parts in zip(self.linears.keys, linears, strict=True)
        ]
        first, packed = numbers[:-1], self.linears.keys == PACKED
        names = ("gate", "up") if len(first) > 1 else ("z",)
        # two full GEMMs add up in float32
        is_sum = len(first) > 1 and not self.linears.parts
        wide = torch.promote_types(dtype, torch.float32) if is_sum else None
        # backward adds up in the order of the linears
        for name, number in list(zip(names, first, strict=True))[::-1]:
            b.apply(number, Linear(dtype, grad_dtype=wide), read, name)
        h = b.add(replace(hidden, is_packed=packed), "h", names)
        h = b.dropout(self.dropout, 0, h, "dropped")
        y = b.apply(numbers[-1], Linear(dtype), h, "down")
        y = b.dropout(self.output_dropout, int(self.dropout > 0), y, "thinned")
        if adds:
            y = b.add(Add(), "y", (y, "x"))
        return b.program([y], products=names, dtype=dtype if adds or read == "x" else None)
