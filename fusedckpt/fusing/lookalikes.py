"""Modules that look like a norm, an MLP or experts, by their layers and by names in their code.

A lookalike that is not fused is named in the report, with a reason; any other module is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from torch import nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from fusedckpt.fusing.code_names import names_in_forward
from fusedckpt.fusing.recording import is_activation
from fusedckpt.layers.linear import Linear

# names in code and of attributes: torch's functions, and transformers' tables of activations
_ACTIVATION_NAMES = frozenset(
    ("celu", "elu", "gelu", "glu", "hardswish", "leaky_relu", "mish", "prelu", "quick_gelu")
    + ("relu", "relu6", "selu", "silu", "softplus", "swish", "swiglu", "hardsigmoid", "hardtanh")
    + ("logsigmoid", "sigmoid", "softsign", "xielu", "ACT2FN", "get_activation")
)
# of torch's activations, no functions of single elements
NOT_POINTWISE = (
    nn.MultiheadAttention,
    nn.Softmax,
    nn.Softmax2d,
    nn.LogSoftmax,
    nn.Softmin,
    nn.AdaptiveLogSoftmaxWithLoss,
)
# functions that a norm's code calls
_NORM_FUNCTIONS = frozenset(("rsqrt", "layer_norm", "rms_norm"))
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
# none of these is over an input's last dimension
OTHER_NORMS = _BATCH_NORMS + _INSTANCE_NORMS + (nn.GroupNorm,)
_NORMS = OTHER_NORMS + (nn.LayerNorm, nn.RMSNorm)
_TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d) + _TRANSPOSED_CONVOLUTIONS


def looks_like(module: nn.Module) -> str | None:
    """Return the kind that a module looks like, "norm", "mlp" or "linear"; None for others."""
    if _is_norm(module):
        return "norm"
    layers = [child for _, child in child_layers(module)]
    num_layers = sum(is_linear(layer) or multiplies_by_experts(layer) for layer in layers)
    # a lazy parameter has no dimensions, and a scale of channels one size alone
    parameters = [p for p in module._parameters.values() if p is not None and not is_lazy(p)]
    num_matrices = num_layers + sum(sum(n > 1 for n in p.shape) >= 2 for p in parameters)
    if not num_matrices or is_linear(module) or type(module).forward is nn.Module.forward:
        return None
    # in a convolutional net, activations follow convolutions, and a lone linear is the head
    has_convolution = any(isinstance(inner, _CONVOLUTIONS) for inner in module.modules())
    if num_layers < 2 and has_convolution:
        return None
    # a lone tanh caps logits
    names = _ACTIVATION_NAMES | ({"tanh"} if num_matrices > 1 else frozenset())
    if not _activates(module, names):
        return None
    return "linear" if num_matrices == 1 else "mlp"


def _is_norm(module: nn.Module) -> bool:
    if isinstance(module, _NORMS):
        return True
    parameters = [p for p in module._parameters.values() if p is not None]
    if module._modules or len(parameters) > 2 or type(module).forward is nn.Module.forward:
        return False
    name = type(module).__name__.lower()
    if "norm" in name and (len(parameters) > 0 or "layernorm" in name or "rmsnorm" in name):
        return True
    are_vectors = not any(is_lazy(p) or p.dim() > 1 for p in parameters)
    return are_vectors and not _NORM_FUNCTIONS.isdisjoint(names_in_forward(type(module)))


def _activates(module: nn.Module, activation_names: Set[str]) -> bool:
    """Whether a child, an attribute or the code of a module's forward is an activation."""
    if any(is_any_activation(child) for _, child in child_layers(module)):
        return True
    values = (getattr(value, "func", value) for value in vars(module).values())
    names = {getattr(value, "__name__", "") for value in values if callable(value)}
    names |= {name.rstrip("_") for name in names_in_forward(type(module))}
    return not activation_names.isdisjoint(names)


def is_any_activation(child: nn.Module) -> bool:
    """Whether a child is an activation, also one that is not fused."""
    if any(is_lazy(p) or p.dim() > 1 for p in child.parameters()) or isinstance(
        child, NOT_POINTWISE
    ):
        return False
    is_torch = type(child).__module__ == "torch.nn.modules.activation"
    return is_torch or isinstance(child, ScriptModule) or is_activation(child)


def acts_itself(module: nn.Module) -> bool:
    """Whether the functions of single elements in a forward are its own, not those of an MLP."""
    layers = (child for _, child in child_layers(module) if not is_linear(child))
    return all(not is_lazy(p) and p.dim() < 2 for layer in layers for p in layer.parameters())


def child_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children, those of lists and dicts in their place."""
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from ((f"{name}.{key}", inner) for key, inner in child.named_children())
        else:
            yield name, child


def has_experts(module: nn.Module) -> bool:
    """Whether a module of no library of torch's has a matrix for each of several experts."""
    weights = [p for p in module._parameters.values() if p is not None and not is_lazy(p)]
    is_torch = type(module).__module__.startswith("torch.") or isinstance(module, _CONVOLUTIONS)
    return not is_torch and any(p.dim() == 3 and min(p.shape) > 1 for p in weights)


def multiplies_by_experts(module: nn.Module) -> bool:
    """Whether it multiplies by experts' matrices, and has no activation, which is its parent's."""
    return has_experts(module) and not _activates(module, _ACTIVATION_NAMES)


def is_linear(child: nn.Module) -> bool:
    """Whether a layer is a linear, also one with adapters or with its weight as [in, out]."""
    if isinstance(child, nn.Linear):
        return getattr(child, "activation", "identity") == "identity" or type(child) is not Linear
    has_lazy = any(p is not None and is_lazy(p) for p in child._parameters.values())
    if isinstance(child, ScriptModule) or has_lazy:
        return False
    return is_transposed(child) or is_adapter(child)


def is_transposed(child: nn.Module) -> bool:
    """Whether a layer is a linear with its weight as [in, out], as transformers' Conv1D is."""
    weight = child._parameters.get("weight")
    bias = child._parameters.get("bias")
    return (
        not isinstance(child, nn.Linear)
        and len(child._parameters) == 2
        and not (child._modules or child._buffers)
        and weight is not None
        and bias is not None
        and weight.dim() == 2
        and getattr(child, "nf", None) == weight.shape[1] == bias.shape[0]
    )


def is_adapter(child: nn.Module) -> bool:
    """Whether a layer wraps a linear and adds to it, as LoRA does."""
    if isinstance(child, (nn.Linear, nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return False
    base = getattr(child, "base_layer", None)
    return isinstance(base, nn.Module) or (
        any(isinstance(inner, nn.Linear) for inner in child.children())
        and hasattr(child, "in_features")
        and hasattr(child, "out_features")
    )
