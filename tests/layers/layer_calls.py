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


LINEAR = {"x": t(N, D), "weight": t(F, D), "bias": t(F)}
NORM = {"x": t(N, D), "normalized_shape": D, "weight": t(D)}
MLP = {"x": t(N, D), "fc1_weight": t(F, D), "fc1_bias": t(F), "fc2_weight": t(D, F)}
MLP["fc2_bias"] = t(D)
GATED = {"x": t(N, D), "gate_weight": t(F, D), "up_weight": t(F, D), "down_weight": t(D, F)}
GATED |= {"gate_bias": t(F), "up_bias": t(F), "down_bias": t(D)}
ADAPTED = {"weight": t(2 * F, D), "A": t(2, D), "B": t(2 * F, 2)}
HEAD = {"x": t(N, D), "weight": t(F, D), "target": t(N, dtype=torch.int64), "bias": t(F)}
LOGITS = {"scale": "offset", "softcap": "none or eps", "chunks": "none or chunks"}
SIZES = {"in_features": D, "hidden_features": F}
RMS = {"eps": "none or eps", "offset": "offset", "cast": "name"}
FACTORY = {"device": "none or device", "dtype": "none or dtype"}
CALL = {"save": "none or name", "kernel": "none or name", "activation": "activation"}
DROPOUTS = ("dropout", "output_dropout")
BLOCK = CALL | {"norm": "none or norm", "residual": "flag", "chunks": "none or chunks"}
MODULE = {"save": "name", "activation": "activation", "residual": "flag"}
MODULE["chunks"] = "none or chunks"


def tensors(valid: dict[str, Any], *required: str) -> dict[str, str]:
    """Kinds of the tensors of a function, of which the named ones cannot be None."""
    return {
        key: "tensor" if key in required else "none or tensor"
        for key, value in valid.items()
        if isinstance(value, Tensor)
    }


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
    module = build()
    before = dict(module.__dict__)

    def call(**attributes: Any) -> Any:
        module.__dict__.update(before)
        for key, value in attributes.items():
            setattr(module, key, value)
        return module(*x)

    return call


