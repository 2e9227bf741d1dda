"""Every error that a caller of a module's constructor can cause, raised before any work."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from fusedckpt.autograd import arguments
from fusedckpt.autograd.arguments import flag, integer


def factory(name: str, device: Any, dtype: Any) -> None:
    """Refuse a device or dtype that parameters cannot have."""
    if device is not None:
        arguments.device(name, device)
    if dtype is not None:
        arguments.dtype(name, dtype)


def linear(name: str, sizes: Mapping[str, Any], bias: Any, device: Any, dtype: Any) -> None:
    """Refuse arguments of an nn.Linear."""
    for key, size in sizes.items():
        integer(name, key, size)
    flag(name, "bias", bias)
    factory(name, device, dtype)


def module(name: str, key: str, given: Any) -> None:
    """Refuse a child that is no module."""
    if not isinstance(given, nn.Module):
        arguments.wrong_type(name, key, "a module", given)


def modules(name: str, key: str, given: tuple[Any, ...]) -> None:
    """Refuse children of which one is no module; nn.Sequential takes None, and one OrderedDict."""
    if key == "linears" and not given:
        raise ValueError(f"{name}: linears must not be empty, got none")
    is_named = key == "args" and len(given) == 1 and isinstance(given[0], OrderedDict)
    for index, layer in given[0].items() if is_named else enumerate(given):
        if layer is not None or key == "linears":
            module(name, f"{key}[{index!r}]", layer)


def block(name: str, in_features: int, out_features: int, norm: Any, residual: Any) -> None:
    """Refuse a norm that is no module, and a residual between two widths."""
    if norm is not None:
        module(name, "norm", norm)
    if flag(name, "residual", residual) and in_features != out_features:
        raise ValueError(
            f"{name}: residual needs as many output as input features, got out_features "
            f"{out_features} for {in_features}"
        )
