"""Everything public of the layers that takes arguments: valid ones, and what kind each is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from bad_values import D, DTensor, F, N, t
from own_classes import SwiGLU
from support import DEVICE
from torch import Tensor, nn

import fusedckpt
from fusedckpt import LoRA, NormSpec, QuantisedWeight, functional


class Target(NamedTuple):
    """Something to call: the name in its errors, what it takes, and what kind each argument is."""

    name: str
    call: Callable[..., Any]
    valid: dict[str, Any]
    kinds: dict[str, str]


# what kind of value an argument takes, where it is no tensor
KINDS = {
    **dict.fromkeys(("in_features", "hidden_features", "out_features"), "size"),
    **dict.fromkeys(("bias", "elementwise_affine", "entropy", "residual", "is_sliceable"), "flag"),
    **dict.fromkeys(("cast", "kind", "layout", "level", "reduction", "to"), "name"),
    **dict.fromkeys(("backend", "kernel", "save"), "none or name"),
    **dict.fromkeys(("label_smoothing", "dropout", "output_dropout"), "probability"),
    **dict.fromkeys(("offset", "scale", "z_loss"), "offset"),
    **dict.fromkeys(("eps", "softcap"), "none or eps"),
    **{"temperature": "eps", "chunks": "none or chunks", "activation": "activation"},
    **{"norm": "none or norm", "weights": "tensors", "biases": "none or tensors"},
    **{"normalized_shape": "shape", "shape": "sizes", "dense": "callable", "dim": "dim"},
    **{"device": "none or device", "dtype": "none or dtype", "segments": "segments"},
    **{"linears": "module", "args": "none or module"},
}


def target(name: str, call: Callable[..., Any], valid: dict[str, Any], keys: str) -> Target:
    """Return a target of keys: `x!` is a tensor that cannot be None, `x:kind` of another kind."""
    found = {}
    for word in keys.split():
        key, _, kind = word.replace("!", ":tensor").partition(":")
        is_tensor = isinstance(valid.get(key), Tensor)
        found[key] = kind.replace("|", " or ") or ("none or tensor" if is_tensor else KINDS[key])
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
RMS, DROPOUTS = "eps offset cast", "dropout output_dropout"
BLOCK = f"save kernel activation norm residual chunks {DROPOUTS}"
MODULE, BIASES = "save:name activation residual chunks", "gate_bias up_bias down_bias"
LOGITS, SMOOTH = "scale softcap chunks", "label_smoothing"
SHAPE, LINEAR_SIZES = {"normalized_shape": D}, {"in_features": D, "out_features": F}
LAYER_WEIGHTS, PACKED = {"weight": t(D), "bias": t(D)}, {"packed": t(F, D)}


def spec(call: Callable[..., Any], kind: str, **valid: Any) -> Callable[..., Any]:
    """Call with a NormSpec of the fields that are given."""
    return lambda **fields: call(**valid, norm=NormSpec(**{"kind": kind} | fields))


def record(**fields: Any) -> QuantisedWeight:
    """A quantised weight [F, D]."""
    given = {"shape": (F, D), "dtype": torch.float32, "device": DEVICE, "dense": len}
    return QuantisedWeight(**given | fields)


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


class Plain(nn.Module):
    """A block that `fuse` swaps."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, F), nn.Linear(F, D)

    def forward(self, x):
        return self.fc2(nn.functional.gelu(self.fc1(x)))


def fused(model: nn.Module) -> nn.Module:
    fusedckpt.fuse(model.to(DEVICE), verify=False)
    assert type(model).__name__.startswith("Fused")
    return model


