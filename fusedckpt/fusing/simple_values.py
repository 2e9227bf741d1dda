"""Values that a match compares: those that cannot change, and code."""

from __future__ import annotations

import enum
import types
from functools import partial
from typing import Any

import torch
from torch import nn

# the value of a missing attribute
MISSING = "no value"
_NUMBERS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_OPTIONS = (range, slice, enum.Enum, torch.dtype, torch.device, torch.layout, torch.memory_format)
_SIMPLE = _NUMBERS + _OPTIONS
_EXECUTABLE = (types.FunctionType, types.BuiltinFunctionType, type, partial)


def is_simple(value: Any) -> bool:
    """Whether a value is immutable, and compared by value."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_simple, value))
    return isinstance(value, _SIMPLE)


def is_function(value: Any) -> bool:
    """Whether a value is code, compared by identity."""
    # torch's builtins and the jit's functions are of classes of their own
    is_code = isinstance(value, _EXECUTABLE) or type(value).__name__.endswith("ScriptFunction")
    return is_code and not isinstance(getattr(value, "__self__", None), nn.Module)
