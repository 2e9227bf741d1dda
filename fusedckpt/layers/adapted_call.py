"""What a call with adapters, quantised weights or dropout comes down to: checked, and settled.

It is settled as the same call without adapters is; adapters, and what they read, come on top.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fusedckpt.autograd import arguments, dispatch
from fusedckpt.autograd.dispatch import Around, Meta
from fusedckpt.autograd.lora import Parts
from fusedckpt.autograd.norm_spec import NormSpec, output_dtype
from fusedckpt.layers import validate
from fusedckpt.layers.norm_function import NormCall
from fusedckpt.layers.projections import flat, refilled


class AdaptedCall(NamedTuple):
    """What a call comes down to.

    dtype: of the GEMMs; norm: None for none; activation: None where the first linears' outputs are
    the result; has_last: whether a linear follows; adds: whether x is added to the result,
    adds_after: outside, in another dtype; dropout, output_dropout: of the hidden layer and the
    result, each with the number of its seed; adapter_dtypes: of each linear's adapters; on_aten:
    whether elementwise work is ATen's; dtypes: of x and every tensor.
    """

    dtype: torch.dtype
    norm: NormCall | None = None
    activation: str | None = None
    level: str = "inputs"
    has_last: bool = False
    chunks: int = 1
    adds: bool = False
    adds_after: bool = False
    dropout: tuple[float, int] = (0.0, 0)
    output_dropout: tuple[float, int] = (0.0, 0)
    adapter_dtypes: tuple[tuple[torch.dtype, ...], ...] = ()
    on_aten: bool = False
    dtypes: tuple[torch.dtype | None, ...] = ()


class AdaptedOptions(NamedTuple):
    """The options of a call.

    plain: those of the same call without adapters, of `kinds`, whose `adapted` settles it for pairs
    of weight and bias; keys: the names of weights; linears: all that is no tensor of them, where a
    quantised weight's place holds its Meta.
    """

    plain: Any
    kinds: tuple[type, ...]
    keys: tuple[str, ...]
    linears: tuple[Parts, ...]

    @property
    def name(self) -> str:
        """Who refuses tensors."""
        return self.plain.name

    @property
    def is_module(self) -> bool:
        """Whether a module calls."""
        return self.plain.is_module

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors: x, the norm's, then those of each linear, in the order of `flat`."""
        found = ["x", "norm.weight?", "norm.bias?"]
        for key, parts in zip(self.keys, self.linears, strict=True):
            weight, bias = key, key.replace("weights", "biases").replace("weight", "bias")
            found += [weight, f"{bias}?"]
            found += [f"{key}.{part}" for _ in parts.adapters for part in ("A", "B")]
        return tuple(found)

    def chosen(self, override: str | None) -> None:
        """Refuse options that there are not."""
        self.plain.chosen(override)

    def settle(self, around: Around, *tensors: Any) -> AdaptedCall | None:
        """Refuse tensors that do not fit."""
        x, norm_weight, norm_bias, *rest = tensors
        values = iter(rest)
        linears = [refilled(parts, values) for parts in self.linears]
        whole = [p._replace(weight=p.base or p.weight) for p in linears]
        metas = (*tensors[:3], *(t for parts in whole for t in flat(parts)))
        validate.tensors(self.name, self.names, metas)
        if getattr(self.plain, "kernel", None) is not None:
            # adapters are GEMMs of their own
            arguments.choice(self.name, "kernel", self.plain.kernel, ("split",))
        read = self._read(around, x, norm_weight)
        pairs = [(parts.weight or parts.base._replace(dtype=read), parts.bias) for parts in linears]
        call = self.plain.adapted(around, x, (norm_weight, norm_bias), pairs)
        for key, parts, (weight, _) in zip(self.keys, linears, pairs, strict=True):
            for pair in parts.adapters:
                _fit(self.name, key, weight.shape, pair, around=around)
        if call is None:
            return None
        adapters = [[around.compute_dtype(a.dtype) for a, _ in parts.adapters] for parts in linears]
        is_empty = 0 in x.shape or any(0 in weight.shape for weight, _ in pairs)
        return call._replace(
            adapter_dtypes=tuple(map(tuple, adapters)),
            on_aten=is_empty or dispatch.path_of(x.device, call.dtype) == "aten",
            dtypes=tuple([None if t is None else t.dtype for t in tensors]),
        )

    def _read(self, around: Around, x: Meta, norm_weight: Meta | None) -> torch.dtype:
        """Return the dtype that a quantised weight is multiplied in: that of what it meets."""
        norm, dtype = getattr(self.plain, "norm", None), x.dtype
        if isinstance(norm, NormSpec):
            dtype = output_dtype(norm, x, norm_weight, around.autocast)
        return around.compute_dtype(dtype)


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
