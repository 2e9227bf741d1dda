"""Weights in int8 with a scale a row, as a stand-in for the weights of quantisation libraries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fusedckpt import register_quantised

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default)


class Int8(Tensor):
    """A frozen matrix [N, K] in int8, times a scale [N, 1]; every op sees it dense."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Int8:
        """Make a tensor of their shape without memory of its own."""
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, numbers.shape, dtype=scale.dtype, device=numbers.device
        )

    def __init__(self, numbers: Tensor, scale: Tensor):
        self.numbers, self.scale = numbers, scale

    @classmethod
    def of(cls, dense: Tensor) -> Int8:
        """Quantise a matrix by the largest number of every row."""
        scale = dense.abs().amax(1, keepdim=True).clamp_min(1e-8) / 127
        return cls((dense / scale).round().to(torch.int8), scale)

    def dequantize(self) -> Tensor:
        """Return it dense."""
        return self.numbers.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Int8:
        return Int8(inner["numbers"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SAME:
            return cls(func(args[0].numbers), func(args[0].scale))
        args, kwargs = tree_map_only(Int8, Int8.dequantize, (args, kwargs or {}))
        return func(*args, **kwargs)


register_quantised(Int8, Int8.dequantize)


def quantise(model: nn.Module) -> nn.Module:
    """Quantise the weight of every linear but the head, and return the model."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and not name.endswith("head"):
            module.weight = nn.Parameter(Int8.of(module.weight.detach()), requires_grad=False)
    return model
