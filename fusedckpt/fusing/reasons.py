"""Recognise modules that look like a norm or an MLP, and say why one was left or not run fused."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Set
from functools import cache
from itertools import pairwise
from types import CodeType
from typing import Any

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from fusedckpt.autograd import dispatch
from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.autograd.private_sharding import is_fsdp_managed
from fusedckpt.blocks import validate
from fusedckpt.blocks.quantised import quantised, why_left
from fusedckpt.fusing import adapters
from fusedckpt.fusing.recorded_block import is_activation
from fusedckpt.layers import sharded
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.layers.linear import Linear

# in code and as attributes: torch's functions, and transformers' tables of activations
_ACTIVATIONS = frozenset(
    ("celu", "elu", "gelu", "glu", "hardswish", "leaky_relu", "mish", "prelu", "quick_gelu")
    + ("relu", "relu6", "selu", "silu", "softplus", "swish", "swiglu", "hardsigmoid", "hardtanh")
    + ("logsigmoid", "sigmoid", "softsign", "xielu", "ACT2FN", "get_activation")
)
# of torch's activations, no functions of single elements
_OTHERS = (
    *(nn.MultiheadAttention, nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin),
    nn.AdaptiveLogSoftmaxWithLoss,
)
# functions that a norm's code calls
_NORMALISES = frozenset(("rsqrt", "layer_norm", "rms_norm"))
_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    *(nn.GroupNorm, nn.LayerNorm, nn.RMSNorm),
)
_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def of_call(module: nn.Module, reason: tuple[str, Any]) -> NotFused:
    """Return why a call of a swapped module ran the original forward, as the module is now."""
    noted = NotFused(*reason)
    if noted.key not in ("weight", "child", "hook"):
        return noted
    part: Any = module
    for name in noted.about.split("."):
        part = getattr(part, name, None)
    if part is None:
        return noted
    look = of_weight if noted.key == "weight" else of_class
    return look(noted.about, part) or noted


def of_class(name: str, child: Any) -> NotFused | None:
    """Say why a fused forward does not compute a linear or adapter, by its class and weights."""
    if adapters.is_lora(child):
        problem = adapters.in_the_way(child)
        below = of_class(f"{name}.base_layer", adapters.base_of(child))
        return below if problem is None else NotFused("adapter", f"{name} is {problem}")
    kind = type(child)
    if _is_adapter(child):
        return NotFused("adapter", f"{name} is a {kind.__module__}.{kind.__name__}")
    if not isinstance(child, nn.Linear) and not is_transposed(child):
        return None
    if "parametrizations" in child._modules:
        return NotFused("parametrized", name)
    weights = {n: weight for n, weight in child._parameters.items() if weight is not None}
    obstacles = filter(None, (of_weight(f"{name}.{n}", weight) for n, weight in weights.items()))
    has_forward = isinstance(child, nn.Linear) and kind.forward is not nn.Linear.forward
    is_other = has_forward and not adapters.is_dequantising(child)
    return next(obstacles, NotFused("linear", (name, kind.__name__)) if is_other else None)


def of_hooks(name: str, child: nn.Module) -> NotFused | None:
    """Say that a child has to be called, None if it has not."""
    return NotFused("hook", name) if has_hooks(child) else None


def of_weight(name: str, weight: Any) -> NotFused | None:
    """Say why a fused forward cannot take a parameter, None if it can."""
    if not isinstance(weight, Tensor) or dispatch.are_plain(weight):
        return None
    if quantised(weight) is not None:
        return None
    if sharded.is_sharded(weight):
        return NotFused("sharded", name)
    if (problem := why_left(weight)) is not None:
        return NotFused("quantised", f"{name} {problem}")
    return NotFused("weight", f"{name} is a {type(weight).__name__} of layout {weight.layout}")


def of_layer(module: nn.Module) -> NotFused | None:
    """Say why no kernel takes a module's own parameters, None if one does."""
    parameters = dict(module.named_parameters(recurse=False))
    if sharded.are_replicated(parameters.values()):
        return None
    weights = {name: weight for name, weight in parameters.items() if quantised(weight) is None}
    obstacles = (of_weight(name, weight) for name, weight in weights.items())
    if (obstacle := next(filter(None, obstacles), None)) is not None:
        return obstacle
    try:
        is_taken = validate.check_dense(type(module).__name__, weights)
    except (TypeError, ValueError) as error:
        return NotFused("dense", str(error))
    return None if is_taken else NotFused("weight", "its parameters are of a class")


def of_storage(module: nn.Module) -> NotFused | None:
    """Say why a module's parameters, and its children's, are not to be looked at.

    Those of FSDP are views of memory that is freed between two forwards: to read them can end the
    process.
    """
    layers = [module, *(layer for _, layer in _children(module))]
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
    """Say why a module's parameters or linears are not to be taken, None if they are."""
    if (obstacle := of_storage(module) or of_layer(module)) is not None:
        return obstacle
    linears = {name: child for name, child in _children(module) if _is_linear(child)}
    obstacles = (of_class(n, child) or of_hooks(n, child) for n, child in linears.items())
    if (obstacle := next(filter(None, obstacles), None)) is not None:
        return obstacle
    weights = [p for layer in linears.values() for p in layer._parameters.values() if p is not None]
    dtypes = sorted({str(weight.dtype) for weight in weights})
    return NotFused("dtypes", ", ".join(dtypes)) if len(dtypes) > 1 else None


