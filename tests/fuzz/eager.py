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
from .operands import Operands, index_of, kind_of, normalized_shape

Outputs = tuple[Tensor, ...]


def activate(name: str | None, z: Tensor) -> Tensor:
    """Apply an activation by any of its names."""
    if name in (None, "identity", "linear", "none"):
        return z
    if name == "relu":
        return F.relu(z)
    if name in ("relu2", "relu_squared", "squared_relu"):
        return F.relu(z) ** 2
    if name == "leaky_relu":
        return F.leaky_relu(z, 0.01)
    if name in ("gelu", "gelu_python"):
        return F.gelu(z)
    if name in ("gelu_tanh", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh"):
        return F.gelu(z, approximate="tanh")
    if name == "quick_gelu":
        return z * torch.sigmoid(1.702 * z)
    if name in ("silu", "swish"):
        return F.silu(z)
    simple = {"sigmoid": torch.sigmoid, "tanh": torch.tanh, "softplus": F.softplus, "mish": F.mish}
    return simple[name](z)  # type: ignore[index]


def normalise(
    c: Config, x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...]
) -> Tensor:
    """Apply the norm of a configuration, as torch, Llama or Gemma have it, or written out."""
    if kind_of(c) == "layer":
        return layer_norm(c, x, weight, bias, shape)
    offset = c.offset if weight is not None else 0.0
    if c.cast == "torch":
        return F.rms_norm(x, shape, weight if not offset else weight + offset, c.eps)  # type: ignore[operator]
    wide = x if x.dtype == torch.float64 else x.float()
    eps = torch.finfo(wide.dtype).eps if c.eps is None else c.eps
    axes = tuple(range(-len(shape), 0))
    wide = wide * torch.rsqrt(wide.pow(2).mean(axes, keepdim=True) + eps)
    if c.cast == "llama":
        return wide.to(x.dtype) if weight is None else (weight + offset) * wide.to(x.dtype)
    scale = 1.0 if weight is None else offset + weight.to(wide.dtype)
    return (wide * scale).to(x.dtype)


def layer_norm(
    c: Config, x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...]
) -> Tensor:
    """Apply LayerNorm, torch's or written out."""
    eps = 1e-5 if c.eps is None else c.eps
    if c.cast != "written":
        return F.layer_norm(x, shape, weight, bias, eps)
    axes = tuple(range(-len(shape), 0))
    x = x - x.mean(axes, keepdim=True)
    x = x * torch.rsqrt(x.pow(2).mean(axes, keepdim=True) + eps)
    return x * (1 if weight is None else weight) + (0 if bias is None else bias)


def norm_of(c: Config, t: Operands, x: Tensor, prefix: str = "norm_") -> Tensor:
    """Apply the norm whose tensors begin with `prefix`, over x's last dimension."""
    weight, bias = t.get(f"{prefix}weight"), t.get(f"{prefix}bias")
    return normalise(c, x, weight, bias, tuple(x.shape[-1:]))


def linear(t: Operands, x: Tensor, name: str = "", suffix: str = "") -> Tensor:
    """Apply the linear of a name."""
    return F.linear(x, t[f"{name}weight{suffix}"], t.get(f"{name}bias{suffix}"))


def hidden_mlp(c: Config, t: Operands, n: Tensor, prefix: str = "") -> Tensor:
    """Apply a plain MLP to what its norm returned."""
    return linear(t, activate(c.activation, linear(t, n, f"{prefix}fc1_")), f"{prefix}fc2_")


def hidden_gated(c: Config, t: Operands, n: Tensor, prefix: str = "") -> Tensor:
    """Apply a gated MLP to what its norm returned."""
    gate = activate(c.activation, linear(t, n, f"{prefix}gate_"))
    return linear(t, gate * linear(t, n, f"{prefix}up_"), f"{prefix}down_")


def _hidden_packed(c: Config, t: Operands, n: Tensor) -> Tensor:
    both = linear(t, n, "gate_")
    half = both.shape[-1] // 2
    return linear(t, activate(c.activation, both[..., :half]) * both[..., half:], "down_")


