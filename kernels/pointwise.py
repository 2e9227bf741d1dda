"""Sequences of cheap functions, forward, in one kernel each: no value between two is stored.

    modulated_norm  norm(x) * factor + shift, for each sample its own factor and shift
    channel_norm    act((x - mean) * rstd * weight + bias + residual), from saved statistics:
                    a group norm or batch norm, and its activation
    gated_sum       residual + gate * branch, the gate broadcast

Backward runs them to make a saved value again (`recipes/recipe_kernels.py`). Each reads its inputs
once and writes its result once; between them all is float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .activations import ACTIVATIONS
from .norm import MAX_BLOCK, NormRule, rows_for
from .norm_kernels import normalize
from .runtime import cdiv, is_exact, jit_kernel, load, store, tl

# elements of a program of the kernels over elements, 8 a thread
POINTWISE_TILE: dict[str, Any] = {"BLOCK": 1024, "num_warps": 4}


class Modulation(NamedTuple):
    """Operands of a norm that is modulated."""

    # the input of the norm [M, N], adjacent columns
    x: Tensor
    # the weight of the norm [N], None where absent
    weight: Tensor | None
    # the bias of the norm [N], None where absent
    bias: Tensor | None
    # multiplies the norm's result: [S, N], a row for each sample, adjacent columns; or None
    factor: Tensor | None
    # added to that: [S, N], a row for each sample, adjacent columns; or None
    shift: Tensor | None
    # the result [M, N], contiguous
    y: Tensor
    # elements between the rows of x
    stride_xm: int
    # elements between the rows of factor, 0 where it is absent
    stride_fm: int
    # elements between the rows of shift, 0 where it is absent
    stride_sm: int


class Channels(NamedTuple):
    """Operands of a norm over channels of x, from its statistics."""

    # the input of the norm [N, C, L], contiguous or channels last
    x: Tensor
    # float32 or x's dtype, one for each group of each sample, or one for each channel
    mean: Tensor
    # 1 / sqrt(variance + eps), likewise
    rstd: Tensor
    # the weight of the norm [C], None where absent
    weight: Tensor | None
    # the bias of the norm [C], None where absent
    bias: Tensor | None
    # added before the activation, laid out as x; None where absent
    residual: Tensor | None
    # the result, laid out as x
    y: Tensor


class GatePlaces(NamedTuple):
    """How a gate is broadcast: element i of the result is multiplied by gate[place(i)].

    place(i) = i // span * stride + i // step % width
    """

    # elements of the result that share a row of the gate
    span: int
    # elements between the rows of the gate
    stride: int
    # adjacent elements of the result that share a number of the gate
    step: int
    # numbers in a row of the gate
    width: int


@jit_kernel
def modulated_norm_kernel(
    t, m, n, rows, eps, LAYER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Compute one tile of rows of `t`, a Modulation; rows: how many a sample has."""
    rm = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    rn = tl.arange(0, BLOCK_N)[None, :]
    sample = rm // rows
    mask = (rm < m) & (rn < n)
    row = load(t.x + rm * t.stride_xm + rn, mask)
    # loads are issued before the first reduction waits
    if t.factor is not None:
        factor = load(t.factor + sample * t.stride_fm + rn, mask)
    if t.shift is not None:
        shift = load(t.shift + sample * t.stride_sm + rn, mask)
    y = normalize(row, rm < m, mask, n, eps, LAYER)
    if t.weight is not None:
        y *= load(t.weight + rn, rn < n)
    if t.bias is not None:
        y += load(t.bias + rn, rn < n)
    if t.factor is not None:
        y *= factor
    if t.shift is not None:
        y += shift
    store(t.y + rm * n + rn, y, mask)


