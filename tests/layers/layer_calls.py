"""Everything public of the layers that takes arguments: valid ones, and what kind each is.

Kinds are read off signatures, so that a new argument is refused what the others of its kind are.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
import zoo
from bad_values import TAKES_NONE, D, DTensor, F, N, t
from support import DEVICE
from torch import Tensor, nn

import fusedckpt
from fusedckpt import LoRA, NormSpec, QuantizedWeight, functional


class Target(NamedTuple):
    """Something to call: the name in its errors, what it takes, and what kind each argument is."""

    name: str
    call: Callable[..., Any]
    valid: dict[str, Any]
    kinds: dict[str, str]


# what kind of value an argument takes, where it is no tensor
KINDS = {
    **dict.fromkeys(("in_features", "hidden_features", "out_features"), "size"),
    **dict.fromkeys(("bias", "elementwise_affine", "entropy"), "flag"),
    **dict.fromkeys(("is_sliceable", "residual"), "flag"),
    **dict.fromkeys(("cast", "kind", "layout", "level", "reduction", "to"), "name"),
    **dict.fromkeys(("backend", "kernel", "save"), "name"),
    **dict.fromkeys(("dropout", "label_smoothing", "output_dropout"), "probability"),
    **dict.fromkeys(("offset", "scale", "z_loss"), "offset"),
    **dict.fromkeys(("eps", "softcap", "temperature"), "eps"),
    **{"chunks": "chunks", "activation": "activation", "norm": "norm", "segments": "segments"},
    **{
        "weights": "tensors",
        "biases": "tensors",
        "linears": "module",
        "args": TAKES_NONE + "module",
    },
    **{"normalized_shape": "shape", "shape": "sizes", "dense": "callable"},
    **{"device": "device", "dtype": "dtype", "gate": "rows", "up": "rows", "packed": "rows"},
}


def target(
    name: str, call: Callable[..., Any], valid: dict[str, Any], of: Any = None, only: str = ""
) -> Target:
    """Return a target that takes what `of` takes, or of that what `only` names.

    of: the call itself, or the class of the record or module behind it.
    """
    found = {}
    for key, parameter in signature(of or call).parameters.items():
        is_tensor = isinstance(valid.get(key), Tensor) and key not in ("gate", "up", "packed")
        kind = "tensor" if is_tensor else KINDS.get(key)
        if key in ("target", "outputs") or kind is None or (only and key not in only.split()):
            continue
        # an adapter's own weight may be any
        if kind == "tensor" and re.search("LoRA|Any", str(parameter.annotation)):
            kind = "weight"
        if key == "norm" and isinstance(of or call, type):
            kind = "module"
        takes_none = parameter.default is None or "None" in str(parameter.annotation)
        takes_none = takes_none and kind != "activation"
        found[key] = TAKES_NONE * takes_none + kind
    return Target(name, call, valid, found)


LINEAR = {"x": t(N, D), "weight": t(F, D), "bias": t(F)}
NORM = {"x": t(N, D), "normalized_shape": D, "weight": t(D)}
LAYER, ADDED = NORM | {"bias": t(D)}, NORM | {"residual": t(N, D)}
MLP = {"x": t(N, D), "fc1_weight": t(F, D), "fc1_bias": t(F), "fc2_weight": t(D, F)}
MLP["fc2_bias"] = t(D)
GATED = {"x": t(N, D), "gate_weight": t(F, D), "up_weight": t(F, D), "down_weight": t(D, F)}
GATED |= {"gate_bias": t(F), "up_bias": t(F), "down_bias": t(D)}
ADAPTED = {"weight": t(2 * F, D), "A": t(2, D), "B": t(2 * F, 2)}
HEAD = {"x": t(N, D), "weight": t(F, D), "target": t(N, dtype=torch.int64), "bias": t(F)}
SIZES = {"in_features": D, "hidden_features": F}
MODULE = "save activation residual chunks"
SHAPE, LINEAR_SIZES = {"normalized_shape": D}, {"in_features": D, "out_features": F}
LAYER_WEIGHTS = {"weight": t(D), "bias": t(D)}


def spec(call: Callable[..., Any], kind: str, **valid: Any) -> Callable[..., Any]:
    """Call with a NormSpec of the fields that are given."""
    return lambda **fields: call(**valid, norm=NormSpec(**{"kind": kind} | fields))


def record(**fields: Any) -> QuantizedWeight:
    """A quantized weight [F, D]."""
    given = {"shape": (F, D), "dtype": torch.float32, "device": DEVICE, "dense": len}
    return QuantizedWeight(**given | fields)


def mlp_of(**fields: Any) -> Any:
    return functional.mlp(**MLP | {"fc1_weight": record(**fields)})


def packed_lora(gate_bias: Any = None, **fields: Any) -> Any:
    """Call with a packed weight [2 F, D] under an adapter."""
    gate = LoRA(**ADAPTED | fields)
    return functional.gated_mlp(X, gate, None, MLP["fc2_weight"], gate_bias=gate_bias)


def attribute(build: Callable[[], Any], *x: Any) -> Callable[..., Any]:
    """Set attributes of a module, then call it."""
    module = build().to(DEVICE)
    before, children = dict(module.__dict__), dict(module._modules)

    def call(**attributes: Any) -> Any:
        module.__dict__.update(before | {"_modules": dict(children)})
        for key, value in attributes.items():
            setattr(module, key, value)
        return module(*x)

    return call


def linear(**options: Any) -> fusedckpt.Linear:
    return fusedckpt.Linear(D, F, device=DEVICE, **options)


def in_order(args: Any, **options: Any) -> nn.Module:
    return fusedckpt.Sequential(args, **options)


def fused(model: nn.Module) -> nn.Module:
    fusedckpt.fuse(model.to(DEVICE), verify=False)
    assert type(model).__name__.startswith("Fused")
    return model


X = t(N, D)
PROJECTIONS = {"x": X, "norm": NormSpec("rms", t(D)), "weights": [t(F, D)], "biases": [t(F)]}
BY_NAME = {
    **{"linear_cross_entropy": HEAD, "token_logprobs": HEAD, "linear_act": LINEAR},
    **{"rms_norm": NORM, "layer_norm": LAYER, "add_rms_norm": ADDED},
    "gated_rms_norm": NORM | {"gate": X},
    **{"add_layer_norm": LAYER | ADDED, "mlp": MLP, "gated_mlp": GATED},
    "norm_linear": PROJECTIONS,
    "prefetch_recompute": {"outputs": X},
    "backends": {"device": DEVICE, "dtype": torch.float32},
}
ONE = {"x": X, "weights": [t(F, D)]}
RMS = "kind eps offset cast"
FUNCTIONS = [
    *(
        target(key, getattr(functional, key, None) or getattr(fusedckpt, key), valid)
        for key, valid in BY_NAME.items()
    ),
    target("mlp", spec(functional.mlp, "rms", **MLP), {"weight": t(D)}, NormSpec, f"weight {RMS}"),
    target("norm_linear", spec(functional.norm_linear, "rms", **ONE), {}, NormSpec, RMS),
    target(
        *("gated_mlp", spec(functional.gated_mlp, "layer", **GATED), LAYER_WEIGHTS),
        *(NormSpec, "bias eps offset cast"),
    ),
    target("mlp", mlp_of, {}, QuantizedWeight),
    target("gated_mlp", packed_lora, ADAPTED, LoRA),
    target("gated_mlp", packed_lora, ADAPTED | {"gate_bias": t(2 * F)}, only="gate_bias"),
    target("register_quantized", partial(fusedckpt.register_quantized, DTensor, len), {}),
    target("saving", lambda level: fusedckpt.saving(level).__enter__(), {}),
]
CONSTRUCTORS = [
    *(
        target(kind.__name__, kind, valid)
        for kind, valid in (
            *((fusedckpt.Linear, LINEAR_SIZES), (fusedckpt.RMSNorm, SHAPE)),
            *((fusedckpt.LayerNorm, SHAPE), (fusedckpt.MLP, SIZES), (fusedckpt.GatedMLP, SIZES)),
        )
    ),
    target(
        *("NormLinear", lambda **a: fusedckpt.NormLinear(*a.values())),
        *({"norm": nn.RMSNorm(D), "linears": nn.Linear(D, F)}, fusedckpt.NormLinear),
    ),
    target("Sequential", in_order, {"args": nn.Linear(D, F)}, fusedckpt.Sequential),
    target("Sequential", lambda args: in_order(OrderedDict(first=args)), {}),
]
CALLED = {
    "Linear": linear(),
    "mlp": fusedckpt.MLP(D, F),
    "MLP": fusedckpt.MLP(D, F, norm=nn.RMSNorm(D)),
    "gated_mlp": fusedckpt.GatedMLP(D, F),
    "layer_norm": fusedckpt.LayerNorm(D),
    "NormLinear": fusedckpt.NormLinear(nn.LayerNorm(D), nn.Linear(D, F)),
    "linear_act": fusedckpt.Sequential(nn.Linear(D, F), nn.GELU()),
}
# a module's errors are its own, or those of the function that it calls
ATTRIBUTES = [
    ("Linear", linear, fusedckpt.Linear, "save activation"),
    ("gated_mlp", lambda: fused(zoo.SwiGLU(D, F)), fusedckpt.GatedMLP, "save"),
    ("fuse", lambda: fused(zoo.MLP(D, F)), fusedckpt.MLP, "save"),
    ("rms_norm", lambda: fusedckpt.RMSNorm(D), fusedckpt.RMSNorm, RMS),
    ("layer_norm", lambda: fusedckpt.LayerNorm(D), fusedckpt.LayerNorm, "eps"),
    (
        *("Sequential", lambda: fusedckpt.Sequential(linear(), nn.GELU())),
        *(fusedckpt.Sequential, "save"),
    ),
    # fused as a whole, and with a child that is called
    *(
        (kind.__name__, lambda k=kind, n=norm: k(D, F, norm=n), kind, MODULE)
        for kind in (fusedckpt.MLP, fusedckpt.GatedMLP)
        for norm in (None, nn.Identity())
    ),
]
MODULES = [
    *(Target(name, m.to(DEVICE), {"input": X}, {"input": "tensor"}) for name, m in CALLED.items()),
    *(target(name, attribute(build, X), {}, *rest) for name, build, *rest in ATTRIBUTES),
]
