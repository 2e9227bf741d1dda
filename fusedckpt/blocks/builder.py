"""How a program is built: steps, and the layouts of parameters; the linears of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fusedckpt.autograd.dispatch import Around, Meta
from fusedckpt.blocks.call import Call, Layout
from fusedckpt.blocks.norm_spec import NormSpec
from fusedckpt.blocks.operands import Parts, flat, refilled
from fusedckpt.blocks.program import Program, Step
from fusedckpt.blocks.steps import Dropout, Linear, Norm


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
            self.param(f"norm.{k}", Layout(1), t) for k, t in (("weight", weight), ("bias", bias))
        ]
        return self.add(op, out, (reads,), given)

    def linear(self, key: str, parts: Parts, dtype: torch.dtype, around: Around) -> tuple[Any, ...]:
        """Add the parameters of a linear layer: its weight, bias, and pairs of adapters."""
        kind = Layout(2, dtype) if parts.base is None else Layout(0)
        weight = self.param(key, kind, parts.weight or parts.base)
        if parts.base is not None:
            self.others.append(len(self.params) - 1)
        bias = self.param(bias_of(key), Layout(1, dtype), parts.bias)
        adapters = []
        for i, ((a, b), constants) in enumerate(zip(parts.adapters, parts.constants, strict=True)):
            own = Layout(2, around.compute_dtype(a.dtype))
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
        op = replace(op, sums=self.dtypes[weight], is_quantised=others)
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
            self.param("seeds", Layout(0), None)
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


def pair_of(parts: Parts, read: torch.dtype) -> tuple[Meta, Meta | None]:
    """Return weight and bias; one that dequantises is multiplied in the dtype that it meets."""
    return parts.weight or parts.base._replace(dtype=read), parts.bias


def metas_of(metas: Sequence[Any], linears: Sequence[Parts]) -> list[Any]:
    """Return what is known of the linears' tensors, with quantised weights in their places."""
    if not any(parts.base is not None for parts in linears):
        return list(metas)
    found = []
    for parts in linears:
        found += flat(parts)
    return [*metas[: len(metas) - len(found)], *found]
