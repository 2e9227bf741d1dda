"""State that a module's forward depends on, besides parameters and input, and checks that it still
holds.

A forward is proven equal for the state that it read: classes, numbers, flags and callables of the
module and its children. That state is stored by name, and compared in every call.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Collection
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.fusing.adapters import base_of, is_dequantising

Path = tuple[str, ...]

_SIMPLE = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type, partial)
# the value of a missing attribute
MISSING = "no value"

# the attribute of a swapped module that has its `Original`
MARK = "_fusedckpt_original"


class Part(NamedTuple):
    """The entry in reports for a swapped module, or a block of a swapped Sequential.

    saved: bytes saved per token before and now, None if unknown.
    """

    kind: str
    change: str
    saved: tuple[float, float] | None


class Original(NamedTuple):
    """The class that a swapped module had, the attributes to delete, and its parts.

    parts: by their names below the module, "" for the module itself.
    """

    kind: type[nn.Module]
    attributes: tuple[str, ...]
    parts: dict[str, Part]


class Weight(NamedTuple):
    """A linear of a block: where its weight and bias are, and if the weight lies as [in, out]."""

    weight: Path
    bias: Path | None
    transposed: bool


class Block(NamedTuple):
    """The block that a forward computes: the arguments of one of our functions.

    kind: "mlp", "gated_mlp" or "linear_act"; linears: in the order of the function's arguments;
    packed: which half of the first weight comes first, "gate" or "up", "" where it has no halves.
    """

    kind: str
    linears: tuple[Weight, ...]
    activation: str
    packed: str = ""


class Held(NamedTuple):
    """The state of one module that must not change.

    path: names of the children that lead to it; kind: its class, None for the swapped module
    itself; children: how many it has; reads: names of attributes, one of the other, and the value.
    """

    path: Path
    kind: type[nn.Module] | None
    children: int
    reads: tuple[tuple[Path, Any], ...]


def is_simple(value: Any) -> bool:
    """Whether a value is immutable, and compared by value."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_simple, value))
    return isinstance(value, _SIMPLE)


def is_function(value: Any) -> bool:
    """Whether a value is code, compared by identity."""
    # torch's builtins and the jit's functions are of classes of their own
    is_code = isinstance(value, _FUNCTIONS) or type(value).__name__.endswith("ScriptFunction")
    return is_code and not isinstance(getattr(value, "__self__", None), nn.Module)


def child_at(module: nn.Module, path: Path) -> nn.Module | None:
    """Return the module at a path of names, below adapters; None if there is none."""
    found: nn.Module | None = module
    for name in path:
        if found is None:
            return None
        found = found._modules.get(name)
        if found is not None and "base_layer" in found._modules:
            found = base_of(found)
    return found


def broken(
    module: nn.Module, held: tuple[Held, ...], watched: Collection[Path] = ()
) -> tuple[str, str] | None:
    """Return the first change in a module, None if there is none.

    "child", "hook" or "changed", and the name of the child that was replaced or has hooks, or of
    the changed attribute; children at the paths `watched` may have hooks.
    """
    for path, kind, children, reads in held:
        part = child_at(module, path)
        if part is None or (kind is not None and _kind(part) is not kind):
            return "child", ".".join(path)
        if kind is not None and path not in watched and has_hooks(part):
            return "hook", ".".join(path)
        if len(part._modules) != children:
            return "child", ".".join(path)
        for names, value in reads:
            found: Any = part
            for name in names:
                found = getattr(found, name, MISSING)
            if found is not value and not (type(found) is type(value) and found == value):
                return "changed", ".".join(path + names)
    return None


def _kind(module: nn.Module) -> type[nn.Module]:
    """Return a module's class before it was swapped, nn.Linear for a linear that dequantises."""
    if is_dequantising(module):
        return nn.Linear
    return module.__dict__[MARK].kind if MARK in module.__dict__ else type(module)
