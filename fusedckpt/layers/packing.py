"""Weights of gated MLPs that hold gate and up in one tensor: from one order of rows to another.

`gated_mlp` reads the gate's rows first. Models pack otherwise too, and a checkpoint of theirs is
converted once, when it is loaded, and back before it is saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedckpt.autograd.arguments import choice, integer, wrong_type

LAYOUTS = ("gate_up", "up_gate", "interleaved")


def pack_gate_up(gate: Tensor, up: Tensor, layout: str = "gate_up", dim: int = 0) -> Tensor:
    """Return gate and up, weights [F, D] or biases [F], as one new tensor [2 F, ...].

    Args:
        gate, up: of the same shape, dtype and device.
        layout: "gate_up", the gate's rows first, as `gated_mlp` reads them; "up_gate", up's first,
            as F.glu splits; "interleaved", rows of gate and up alternate, as in gpt-oss.
        dim: the dimension of size F; -1 for weights stored as [D, F].

    Raises:
        ValueError: an unknown layout or dimension, or shapes, dtypes or devices that differ.
        TypeError: not tensors.
    """
    dim = _check("pack_gate_up", dim, {"layout": layout}, gate=gate, up=up)
    mine, other = ((t.shape, t.dtype, t.device) for t in (gate, up))
    if mine != other:
        raise ValueError(
            f"pack_gate_up: gate and up must have one shape, dtype and device, got "
            f"{list(gate.shape)} {gate.dtype} on {gate.device} and "
            f"{list(up.shape)} {up.dtype} on {up.device}"
        )
    return _pack(gate, up, layout, dim)


def unpack_gate_up(packed: Tensor, layout: str = "gate_up", dim: int = 0) -> tuple[Tensor, Tensor]:
    """Return gate and up, each [F, ...], as views of `packed` [2 F, ...]: undoes `pack_gate_up`.

    Raises:
        ValueError: an odd number of rows, an unknown layout or dimension.
        TypeError: not a tensor.
    """
    dim = _check("unpack_gate_up", dim, {"layout": layout}, packed=packed)
    if layout == "interleaved":
        gate, up = packed.unflatten(dim, (packed.shape[dim] // 2, 2)).unbind(dim + 1)
        return gate, up
    first, second = packed.chunk(2, dim)
    return (first, second) if layout == "gate_up" else (second, first)


def repack_gate_up(packed: Tensor, layout: str, to: str = "gate_up", dim: int = 0) -> Tensor:
    """Return `packed` [2 F, ...] in another order of rows, as a new tensor.

        repack_gate_up(repack_gate_up(w, "interleaved"), "gate_up", "interleaved") == w

    Arguments and errors are those of `pack_gate_up`; `layout` is the present order, `to` the new
    one. Differentiable, but meant for converting checkpoints, not weights in every step.
    """
    dim = _check("repack_gate_up", dim, {"layout": layout, "to": to}, packed=packed)
    return _pack(*unpack_gate_up(packed, layout, dim), to, dim)


def _pack(gate: Tensor, up: Tensor, layout: str, dim: int) -> Tensor:
    if layout == "interleaved":
        return torch.stack((gate, up), dim + 1).flatten(dim, dim + 1)
    return torch.cat((gate, up) if layout == "gate_up" else (up, gate), dim)


def _check(name: str, dim: Any, layouts: dict[str, Any], **given: Any) -> int:
    """Return the dimension that counts the rows, which are even in `packed`; not negative."""
    for key, layout in layouts.items():
        choice(name, key, layout, LAYOUTS)
    for key, value in given.items():
        if not isinstance(value, Tensor):
            wrong_type(name, key, "a tensor", value)
        if value.dim() == 0:
            raise ValueError(f"{name}: {key} must have at least one dimension, got []")
        dim = integer(name, "dim", dim, -value.dim(), most=value.dim() - 1) % value.dim()
        if key == "packed" and value.shape[dim] % 2:
            raise ValueError(
                f"{name}: packed must have 2 F rows in dimension {dim}, got {value.shape[dim]} "
                f"(packed {list(value.shape)})"
            )
    return dim
