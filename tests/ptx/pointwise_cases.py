"""Cases of kernels of cheap functions; tests/kernels/test_pointwise.py interprets them, too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedckpt.kernels import pointwise
from fusedckpt.kernels.activations import ACTIVATIONS
from fusedckpt.kernels.norm import NormRule
from tests.ptx.judging import DTYPES, KernelCase, Maybe, Results, beside, named


def modulated(
    kind: str, rows: int, n: int, norm: str = "layer", affine: bool = False, shift: bool = True
) -> Results:
    """modulated_norm_kernel; factor and shift are chunks of one tensor, as modulations are."""
    dtype, samples = DTYPES[kind], 3
    x = torch.randn(samples * rows, n, dtype=dtype)
    parts = torch.randn(samples, 2 * n, dtype=dtype).chunk(2, 1)
    factor, added = parts[0], parts[1] if shift else None
    weight = torch.randn(n, dtype=dtype) if affine else None
    bias = torch.randn(n, dtype=dtype) if affine and norm == "layer" else None
    rule = NormRule(norm, 1e-6)
    y = pointwise.modulated_norm(x, weight, bias, factor, added, rows, rule)

    def eager(x: Tensor, weight: Maybe, bias: Maybe, factor: Tensor, added: Maybe) -> list[Maybe]:
        normed = (
            F.layer_norm(x, (n,), weight, bias, 1e-6)
            if norm == "layer"
            else F.rms_norm(x, (n,), weight, 1e-6)
        )
        y = normed.view(samples, rows, n) * factor[:, None]
        y = y if added is None else y + added[:, None]
        return [y.flatten(0, 1)]

    return beside([y], eager, x, weight, bias, factor, added)


def channels(
    kind: str,
    size: tuple[int, ...],
    groups: int,
    activation: str = "silu",
    last: bool = False,
    residual: bool = False,
) -> Results:
    """channel_norm_kernel; groups: 0 for a batch norm."""
    dtype = DTYPES[kind]
    order = torch.channels_last if last else torch.contiguous_format
    x, r = (torch.randn(size, dtype=dtype).contiguous(memory_format=order) for _ in range(2))
    w, b = torch.randn(size[1], dtype=dtype), torch.randn(size[1], dtype=dtype)
    wide = x.double()
    grouped = wide.reshape(size[0], groups, -1) if groups else wide.transpose(0, 1).flatten(1)
    mean = grouped.mean(-1).float()
    rstd = (grouped.var(-1, correction=0) + 1e-5).rsqrt().float()
    added = r if residual else None
    y = pointwise.channel_norm(x, mean, rstd, w, b, groups, activation, added)
    assert y.stride() == x.stride()

    def eager(x: Tensor, w: Tensor, b: Tensor, added: Maybe) -> list[Maybe]:
        if groups:
            normed = F.group_norm(x, groups, w, b, 1e-5)
        else:
            normed = F.batch_norm(x, None, None, w, b, training=True)
        normed = normed if added is None else normed + added
        return [ACTIVATIONS[activation].eager(normed)]

    return beside([y], eager, x, w, b, added)


def gated(kind: str, size: tuple[int, ...], gate_size: tuple[int, ...]) -> Results:
    """gated_sum_kernel; the gate is a chunk of a wider tensor where it has samples."""
    dtype = DTYPES[kind]
    residual, branch = (torch.randn(size, dtype=dtype) for _ in range(2))
    if len(gate_size) == len(size):
        gate = torch.randn(gate_size[0], 2, *gate_size[1:], dtype=dtype)[:, 1]
    else:
        gate = torch.randn(gate_size, dtype=dtype)
    places = pointwise.operand_places_of(gate, branch)
    assert places is not None
    y = pointwise.gated_sum(residual, branch, gate, places)
    return beside([y], lambda r, b, g: [r + g * b], residual, branch, gate)


def pointwise_cases() -> list[KernelCase]:
    """Return the cases of sequences."""
    return [
        named(modulated, "bf16", 7, 1152, affine=True),
        named(modulated, "f32", 5, 3072, affine=True),
        named(modulated, "bf16", 2, 1152, norm="rms", affine=True, shift=False),
        named(modulated, "f32", 2, 3072, norm="rms", affine=True, shift=False),
        named(modulated, "f32", 5, 301),
        named(modulated, "f16", 3, 64, norm="rms", affine=True),
        named(modulated, "bf16", 4, 130, affine=True, shift=False),
        *(
            case
            for kind in ("bf16", "f32")
            for last in (False, True)
            for case in (
                named(channels, kind, (2, 16, 9, 7), 4, last=last),
                named(channels, kind, (3, 10, 7, 5), 0, "relu", last=last, residual=True),
            )
        ),
        named(channels, "f32", (2, 12, 45), 3, "gelu"),
        named(channels, "f16", (3, 10, 17, 5), 0, "identity", residual=True),
        named(gated, "bf16", (2, 45, 70), (2, 1, 70)),
        named(gated, "f32", (2, 17, 130), (130,)),
        named(gated, "f16", (3, 10, 7, 5), (3, 10, 1, 1)),
        named(gated, "bf16", (2, 17, 70), (2, 17, 70)),
    ]
