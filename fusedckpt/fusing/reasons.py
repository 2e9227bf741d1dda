"""The reasons why a module is left, or did not run fused, as it is now.

Each function looks at one part of a module: its storage, its parameters, a linear, a hook. It
returns a `NotFused`, or None where nothing is in the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
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
from fusedckpt.fusing.lookalikes import (
    NOT_POINTWISE,
    OTHER_NORMS,
    child_layers,
    has_experts,
    is_adapter,
    is_any_activation,
    is_linear,
    is_transposed,
    multiplies_by_experts,
)
from fusedckpt.layers import sharded
from fusedckpt.layers.fallbacks import NotFused

_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
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


def linears_apart(parent: nn.Sequential) -> Iterator[tuple[str, NotFused]]:
    """Yield a Sequential's linears that an activation follows, and why each is apart from it."""
    skipped = (nn.Identity, *_DROPOUTS)
    layers = [pair for pair in parent.named_children() if not isinstance(pair[1], skipped)]
    for (name, linear), (_, act) in pairwise(layers):
        if is_linear(linear) and (is_any_activation(act) or isinstance(act, NOT_POINTWISE)):
            obstacle = of_linear(name, linear) or of_hooks(name, linear) or of_hooks(str(act), act)
            yield name, obstacle or NotFused("apart", str(act))
