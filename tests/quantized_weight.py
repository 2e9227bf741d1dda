"""A quantized weight of the tests' own: int8 rows with a scale each, dense only when asked for.

[N, K], or [E, N, K] of experts.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fusedckpt import register_quantized

aten = torch.ops.aten


class Int8Rows(Tensor):
    """Knows F.linear, rows and `dequantize`, as torchao's classes do; counts what it made dense."""

    made: ClassVar[list[weakref.ref[Tensor]]] = []
    # rows and bytes of each that was
    sizes: ClassVar[list[tuple[int, int]]] = []

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Int8Rows:
        options = {"dtype": scale.dtype, "device": data.device, "requires_grad": False}
        return Tensor._make_wrapper_subclass(cls, data.shape, **options)

    def __init__(self, data: Tensor, scale: Tensor):
        self.int_data, self.scale = data, scale

    def dequantize(self) -> Tensor:
        dense = self.int_data.to(self.scale.dtype) * self.scale[..., None]
        Int8Rows.made.append(weakref.ref(dense))
        Int8Rows.sizes.append((dense.shape[0], dense.nbytes))
        assert Int8Rows.num_alive() == 1
        return dense

    @staticmethod
    def num_alive() -> int:
        return sum(ref() is not None for ref in Int8Rows.made)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["int_data", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, size: Any, stride: Any) -> Int8Rows:
        return cls(inner["int_data"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        w = args[0] if isinstance(args[0], cls) else None
        if func in (aten.detach.default, aten.alias.default):
            return cls(w.int_data, w.scale)
        if func is aten.slice.Tensor and args[1:2] in ((), (0,)):
            return cls(func(w.int_data, *args[1:]), func(w.scale, *args[1:]))
        if func is aten.t.default:
            return w.int_data.to(w.scale.dtype).mul(w.scale[:, None]).t()
        raise NotImplementedError(f"{func} of a quantized weight")


register_quantized(Int8Rows, Int8Rows.dequantize)


def quantize(weight: Tensor) -> nn.Parameter:
    """Round rows to 127 steps of their largest element."""
    weight = weight.detach()
    scale = weight.abs().amax(-1) / 127
    data = (weight / scale[..., None]).round().to(torch.int8)
    return nn.Parameter(Int8Rows(data, scale), requires_grad=False)


def forget() -> None:
    """Start counting anew."""
    Int8Rows.made.clear()
    Int8Rows.sizes.clear()
