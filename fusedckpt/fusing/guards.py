"""Guards: the state for which a module's forward was proven equal, compared in every call.

A forward is proven equal for the state that it read while it was recorded: classes, numbers, flags
and callables of the module and its children. The state is stored by name.
"""

from __future__ import annotations

import enum
import types
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedckpt.autograd.dispatch import has_hooks
from fusedckpt.fusing.adapters import base_of, is_dequantising
from fusedckpt.fusing.replica import Path
from fusedckpt.fusing.swap import MARK
from fusedckpt.layers.fallbacks import NotFused


class Guard(NamedTuple):
    """The state of one module for which a match holds."""

    # the names of the children that lead to it
    path: Path
    # its class, None for the swapped module itself
    kind: type[nn.Module] | None
    # the number of its children, None for any
    num_children: int | None
    # attributes that were read, each as the names that lead to it, and their values
    reads: tuple[tuple[Path, Any], ...]


# the value of a missing attribute
MISSING = "no value"
_NUMBERS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_OPTIONS = (range, slice, enum.Enum, torch.dtype, torch.device, torch.layout, torch.memory_format)
_SIMPLE = _NUMBERS + _OPTIONS
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type, partial)


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
    child: nn.Module | None = module
    for name in path:
        child = None if child is None else child._modules.get(name)
        if child is not None and "base_layer" in child._modules:
            child = base_of(child)
    return child


def first_change(module: nn.Module, guards: tuple[Guard, ...]) -> NotFused | None:
    """Return the first change in a module since it was recorded, None if nothing changed.

    The reason names the child that was replaced or has hooks, or the changed attribute.
    """
    for path, kind, num_children, reads in guards:
        part = child_at(module, path)
        if part is None or (kind is not None and kind is not _original_class(part)):
            return NotFused("child", ".".join(path))
        if kind is not None and has_hooks(part):
            return NotFused("hook", ".".join(path))
        if num_children is not None and len(part._modules) != num_children:
            return NotFused("child", ".".join(path))
        for names, value in reads:
            now: Any = part
            for name in names:
                now = getattr(now, name, MISSING)
            if now is not value and not (type(now) is type(value) and now == value):
                return NotFused("changed", ".".join(path + names))
    return None


def _original_class(module: nn.Module) -> type[nn.Module]:
    """Return a module's class before it was swapped, nn.Linear for a linear that dequantises."""
    if is_dequantising(module):
        return nn.Linear
    return module.__dict__[MARK].kind if MARK in module.__dict__ else type(module)
