"""Modules that look like a norm, an MLP or experts, and the reasons why they are left.

They are told by their layers and by names in their code. A lookalike that is not fused is named in
the report, with a reason; any other module is not. Each function that returns a reason looks at one
part of a module as it is now: its storage, its parameters, a linear, a hook. It returns a
`NotFused`, or None where nothing is in the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from fusedckpt.autograd import dispatch
from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.autograd.private import is_fsdp_managed
from fusedckpt.blocks import validate
from fusedckpt.blocks.quantized import quantized, why_left
from fusedckpt.fusing import adapters
from fusedckpt.fusing.recording import is_activation
from fusedckpt.layers import sharded
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.layers.linear import Linear
from fusedckpt.state.code_names import names_in_forward

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
_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


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


def wraps_norm(module: nn.Module) -> bool:
    """Whether a module of other code calls one norm, and has no weights but a scale or a shift."""
    children = [*module.children()]
    is_own = not type(module).__module__.startswith(("torch.", "fusedckpt."))
    if not is_own or len(children) != 1 or not _is_norm(children[0]):
        return False
    vectors = [p for p in module._parameters.values() if p is not None]
    return bool(vectors) and not any(is_lazy(p) or p.dim() > 1 for p in vectors)


def _activates(module: nn.Module, activation_names: Set[str]) -> bool:
    """Whether a child, an attribute or the code of a module's forward is an activation."""
    if any(is_any_activation(child) for _, child in child_layers(module)):
        return True
    return not activation_names.isdisjoint(names_called(module))


def names_called(module: nn.Module) -> set[str]:
    """Return the names of functions that are attributes of a module, or named in its forward."""
    values = (getattr(value, "func", value) for value in vars(module).values())
    names = {getattr(value, "__name__", "") for value in values if callable(value)}
    return names | {name.rstrip("_") for name in names_in_forward(type(module))}


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


def of_call(module: nn.Module, note: tuple[str, Any]) -> NotFused:
    """Return why a call of a swapped module ran the original forward, as the module is now.

    note: the key and the subject that the call left.
    """
    reason = NotFused(*note)
    if reason.key not in ("weight", "child", "hook"):
        return reason
    part: Any = module
    for name in reason.about.split("."):
        part = getattr(part, name, None)
    if part is None:
        return reason
    look = of_weight if reason.key == "weight" else of_linear
    return look(reason.about, part) or reason


def of_linear(name: str, child: Any) -> NotFused | None:
    """Return why a fused forward does not compute a linear or adapter, by its class and weights."""
    if adapters.is_lora(child):
        problem = adapters.in_the_way(child)
        below = of_linear(f"{name}.base_layer", adapters.base_of(child))
        return below if problem is None else NotFused("adapter", f"{name} is {problem}")
    kind = type(child)
    if is_adapter(child):
        return NotFused("adapter", f"{name} is a {kind.__module__}.{kind.__name__}")
    if not isinstance(child, nn.Linear) and not is_transposed(child):
        return None
    if "parametrizations" in child._modules:
        return NotFused("parametrized", name)
    weights = {n: weight for n, weight in child._parameters.items() if weight is not None}
    obstacles = (of_weight(f"{name}.{n}", weight) for n, weight in weights.items())
    if (obstacle := next(filter(None, obstacles), None)) is not None:
        return obstacle
    has_forward = isinstance(child, nn.Linear) and kind.forward is not nn.Linear.forward
    if has_forward and not adapters.is_dequantizing(child):
        return NotFused("linear", (name, kind.__name__))
    return None


def of_hooks(name: str, child: nn.Module) -> NotFused | None:
    """Return the reason that a child has to be called, None if it has not."""
    return NotFused("hook", name) if has_hooks(child) else None


def of_weight(name: str, weight: Any) -> NotFused | None:
    """Return why a fused forward cannot take a parameter, None if it can."""
    if not isinstance(weight, Tensor) or dispatch.are_plain(weight):
        return None
    if quantized(weight) is not None:
        return None
    if sharded.is_sharded(weight):
        return NotFused("sharded", name)
    if (problem := why_left(weight)) is not None:
        return NotFused("quantized", f"{name} {problem}")
    return NotFused("weight", f"{name} is a {type(weight).__name__} of layout {weight.layout}")


