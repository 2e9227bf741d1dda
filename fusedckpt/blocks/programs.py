"""The programs of linears, norms, and norms with linears, and the checks of their calls.

A layer's options are a record without tensors. `settle` takes them with the shapes and dtypes of a
call's tensors to a Call; `dispatch.settled` remembers it for calls that are alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fusedckpt import reference
from fusedckpt.autograd import arguments, dispatch, levels
from fusedckpt.autograd.dispatch import Around, Meta, Path
from fusedckpt.blocks import validate
from fusedckpt.blocks.builder import Builder, Linears, bias_of, metas_of, pair_of
from fusedckpt.blocks.call import Call
from fusedckpt.blocks.norm_spec import NormSpec, output_dtype, rule_of, sums_dtype
from fusedckpt.blocks.steps import Add, Hidden, Linear, Norm


class LinearOptions(NamedTuple):
    """The options of a linear layer with an activation."""

    name: str
    activation: str | None
    save: str | None
    default: str = "inputs"
    kernel: str | None = None
    is_module: bool = False
    linears: Linears = Linears(("weight",))

    levels = ("inputs", "preact")

    num_seeds = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors of a call."""
        return ("x", *self.linears.names)

    def chosen(self, override: str | None) -> tuple[str, str]:
        """Return activation and save level; refuse unknown ones, and unknown kernels."""
        level = levels.chosen(self.name, (self.save, override, self.default), self.levels)
        activation = validate.activation(self.name, self.activation)
        validate.kernel(self.name, self.kernel, "fused")
        return activation, level

    def reference(self, x: Any, norm: Any, linears: Sequence[tuple[Any, Any]]) -> Any:
        """Return the result by the eager reference."""
        return reference.linear_act(x, *linears[0], self.activation)

    def saved_gemms(self, adapters: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of the reference's GEMMs whose outputs the level saves."""
        activation, level = self.chosen(levels.override.level)
        return (0,) if level == "preact" and activation != "identity" else ()

    def settle(self, around: Around, x: Any, *metas: Any) -> Call | Path:
        """Refuse arguments that F.linear would refuse."""
        name = self.name
        activation, level = self.chosen(around.level)
        validate.tensors(name, self.names, (x, *metas_of(metas, self.linears.of(metas))))
        if self.linears.parts and self.kernel is not None:
            # adapters are GEMMs of their own
            arguments.choice(name, "kernel", self.kernel, ("split",))
        (parts,) = linears = self.linears.of(metas)
        weight, bias = pair_of(parts, around.compute_dtype(x.dtype))
        validate.linear(name, x.shape, (weight, bias))
        dtype = validate.multiplied(name, around, x.dtype, {"weight": weight, "bias": bias})
        self.linears.check(name, linears, around)
        validate.runs(name, self.kernel, "fused", x, dtype=dtype)
        if around.twin:
            return Path.REFERENCE
        variant = _linear_variant(x, dtype, activation, self.kernel, weight.shape)
        if self.linears.parts and variant == "fused":
            variant = "split"
        b = Builder()
        numbers = b.linear("weight", parts, dtype, around)
        has_z = activation != "identity"
        y = b.apply(numbers, Linear(dtype), "x", "z" if has_z else "y")
        if has_z:
            y = b.add(Hidden(activation, variant), "y", (y,))
        program = b.program([y], products=("z",) if has_z else (), dtype=dtype)
        level = level if around.grad else "inputs"
        read = None if x.dtype == dtype else dtype
        metas = (x._replace(dtype=dtype), *metas_of(metas, linears))
        return b.call("linear_act", program, metas, level=level, direct=around.direct, read=read)


def _linear_variant(
    x: Meta, dtype: torch.dtype, activation: str, kernel: str | None, weight: Any
) -> str:
    """Return which launcher runs for tensors like x: fused, split or aten."""
    # an identity has nothing to fuse
    kernel = "split" if activation == "identity" and kernel is None else kernel
    sizes = math.prod(x.shape[:-1]), *weight
    return dispatch.variant_for("linear_act", x, dtype, sizes, kernel=kernel, fused="fused")


# F.rms_norm takes them
COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))


