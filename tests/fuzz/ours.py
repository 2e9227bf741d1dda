"""The same functions by the library: its public functions and modules on a configuration."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

import fusedckpt
from fusedckpt import functional
from fusedckpt.kernels.activations import ACTIVATIONS, CANONICAL

from .config import Config
from .eager import Outputs
from .operands import Operands, index_of, kind_of, layers_of, normalized_shape, part_of, readers_of

LEVELS = {
    **dict.fromkeys(("linear_act", "mlp", "Sequential"), ("inputs", "preact")),
    **dict.fromkeys(("gated_mlp", "packed_mlp", "experts"), ("inputs", "gate", "preact")),
}
# arguments by the operands that they take, where another name says more of a configuration
RENAMED = {"gate_up": "gate_weight", "down": "down_weight", "gate_up_bias": "gate_bias"}
NORM = {"weight": "norm_weight", "bias": "norm_bias"}


def _level(c: Config) -> str | None:
    return c.save if c.save in LEVELS.get(c.function, ()) else None


def _spec(c: Config, t: Operands) -> fusedckpt.NormSpec | None:
    kind, weight, bias = kind_of(c), t.get("norm_weight"), t.get("norm_bias")
    options = _rms_options(c, weight) if kind == "rms" else {}
    return None if kind is None else fusedckpt.NormSpec(kind, weight, bias, c.eps, **options)


def _rms_options(c: Config, weight: Tensor | None) -> dict[str, Any]:
    return {"offset": 0.0 if weight is None else c.offset, "cast": c.cast}


def _options(c: Config, t: Operands) -> dict[str, Any]:
    """Return the options of all functions by name."""
    kernel = "hybrid" if c.kernel == "fused" and "mlp" in c.function else c.kernel
    if kernel != "split" and "float64" in (c.autocast, c.dtype):
        # which the fused ones do not take
        kernel = None
    return {
        "activation": c.activation or ("identity" if c.function == "experts" else None),
        "norm": _spec(c, t),
        "normalized_shape": normalized_shape(c),
        "eps": 1e-5 if c.eps is None and kind_of(c) == "layer" else c.eps,
        **_rms_options(c, t.get("norm_weight")),
        **{"residual": c.residual, "save": _level(c), "chunks": c.chunks, "kernel": kernel},
        "is_transposed": c.is_transposed,
    }


def _function(c: Config, t: Operands) -> Any:
    """Call a public function with the operands and options that it takes."""
    called = getattr(functional, {"packed_mlp": "gated_mlp"}.get(c.function, c.function))
    renamed = RENAMED | (NORM if "norm" in c.function else {})
    options = _options(c, t)
    if c.function == "norm_linear":
        weights = [t[f"weight{i}"] for i in range(3) if f"weight{i}" in t]
        biases = [t.get(f"bias{i}") for i in range(len(weights))]
        options["weights"] = weights
        options["biases"] = biases if any(b is not None for b in biases) else None
    elif c.function == "experts":
        options["index"] = index_of(c)
        for key, name in (("gate_up", "gate_"), ("down", "down_")):
            if f"{name}A" in t:
                parts = [t[f"{name}{part}"] for part in ("weight", "A", "B")]
                options[key] = fusedckpt.LoRA(*parts, scale=1.5)
    if "residual" in t:
        del options["residual"]
    names = signature(called).parameters.keys() - {"dropout", "output_dropout"}
    return called(
        **{
            name: options[name] if name in options else t.get(renamed.get(name, name))
            for name in names
        }
    )


def _fill(module: nn.Module, weight: Tensor | None, bias: Tensor | None) -> Any:
    """Give a module parameters, None for none."""
    parts = {"weight": weight, "bias": bias}
    for name in parts.keys() & module._parameters.keys():
        setattr(module, name, parts[name])
    return module


def _linear(t: Operands, prefix: str) -> Any:
    weight, bias = t[f"{prefix}weight"], t.get(f"{prefix}bias")
    return _fill(fusedckpt.Linear(*weight.shape[::-1], device="meta"), weight, bias)


def _norm(c: Config, t: Operands, width: int, prefix: str) -> Any:
    weight, bias = t.get(f"{prefix}weight"), t.get(f"{prefix}bias")
    if kind_of(c) == "layer":
        eps, affine = 1e-5 if c.eps is None else c.eps, weight is not None
        built = fusedckpt.LayerNorm(width, eps, affine, bias is not None, device="meta")
    else:
        options = _rms_options(c, weight)
        built = fusedckpt.RMSNorm(width, c.eps, weight is not None, device="meta", **options)
    return _fill(built, weight, bias)


def _sequential(c: Config, t: Operands) -> nn.Module:
    act = ACTIVATIONS[CANONICAL[c.activation or "identity"]]
    made = {
        "l": lambda prefix, _: _linear(t, prefix),
        "n": lambda prefix, width: _norm(c, t, width, prefix),
        "a": lambda *_: act.module(**act.module_state),  # type: ignore[misc]
    }
    layers = [made[letter](prefix, width) for prefix, letter, width, _ in layers_of(c)]
    return fusedckpt.Sequential(*layers, save=_level(c) or "inputs", chunks=c.chunks)


class _Shared(nn.Module):
    """A norm module, and layers that all read its result."""

    def __init__(self, c: Config, t: Operands):
        super().__init__()
        self.c, self.t, self.norm = c, t, _norm(c, t, c.d, "norm_")

    def forward(self, x: Tensor) -> Outputs:
        n, found = self.norm(x), []
        for prefix, reader in readers_of(self.c):
            own = part_of(self.t, prefix)
            if reader.function == "Linear":
                found.append(_linear(own, "")(n))
            else:
                y = n if reader.function == "n" else _function(reader, own | {"x": n})
                found += [y] if isinstance(y, Tensor) else y
        return tuple(found)


MODULES: dict[str, Callable[[Config, Operands], nn.Module]] = {
    "Sequential": _sequential,
    "shared": _Shared,
}


def call(c: Config, t: Operands) -> Outputs:
    """Run the library's function or module."""
    make = MODULES.get(c.function)
    found = _function(c, t) if make is None else make(c, t)(t["x"])
    return (found,) if isinstance(found, torch.Tensor) else tuple(found)