@jit_kernel
def channel_norm_kernel(
    t,
    numel,
    channels,
    length,
    groups,
    size,
    ACTIVATION: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute some elements of `t`, Channels; LAST: whether channels lie last in memory.

    groups: statistics of a sample, 0 where all samples share them; size: channels of a group.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < numel
    sample = i // (channels * length)
    if LAST:
        channel = i % channels
    else:
        channel = i // length % channels
    group = sample * groups + channel // size
    y = load(t.x + i, mask)
    y = (y - load(t.mean + group, mask)) * load(t.rstd + group, mask)
    if t.weight is not None:
        y *= load(t.weight + channel, mask)
    if t.bias is not None:
        y += load(t.bias + channel, mask)
    if t.residual is not None:
        y += load(t.residual + i, mask)
    store(t.y + i, ACTIVATION(y, y, is_exact(t.y))[0], mask)


@jit_kernel
def gated_sum_kernel(
    residual, branch, gate, y, numel, span, stride, step, width, BLOCK: tl.constexpr
):
    """Compute some elements of residual + gate * branch; span to width: see GatePlaces."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < numel
    product = load(branch + i, mask) * load(gate + i // span * stride + i // step % width, mask)
    store(y + i, load(residual + i, mask) + product, mask)


def fits(n: int) -> bool:
    """Whether rows of n columns are modulated by a kernel."""
    return 0 < n <= MAX_BLOCK


def modulated_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    factor: Tensor | None,
    shift: Tensor | None,
    rows: int,
    rule: NormRule,
) -> Tensor:
    """Return norm(x) * factor + shift of x [M, N], `rows` rows for each row of factor and shift."""
    m, n = x.shape
    y = x.new_empty(m, n)
    strides = [0 if t is None else t.stride(0) for t in (factor, shift)]
    t = Modulation(x, weight, bias, factor, shift, y, x.stride(0), *strides)
    how: dict[str, Any] = {"LAYER": rule.kind == "layer", **rows_for(n)}
    grid = (cdiv(m, how["BLOCK_M"]),)
    modulated_norm_kernel[grid](t, m, n, rows, rule.eps, **how)
    return y


def channel_norm(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    activation: str = "identity",
    residual: Tensor | None = None,
) -> Tensor:
    """Return act of a norm of x [N, C, ...], which fills its storage, plus a residual.

    groups: of a group norm, with statistics [N, groups]; 0 for a batch norm's [C].
    """
    channels = x.shape[1]
    length = x[0, 0].numel()
    y = torch.empty_like(x)
    t = Channels(x, mean, rstd, weight, bias, residual, y)
    size = channels // groups if groups else 1
    act = ACTIVATIONS[activation].value_and_grad
    how = {"ACTIVATION": act, "LAST": is_channels_last(x), **POINTWISE_TILE}
    grid = (cdiv(x.numel(), POINTWISE_TILE["BLOCK"]),)
    sizes = x.numel(), channels, length, groups, size
    channel_norm_kernel[grid](t, *sizes, **how)
    return y


def is_channels_last(x: Tensor) -> bool:
    """Whether channels of x [N, C, ...] lie last in memory."""
    return not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def gated_sum(residual: Tensor, branch: Tensor, gate: Tensor, places: GatePlaces) -> Tensor:
    """Return residual + gate * branch, tensors with one layout but for the gate."""
    y = torch.empty_like(branch)
    grid = (cdiv(branch.numel(), POINTWISE_TILE["BLOCK"]),)
    gated_sum_kernel[grid](residual, branch, gate, y, branch.numel(), *places, **POINTWISE_TILE)
    return y


def operand_places_of(gate: Tensor, like: Tensor) -> GatePlaces | None:
    """Return how a gate is broadcast to a contiguous tensor, None where the kernel cannot.

    It can if the gate's own dimensions are at most a first one, and some that are adjacent in
    memory: [B, 1, N] or [N] beside [B, T, N], [B, C, 1, 1] beside [B, C, H, W].
    """
    sizes = (1,) * (like.dim() - gate.dim()) + tuple(gate.shape)
    if not like.is_contiguous() or like.numel() == 0 or len(sizes) > like.dim():
        return None
    strides = (0,) * (like.dim() - gate.dim()) + gate.stride()
    has = [size > 1 for size in sizes]
    if any(size not in (1, whole) for size, whole in zip(sizes, like.shape, strict=True)):
        return None
    first = 1 if like.dim() > 1 and has[0] else 0
    inner = [d for d in range(first, like.dim()) if has[d]]
    # inner dimensions follow one another, and lie without gaps
    width = 1
    for d in reversed(inner):
        if strides[d] != width or (d != inner[-1] and not has[d + 1]):
            return None
        width *= sizes[d]
    step = like[(0,) * (inner[-1] + 1)].numel() if inner else like.numel()
    span = like[0].numel() if first else like.numel()
    if not inner:
        step = span
    return GatePlaces(span, strides[0] if first else 0, step, width)
