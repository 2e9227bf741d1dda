"""The programs of all fused layers, and the checks that a call of one passes before any work.

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
from fusedckpt.autograd.dispatch import Around, Meta
from fusedckpt.autograd.lora import Parts
from fusedckpt.autograd.norm_spec import NormSpec, output_dtype, rule_of, sums_dtype
from fusedckpt.blocks import run, validate
from fusedckpt.blocks.call import Call, Layout
from fusedckpt.blocks.operands import flat, refilled
from fusedckpt.blocks.steps import Add, Dropout, Hidden, Linear, Norm, Program, Step

# gate and up in one weight
PACKED = ("gate_weight", "down_weight")
GATED = ("gate_weight", "up_weight", "down_weight")


class Builder:
    """Collects a program's steps and the layouts of its parameters."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.params: list[str] = []
        self.layouts: list[Layout] = []
        self.others: list[int] = []
        self.dtypes: list[Any] = []
        self.num_seeds = 0

    def param(self, name: str, layout: Layout, meta: Any) -> int | None:
        """Add a parameter, and return its number, None if it is absent."""
        self.params.append(name)
        self.layouts.append(layout)
        self.dtypes.append(None if meta is None else meta.dtype)
        return None if meta is None else len(self.params) - 1

    def add(self, op: Any, out: str, reads: Sequence[str], params: Sequence[Any] = ()) -> str:
        """Add a step, and return the name of its output."""
        self.steps.append(Step(op, out, tuple(reads), tuple(params)))
        return out

    def norm(self, op: Norm, weight: Any, bias: Any, reads: str = "x", out: str = "n") -> str:
        """Add a norm and its parameters."""
        given = [
            self.param(f"norm.{k}", Layout("vector"), t)
            for k, t in (("weight", weight), ("bias", bias))
        ]
        return self.add(op, out, (reads,), given)

    def linear(self, key: str, parts: Parts, dtype: torch.dtype, around: Around) -> tuple[Any, ...]:
        """Add the parameters of a linear layer: its weight, bias, and pairs of adapters."""
        kind = Layout("weight", dtype) if parts.base is None else Layout("")
        weight = self.param(key, kind, parts.weight or parts.base)
        if parts.base is not None:
            self.others.append(len(self.params) - 1)
        bias = self.param(bias_of(key), Layout("vector", dtype), parts.bias)
        adapters = []
        for i, ((a, b), constants) in enumerate(zip(parts.adapters, parts.constants, strict=True)):
            own = Layout("weight", around.compute_dtype(a.dtype))
            number = i if i else ""
            numbers = [self.param(f"{key}.{n}{number}", own, t) for n, t in (("A", a), ("B", b))]
            adapters.append((*numbers, constants, own.dtype))
        return weight, bias, tuple(adapters)

    def apply(self, numbers: Any, op: Linear, read: str, out: str) -> str:
        """Add the steps of a linear layer: adapters' narrow outputs first, then y, then the sum."""
        weight, bias, adapters = numbers
        narrow = []
        for i, (a, _, constants, dtype) in enumerate(adapters):
            low = read
            if constants.dropout:
                self.num_seeds = max(self.num_seeds, constants.seed + 1)
                drop = Dropout(constants.dropout, constants.seed, dtype)
                low = self.add(drop, f"{out}.x{i}", (read,), ("seeds",))
            down = Linear(dtype, sums=self.dtypes[a])
            narrow.append(self.add(down, f"{out}.low{i}", (low,), (a, None)))
        name, others = out if not adapters else f"{out}.base", weight in self.others
        op = op._replace(sums=self.dtypes[weight], is_quantised=others)
        y = self.add(op, name, (read,), (weight, bias))
        for i, (_, b, constants, dtype) in enumerate(adapters):
            name = out if i == len(adapters) - 1 else f"{out}.sum{i}"
            rounded = op.dtype if i == len(adapters) - 1 else None
            up = Linear(dtype, constants.scale, sums=self.dtypes[b], out=rounded)
            y = self.add(up, name, (narrow[i], y), (b, None))
        return y

    def dropout(self, p: float, index: int, read: str, out: str) -> str:
        """Add a dropout of the call's own, if there is one."""
        if not p:
            return read
        self.num_seeds = max(self.num_seeds, index + 1)
        return self.add(Dropout(p, index), out, (read,), ("seeds",))

    def program(self, results: Sequence[str], **options: Any) -> Program:
        """Return the program; the seeds are its last parameter."""
        if self.num_seeds:
            self.param("seeds", Layout(""), None)
        number = len(self.params) - 1
        steps = tuple(
            step._replace(params=tuple([number if p == "seeds" else p for p in step.params]))
            for step in self.steps
        )
        options.setdefault("inputs", ("x",))
        return Program(steps=steps, results=tuple(results), params=tuple(self.params), **options)

    def call(self, name: str, program: Program, metas: Sequence[Any], **options: Any) -> Call:
        """Return the call."""
        count = len(program.inputs) + len(self.layouts)
        metas = (*metas, *[None] * (count - len(metas)))
        options |= {"others": tuple(self.others), "num_seeds": self.num_seeds}
        return Call(name, program, tuple(self.layouts), metas, **options)


