"""What every function must compute, in plain torch: written apart from the library, on purpose.

In float64 it is the truth, in the dtype under test the measure of what error is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import Config
from .operands import (
    Operands,
    index_of,
    kind_of,
    layers_of,
    normalized_shape,
    part_of,
    readers_of,
)

Outputs = tuple[Tensor, ...]

# by every name that people use
ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys((None, "identity", "linear", "none"), lambda z: z),
    "relu": F.relu,
    **dict.fromkeys(("relu2", "relu_squared", "squared_relu"), lambda z: F.relu(z) ** 2),
    "leaky_relu": F.leaky_relu,
    **dict.fromkeys(("gelu", "gelu_python"), F.gelu),
    **dict.fromkeys(
        ("gelu_tanh", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh"),
        lambda z: F.gelu(z, approximate="tanh"),
    ),
    "quick_gelu": lambda z: z * torch.sigmoid(1.702 * z),
    **dict.fromkeys(("silu", "swish"), F.silu),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "mish": F.mish,
}


def normalize(
    c: Config, t: Operands, x: Tensor, prefix: str = "norm_", shape: tuple[int, ...] | None = None
) -> Tensor:
    """Apply the norm whose tensors begin with a prefix, as torch, Llama or Gemma have it.

    Written out where the cast is "written", or torch has no such norm.
    """
    weight, bias = t.get(f"{prefix}weight"), t.get(f"{prefix}bias")
    shape = shape or tuple(x.shape[-1:])
    axes = tuple(range(-len(shape), 0))
    if kind_of(c) == "layer":
        eps = 1e-5 if c.eps is None else c.eps
        if c.cast != "written":
            return F.layer_norm(x, shape, weight, bias, eps)
        x = x - x.mean(axes, keepdim=True)
        x = x * torch.rsqrt(x.pow(2).mean(axes, keepdim=True) + eps)
        return x * (1 if weight is None else weight) + (0 if bias is None else bias)
    offset = c.offset if weight is not None else 0.0
    if c.cast == "torch":
        return F.rms_norm(x, shape, weight if not offset else weight + offset, c.eps)  # type: ignore[operator]
    wide = x if x.dtype == torch.float64 else x.float()
    eps = torch.finfo(wide.dtype).eps if c.eps is None else c.eps
    wide = wide * torch.rsqrt(wide.pow(2).mean(axes, keepdim=True) + eps)
    if c.cast == "llama":
        return wide.to(x.dtype) if weight is None else (weight + offset) * wide.to(x.dtype)
    return (wide * (1.0 if weight is None else offset + weight.to(wide.dtype))).to(x.dtype)


def linear(t: Operands, x: Tensor, name: str = "", suffix: str = "") -> Tensor:
    """Apply the linear of a name, and its adapter, cast as peft casts those of experts."""
    weight = t[f"{name}weight{suffix}"]
    y = F.linear(x, weight, t.get(f"{name}bias{suffix}"))
    if f"{name}A" not in t:
        return y
    a, b = (t[f"{name}{part}"].to(weight.dtype) for part in "AB")
    return y + 1.5 * F.linear(F.linear(x, a), b)


def _mlp(c: Config, t: Operands, n: Tensor) -> Tensor:
    return linear(t, ACTIVATIONS[c.activation](linear(t, n, "fc1_")), "fc2_")


def _gated(c: Config, t: Operands, n: Tensor) -> Tensor:
    gate = ACTIVATIONS[c.activation](linear(t, n, "gate_"))
    return linear(t, gate * linear(t, n, "up_"), "down_")


def _packed(c: Config, t: Operands, n: Tensor) -> Tensor:
    gate, up = linear(t, n, "gate_").tensor_split(2, -1)
    return linear(t, ACTIVATIONS[c.activation](gate) * up, "down_")


def _block(hidden: Callable[[Config, Operands, Tensor], Tensor]) -> Callable[..., Outputs]:
    def call(c: Config, t: Operands) -> Outputs:
        x = t["x"]
        y = hidden(c, t, x if kind_of(c) is None else normalize(c, t, x))
        return (x + y if c.residual else y,)

    return call


def _experts(c: Config, t: Operands) -> Outputs:
    """Sum each token's experts, one expert after the other, as transformers does."""
    leading = math.prod(c.rows)
    x, index = t["x"].reshape(leading, c.d), index_of(c).reshape(leading, c.top_k)
    scores, y = t["scores"].reshape(leading, c.top_k), None
    for e in range(c.experts):
        tokens, slots = torch.where(index == e)
        own = {name: t[name][e] for name in t if name.startswith(("gate_", "down_"))}
        if c.is_transposed:
            own = {name: w.t() if w.dim() > 1 else w for name, w in own.items()}
        rows = _packed(c, own, x[tokens]) * scores[tokens, slots, None]
        y = rows.new_zeros(len(x), c.out) if y is None else y
        y = y.index_add(0, tokens, rows)
    assert y is not None
    # as its linears, whatever the dtype of the scores
    dtype = F.linear(x[:0], x[:0]).dtype
    return (y.to(dtype).view(*c.rows, c.out),)


def _norm(c: Config, t: Operands) -> Outputs:
    total = t["x"] + t["residual"] if "residual" in t else t["x"]
    n = normalize(c, t, total, shape=normalized_shape(c))
    return (n, total) if "residual" in t else (n,)


def _norm_linear(c: Config, t: Operands) -> Outputs:
    n = normalize(c, t, t["x"])
    return tuple(linear(t, n, "", str(i)) for i in range(3) if f"weight{i}" in t)


def _sequential(c: Config, t: Operands) -> Outputs:
    x = t["x"]
    for prefix, letter, *_ in layers_of(c):
        if letter == "n":
            x = normalize(c, t, x, prefix)
        else:
            x = linear(t, x, prefix) if letter == "l" else ACTIVATIONS[c.activation](x)
    return (x,)


def _shared(c: Config, t: Operands) -> Outputs:
    n = normalize(c, t, t["x"])
    found = [
        EAGER[reader.function](reader, part_of(t, prefix) | {"x": n})
        for prefix, reader in readers_of(c)
    ]
    return tuple(y for ys in found for y in ys)


EAGER: dict[str, Callable[[Config, Operands], Outputs]] = {
    "linear_act": lambda c, t: (ACTIVATIONS[c.activation](linear(t, t["x"])),),
    "Linear": lambda c, t: (linear(t, t["x"]),),
    **dict.fromkeys(("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"), _norm),
    "norm_linear": _norm_linear,
    "mlp": _block(_mlp),
    "gated_mlp": _block(_gated),
    "packed_mlp": _block(_packed),
    "experts": _experts,
    "n": lambda c, t: (t["x"],),
    "Sequential": _sequential,
    "shared": _shared,
}
