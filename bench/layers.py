"""A decoder layer and a stack of them, written once over the functions of either library.

`lib` is `fusedckpt.reference` or `fusedckpt.functional`. Attention is torch's in both, without
positions, which would cost everyone the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from bench.sizes import Size
from fusedckpt.autograd.norm_spec import NormSpec

__all__ = ["EPS", "LAYERS", "decoder_layer", "layer_shapes", "norm_of", "stack"]

# Llama 3's
EPS = 1e-5
# of the stack
LAYERS = 4

Wrap = Callable[..., Tensor]


def norm_of(weight: Tensor) -> NormSpec:
    """Return the norm that every case has."""
    return NormSpec("rms", weight, eps=EPS)


def layer_shapes(size: Size) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a layer's nine parameters."""
    d, kv, up = size.dim, (size.kv, size.dim), (size.hidden, size.dim)
    return (d,), (d, d), kv, kv, (d, d), (d,), up, up, up[::-1]


def decoder_layer(lib: Any, size: Size, x: Tensor, *parameters: Tensor, **options: Any) -> Tensor:
    """Pre-norm causal attention with grouped heads, then SwiGLU, each added to x [B, S, D]."""
    attn_norm, q, k, v, o, mlp_norm, *weights = parameters
    heads = (
        y.unflatten(-1, (-1, size.head_dim)).transpose(1, 2)
        for y in lib.norm_linear(x, norm_of(attn_norm), (q, k, v))
    )
    y = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=size.kv < size.dim)
    x = x + F.linear(y.transpose(1, 2).flatten(2), o)
    return lib.gated_mlp(x, *weights, norm=norm_of(mlp_norm), residual=True, **options)


def layers_of(
    lib: Any, size: Size, parameters: tuple[Tensor, ...], options: dict[str, Any]
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield every layer of a stack, as a function of x."""
    count = len(parameters) // LAYERS

    def bind(own: tuple[Tensor, ...]) -> Callable[[Tensor], Tensor]:
        return lambda x: decoder_layer(lib, size, x, *own, **options)

    for start in range(0, len(parameters), count):
        yield bind(parameters[start : start + count])


def stack(
    lib: Any,
    size: Size,
    x: Tensor,
    *parameters: Tensor,
    per_layer: Wrap | None = None,
    whole: Wrap | None = None,
    **options: Any,
) -> Tensor:
    """LAYERS decoder layers; `per_layer` or `whole` calls fn(x) for one, or for all of them."""
    layers = list(layers_of(lib, size, parameters, options))

    def run(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x) if per_layer is None else per_layer(layer, x)
        return x

    return run(x) if whole is None else whole(run, x)