def of_parameters(module: nn.Module) -> NotFused | None:
    """Return why no kernel takes a module's own parameters, None if one does."""
    parameters = dict(module.named_parameters(recurse=False))
    if sharded.are_replicated(parameters.values()):
        return None
    weights = {name: weight for name, weight in parameters.items() if quantized(weight) is None}
    obstacles = (of_weight(name, weight) for name, weight in weights.items())
    if (obstacle := next(filter(None, obstacles), None)) is not None:
        return obstacle
    try:
        is_taken = validate.check_dense(type(module).__name__, weights)
    except (TypeError, ValueError) as error:
        return NotFused("dense", str(error))
    return None if is_taken else NotFused("weight", "its parameters are of a class")


def of_storage(module: nn.Module) -> NotFused | None:
    """Return why a module's parameters, and its children's, are not to be looked at.

    Those of FSDP are views of memory that is freed between two forwards: to read them can end the
    process.
    """
    layers = [module, *(layer for _, layer in child_layers(module))]
    if any(isinstance(layer, ScriptModule) for layer in layers):
        return NotFused("scripted")
    if any(map(is_fsdp_managed, layers)):
        return NotFused("fsdp")
    parameters = [p for layer in layers for p in layer._parameters.values() if p is not None]
    if any(map(is_lazy, parameters)):
        return NotFused("lazy")
    if any(hasattr(parameter, "ds_id") and parameter.numel() == 0 for parameter in parameters):
        return NotFused("deepspeed")
    return NotFused("freed") if any(map(_is_freed, parameters)) else None


def _is_freed(x: Tensor) -> bool:
    if x.is_meta or not dispatch.are_plain(x) or x.numel() == 0:
        return False
    return x.untyped_storage().nbytes() == 0


def of_parts(module: nn.Module) -> NotFused | None:
    """Return why a module's parameters or linears are not to be taken, None if they are."""
    if (obstacle := of_storage(module) or of_parameters(module)) is not None:
        return obstacle
    linears = {name: child for name, child in child_layers(module) if is_linear(child)}
    obstacles = (of_linear(n, child) or of_hooks(n, child) for n, child in linears.items())
    if (obstacle := next(filter(None, obstacles), None)) is not None:
        return obstacle
    weights = [p for layer in linears.values() for p in layer._parameters.values() if p is not None]
    dtypes = sorted({str(weight.dtype) for weight in weights})
    return NotFused("dtypes", ", ".join(dtypes)) if len(dtypes) > 1 else None


def of_module(module: nn.Module, kind: str, obstacle: NotFused | None) -> NotFused:
    """Return why a module that looks like some kind was left.

    obstacle: the matcher's reason, if it has one.
    """
    if (reason := of_parts(module)) is not None:
        return reason
    if isinstance(module, OTHER_NORMS):
        return NotFused("other norm")
    if obstacle is not None:
        return obstacle
    if kind == "norm":
        return NotFused("other norm")
    layers = [child for _, child in child_layers(module) if multiplies_by_experts(child)]
    held_by = [module, *layers] if has_experts(module) else layers
    weights = (p for layer in held_by for p in layer._parameters.values() if p is not None)
    counts = Counter(len(weight) for weight in weights if weight.dim() == 3)
    # an expert has at least two matrices
    is_mixture = any(count > 1 for count in counts.values())
    return NotFused("experts" if is_mixture else "beside")


def of_swap(module: nn.Module, attributes: dict[str, Any], layers: list[Any]) -> NotFused | None:
    """Return why a module with these attributes and layers cannot be swapped, None if it can."""
    if "forward" in module.__dict__:
        return NotFused("forward")
    name = next((attribute for attribute in attributes if hasattr(module, attribute)), None)
    if name is not None:
        return NotFused("attribute", name)
    return next(filter(None, map(of_parameters, [module, *layers])), None)


def linears_apart(parent: nn.Sequential) -> Iterator[tuple[str, NotFused]]:
    """Yield a Sequential's linears that an activation follows, and why each is apart from it."""
    skipped = (nn.Identity, *_DROPOUTS)
    layers = [pair for pair in parent.named_children() if not isinstance(pair[1], skipped)]
    for (name, linear), (_, act) in pairwise(layers):
        if is_linear(linear) and (is_any_activation(act) or isinstance(act, NOT_POINTWISE)):
            obstacle = of_linear(name, linear) or of_hooks(name, linear) or of_hooks(str(act), act)
            yield name, obstacle or NotFused("apart", str(act))
