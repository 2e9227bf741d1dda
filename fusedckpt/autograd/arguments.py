"""Checks of one argument, and of constructors.

Every error names function, argument, expected value and given one.
numpy's integers, floats and bools count as Python's. A bool is no number, a tensor no number or
flag, and a number is finite.
"""

from __future__ import annotations

import math
import operator
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LARGEST = 2**63 - 1


def wrong_type(name: str, key: str, expected: str, value: Any) -> NoReturn:
    """Raise the TypeError of an argument."""
    raise TypeError(f"{name}: {key} must be {expected}, got {type(value).__name__}")


def wrong_value(name: str, key: str, expected: str, value: Any) -> NoReturn:
    """Raise the ValueError of an argument."""
    raise ValueError(f"{name}: {key} must be {expected}, got {value!r}")


def number(name: str, key: str, value: Any, least: float = -math.inf) -> None:
    """Refuse a value that is no finite real number, or a smaller one than `least`."""
    is_number = isinstance(value, (float, int, np.floating, np.integer))
    if isinstance(value, bool) or not is_number:
        wrong_type(name, key, "a number", value)
    try:
        as_float = float(value)
    except OverflowError:
        as_float = math.inf
    if not (least <= as_float and -math.inf < as_float < math.inf):
        bound = "" if least == -math.inf else f" of at least {least:g}"
        wrong_value(name, key, f"a finite number{bound}", value)


def probability(name: str, key: str, value: Any) -> None:
    """Refuse a value that is no probability."""
    number(name, key, value, 0)
    if value > 1:
        wrong_value(name, key, "a probability", value)


def integer(name: str, key: str, value: Any, least: int = 0, most: int = LARGEST) -> int:
    """Return an integer, which is from `least` to `most`."""
    as_int = value
    if type(value) is not int and not isinstance(value, torch.SymInt):
        try:
            # numpy before 2.3 takes its booleans for integers
            as_int = None if isinstance(value, bool | np.bool_) else operator.index(value)
        except (TypeError, RuntimeError):
            # RuntimeError: a tensor on meta
            as_int = None
        if as_int is None:
            wrong_type(name, key, "an integer", value)
    if not least <= as_int <= most:
        wrong_value(name, key, f"an integer from {least} to {most}", value)
    return as_int


def flag(name: str, key: str, value: Any) -> bool:
    """Return a flag: True, False, or 1 or 0 for them."""
    if value is not True and value is not False:
        if not isinstance(value, (int, np.integer, np.bool_)):
            wrong_type(name, key, "True or False", value)
        if value not in (0, 1):
            wrong_value(name, key, "True or False", value)
    return bool(value)


def choice(name: str, key: str, value: Any, choices: Collection[str]) -> None:
    """Refuse a value that is none of these strings."""
    if not isinstance(value, str):
        wrong_type(name, key, f"one of {', '.join(choices)}", value)
    if value not in choices:
        wrong_value(name, key, f"one of {', '.join(choices)}", value)


def device(name: str, value: Any, key: str = "device") -> None:
    """Refuse a value that torch.device refuses."""
    try:
        torch.device(value)
    except TypeError:
        wrong_type(name, key, "a torch.device or the name of one", value)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{name}: {key} must name a device of torch, got {value!r} ({reason})"
        ) from None


def dtype(name: str, value: Any, key: str = "dtype") -> None:
    """Refuse a dtype that no layer computes in."""
    if not isinstance(value, torch.dtype):
        wrong_type(name, key, "a torch.dtype", value)
    if value not in DTYPES:
        wrong_value(name, key, f"one of {', '.join(map(str, DTYPES))}", value)


check_device = device
check_dtype = dtype


def factory(name: str, device: Any, dtype: Any) -> None:
    """Refuse a device or dtype that parameters cannot have."""
    if device is not None:
        check_device(name, device)
    if dtype is not None:
        check_dtype(name, dtype)


def linear_sizes(name: str, sizes: Mapping[str, Any], bias: Any, device: Any, dtype: Any) -> None:
    """Refuse arguments of an nn.Linear."""
    for key, size in sizes.items():
        integer(name, key, size)
    flag(name, "bias", bias)
    factory(name, device, dtype)


def module(name: str, key: str, value: Any) -> None:
    """Refuse a child that is no module."""
    if not isinstance(value, nn.Module):
        wrong_type(name, key, "a module", value)


def modules(name: str, key: str, layers: tuple[Any, ...]) -> None:
    """Refuse children of which one is no module; nn.Sequential takes None, and one OrderedDict."""
    if key == "linears" and not layers:
        raise ValueError(f"{name}: linears must not be empty, got none")
    is_named = key == "args" and len(layers) == 1 and isinstance(layers[0], OrderedDict)
    for index, layer in layers[0].items() if is_named else enumerate(layers):
        if layer is not None or key == "linears":
            module(name, f"{key}[{index!r}]", layer)


def layer_sizes(name: str, in_features: int, out_features: int, norm: Any, residual: Any) -> None:
    """Refuse a norm that is no module, and a residual between two widths."""
    if norm is not None:
        module(name, "norm", norm)
    if flag(name, "residual", residual) and in_features != out_features:
        raise ValueError(
            f"{name}: residual=True adds the input to the result, so out_features must be "
            f"in_features, {in_features}, got {out_features}: pass residual=False"
        )
