"""What a module is made of: linears, activations, dropouts, and what blocks their shapes allow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt import parity
from fusedckpt.kernels.activations import ACTIVATIONS
from fusedckpt.parity import is_transposed

# within which blocks are told apart, in float64: some compute parts of it in float32
TOL = 1e-5
# and activations: another threshold of a softplus shows only here
_ACTIVATION_TOL = 1e-8
# a block is probed on slices of its weights: what it computes does not depend on its size
_D, _F = 24, 40
_DROPOUTS = nn.modules.dropout._DropoutNd


@dataclass
class Parts:
    """A module's children by what they are."""

    linears: dict[str, Any] = field(default_factory=dict)
    activations: dict[str, nn.Module] = field(default_factory=dict)
    dropouts: dict[str, nn.Module] = field(default_factory=dict)
    identities: dict[str, nn.Module] = field(default_factory=dict)
    others: dict[str, nn.Module] = field(default_factory=dict)


def parts_of(module: nn.Module) -> Parts:
    """Sort the children of a module."""
    parts = Parts()
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) or is_transposed(child):
            parts.linears[name] = child
        elif type(child) is nn.Dropout:
            parts.dropouts[name] = child
        elif type(child) is nn.Identity:
            parts.identities[name] = child
        elif has_nothing(child) and not isinstance(child, _DROPOUTS):
            parts.activations[name] = child
        else:
            parts.others[name] = child
    return parts


def has_nothing(module: nn.Module) -> bool:
    """Whether a module has neither parameters, buffers nor children, as activations have none."""
    return not (module._parameters or module._buffers or module._modules)


def activation_of(function: Any) -> str | None:
    """Return the table's name for what a callable computes, None where it is not in the table."""
    z = torch.linspace(-30, 30, 1201, dtype=torch.float64, device="cpu")
    z = torch.cat([z, z[:1] * 7, z[-1:] * 7])
    with parity.undisturbed(torch.device("cpu")), torch.no_grad():
        try:
            h = function(z.clone())
        except Exception:  # arbitrary code of others
            return None
        if not isinstance(h, Tensor) or h.shape != z.shape:
            return None
        for name, act in ACTIVATIONS.items():
            tol = _ACTIVATION_TOL
            if torch.allclose(h.double(), act.eager(z), rtol=tol, atol=tol):
                return name
    return None


def shape_of(linear: Any) -> tuple[int, int]:
    """Return a linear's (out, in)."""
    out, features = linear.weight.shape
    return (features, out) if is_transposed(linear) else (out, features)


@dataclass(frozen=True)
class Layout:
    """One way in which linears can form a block.

    kind, packed: as `swapped.MLPPlan` has them; linears: names in the order of their parts; sizes:
    small shapes for their parameters, by id.
    """

    kind: str
    packed: str
    linears: tuple[str, ...]
    sizes: dict[int, tuple[int, ...]]
    features: int


def layouts(linears: dict[str, Any]) -> Iterator[Layout]:
    """Yield what shapes allow, the parts in the order in which the children stand first."""
    if not 1 <= len(linears) <= 3 or any(
        not _is_matrix(linear.weight) for linear in linears.values()
    ):
        return
    for order in permutations(linears):
        shapes = [shape_of(linears[name]) for name in order]
        for kind, packed in _kinds(shapes):
            sizes = {
                key: size
                for name, small in zip(order, _small(shapes, packed), strict=True)
                for key, size in _sizes(linears[name], small)
            }
            yield Layout(kind, packed, order, sizes, min(shapes[0][1], _D))


def _is_matrix(weight: Any) -> bool:
    return isinstance(weight, Tensor) and weight.dim() == 2 and 0 not in weight.shape


def _kinds(shapes: list[tuple[int, int]]) -> Iterator[tuple[str, str]]:
    """Yield (kind, packed) of what linears of these (out, in) can form in this order."""
    if len(shapes) == 1:
        yield "linear_act", ""
        return
    *first, (_, f) = shapes
    if len(first) == 2 and first[0] == first[1] and first[0][0] == f:
        yield "gated_mlp", ""
    if len(first) == 1 and first[0][0] == f:
        yield "mlp", ""
    if len(first) == 1 and first[0][0] == 2 * f:
        yield "gated_mlp", "gate"
        yield "gated_mlp", "up"


def _small(shapes: list[tuple[int, int]], packed: str) -> list[tuple[int, int]]:
    """Return small (out, in) that fit each other as the shapes do."""
    f = shapes[-1][1] if len(shapes) > 1 else shapes[0][0]
    d, out = shapes[0][1], shapes[-1][0]
    small_d, small_f = min(d, _D), min(f, _F)
    if len(shapes) == 1:
        return [(small_f, small_d)]
    small_out = small_d if out == d else min(out, _D)
    first = (2 * small_f if packed else small_f, small_d)
    return [first] * (len(shapes) - 1) + [(small_out, small_f)]


def _sizes(linear: Any, shape: tuple[int, int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    out, features = shape
    yield id(linear.weight), ((features, out) if is_transposed(linear) else shape)
    if linear.bias is not None:
        yield id(linear.bias), (out,)
