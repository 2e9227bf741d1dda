"""Every error that a caller of a module's constructor can cause, raised before any work."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn

from fusedckpt.autograd import arguments
from fusedckpt.autograd.arguments import flag, integer


def factory(name: str, device: Any, dtype: Any) -> None:
    """Refuse what parameters cannot be made on, or of."""
    if device is not None:
        arguments.device(name, device)
    if dtype is not None:
        arguments.dtype(name, dtype)


def linear(
    name: str, in_features: Any, out_features: Any, bias: Any, device: Any, dtype: Any
) -> tuple[int, int, bool]:
    """Return the sizes of an nn.Linear, and whether it has a bias."""
    factory(name, device, dtype)
    return (
        integer(name, "in_features", in_features),
        integer(name, "out_features", out_features),
        flag(name, "bias", bias),
    )


def module(name: str, key: str, given: Any) -> None:
    """Refuse a child that is no module."""
    if not isinstance(given, nn.Module):
        arguments.wrong_type(name, key, "a module", given)


def norm_and_linears(name: str, norm: Any, linears: tuple[Any, ...]) -> None:
    """Refuse children of a NormLinear."""
    module(name, "norm", norm)
    if not linears:
        raise ValueError(f"{name}: linears must not be empty, got none")
    for i, linear in enumerate(linears):
        module(name, f"linears[{i}]", linear)


def layers(name: str, given: tuple[Any, ...]) -> None:
    """Refuse children of a Sequential; nn.Sequential takes None."""
    if len(given) == 1 and isinstance(given[0], OrderedDict):
        named = given[0].items()
    else:
        named = enumerate(given)
    for key, layer in named:
        if layer is not None:
            module(name, f"args[{key!r}]", layer)


def block(
    name: str,
    sizes: tuple[Any, Any, Any],
    linear: tuple[Any, Any, Any],
    norm: Any,
    residual: Any,
) -> None:
    """Refuse arguments of an MLP module, of which out_features may be None."""
    *first, out_features = sizes
    out_features = first[0] if out_features is None else out_features
    keys = ("in_features", "hidden_features", "out_features")
    for key, size in zip(keys, (*first, out_features), strict=True):
        integer(name, key, size)
    bias, device, dtype = linear
    flag(name, "bias", bias)
    factory(name, device, dtype)
    if norm is not None:
        module(name, "norm", norm)
    if flag(name, "residual", residual) and first[0] != out_features:
        raise ValueError(
            f"{name}: residual needs as many output as input features, got out_features "
            f"{out_features} for {first[0]}"
        )
