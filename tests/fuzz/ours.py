"""The same functions by the library: its public functions and modules on a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fusedckpt
from fusedckpt import functional as fused

from .config import Config
from .eager import Outputs
from .operands import Operands, index_of, kind_of, linears_of, normalized_shape, out_features

# nn.Module of an activation, by the name it has in a Sequential
MODULES: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "softplus": nn.Softplus,
    "mish": nn.Mish,
}


def _levels(c: Config, *levels: str) -> str | None:
    """Return the level of a call, as far as the layer has it."""
    return c.save if c.save in levels else None


def _kernel(c: Config, fused_name: str) -> str | None:
    """Return the variant of a call, None where the dtype or a size of zero forbids the fused."""
    if c.kernel == "fused":
        widest = c.autocast or c.dtype
        return fused_name if "float64" not in (widest, c.dtype, *dict(c.dtypes).values()) else None
    return c.kernel


def _rms_options(c: Config, has_weight: bool) -> dict[str, Any]:
    return {"offset": c.offset if has_weight else 0.0, "cast": c.cast}


def _spec(c: Config, t: Operands) -> fusedckpt.NormSpec | None:
    kind, weight, bias = kind_of(c), t.get("norm_weight"), t.get("norm_bias")
    if kind is None:
        return None
    if kind == "layer":
        return fusedckpt.NormSpec("layer", weight, bias, c.eps)
    options = _rms_options(c, weight is not None)
    return fusedckpt.NormSpec("rms", weight, None, c.eps, **options)


def _linear_act(c: Config, t: Operands) -> Tensor:
    save, kernel = _levels(c, "inputs", "preact"), _kernel(c, "fused")
    return fused.linear_act(
        t["x"], t["weight"], t.get("bias"), c.activation, save=save, kernel=kernel
    )


def _norm(c: Config, t: Operands) -> Any:
    weight = t.get("norm_weight")
    before = (t["x"], t["residual"]) if "residual" in t else (t["x"],)
    if kind_of(c) == "rms":
        options = _rms_options(c, weight is not None)
        return getattr(fused, c.function)(*before, normalized_shape(c), weight, c.eps, **options)
    eps = 1e-5 if c.eps is None else c.eps
    return getattr(fused, c.function)(*before, normalized_shape(c), weight, t.get("norm_bias"), eps)


def _norm_linear(c: Config, t: Operands) -> Outputs:
    weights = [t[f"weight{i}"] for i in range(3) if f"weight{i}" in t]
    biases = [t.get(f"bias{i}") for i in range(len(weights))]
    given = biases if any(b is not None for b in biases) else None
    return fused.norm_linear(t["x"], _spec(c, t), weights, given)  # type: ignore[arg-type]


def _block_options(c: Config, *levels: str) -> dict[str, Any]:
    return {
        "residual": c.residual,
        "save": _levels(c, *levels),
        "chunks": c.chunks,
        "kernel": _kernel(c, "hybrid"),
    }


def _mlp(c: Config, t: Operands) -> Tensor:
    weights = (t["fc1_weight"], t.get("fc1_bias"), t["fc2_weight"], t.get("fc2_bias"))
    options = _block_options(c, "inputs", "preact")
    return fused.mlp(t["x"], *weights, c.activation, norm=_spec(c, t), **options)  # type: ignore[arg-type]


def _gated_mlp(c: Config, t: Operands) -> Tensor:
    weights = t["gate_weight"], t.get("up_weight"), t["down_weight"]
    biases = {key: t.get(key) for key in ("gate_bias", "up_bias", "down_bias")}
    options = _block_options(c, "inputs", "gate", "preact")
    return fused.gated_mlp(t["x"], *weights, c.activation, norm=_spec(c, t), **biases, **options)  # type: ignore[arg-type]


def _experts(c: Config, t: Operands) -> Tensor:
    biases = {"gate_up_bias": t.get("gate_bias"), "down_bias": t.get("down_bias")}
    options = {"save": _levels(c, "inputs", "gate", "preact"), "chunks": c.chunks}
    weights = t["gate_weight"], t["down_weight"]
    return fused.experts(
        *(t["x"], index_of(c), t["scores"], *weights),
        activation=c.activation or "identity",
        is_transposed=c.is_transposed,
        **biases,
        **options,  # type: ignore[arg-type]
    )


def fill(module: nn.Module, **parameters: Tensor | None) -> Any:
    """Give a module parameters, None for none."""
    for name, parameter in parameters.items():
        setattr(module, name, parameter)
    return module


def linear(t: Operands, name: str, kind: Any = nn.Linear, suffix: str = "", **options: Any) -> Any:
    """Build a linear over the operands of a name."""
    weight, bias = t[f"{name}weight{suffix}"], t.get(f"{name}bias{suffix}")
    built = kind(*weight.shape[::-1], bias=bias is not None, device="meta", **options)
    return fill(built, weight=weight, bias=bias)


def norm(c: Config, t: Operands, shape: tuple[int, ...], prefix: str = "norm_") -> Any:
    """Build a norm, of torch's class where ours has nothing more to say."""
    weight, bias = t.get(f"{prefix}weight"), t.get(f"{prefix}bias")
    affine = weight is not None
    native = c.native and c.function not in ("LayerNorm", "RMSNorm", "shared")
    if kind_of(c) == "layer":
        kind, eps = (
            nn.LayerNorm if native else fusedckpt.LayerNorm,
            1e-5 if c.eps is None else c.eps,
        )
        built = kind(shape, eps, affine, bias is not None, device="meta")
    elif native and c.cast == "torch" and not (affine and c.offset):
        built = nn.RMSNorm(shape, c.eps, affine, device="meta")
    else:
        options = _rms_options(c, affine)
        built = fusedckpt.RMSNorm(shape, c.eps, affine, device="meta", **options)
    return fill(built, weight=weight) if bias is None else fill(built, weight=weight, bias=bias)


