"""Why a module was left, or ran its original forward, in words."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd import dispatch
from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.autograd.private import is_fsdp_managed
from fusedckpt.blocks import validate
from fusedckpt.blocks.quantised import quantised, why_left
from fusedckpt.fusing import adapters
from fusedckpt.layers import styles
from fusedckpt.layers.fallbacks import Fallback

_CALLS = {
    "arguments": "called with arguments other than one tensor",
    "child": "{} was replaced by another module since it was fused",
    "adapter": "{}: only peft's plain LoRA is fused",
    "packed": "{} packs up before gate, and is adapted or quantised",
    "hook": "{}: it has a hook, or its forward was replaced",
    "weight": "{} is a tensor subclass with its own ops",
    "changed": "{} has changed since it was fused",
    "dropout": "{} applies dropout inside the block in training",
    "input": "its input is a {}, which only its own forward takes",
    "layout": "its input or output is not sharded by whole rows",
    "cache": "called with a {}, which its forward may change, as a cache of keys and values",
    "hooked": "{}: it has a hook, and would be called twice",
    "again": "its attention would save more than four times its result, and runs again in backward",
    "large": "attention or a linear in it would save more than four times its result",
    "unseen": "its attention is no call of torch's or transformers' functions",
    "dtype": "its input is {}, a dtype that was not proven equal, or not that of its weights",
}

# which others are fused
_SHARDED = (
    "only norms on whole rows, and MLPs split by columns, then by rows, run fused, and not compiled"
)


def of_call(module: nn.Module, fallback: Fallback) -> str:
    """Say why a call of a swapped module ran the original forward."""
    (what, about), reason = fallback, None
    if what == "weight":
        reason = of_weight(about, _attribute(module, about))
    elif what in ("child", "hook"):
        # a child's class says more than that it is watched: sharding hooks it, too
        child = _attribute(module, about)
        reason = of_linear(about, child) if isinstance(child, nn.Module) else None
    return reason or _CALLS[what].format(about)


def of_linear(name: str, child: nn.Module) -> str | None:
    """Say why a fused forward does not compute a child that stands for a linear, None if it can."""
    return of_class(name, child) or of_hooks(name, child)


def of_class(name: str, child: nn.Module) -> str | None:
    """Say so for a child's class and weights, without a look at its hooks."""
    kind = type(child)
    if adapters.is_lora(child):
        problem = adapters.in_the_way(child)
        below = of_class(f"{name}.base_layer", adapters.base_of(child))
        return below if problem is None else _CALLS["adapter"].format(f"{name} is {problem}")
    if is_adapter(child):
        return _CALLS["adapter"].format(f"{name} is a {_adapter(kind)}")
    if not isinstance(child, nn.Linear) and not is_transposed(child):
        return None
    if "parametrizations" in child._modules:
        return f"{name}: its weights are parametrized"
    for key, weight in child._parameters.items():
        reason = None if weight is None else of_weight(f"{name}.{key}", weight)
        if reason is not None:
            return reason
    is_own = kind.forward is not nn.Linear.forward and not adapters.is_dequantising(child)
    if isinstance(child, nn.Linear) and is_own:
        return f"{name} is a {_name(kind)}, a linear with its own forward"
    return None


def of_hooks(name: str, child: nn.Module) -> str | None:
    """Say that a child has to be called, None if it has not."""
    return _CALLS["hook"].format(name) if has_hooks(child) else None


def of_weight(name: str, weight: Any) -> str | None:
    """Say why a fused forward cannot take a parameter, None if it can."""
    if (
        not isinstance(weight, Tensor)
        or dispatch.are_plain(weight)
        or quantised(weight) is not None
    ):
        return None
    if (why := why_left(weight)) is not None:
        return f"{name}: {why}"
    if type(weight).__name__ == "DTensor":
        return f"{name} is a DTensor: {_SHARDED}"
    if dispatch.is_plain(type(weight)):
        return f"{name} must be a dense tensor, got layout {weight.layout}"
    return f"{name} is a {_name(type(weight))}: such tensor subclasses are not fused"


def of_layer(module: nn.Module) -> str | None:
    """Say why no kernel takes a module's own parameters, None if one does."""
    if styles.is_known(module):
        return None
    given = dict(module.named_parameters(recurse=False))
    given = {name: weight for name, weight in given.items() if quantised(weight) is None}
    for name, parameter in given.items():
        if (reason := of_weight(name, parameter)) is not None:
            return reason
    try:
        takes = validate.dense(type(module).__name__, given)
    except (TypeError, ValueError) as error:
        return str(error)
    return (
        None
        if takes
        else f"{type(module).__name__}: only eager takes tensors of its parameters' class"
    )


def of_storage(module: nn.Module) -> str | None:
    """Say why a module's parameters are not to be looked at, None if they are all there.

    Its children's, too. Those of FSDP are views of memory that is freed between two forwards: to
    read them can end the process.
    """
    named = [("it", module), *children_of(module)]
    for name, layer in named:
        if isinstance(layer, torch.jit.ScriptModule):
            return f"TorchScript compiled {name}: fuse before scripting"
    layers = [layer for _, layer in named]
    if any(map(is_fsdp_managed, layers)):
        return "its parameters are sharded by FSDP: fuse before sharding"
    given = [p for layer in layers for p in layer._parameters.values() if p is not None]
    if any(nn.parameter.is_lazy(parameter) for parameter in given):
        return "its parameters are not initialised: call the model once before"
    if any(hasattr(parameter, "ds_id") and parameter.numel() == 0 for parameter in given):
        return "its parameters are sharded by DeepSpeed: fuse before sharding"
    if any(_is_freed(parameter) for parameter in given):
        return "the storage of its parameters was freed"
    return None


def children_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children, those of lists and dicts in their place."""
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from ((f"{name}.{key}", inner) for key, inner in child.named_children())
        else:
            yield name, child


def _is_freed(x: Tensor) -> bool:
    if x.is_meta or not dispatch.are_plain(x) or x.numel() == 0:
        return False
    return x.untyped_storage().nbytes() == 0


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


def _adapter(kind: type) -> str:
    """Name an adapter by the base that its library's adapters of one method share."""
    library = kind.__module__.partition(".")[0]
    for base in kind.__mro__:
        if base.__name__.endswith("Layer") and base.__module__.startswith(library + "."):
            return _name(base)
    return _name(kind)


def _name(kind: type) -> str:
    """Name a class with the library that it is from."""
    library = kind.__module__.partition(".")[0]
    file = getattr(sys.modules.get(library), "__file__", None) or ""
    is_library = library != "torch" and "site-packages" in file
    return f"{library} {kind.__name__}" if is_library else kind.__name__


def _attribute(module: nn.Module, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found
