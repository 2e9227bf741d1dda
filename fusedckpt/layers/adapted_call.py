"""What a call with adapters, quantised weights or dropout comes down to: checked, and settled."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from fusedckpt.autograd import arguments, dispatch, levels
from fusedckpt.autograd.dispatch import Around, Meta
from fusedckpt.autograd.lora import Parts
from fusedckpt.autograd.norm_spec import NormSpec, rule_of, sums_dtype
from fusedckpt.kernels import mlp as kernels
from fusedckpt.layers import validate
from fusedckpt.layers.norm_function import NormCall
from fusedckpt.layers.projections import flat, refilled, shape_of


class AdaptedCall(NamedTuple):
    """What a call comes down to.

    norm: None for none; activation: None where the first linears' outputs are the result; has_last:
    whether a linear follows; dropout, output_dropout: of the hidden layer and the result, each with
    the number of its seed; adds: whether x is added to the result, adds_after: outside, in another
    dtype; dtype: of the GEMMs; adapter_dtypes: of each linear's adapters; on_aten: whether
    elementwise work is ATen's; dtypes: of x and every tensor.
    """

    norm: NormCall | None
    activation: str | None
    has_last: bool
    dropout: tuple[float, int]
    output_dropout: tuple[float, int]
    adds: bool
    adds_after: bool
    dtype: torch.dtype
    adapter_dtypes: tuple[tuple[torch.dtype, ...], ...]
    on_aten: bool
    chunks: int
    level: str
    dtypes: tuple[torch.dtype | None, ...]


class AdaptedOptions(NamedTuple):
    """The options of a call; keys: the names of weights; linears: all that is no tensor of them.

    A weight's place holds its Meta. norm: a NormSpec without its tensors, of `kinds`; over: its
    shape.
    """

    name: str
    keys: tuple[str, ...]
    linears: tuple[Parts, ...]
    activation: str | None
    save: str | None
    levels: tuple[str, ...]
    has_last: bool = False
    residual: bool = False
    chunks: int | None = None
    kernel: str | None = None
    norm: NormSpec | None = None
    kinds: tuple[type, ...] = ()
    over: Any = None
    dropout: float = 0.0
    output_dropout: float = 0.0
    default: str = "inputs"
    is_module: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors: x, the norm's, then those of each linear, in the order of `flat`."""
        found = ["x", "norm.weight?", "norm.bias?"]
        for key, parts in zip(self.keys, self.linears, strict=True):
            weight, bias = key, key.replace("weights", "biases").replace("weight", "bias")
            found += [weight + ("" if parts.base is None else "?"), f"{bias}?"]
            found += [f"{key}.{part}" for _ in parts.adapters for part in ("A", "B")]
        return tuple(found)

    def chosen(self, override: str | None) -> tuple[str | None, str]:
        """Return activation and save level; refuse options that there are not."""
        level = "inputs"
        if self.levels:
            level = levels.chosen(self.name, (self.save, override, self.default), self.levels)
        activation = None
        if self.activation is not None:
            activation = validate.activation(self.name, self.activation)
        validate.block(self.name, self.residual, self.chunks)
        if self.kernel is not None:
            # adapters are GEMMs of their own
            arguments.choice(self.name, "kernel", self.kernel, ("split",))
        return (None if activation == "identity" and not self.has_last else activation), level

    def settle(self, around: Around, x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
        """Refuse tensors that do not fit."""
        name, norm, tensors = self.name, self.norm, (x, weight, bias, *rest)
        activation, level = self.chosen(around.level)
        if isinstance(norm, NormSpec):
            norm = norm._replace(weight=weight, bias=bias)
        if norm is not None:
            validate.norm_spec(name, norm)
        validate.tensors(name, self.names, tensors)
        if self.over is not None:
            shape = validate.normalized_shape(name, self.over)
            validate.norm(name, x, shape, weight, bias)
        values = iter(rest)
        linears = [refilled(parts, values) for parts in self.linears]
        self._fit(x, linears)
        dtype, adapter_dtypes = self._dtypes(
            around, validate.normed(name, x, norm, around), linears
        )
        if around.twin:
            return None
        sizes = math.prod(x.shape[:-1]), x.shape[-1], shape_of(linears[0])[0]
        chunks = self._chunks(sizes, len(linears), dtype)
        call = None
        if norm is not None:
            # over several chunks they are rounded at the end
            wide = torch.promote_types(x.dtype, torch.float32)
            sums = sums_dtype(x, weight, bias) if chunks == 1 else wide
            call = NormCall(1, rule_of(norm, x.dtype), dtype, sums, around.direct)
        # the first seeds are theirs
        dropouts = (self.dropout, 0), (self.output_dropout, int(self.dropout > 0))
        return AdaptedCall(
            call,
            activation,
            self.has_last,
            *dropouts,
            adds=self.residual and x.dtype == dtype,
            adds_after=self.residual and x.dtype != dtype,
            dtype=dtype,
            adapter_dtypes=adapter_dtypes,
            on_aten=0 in sizes or dispatch.path_of(x.device, dtype) == "aten",
            chunks=chunks,
            level=level if around.grad else "inputs",
            dtypes=tuple([None if t is None else t.dtype for t in tensors]),
        )

    def _chunks(self, sizes: tuple[int, int, int], num_linears: int, dtype: torch.dtype) -> int:
        if self.chunks is not None or not self.has_last:
            return self.chunks or 1
        return kernels.chunks_for(*sizes, num_linears, dtype.itemsize)

    def _fit(self, x: Meta, linears: list[Parts]) -> None:
        """Refuse shapes of weights, and of adapters, that do not fit."""
        pairs = [(meta_of(parts), parts.bias) for parts in linears]
        if self.has_last:
            keys = [key.removesuffix("_weight") for key in self.keys]
            named = dict(zip(keys, pairs, strict=True))
            validate.mlp(self.name, x, named, self.residual, packed=False)
        names = self.keys
        for i, (weight, bias) in enumerate(pairs):
            if weight.device != x.device:
                raise ValueError(
                    f"{self.name}: {names[i]} must be on the device of x, {x.device}, got "
                    f"{weight.device}"
                )
            if not self.has_last:
                keys = names[i], self.names[3:][_offset(linears, i) + 1].rstrip("?")
                validate.linear(self.name, x.shape, (weight, bias), keys)
            for a, b in linears[i].adapters:
                lora(self.name, names[i], weight.shape, a, b)

    def _dtypes(
        self, around: Around, read: torch.dtype, linears: list[Parts]
    ) -> tuple[torch.dtype, tuple[tuple[torch.dtype, ...], ...]]:
        """Return the dtypes of the GEMMs and the adapters'; refuse mixtures that torch refuses."""
        given = {}
        for key, parts in zip(self.keys, linears, strict=True):
            given |= {key: parts.weight, key.replace("weight", "bias"): parts.bias}
        dtype = validate.multiplied(self.name, around, read, given)
        found = []
        for key, parts in zip(self.keys, linears, strict=True):
            for a, b in parts.adapters:
                if a.dtype != b.dtype and around.autocast is None:
                    raise TypeError(
                        f"{self.name}: {key}.A and {key}.B must share a dtype, got {a.dtype} and "
                        f"{b.dtype}"
                    )
            found.append(tuple([around.compute_dtype(a.dtype) for a, _ in parts.adapters]))
        return dtype, tuple(found)


def meta_of(parts: Parts) -> Meta:
    """Return what is known of a weight."""
    weight = parts.weight if parts.base is None else parts.base
    return Meta(weight.shape, weight.dtype, weight.device)


def _offset(linears: list[Parts], index: int) -> int:
    return sum(len(flat(parts)) for parts in linears[:index])


def lora(name: str, key: str, weight: torch.Size, a: Meta, b: Meta) -> None:
    """Refuse an adapter that does not go beside a weight [N, K]."""
    fits = len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1]
    if not fits or (b.shape[0], a.shape[1]) != tuple(weight):
        raise ValueError(
            f"{name}: {key} is {list(weight)}, so A must be [r, {weight[1]}] and B "
            f"[{weight[0]}, r], got {list(a.shape)} and {list(b.shape)}"
        )