def _experts(c: Config, t: Operands) -> Outputs:
    """Sum each token's experts, one expert after the other, as transformers does."""
    leading = math.prod(c.rows)
    x, index = t["x"].reshape(leading, c.d), index_of(c).reshape(leading, c.top_k)
    scores, y = t["scores"].reshape(leading, c.top_k), None
    for e in range(c.experts):
        tokens, slots = torch.where(index == e)
        names = ("gate_weight", "gate_bias", "down_weight", "down_bias")
        own = {name: t[name][e] for name in names if name in t}
        if c.is_transposed:
            own |= {name: own[name].t() for name in ("gate_weight", "down_weight")}
        rows = _hidden_packed(c, own, x[tokens]) * scores[tokens, slots, None]
        y = rows.new_zeros(len(x), c.out) if y is None else y
        y = y.index_add(0, tokens, rows)
    assert y is not None
    # as its linears, whatever the dtype of the scores
    dtype = F.linear(x[:0], x[:0]).dtype
    return (y.to(dtype).view(*c.rows, c.out),)


def _linear_act(c: Config, t: Operands) -> Outputs:
    return (activate(c.activation, linear(t, t["x"])),)


def _norm(c: Config, t: Operands) -> Outputs:
    weight, bias = t.get("norm_weight"), t.get("norm_bias")
    return (normalise(c, t["x"], weight, bias, normalized_shape(c)),)


def _add(c: Config, t: Operands) -> Outputs:
    total = t["x"] + t["residual"]
    return (*_norm(c, t | {"x": total}), total)


def _norm_linear(c: Config, t: Operands) -> Outputs:
    n = norm_of(c, t, t["x"])
    return tuple(linear(t, n, "", str(i)) for i in range(3) if f"weight{i}" in t)


def _block(hidden: Callable[[Config, Operands, Tensor], Tensor]) -> Callable[..., Outputs]:
    def call(c: Config, t: Operands) -> Outputs:
        x = t["x"]
        y = hidden(c, t, x if kind_of(c) is None else norm_of(c, t, x))
        return (x + y if c.residual else y,)

    return call


def _sequential(c: Config, t: Operands) -> Outputs:
    x = t["x"]
    for index, letter in enumerate(c.stack):
        if letter == "n":
            x = norm_of(c, t, x, f"{index}_")
        elif letter == "l":
            x = linear(t, x, f"{index}_")
        else:
            x = activate(c.activation, x)
    return (x,)


def _shared(c: Config, t: Operands) -> Outputs:
    n = norm_of(c, t, t["x"])
    found = []
    for index, reader in enumerate(c.readers):
        prefix = f"{index}_"
        if reader == "linear":
            found.append(linear(t, n, prefix))
        elif reader == "linear_act":
            found.append(activate(c.activation, linear(t, n, prefix)))
        elif reader == "mlp":
            found.append(hidden_mlp(c, t, n, prefix))
        elif reader == "gated_mlp":
            found.append(hidden_gated(c, t, n, prefix))
        elif reader == "norm_linear":
            weight = t[f"{prefix}norm_weight"]
            found.append(linear(t, F.rms_norm(n, weight.shape, weight, 1e-6), prefix))
        else:
            found.append(n)
    return tuple(found)


EAGER: dict[str, Callable[[Config, Operands], Outputs]] = {
    **dict.fromkeys(("linear_act", "Linear"), _linear_act),
    **dict.fromkeys(("rms_norm", "layer_norm", "RMSNorm", "LayerNorm"), _norm),
    **dict.fromkeys(("add_rms_norm", "add_layer_norm"), _add),
    **dict.fromkeys(("norm_linear", "NormLinear"), _norm_linear),
    **dict.fromkeys(("mlp", "MLP"), _block(hidden_mlp)),
    **dict.fromkeys(("gated_mlp", "GatedMLP"), _block(hidden_gated)),
    "packed_mlp": _block(_hidden_packed),
    "experts": _experts,
    "Sequential": _sequential,
    "shared": _shared,
}
