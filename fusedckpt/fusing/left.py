"""Which modules hold a norm, or an activation beside linears, and why such a one was left.

Found without running them: by their children, parameters and the names in their code.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from types import CodeType

import torch
from torch import nn
from torch.jit import ScriptModule
from torch.nn import functional
from torch.nn.modules import activation as activations
from torch.nn.parameter import is_lazy

from fusedckpt.fusing import reasons
from fusedckpt.fusing.layouts import NONE, activation_by, is_activation
from fusedckpt.fusing.reasons import children_of, is_transposed
from fusedckpt.fusing.recording import record
from fusedckpt.fusing.replica import takes_one
from fusedckpt.layers.linear import Linear

__all__ = ["activates", "apart", "holds", "reason_of"]

_MODULES = tuple(getattr(activations, name) for name in activations.__all__)
# of these, the modules that are no functions of single elements
_OTHERS = (
    *(nn.MultiheadAttention, nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin),
    nn.AdaptiveLogSoftmaxWithLoss,
)
_NAMES = frozenset(
    ("celu", "elu", "gelu", "glu", "hardswish", "leaky_relu", "mish", "prelu", "quick_gelu")
    + ("relu", "relu6", "selu", "silu", "softplus", "swish", "swiglu", "hardsigmoid", "hardtanh")
    + ("logsigmoid", "sigmoid", "softsign", "tanh", "tanhshrink", "xielu")
)
# in code: in place, and transformers' tables of activations
_CALLED = _NAMES | {f"{name}_" for name in _NAMES} | {"ACT2FN", "get_activation"}
_FUNCTIONS = tuple(
    getattr(library, name)
    for library in (functional, torch)
    for name in _NAMES
    if hasattr(library, name)
)
# these cap logits, after a linear, in a model
_CAPS = ("softcap", "soft_cap")
_NORMS = ("layernorm", "rmsnorm", "layer_norm", "rms_norm")
# functions that a norm's code calls
_NORMALISES = frozenset(("rsqrt", "layer_norm", "rms_norm"))
_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_BATCH_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
# layers that do nothing to a block, or drop in it
_BETWEEN = (
    *(nn.Dropout, nn.Identity, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def holds(module: nn.Module) -> str | None:
    """Return the kind that a module looks like, "norm", "mlp" or "linear"; None for others."""
    if _is_norm(module):
        return "norm"
    linears = _linears(module)
    count = len(linears) + len(_own(module))
    if not count or _is_linear(module) or type(module).forward is nn.Module.forward:
        return None
    # in a convolutional net, activations follow convolutions, and a lone linear is the head
    convolutions = any(isinstance(inner, _CONVOLUTIONS) for inner in module.modules())
    if not _has_activation(module) or (convolutions and len(linears) < 2):
        return None
    return "linear" if count == 1 else "mlp"


def activates(module: nn.Module) -> bool:
    """Whether an activation in a module's forward is its own, and not a child's with weights."""
    inside = (one for one in _beside(module).values() for one in one.parameters())
    return _has_activation(module) or all(not is_lazy(p) and p.dim() < 2 for p in inside)


def of_parts(module: nn.Module) -> str | None:
    """Say why a module's parameters or linears are not to be taken, None if they are."""
    own = reasons.of_storage(module) or reasons.of_layer(module)
    return own or _of_linears(_linears(module))


def reason_of(module: nn.Module, found: str | None) -> str:
    """Say why a module that `holds` something was left; `found` is a matcher's reason."""
    linears = _linears(module)
    if (reason := of_parts(module)) is not None:
        return reason
    if _is_norm(module):
        return found or _of_norm(module)
    own = _own(module)
    if any(module.get_parameter(name).dim() == 3 for name in own):
        return found or "its weights are 3-dimensional: experts have gate_up_proj and down_proj"
    beside = _beside(module)
    if beside and (linears or own):
        return _written_inside(beside)
    if found is not None:
        return _of_activation(module, found.endswith(NONE)) or found
    if not takes_one(module):
        return "its forward takes more than one tensor"
    # too many, of any kind, or empty ones
    parts = [*linears, *(name for name, one in module._parameters.items() if one is not None)]
    return f"its layers and parameters do not form an MLP: {', '.join(parts)}"


def _written_inside(beside: dict[str, nn.Module]) -> str:
    """Say that a layer calls linears and an activation itself, beside other layers."""
    return (
        f"its linears and activation are written inside this layer's forward (beside "
        f"{', '.join(beside)}): fuse takes them from a module of their own, or where an activation "
        "module reads a linear after a fused norm"
    )


def _of_linears(linears: dict[str, nn.Module]) -> str | None:
    each = (reasons.of_linear(name, child) for name, child in linears.items())
    weights = [p for one in linears.values() for p in one._parameters.values() if p is not None]
    dtypes = sorted({str(weight.dtype) for weight in weights})
    several = f"its weights have several dtypes: {', '.join(dtypes)}" if len(dtypes) > 1 else None
    return next((reason for reason in each if reason is not None), several)


def _of_norm(module: nn.Module) -> str:
    if isinstance(module, (*_BATCH_NORMS, nn.GroupNorm)):
        return "it does not normalise over the last dimensions, as LayerNorm and RMSNorm do"
    if not takes_one(module):
        return "its forward takes more than one tensor"
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.dim() > 1:
            return f"{name} has {parameter.dim()} dimensions, not one"
    return f"{type(module).__name__} computes no known norm"