def of_module(module: nn.Module, kind: str, reason: NotFused | None) -> NotFused:
    """Say why a module that looks like some kind was left; `reason` is the matcher's."""
    if (obstacle := of_parts(module) or reason) is not None:
        return obstacle
    if kind == "norm":
        return NotFused("other norm")
    is_mixture = _has_experts(module) or any(_is_products(child) for _, child in _children(module))
    return NotFused("experts" if is_mixture else "beside")


def looks_like(module: nn.Module) -> str | None:
    """Return the kind that a module looks like, "norm", "mlp" or "linear"; None for others."""
    if _is_norm(module):
        return "norm"
    linears = sum(_is_linear(child) or _is_products(child) for _, child in _children(module))
    # a lazy parameter has no dimensions, and a scale of channels one size alone
    parameters = [p for p in module._parameters.values() if p is not None and not is_lazy(p)]
    count = linears + sum(sum(n > 1 for n in p.shape) >= 2 for p in parameters)
    if not count or _is_linear(module) or type(module).forward is nn.Module.forward:
        return None
    # in a convolutional net, activations follow convolutions, and a lone linear is the head
    is_head = linears < 2 and any(isinstance(inner, _CONVOLUTIONS) for inner in module.modules())
    # a lone tanh caps logits
    if is_head or not _activates(module, _ACTIVATIONS | ({"tanh"} if count > 1 else frozenset())):
        return None
    return "linear" if count == 1 else "mlp"


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
    return are_vectors and not _NORMALISES.isdisjoint(called_by(type(module)))


def _activates(module: nn.Module, known: Set[str]) -> bool:
    """Whether a child, an attribute or the code of a module's forward is an activation."""
    if any(acts(child) for _, child in _children(module)):
        return True
    values = (getattr(value, "func", value) for value in vars(module).values())
    names = {getattr(value, "__name__", "") for value in values if callable(value)}
    names |= {name.rstrip("_") for name in called_by(type(module))}
    return not known.isdisjoint(names)


def acts(child: nn.Module) -> bool:
    """Whether a child is an activation, also one that is not fused."""
    if any(is_lazy(p) or p.dim() > 1 for p in child.parameters()) or isinstance(child, _OTHERS):
        return False
    is_torch = type(child).__module__ == "torch.nn.modules.activation"
    return is_torch or isinstance(child, ScriptModule) or is_activation(child)


def acts_beside(module: nn.Module) -> bool:
    """Whether the functions of single elements in a forward are its own, not those of an MLP."""
    inside = (child for _, child in _children(module) if not _is_linear(child))
    return all(not is_lazy(p) and p.dim() < 2 for child in inside for p in child.parameters())


def apart(parent: nn.Sequential) -> Iterator[tuple[str, NotFused]]:
    """Yield a Sequential's linears that an activation follows, and why each is apart from it."""
    skipped = (nn.Identity, *_DROPOUTS)
    layers = [pair for pair in parent.named_children() if not isinstance(pair[1], skipped)]
    for (name, linear), (_, act) in pairwise(layers):
        if _is_linear(linear) and (acts(act) or isinstance(act, _OTHERS)):
            obstacle = of_class(name, linear) or of_hooks(name, linear) or of_hooks(str(act), act)
            yield name, obstacle or NotFused("apart", str(act))


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children, those of lists and dicts in their place."""
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from ((f"{name}.{key}", inner) for key, inner in child.named_children())
        else:
            yield name, child


def _has_experts(module: nn.Module) -> bool:
    """Whether a module of no library of torch's has a matrix for each of several experts."""
    weights = [p for p in module._parameters.values() if p is not None and not is_lazy(p)]
    is_own = not type(module).__module__.startswith("torch.")
    return is_own and any(p.dim() == 3 and min(p.shape) > 1 for p in weights)


def _is_products(module: nn.Module) -> bool:
    """Whether it multiplies by experts' matrices, and has no activation, which is its parent's."""
    return _has_experts(module) and not _activates(module, _ACTIVATIONS)


def _is_linear(child: nn.Module) -> bool:
    if isinstance(child, nn.Linear):
        return getattr(child, "activation", "identity") == "identity" or type(child) is not Linear
    is_lazy_one = any(p is not None and is_lazy(p) for p in child._parameters.values())
    if isinstance(child, ScriptModule) or is_lazy_one:
        return False
    return is_transposed(child) or _is_adapter(child)


def is_transposed(child: nn.Module) -> bool:
    """Whether a layer is a linear with its weight as [in, out], as transformers' Conv1D is."""
    weight, bias = child._parameters.get("weight"), child._parameters.get("bias")
    return (
        not isinstance(child, nn.Linear)
        and len(child._parameters) == 2
        and not (child._modules or child._buffers)
        and weight is not None
        and bias is not None
        and weight.dim() == 2
        and getattr(child, "nf", None) == weight.shape[1] == bias.shape[0]
    )


def _is_adapter(child: nn.Module) -> bool:
    """Whether a layer wraps a linear and adds to it, as LoRA does."""
    if isinstance(child, (nn.Linear, nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return False
    base = getattr(child, "base_layer", None)
    return isinstance(base, nn.Module) or (
        any(isinstance(inner, nn.Linear) for inner in child.children())
        and hasattr(child, "in_features")
        and hasattr(child, "out_features")
    )


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
        named = {name for code in codes for name in _names(getattr(code, "__code__", None))}
        called |= named
        names = {n for n in named - seen if n not in vars(nn.Module)}
    return frozenset(called)


def _names(code: CodeType | None) -> Iterator[str]:
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _names(constant)
