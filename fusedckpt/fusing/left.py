"""Which modules hold a norm, or an activation beside linears, and why such a one was left.

Found without running them: by their children, parameters and the names in their code.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from types import CodeType

from torch import nn
from torch.jit import ScriptModule
from torch.nn import functional
from torch.nn.modules import activation as activations
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from fusedckpt.fusing import reasons
from fusedckpt.fusing.layouts import NONE, activation_by
from fusedckpt.fusing.reasons import children_of, is_transposed
from fusedckpt.fusing.recording import record
from fusedckpt.fusing.replica import takes_one
from fusedckpt.layers.linear import Linear

__all__ = ["apart", "holds", "reason_of"]

_MODULES = tuple(getattr(activations, name) for name in activations.__all__)
# of these, what is no function of single elements
_OTHERS = (
    *(nn.MultiheadAttention, nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin),
    nn.AdaptiveLogSoftmaxWithLoss,
)
_NAMES = frozenset(
    ("celu", "elu", "gelu", "glu", "hardswish", "leaky_relu", "mish", "prelu", "quick_gelu")
    + ("relu", "relu6", "selu", "silu", "softplus", "swish", "swiglu")
)
_FUNCTIONS = tuple(getattr(functional, name) for name in _NAMES if hasattr(functional, name))
_NORMS = ("layernorm", "rmsnorm", "layer_norm", "rms_norm")
# what does nothing to a block, or drops in it
_BETWEEN = (nn.Dropout, nn.Identity, nn.modules.dropout._DropoutNd)


def holds(module: nn.Module) -> str | None:
    """Return "norm", "mlp" or "linear" for what a module looks like, None for none of these."""
    if _is_norm(module):
        return "norm"
    linears = _linears(module)
    count = len(linears) + len(_own(module))
    if not count or _is_linear(module) or type(module).forward is nn.Module.forward:
        return None
    # of a convolutional net, whose activations follow convolutions, a lone linear is the head
    convolutions = any(isinstance(inner, _ConvNd) for inner in module.modules())
    if not _has_activation(module) or (convolutions and len(linears) < 2):
        return None
    return "linear" if count == 1 else "mlp"


def reason_of(module: nn.Module, found: str | None) -> str:
    """Say why a module that `holds` something was left; `found` is what a matcher said."""
    linears = _linears(module)
    of_parts = reasons.of_storage(module) or reasons.of_layer(module) or _of_linears(linears)
    if of_parts is not None:
        return of_parts
    if _is_norm(module):
        return found or _of_norm(module)
    beside = ", ".join(_beside(module))
    if beside:
        return f"its linears and activation are called together with {beside}, not alone"
    if found is not None:
        return (_of_activation(module) if found.endswith(NONE) else None) or found
    if any(module.get_parameter(name).dim() == 3 for name in _own(module)):
        return "its weights are 3-dimensional: a mixture of experts is not fused"
    if not takes_one(module):
        return "its forward takes more than one tensor"
    # too many, of any kind, or empty ones
    parts = [*linears, *(name for name, one in module._parameters.items() if one is not None)]
    return f"its layers and parameters do not form an MLP: {', '.join(parts)}"


def _of_linears(linears: dict[str, nn.Module]) -> str | None:
    each = (reasons.of_linear(name, child) for name, child in linears.items())
    weights = [p for one in linears.values() for p in one._parameters.values() if p is not None]
    dtypes = sorted({str(weight.dtype) for weight in weights})
    several = f"its weights have several dtypes: {', '.join(dtypes)}" if len(dtypes) > 1 else None
    return next((reason for reason in each if reason is not None), several)


def _of_norm(module: nn.Module) -> str:
    if isinstance(module, (_NormBase, nn.GroupNorm)):
        return "it does not normalise over the last dimensions, as LayerNorm and RMSNorm do"
    return f"{type(module).__name__} computes no known norm"


def _of_activation(module: nn.Module) -> str | None:
    """Name the activation that is unknown: it says more than the ops that it computes."""
    acts = [(name, act) for name, act in module.named_children() if _is_activation(act)]
    known = (None, "identity")
    unknown = (pair for pair in acts if activation_by(record(pair[1], (2, 3, 8))) in known)
    return next((f"{name}: {act} {NONE}" for name, act in unknown), None)


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
    if isinstance(module, (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)):
        return True
    name = type(module).__name__.lower()
    own = sum(p is not None for p in module._parameters.values())
    named = any(norm in name for norm in _NORMS) or ("norm" in name and own > 0)
    return named and own <= 2 and not module._modules


def _linears(module: nn.Module) -> dict[str, nn.Module]:
    return {name: child for name, child in children_of(module) if _is_linear(child)}


def _own(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters that can be weights of linears."""
    # what was never initialised has no dimensions
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


def _has_nothing(module: nn.Module) -> bool:
    """Whether a module has neither parameters, buffers nor children, as activations have none."""
    return not (module._parameters or module._buffers or module._modules)


def _beside(module: nn.Module) -> list[str]:
    return [
        name
        for name, child in children_of(module)
        if not (_is_linear(child) or _has_nothing(child) or isinstance(child, _BETWEEN))
    ]


def _has_activation(module: nn.Module) -> bool:
    """Whether a child, an attribute or the code of a module's forward is an activation."""
    if any(_is_activation(child) for _, child in children_of(module)):
        return True
    own = (getattr(value, "func", value) for value in vars(module).values())
    if any(value is function for value in own for function in _FUNCTIONS):
        return True
    kind = type(module)
    # FSDP's class of a module is made in torch, the forward is not
    by = next((base for base in kind.__mro__ if "forward" in vars(base)), kind)
    return not by.__module__.startswith("torch.") and _calls(kind)


def _is_activation(child: nn.Module) -> bool:
    if isinstance(child, _MODULES):
        return not isinstance(child, _OTHERS)
    kind = child.original_name if isinstance(child, ScriptModule) else type(child).__name__
    return _has_nothing(child) and any(known in kind.lower() for known in _NAMES)


@cache
def _calls(kind: type[nn.Module]) -> bool:
    """Whether a forward's code, or that of the methods it calls, names an activation."""
    seen: set[str] = set()
    names = {"forward"}
    while names:
        seen |= names
        # of all classes: one calls the other's by super()
        methods = [vars(base).get(name) for base in kind.__mro__ for name in names]
        codes = [inspect.unwrap(method) for method in methods if callable(method)]
        found = {name for one in codes for name in _names(getattr(one, "__code__", None))}
        if found & _NAMES:
            return True
        names = {n for n in found - seen if n not in vars(nn.Module)}
    return False


def _names(code: CodeType | None) -> Iterator[str]:
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _names(constant)