def bias_of(key: str) -> str:
    """Return the name of the bias beside a weight."""
    return key.replace("weights", "biases").replace("weight", "bias")


class Linears(NamedTuple):
    """The linear layers of a call, without their tensors.

    keys: the names of weights; parts: where one of them is a record or dequantises, each taken
    apart, with the Meta of a quantised weight.
    """

    keys: tuple[str, ...]
    parts: tuple[Parts, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors of each linear, in the order of `flat`."""
        found = []
        for key, parts in zip(self.keys, self.parts or (None,) * len(self.keys), strict=True):
            bias = bias_of(key)
            found += [key, f"{bias}?"]
            if parts is not None:
                found += [f"{key}.{part}" for _ in parts.adapters for part in ("A", "B")]
        return tuple(found)

    def of(self, metas: Sequence[Any]) -> list[Parts]:
        """Return the linears with what is known of their tensors."""
        if self.parts:
            values = iter(metas)
            return [refilled(parts, values) for parts in self.parts]
        pairs = zip(metas[::2], metas[1::2], strict=True)
        return [Parts(weight, None, bias, (), ()) for weight, bias in pairs]

    def check(self, name: str, linears: Sequence[Parts], around: Around) -> None:
        """Refuse adapters that do not fit their weights."""
        for key, parts in zip(self.keys, linears, strict=True):
            for pair in parts.adapters:
                _fit(name, key, (parts.weight or parts.base).shape, pair, around=around)


def _fit(name: str, key: str, weight: torch.Size, pair: tuple[Meta, Meta], around: Around) -> None:
    """Refuse an adapter that does not go beside a weight [N, K]."""
    a, b = pair
    fits = len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1]
    if not fits or (b.shape[0], a.shape[1]) != tuple(weight):
        raise ValueError(
            f"{name}: {key} is {list(weight)}, so A must be [r, {weight[1]}] and B "
            f"[{weight[0]}, r], got {list(a.shape)} and {list(b.shape)}"
        )
    if a.dtype != b.dtype and around.autocast is None:
        raise TypeError(
            f"{name}: {key}.A and {key}.B must share a dtype, got {a.dtype} and {b.dtype}"
        )


def split(norm: Any) -> tuple[tuple[Any, tuple[type, ...]], tuple[Any, Any]]:
    """Return a record without its tensors, and the types in it; and these tensors."""
    if not isinstance(norm, NormSpec):
        # refused where it is not None
        return (norm, ()), (None, None)
    bare = norm._replace(weight=None, bias=None)
    return (bare, tuple(map(type, bare))), (norm.weight, norm.bias)


def _pair(parts: Parts, read: torch.dtype) -> tuple[Meta, Meta | None]:
    """Return weight and bias; one that dequantises is multiplied in the dtype that it meets."""
    return parts.weight or parts.base._replace(dtype=read), parts.bias


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

    def settle(self, around: Around, x: Any, *metas: Any) -> Call | None:
        """Refuse arguments that F.linear would refuse."""
        name = self.name
        activation, level = self.chosen(around.level)
        validate.tensors(name, self.names, (x, *_metas(metas, self.linears.of(metas))))
        if self.linears.parts and self.kernel is not None:
            # adapters are GEMMs of their own
            arguments.choice(name, "kernel", self.kernel, ("split",))
        (parts,) = linears = self.linears.of(metas)
        weight, bias = _pair(parts, around.compute_dtype(x.dtype))
        validate.linear(name, x.shape, (weight, bias))
        dtype = validate.multiplied(name, around, x.dtype, {"weight": weight, "bias": bias})
        self.linears.check(name, linears, around)
        validate.runs(name, self.kernel, "fused", x, dtype=dtype)
        if around.twin:
            return None
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
        metas = (x._replace(dtype=dtype), *_metas(metas, linears))
        return b.call("linear_act", program, metas, level=level, direct=around.direct, read=read)


def _linear_variant(
    x: Meta, dtype: torch.dtype, activation: str, kernel: str | None, weight: Any
) -> str:
    """Return which launcher runs for tensors like x: fused, split or aten."""
    # an identity has nothing to fuse
    kernel = "split" if activation == "identity" and kernel is None else kernel
    sizes = math.prod(x.shape[:-1]), *weight
    return dispatch.variant_for("linear_act", x, dtype, sizes, kernel=kernel, fused="fused")


def _metas(metas: Sequence[Any], linears: Sequence[Parts]) -> list[Any]:
    """Return what is known of the linears' tensors, with quantised weights in their places."""
    if not any(parts.base is not None for parts in linears):
        return list(metas)
    found = []
    for parts in linears:
        found += flat(parts)
    return [*metas[: len(metas) - len(found)], *found]


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

    def settle(self, around: Around, x: Any, residual: Any, weight: Any, bias: Any) -> Call | None:
        """Refuse arguments that the eager norm would refuse."""
        name, metas = self.name, (x, residual, weight, bias)
        self.chosen(around.level, weight is not None)
        shape = validate.normalized_shape(name, self.normalized_shape)
        dtype = getattr(x, "dtype", None)
        if self.is_module and self.kind == "rms" and dtype in COMPLEX:
            return None
        validate.tensors(name, self.names, metas)
        validate.norm(name, x, shape, weight, bias)
        if residual is not None:
            validate.residual(name, x, residual)
            x = x._replace(dtype=torch.promote_types(x.dtype, residual.dtype))
        if self.kind == "layer":
            validate.layer_norm_dtypes(name, x, (weight, bias), around)
        if around.twin:
            return None
        spec = NormSpec(self.kind, None, None, self.eps, self.offset, self.cast)
        rule = rule_of(spec, x.dtype)
        out_dtype = output_dtype(rule, x, weight, around.autocast)
        op = Norm(rule, out_dtype, sums_dtype(x, weight, bias), norm_kernel(x, x.dtype))
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

    def settle(self, around: Around, x: Any, weight: Any, bias: Any, *metas: Any) -> Call | None:
        """Refuse linears that cannot all read norm(x)."""
        name, norm = self.name, self.norm
        if isinstance(norm, NormSpec):
            norm = norm._replace(weight=weight, bias=bias)
        validate.norm_spec(name, norm)
        linears = self.linears.of(metas)
        validate.tensors(name, self.names, (x, weight, bias, *_metas(metas, linears)))
        if self.over is not None:
            shape = validate.normalized_shape(name, self.over)
            validate.norm(name, x, shape, weight, bias=bias)
        read = validate.normed(name, x, norm, around)
        given = {}
        for key, parts in zip(self.linears.keys, linears, strict=True):
            pair, keys = (
                _pair(parts, around.compute_dtype(read)),
                (key, key.replace("weights", "biases")),
            )
            validate.linear(name, x.shape, pair, keys)
            given |= dict(zip(keys, pair, strict=True))
        dtype = validate.multiplied(name, around, read, given)
        self.linears.check(name, linears, around)
        if around.twin:
            return None
        b, rule = Builder(), rule_of(norm, x.dtype)
        b.norm(
            Norm(rule, dtype, sums_dtype(x, weight, bias), norm_kernel(x, x.dtype)), weight, bias
        )
        op = Linear(dtype, grad_dtype=torch.promote_types(dtype, x.dtype))
        numbers = [b.linear(key, p, dtype, around) for key, p in zip(self.linears.keys, linears)]
        results = [f"y{i}" for i in range(len(linears))]
        # backward adds up in the order of the linears
        for out, number in list(zip(results, numbers, strict=True))[::-1]:
            b.apply(number, op, "n", out)
        metas = (x, weight, bias, *_metas(metas, linears))
        return b.call("norm_linear", b.program(results), metas, direct=around.direct)


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
        """The name that errors about tensors have: the function's, or that of a module with a norm."""
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
        validate.tensors(name, self.names, (x, weight, bias, *_metas(rest, linears)))
        if not self.is_plain and self.kernel is not None:
            # adapters are GEMMs of their own
            arguments.choice(name, "kernel", self.kernel, ("split",))
        if self.over is not None:
            shape = validate.normalized_shape(name, self.over)
            validate.norm(name, x, shape, weight, bias=bias)
        read = x.dtype
        if norm is not None:
            read = output_dtype(norm, x, weight, around.autocast)
        pairs = [_pair(parts, around.compute_dtype(read)) for parts in linears]
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

    def settle(self, around: Around, x: Any, *metas: Any) -> Call | None:
        """Refuse a block whose parts do not fit."""
        activation, level = self.chosen(around.level)
        linears, dtype = self.checked(around, x, metas)
        if around.twin:
            return None
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
            b.param("norm.weight", Layout("vector"), None)
            b.param("norm.bias", Layout("vector"), None)
        else:
            body = "aten" if kernel == "aten" else "triton"
            read = b.norm(Norm(rule_of(self.norm, x.dtype), dtype, None, body), weight, bias)
        program = self._built(b, linears, Hidden(activation, kernel), read, dtype, around, adds)
        cast = None if self.norm is not None or x.dtype == dtype else dtype
        known = x if cast is None else x._replace(dtype=dtype)
        return b.call(
            self.function,
            program,
            (known, weight, bias, *_metas(metas[2:], linears)),
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
        h = b.add(hidden._replace(is_packed=packed), "h", names)
        h = b.dropout(self.dropout, 0, h, "dropped")
        y = b.apply(numbers[-1], Linear(dtype), h, "down")
        y = b.dropout(self.output_dropout, int(self.dropout > 0), y, "thinned")
        if adds:
            y = b.add(Add(), "y", (y, "x"))
        return b.program([y], products=names, dtype=dtype if adds or read == "x" else None)