class NormOptions(NamedTuple):
    """The options of a norm."""

    name: str
    kind: str
    normalized_shape: Any
    eps: float | None
    offset: float = 0.0
    cast: str = "torch"
    is_module: bool = False
    names: tuple[str, ...] = ("x", "residual?", "weight?", "bias?")

    def chosen(self, override: str | None, has_weight: bool = True) -> None:
        """Refuse options that mean nothing."""
        if self.kind == "layer":
            arguments.number(self.name, "eps", self.eps, 0)
        else:
            validate.rms_options(self.name, self.eps, self.offset, self.cast, has_weight)

    def settle(self, around: Around, x: Any, residual: Any, weight: Any, bias: Any) -> Call | Path:
        """Refuse arguments that the eager norm would refuse."""
        name, metas = self.name, (x, residual, weight, bias)
        self.chosen(around.level, weight is not None)
        shape = validate.normalized_shape(name, self.normalized_shape)
        dtype = getattr(x, "dtype", None)
        if self.is_module and self.kind == "rms" and dtype in COMPLEX:
            return Path.OWN
        validate.tensors(name, self.names, metas)
        validate.norm(name, x, shape, weight, bias)
        if residual is not None:
            validate.residual(name, x, residual)
            x = x._replace(dtype=torch.promote_types(x.dtype, residual.dtype))
        if self.kind == "layer":
            validate.layer_norm_dtypes(name, x, (weight, bias), around)
        if around.twin:
            return Path.REFERENCE
        spec = NormSpec(self.kind, None, None, self.eps, self.offset, self.cast)
        rule = rule_of(spec, x.dtype)
        out_dtype = output_dtype(rule, x, weight, around.autocast)
        op = Norm(rule, out_dtype, sums_dtype(x, weight, bias), norm_kernel(x, x.dtype), len(shape))
        b, options = Builder(), {"num_dims": len(shape)}
        if residual is None:
            b.norm(op, weight, bias, out="y")
            program, metas = b.program(["y"], **options), (x, weight, bias)
        else:
            b.add(Add(), "total", ("x", "residual"))
            b.norm(op, weight, bias, reads="total", out="y")
            options |= {"inputs": ("x", "residual"), "keeps": ("total",)}
            program = b.program(["y", "total"], **options)
        return b.call("norm", program, metas, direct=around.direct)


def norm_kernel(x: Meta, dtype: torch.dtype) -> str:
    """Return which kernels normalise tensors like x."""
    on_aten = 0 in x.shape or dispatch.path_of(x.device, dtype) == "aten"
    return "aten" if on_aten else "triton"


class NormLinearOptions(NamedTuple):
    """The options of a norm with linears; norm: a NormSpec without its tensors, of `kinds`; over:
    its shape.
    """

    name: str
    norm: NormSpec
    kinds: tuple[type, ...]
    linears: Linears
    over: Any = None
    is_module: bool = False

    num_seeds = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors of a call."""
        return ("x", "norm.weight?", "norm.bias?", *self.linears.names)

    def chosen(self, override: str | None) -> None:
        """Nothing is chosen."""

    def reference(self, x: Any, norm: Any, linears: Sequence[tuple[Any, Any]]) -> Any:
        """Return the results by the eager reference."""
        spec = self.norm._replace(weight=norm[0], bias=norm[1])
        weights, biases = zip(*linears, strict=True)
        return reference.norm_linear(x, spec, weights, biases)

    def saved_gemms(self, adapters: Sequence[int]) -> tuple[int, ...]:
        """Return none: no GEMM is recomputed."""
        return ()

    def settle(self, around: Around, x: Any, weight: Any, bias: Any, *metas: Any) -> Call | Path:
        """Refuse linears that cannot all read norm(x)."""
        name, norm = self.name, self.norm
        if isinstance(norm, NormSpec):
            norm = norm._replace(weight=weight, bias=bias)
        validate.norm_spec(name, norm)
        linears = self.linears.of(metas)
        validate.tensors(name, self.names, (x, weight, bias, *metas_of(metas, linears)))
        if self.over is not None:
            shape = validate.normalized_shape(name, self.over)
            validate.norm(name, x, shape, weight, bias=bias)
        keys = [(key, bias_of(key)) for key in self.linears.keys]
        for names, parts in zip(keys, linears, strict=True):
            validate.linear(name, x.shape, pair_of(parts, x.dtype), names)
        read = validate.normed(name, x, norm, around)
        given: dict[str, Any] = {}
        for names, parts in zip(keys, linears, strict=True):
            given |= zip(names, pair_of(parts, around.compute_dtype(read)), strict=True)
        dtype = validate.multiplied(name, around, read, given)
        self.linears.check(name, linears, around)
        if around.twin:
            return Path.REFERENCE
        b, rule = Builder(), rule_of(norm, x.dtype)
        b.norm(
            Norm(rule, dtype, sums_dtype(x, weight, bias), norm_kernel(x, x.dtype)), weight, bias
        )
        op = Linear(dtype, grad_dtype=torch.promote_types(dtype, x.dtype))
        numbers = [
            b.linear(key, p, dtype, around)
            for key, p in zip(self.linears.keys, linears, strict=True)
        ]
        results = [f"y{i}" for i in range(len(linears))]
        # backward adds up in the order of the linears
        for out, number in list(zip(results, numbers, strict=True))[::-1]:
            b.apply(number, op, "n", out)
        metas = (x, weight, bias, *metas_of(metas, linears))
        return b.call("norm_linear", b.program(results), metas, direct=around.direct)