X = t(N, D)
PROJECTIONS = {"x": X, "norm": NormSpec("rms", t(D)), "weights": [t(F, D)], "biases": [t(F)]}
BOTH = {"gate": t(F, D), "up": t(F, D)}
BY_NAME = {
    "linear_cross_entropy": (HEAD, f"x! weight! bias {LOGITS} reduction backend z_loss {SMOOTH}"),
    "token_logprobs": (HEAD, f"{LOGITS} temperature entropy"),
    "linear_act": (LINEAR, "x! weight! bias save kernel activation"),
    "rms_norm": (NORM, f"x! weight normalized_shape {RMS}"),
    "layer_norm": (LAYER, "x! weight bias normalized_shape eps:eps"),
    "add_rms_norm": (ADDED, f"x! residual! weight normalized_shape {RMS}"),
    "add_layer_norm": (LAYER | ADDED, "x! residual! weight bias normalized_shape eps:eps"),
    "mlp": (MLP, f"x! fc1_weight! fc2_weight! fc1_bias fc2_bias {BLOCK}"),
    "gated_mlp": (GATED, f"x! gate_weight! down_weight! {BIASES} up_weight {BLOCK}"),
    "norm_linear": (PROJECTIONS, "x! norm:norm weights biases"),
    "pack_gate_up": (BOTH, "gate:rows up:rows layout dim"),
    "unpack_gate_up": (PACKED, "packed:rows layout dim"),
    "repack_gate_up": (PACKED | {"layout": "gate_up"}, "packed:rows layout to dim"),
    "prefetch_recompute": ({"outputs": X}, "segments"),
    "paths": ({"device": DEVICE, "dtype": torch.float32}, "device:device dtype:dtype"),
}
ONE = {"x": X, "weights": [t(F, D)]}
ADAPTER = "weight! A! B! gate_bias scale dropout"
REGISTER = partial(fusedckpt.register_quantised, DTensor, len)
FUNCTIONS = [
    *(
        target(key, getattr(functional, key, None) or getattr(fusedckpt, key), *row)
        for key, row in BY_NAME.items()
    ),
    target("mlp", spec(functional.mlp, "rms", **MLP), {"weight": t(D)}, f"kind weight {RMS}"),
    target("norm_linear", spec(functional.norm_linear, "rms", **ONE), {}, f"kind {RMS}"),
    target("gated_mlp", spec(functional.gated_mlp, "layer", **GATED), LAYER_WEIGHTS, f"bias {RMS}"),
    target("mlp", mlp_of, {}, "shape dtype:dtype device:device dense is_sliceable"),
    target("gated_mlp", packed_lora, ADAPTED | {"gate_bias": t(2 * F)}, ADAPTER),
    target("register_quantised", REGISTER, {}, "is_sliceable"),
    target("saving", lambda level: fusedckpt.saving(level).__enter__(), {}, "level"),
]
MADE = "in_features:size hidden_features:size out_features:none|size bias:flag norm:none|module"
MADE = f"{MADE} save:name activation residual chunks device dtype"
CONSTRUCTORS = [
    target(kind.__name__, kind, valid, keys)
    for kind, valid, keys in (
        (fusedckpt.Linear, LINEAR_SIZES, "in_features out_features bias save:name activation"),
        (fusedckpt.Linear, LINEAR_SIZES, "device dtype"),
        (fusedckpt.RMSNorm, SHAPE, f"normalized_shape elementwise_affine {RMS} device dtype"),
        (fusedckpt.LayerNorm, SHAPE, "normalized_shape eps:eps elementwise_affine bias"),
        (fusedckpt.LayerNorm, SHAPE, "device dtype"),
        (fusedckpt.MLP, SIZES, MADE),
        (fusedckpt.GatedMLP, SIZES, MADE),
    )
]
PARTS, PART_KEYS = {"norm": nn.RMSNorm(D), "linears": nn.Linear(D, F)}, "norm:module linears"
CONSTRUCTORS += [
    target(
        "NormLinear", lambda **a: fusedckpt.NormLinear(*a.values()), PARTS, "norm:module linears"
    ),
    target("Sequential", in_order, {"args": nn.Linear(D, F)}, "args save:name chunks"),
    target("Sequential", lambda args: in_order(OrderedDict(first=args)), {}, "args"),
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
    ("Linear", linear, "save:name activation"),
    ("gated_mlp", lambda: fused(SwiGLU(D, F)), "save:name"),
    ("fuse", lambda: fused(Plain()), "save:name"),
    ("rms_norm", lambda: fusedckpt.RMSNorm(D), RMS),
    ("layer_norm", lambda: fusedckpt.LayerNorm(D), "eps:eps"),
    ("Sequential", lambda: fusedckpt.Sequential(linear(), nn.GELU()), "save:name"),
    # fused as a whole, and with a child that is called
    *(
        (kind.__name__, lambda k=kind, n=norm: k(D, F, norm=n), MODULE)
        for kind in (fusedckpt.MLP, fusedckpt.GatedMLP)
        for norm in (None, nn.Identity())
    ),
]
MODULES = [
    *(target(name, m.to(DEVICE), {"input": X}, "input!") for name, m in CALLED.items()),
    *(target(name, attribute(build, X), {}, keys) for name, build, keys in ATTRIBUTES),
]