def linear(**options: Any) -> fusedckpt.Linear:
    return fusedckpt.Linear(D, F, device=DEVICE, **options)


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
FUNCTIONS = [
    Target(
        "linear_cross_entropy",
        functional.linear_cross_entropy,
        HEAD,
        tensors(HEAD | {"target": None}, "x", "weight")
        | LOGITS
        | {"reduction": "name", "backend": "none or name", "z_loss": "offset"}
        | {"label_smoothing": "probability"},
    ),
    Target(
        "token_logprobs",
        functional.token_logprobs,
        HEAD,
        LOGITS | {"temperature": "eps", "entropy": "flag"},
    ),
    Target("linear_act", functional.linear_act, LINEAR, tensors(LINEAR, "x", "weight") | CALL),
    Target(
        "rms_norm",
        functional.rms_norm,
        NORM,
        tensors(NORM, "x") | RMS | {"normalized_shape": "shape"},
    ),
    Target(
        "layer_norm",
        functional.layer_norm,
        NORM | {"bias": t(D)},
        tensors(NORM | {"bias": t(D)}, "x") | {"normalized_shape": "shape", "eps": "eps"},
    ),
    Target(
        "add_rms_norm",
        functional.add_rms_norm,
        NORM | {"residual": X},
        tensors(NORM | {"residual": X}, "x", "residual") | RMS | {"normalized_shape": "shape"},
    ),
    Target(
        "add_layer_norm",
        functional.add_layer_norm,
        NORM | {"residual": X, "bias": t(D)},
        tensors(NORM | {"residual": X, "bias": t(D)}, "x", "residual")
        | {"normalized_shape": "shape", "eps": "eps"},
    ),
    Target("mlp", functional.mlp, MLP, tensors(MLP, "x", "fc1_weight", "fc2_weight") | BLOCK),
    Target(
        "gated_mlp",
        functional.gated_mlp,
        GATED,
        tensors({**GATED, "up_weight": None}, "x", "gate_weight", "down_weight")
        | BLOCK
        | {"up_weight": "none or tensor"},
    ),
    Target(
        "norm_linear",
        functional.norm_linear,
        {"x": X, "norm": NormSpec("rms", t(D)), "weights": [t(F, D)], "biases": [t(F)]},
        {"x": "tensor", "norm": "norm", "weights": "tensors", "biases": "none or tensors"},
    ),
    *(
        Target(
            "mlp" if call is functional.mlp else "norm_linear",
            spec(call, "rms", **valid),
            {"weight": t(D)},
            {"kind": "name", "weight": "none or tensor"} | RMS,
        )
        for call, valid in (
            (functional.mlp, MLP),
            (functional.norm_linear, {"x": X, "weights": [t(F, D)]}),
        )
    ),
    Target(
        "gated_mlp",
        spec(functional.gated_mlp, "layer", **GATED),
        {"weight": t(D), "bias": t(D)},
        {"bias": "none or tensor", "eps": "none or eps", "offset": "offset", "cast": "name"},
    ),
    Target(
        "pack_gate_up",
        fusedckpt.pack_gate_up,
        {"gate": t(F, D), "up": t(F, D)},
        {"gate": "rows", "up": "rows", "layout": "name", "dim": "dim"},
    ),
    Target(
        "unpack_gate_up",
        fusedckpt.unpack_gate_up,
        {"packed": t(F, D)},
        {"packed": "rows", "layout": "name", "dim": "dim"},
    ),
    Target(
        "repack_gate_up",
        fusedckpt.repack_gate_up,
        {"packed": t(F, D), "layout": "gate_up"},
        {"packed": "rows", "layout": "name", "to": "name", "dim": "dim"},
    ),
    *(
        Target(call.__name__, call, valid, dict.fromkeys(DROPOUTS, "probability"))
        for call, valid in ((functional.mlp, MLP), (functional.gated_mlp, GATED))
    ),
    Target("mlp", mlp_of, {}, {"shape": "sizes", "dtype": "dtype", "device": "device"}),
    Target("mlp", mlp_of, {}, {"dense": "callable", "is_sliceable": "flag"}),
    Target(
        "gated_mlp",
        packed_lora,
        {"gate_bias": t(2 * F)},
        dict.fromkeys(("weight", "A", "B"), "tensor")
        | {"gate_bias": "none or tensor", "scale": "offset", "dropout": "probability"},
    ),
    Target(
        "register_quantised",
        partial(fusedckpt.register_quantised, DTensor, len),
        {},
        {"is_sliceable": "flag"},
    ),
    Target(
        "prefetch_recompute", fusedckpt.prefetch_recompute, {"outputs": X}, {"segments": "segments"}
    ),
    Target("saving", lambda level: fusedckpt.saving(level).__enter__(), {}, {"level": "name"}),
    Target(
        "paths",
        fusedckpt.paths,
        {"device": DEVICE, "dtype": torch.float32},
        {"device": "device", "dtype": "dtype"},
    ),
]
CONSTRUCTORS = [
    Target(
        "Linear",
        fusedckpt.Linear,
        {"in_features": D, "out_features": F},
        {"in_features": "size", "out_features": "size", "bias": "flag", "save": "name"}
        | {"activation": "activation"}
        | FACTORY,
    ),
    Target(
        "RMSNorm",
        fusedckpt.RMSNorm,
        {"normalized_shape": D},
        {"normalized_shape": "shape", "elementwise_affine": "flag"} | RMS | FACTORY,
    ),
    Target(
        "LayerNorm",
        fusedckpt.LayerNorm,
        {"normalized_shape": D},
        {"normalized_shape": "shape", "eps": "eps", "elementwise_affine": "flag", "bias": "flag"}
        | FACTORY,
    ),
    *(
        Target(
            kind.__name__,
            kind,
            SIZES,
            dict.fromkeys(SIZES, "size")
            | {"out_features": "none or size", "bias": "flag", "norm": "none or module"}
            | MODULE
            | FACTORY,
        )
        for kind in (fusedckpt.MLP, fusedckpt.GatedMLP)
    ),
    Target(
        "NormLinear",
        lambda norm, linears: fusedckpt.NormLinear(norm, linears),
        {"norm": nn.RMSNorm(D), "linears": nn.Linear(D, F)},
        {"norm": "module", "linears": "module"},
    ),
    Target(
        "Sequential",
        lambda args, save="inputs", chunks=None: fusedckpt.Sequential(
            args, save=save, chunks=chunks
        ),
        {"args": nn.Linear(D, F)},
        {"args": "none or module", "save": "name", "chunks": "none or chunks"},
    ),
    Target(
        "Sequential",
        lambda args: fusedckpt.Sequential(OrderedDict(first=args)),
        {},
        {"args": "none or module"},
    ),
]
MODULES = [
    Target("Linear", attribute(linear, X), {}, {"save": "name", "activation": "activation"}),
    *(
        Target(name, module.to(DEVICE), {"input": X}, {"input": "tensor"})
        for name, module in (
            ("Linear", linear()),
            ("mlp", fusedckpt.MLP(D, F)),
            ("MLP", fusedckpt.MLP(D, F, norm=nn.RMSNorm(D))),
            ("gated_mlp", fusedckpt.GatedMLP(D, F)),
            ("layer_norm", fusedckpt.LayerNorm(D)),
            ("NormLinear", fusedckpt.NormLinear(nn.LayerNorm(D), nn.Linear(D, F))),
            ("linear_act", fusedckpt.Sequential(nn.Linear(D, F), nn.GELU())),
        )
    ),
    Target("gated_mlp", attribute(lambda: fused(SwiGLU(D, F)), X), {}, {"save": "name"}),
    Target("fuse", attribute(lambda: fused(Plain()), X), {}, {"save": "name"}),
    Target("rms_norm", attribute(lambda: fusedckpt.RMSNorm(D, device=DEVICE), X), {}, RMS),
    Target(
        "layer_norm",
        attribute(lambda: fusedckpt.LayerNorm(D, device=DEVICE), X),
        {},
        {"eps": "eps"},
    ),
    *(
        Target(
            kind.__name__,
            attribute(lambda kind=kind, norm=norm: kind(D, F, device=DEVICE, norm=norm), X),
            {},
            MODULE,
        )
        for kind in (fusedckpt.MLP, fusedckpt.GatedMLP)
        # fused as a whole, and with a child that is called
        for norm in (None, nn.Identity())
    ),
    Target(
        "Sequential",
        attribute(lambda: fusedckpt.Sequential(linear(), nn.GELU()), X),
        {},
        {"save": "name"},
    ),
]