def _of_activation(module: nn.Module, is_unknown: bool) -> str | None:
    """Name the activation that has tensors or is unknown: it says more than its ops."""
    for name, act in module.named_children():
        has_tensors = any(True for _ in (*act.parameters(), *act.buffers()))
        if not (is_unknown or has_tensors) or not _is_activation(act):
            continue
        if activation_by(record(act, (2, 3, 8))) in (None, "identity"):
            return f"{name}: {act} {NONE}"
    return None


def apart(parent: nn.Sequential) -> Iterator[tuple[str, str]]:
    """Yield a Sequential's linears that an activation follows, and why each is apart from it."""
    layers = [pair for pair in parent.named_children() if not isinstance(pair[1], nn.Identity)]
    for index, (name, linear) in enumerate(layers):
        between = index + 1
        while between < len(layers) and isinstance(layers[between][1], _BETWEEN):
            between += 1
        if not _is_linear(linear) or between == len(layers):
            continue
        act, follower = layers[between]
        if _is_activation(follower) or isinstance(follower, _MODULES):
            reason = reasons.of_linear(name, linear) or reasons.of_hooks(act, follower)
            if reason is None and between > index + 1:
                reason = f"there is a dropout between it and {act}"
            yield name, reason or f"{follower} {NONE}"


def _is_norm(module: nn.Module) -> bool:
    if isinstance(module, (*_BATCH_NORMS, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)):
        return True
    kind = type(module)
    own = [p for p in module._parameters.values() if p is not None]
    if module._modules or len(own) > 2 or kind.forward is nn.Module.forward:
        return False
    name = kind.__name__.lower()
    named = any(norm in name for norm in _NORMS) or ("norm" in name and len(own) > 0)
    are_vectors = not any(is_lazy(p) or p.dim() > 1 for p in own)
    return named or (are_vectors and bool(called_by(kind) & _NORMALISES))


def _linears(module: nn.Module) -> dict[str, nn.Module]:
    return {name: child for name, child in children_of(module) if _is_linear(child)}


def _own(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters that can be weights of linears."""
    # a lazy parameter has no dimensions
    own = {k: p for k, p in module._parameters.items() if p is not None and not is_lazy(p)}
    # a scale of channels has one size alone
    return [name for name, parameter in own.items() if sum(n > 1 for n in parameter.shape) >= 2]


def _is_linear(child: nn.Module) -> bool:
    if isinstance(child, nn.Linear):
        return getattr(child, "activation", "identity") == "identity" or type(child) is not Linear
    if isinstance(child, ScriptModule):
        return False
    lazy = any(p is not None and is_lazy(p) for p in child._parameters.values())
    return not lazy and (is_transposed(child) or reasons.is_adapter(child))


def _beside(module: nn.Module) -> dict[str, nn.Module]:
    """Return the children that are no linears, activations or dropouts."""
    return {
        name: child
        for name, child in children_of(module)
        if not (_is_linear(child) or _is_activation(child) or isinstance(child, _BETWEEN))
        and (child._parameters or child._buffers or child._modules)
    }


def _has_activation(module: nn.Module) -> bool:
    """Whether a child, an attribute or the code of a module's forward is an activation."""
    if any(_is_activation(child) for _, child in children_of(module)):
        return True
    own = (getattr(value, "func", value) for value in vars(module).values())
    if any(value is function for value in own for function in _FUNCTIONS):
        return True
    called = called_by(type(module))
    return bool(called & _CALLED) and not (
        called & _CALLED == {"tanh"} and any(cap in name for cap in _CAPS for name in called)
    )


def _is_activation(child: nn.Module) -> bool:
    """Whether a child is an activation: by its class, or by the function that it computes."""
    if isinstance(child, _MODULES):
        return not isinstance(child, _OTHERS)
    # one with weights is no function of single elements
    if any(is_lazy(p) or p.dim() > 1 for p in child.parameters()):
        return False
    if isinstance(child, ScriptModule):
        return any(known in child.original_name.lower() for known in _NAMES)
    kind = type(child)
    if any(known in kind.__name__.lower() for known in _NAMES):
        return True
    return not kind.__module__.startswith("torch.") and is_activation(child)


@cache
def called_by(kind: type, method: str = "forward") -> frozenset[str]:
    """Return the names in a method's code, and in that of the methods it calls."""
    # FSDP's class of a module is made in torch, the forward is not
    by = next((base for base in kind.__mro__ if method in vars(base)), kind)
    if by.__module__.startswith("torch."):
        return frozenset()
    seen: set[str] = set()
    called: set[str] = set()
    names = {method}
    while names:
        seen |= names
        # of all classes: one calls the other's by super()
        methods = [vars(base).get(name) for base in kind.__mro__ for name in names]
        codes = [inspect.unwrap(method) for method in methods if callable(method)]
        found = {name for one in codes for name in _names(getattr(one, "__code__", None))}
        called |= found
        names = {n for n in found - seen if n not in vars(nn.Module)}
    return frozenset(called)


def _names(code: CodeType | None) -> Iterator[str]:
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _names(constant)