def _norm_child(c: Config, t: Operands) -> nn.Module | None:
    return None if kind_of(c) is None else norm(c, t, (c.d,))


def _linear_module(c: Config, t: Operands) -> nn.Module:
    options = {"activation": c.activation, "save": _levels(c, "inputs", "preact") or "inputs"}
    return linear(t, "", fusedckpt.Linear, **options)


def _norm_linear_module(c: Config, t: Operands) -> nn.Module:
    kind = nn.Linear if c.native else fusedckpt.Linear
    linears = [linear(t, "", kind, str(i)) for i in range(3) if f"weight{i}" in t]
    return fusedckpt.NormLinear(norm(c, t, (c.d,)), *linears)


def _block_module(c: Config, t: Operands) -> nn.Module:
    gated = c.function == "GatedMLP"
    kind = fusedckpt.GatedMLP if gated else fusedckpt.MLP
    levels = ("inputs", "gate", "preact") if gated else ("inputs", "preact")
    bias = any(name.endswith("_bias") and name != "norm_bias" for name in t)
    options = {"norm": _norm_child(c, t), "residual": c.residual, "chunks": c.chunks}
    save = _levels(c, *levels) or "inputs"
    features, activation = (c.d, c.f, out_features(c)), c.activation or "identity"
    block = kind(*features, activation, bias, device="meta", save=save, **options)
    names = ("gate_", "up_", "down_") if gated else ("fc1_", "fc2_")
    for name in names:
        child = f"{name}proj" if gated else name[:-1]
        setattr(block, child, linear(t, name, type(getattr(block, child))))
    return block


def _sequential(c: Config, t: Operands) -> nn.Module:
    layers: list[nn.Module] = []
    widths = {index: d for index, d, _ in linears_of(c)}
    width = c.d
    for index, letter in enumerate(c.stack):
        if letter == "n":
            layers.append(norm(c, t, (width,), f"{index}_"))
        elif letter == "l":
            kind = nn.Linear if c.native else fusedckpt.Linear
            layers.append(linear(t, f"{index}_", kind))
            width = layers[-1].out_features  # type: ignore[assignment]
            assert widths[index] == layers[-1].in_features
        else:
            layers.append(MODULES[c.activation]())  # type: ignore[index]
    save = _levels(c, "inputs", "preact") or "inputs"
    return fusedckpt.Sequential(*layers, save=save, chunks=c.chunks)


class _Shared(nn.Module):
    """A norm module, and layers that all read its result."""

    def __init__(self, c: Config, t: Operands):
        super().__init__()
        self.c, self.t = c, t
        self.norm = norm(c, t, (c.d,))

    def forward(self, x: Tensor) -> Outputs:
        n = self.norm(x)
        return tuple(self.read(n, i, reader) for i, reader in enumerate(self.c.readers))

    def read(self, n: Tensor, index: int, reader: str) -> Tensor:
        prefix = f"{index}_"
        t = {key.removeprefix(prefix): v for key, v in self.t.items() if key.startswith(prefix)}
        c = self.c.but(norm=None, residual=False)
        if reader == "linear":
            return linear(t, "", fusedckpt.Linear)(n)
        if reader == "linear_act":
            return _linear_act(c, t | {"x": n})
        if reader == "mlp":
            return _mlp(c.but(function="mlp"), t | {"x": n})
        if reader == "gated_mlp":
            return _gated_mlp(c.but(function="gated_mlp"), t | {"x": n})
        if reader == "norm_linear":
            spec = fusedckpt.NormSpec("rms", t["norm_weight"], None, 1e-6)
            return fused.norm_linear(n, spec, [t["weight"]], [t.get("bias")])[0]
        return n


def _norm_module(c: Config, t: Operands) -> nn.Module:
    return norm(c, t, normalized_shape(c))


FUNCTIONS: dict[str, Callable[[Config, Operands], Any]] = {
    "linear_act": _linear_act,
    **dict.fromkeys(("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"), _norm),
    "norm_linear": _norm_linear,
    "mlp": _mlp,
    **dict.fromkeys(("gated_mlp", "packed_mlp"), _gated_mlp),
    "experts": _experts,
}
BUILDERS: dict[str, Callable[[Config, Operands], nn.Module]] = {
    "Linear": _linear_module,
    **dict.fromkeys(("RMSNorm", "LayerNorm"), _norm_module),
    "NormLinear": _norm_linear_module,
    **dict.fromkeys(("MLP", "GatedMLP"), _block_module),
    "Sequential": _sequential,
    "shared": _Shared,
}


def call(c: Config, t: Operands) -> Outputs:
    """Run the library's function or module."""
    if c.function in FUNCTIONS:
        found = FUNCTIONS[c.function](c, t)
    else:
        found = BUILDERS[c.function](c, t)(t["x"])
    return (found,) if isinstance(found, torch.Tensor) else tuple(found)
