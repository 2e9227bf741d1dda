"""Statistics of rows of logits, and their gradient written over the logits.

Each reads the logits once: the gradient takes the statistics. No logits exist beside those that a
GEMM has just made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .activations import tanh
from .runtime import (
    cdiv,
    jit_kernel,
    load,
    next_power_of_2,
    round_to,
    row_blocks,
    store,
    tl,
    triton,
)

# of a row's result: log p(target), log-sum-exp, the mean of log p, entropy
WIDTH = 4
BLOCK = 4096
# adjacent elements of a vector, which share a thread and its running maximum
ADJACENT_LOGITS = tl.constexpr(8)


class LogitRule(NamedTuple):
    """How logits come from the outputs u of a linear: sharpness softcap(scale u)."""

    # multiplies u first
    scale: float = 1.0
    # softcap(z) = softcap tanh(z / softcap); z itself where it is None
    softcap: float | None = None
    # 1 / temperature
    sharpness: float = 1.0
    # rows with this target have statistics and gradients of zero
    ignore_index: int = -100
    # whether the entropy is computed; it is zero otherwise
    entropy: bool = False


class LogitRows(NamedTuple):
    """Operands of a pass over rows of logits."""

    # the outputs of the linear [M, N]
    u: Tensor
    # the classes [M]
    target: Tensor
    # the statistics [M, 4] that the forward writes, and the backward reads
    y: Tensor
    # the gradients of the statistics [M, 4]
    dy: Tensor | None
    # the gradient of u [M, N] that the backward writes
    dz: Tensor | None


@triton.jit
def logits_of(u, scale, softcap, sharpness):
    """Return logits in float32, and their slope."""
    if softcap is not None:
        t = tanh(u * (scale / softcap), u, EXACT=True)[0]
        z = softcap * t * sharpness
        slope = (1.0 - t * t) * (scale * sharpness)
    else:
        z = u * (scale * sharpness)
        slope = scale * sharpness
    return z, slope


@triton.jit
def exp_of(x):
    """Return exp(x), one instruction and a product; tl.exp takes four more."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def place_of(row, n, ODD: tl.constexpr):
    """Return the start of the first vector of a row, and the elements in it before the row.

    A row of an odd number of classes may begin within a vector. Only its two ends are masked, as a
    masked load of such a row reads one element at a time.
    """
    first = row * n
    shift = 0
    if ODD:
        first = tl.multiple_of(first // ADJACENT_LOGITS * ADJACENT_LOGITS, ADJACENT_LOGITS)
        shift = (row * n - first).to(tl.int32)
    return first, shift


@triton.jit
def add_block(sums, z, mask, ENTROPY: tl.constexpr):
    """Add a block of logits to running sums, for each of ADJACENT_LOGITS adjacent elements."""
    top, total, plain, weighted = sums
    if mask is not None:
        plain += tl.sum(tl.reshape(tl.where(mask, z, 0.0), (top.shape[0], ADJACENT_LOGITS)), 1)
        z = tl.where(mask, z, float("-inf"))
    z = tl.reshape(z, (top.shape[0], ADJACENT_LOGITS))
    if mask is None:
        plain += tl.sum(z, 1)
    now = tl.maximum(top, tl.max(z, 1))
    e = exp_of(z - now[:, None])
    shrink = exp_of(top - now)
    total = total * shrink + tl.sum(e, 1)
    if ENTROPY:
        weighted = weighted * shrink + tl.sum(e * tl.where(e == 0.0, 0.0, z), 1)
    return now, total, plain, weighted


@triton.jit
def row_statistics(
    u,
    shift,
    n,
    scale,
    softcap,
    sharpness,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return log-sum-exp, mean and entropy of the n logits from u + shift.

    Threads keep sums of their own, which one reduction joins at the end.
    """
    zeros = tl.zeros((BLOCK // ADJACENT_LOGITS,), tl.float32)
    # finite, so that a first block of -inf makes no NaN
    sums = zeros - 3.0e38, zeros, zeros, zeros
    end = n + shift
    whole = end // BLOCK * BLOCK
    lead = 0
    rn = tl.arange(0, BLOCK)
    if shift > 0:
        mask = (rn >= shift) & (rn < end)
        z = logits_of(load(u + rn, mask), scale, softcap, sharpness)[0]
        sums = add_block(sums, z, mask, ENTROPY)
        lead += BLOCK
    for start in range(lead, whole, BLOCK):
        x = tl.load(u + start + rn).to(tl.float32)
        sums = add_block(sums, logits_of(x, scale, softcap, sharpness)[0], None, ENTROPY)
    if (lead <= whole) & (whole < end):
        mask = whole + rn < end
        z = logits_of(load(u + whole + rn, mask), scale, softcap, sharpness)[0]
        sums = add_block(sums, z, mask, ENTROPY)
    best = tl.max(sums[0], 0)
    shrink = exp_of(sums[0] - best)
    total = tl.sum(sums[1] * shrink, 0)
    lse = best + tl.log(total)
    entropy = lse - tl.sum(sums[3] * shrink, 0) / total if ENTROPY else 0.0
    return lse, tl.sum(sums[2], 0) / n, entropy


@jit_kernel
def cross_entropy_kernel(
    t,
    n,
    ignored,
    scale,
    softcap,
    sharpness,
    ODD: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the statistics of one row of `t`, LogitRows."""
    row = tl.program_id(0).to(tl.int64)
    first, shift = place_of(row, n, ODD)
    target = tl.load(t.target + row)
    is_counted = target != ignored
    lse, mean, entropy = row_statistics(
        t.u + first, shift, n, scale, softcap, sharpness, ENTROPY, BLOCK
    )
    u_target = load(t.u + row * n + target, is_counted)
    z_target = logits_of(u_target, scale, softcap, sharpness)[0]
    column = tl.arange(0, 4)
    y = tl.where(column == 0, z_target - lse, tl.where(column == 1, lse, entropy))
    y = tl.where(column == 2, mean - lse, y)
    tl.store(t.y + row * 4 + column, tl.where(is_counted, y, 0.0))


@triton.jit
def logit_grad(u, place, t, row, n, scale, softcap, sharpness, is_counted, ENTROPY: tl.constexpr):
    """Return dz of some logits; place: that of the target among them."""
    z, slope = logits_of(u, scale, softcap, sharpness)
    d_target = tl.load(t.dy + row * 4)
    d_mean = tl.load(t.dy + row * 4 + 2)
    share = tl.load(t.dy + row * 4 + 1) - d_target - d_mean
    logp = z - tl.load(t.y + row * 4 + 1)
    p = exp_of(logp)
    dz = p * share + d_mean / n
    if ENTROPY:
        entropy = tl.load(t.y + row * 4 + 3)
        dz -= p * (tl.where(p == 0.0, 0.0, logp) + entropy) * tl.load(t.dy + row * 4 + 3)
    dz += tl.where(tl.arange(0, u.shape[0]) == place, d_target, 0.0)
    return tl.where(is_counted, dz * slope, 0.0)


@jit_kernel
def cross_entropy_grad_kernel(
    t,
    n,
    ignored,
    scale,
    softcap,
    sharpness,
    ODD: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a block of a row of dz, which may be its u, from the statistics of the forward."""
    blocks = tl.cdiv(n + ADJACENT_LOGITS - 1 if ODD else n, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first, shift = place_of(row, n, ODD)
    start = tl.program_id(0) % blocks * BLOCK
    rn = start + tl.arange(0, BLOCK)
    target = tl.load(t.target + row)
    is_counted = target != ignored
    place = (target + shift - start).to(tl.int32)
    numbers = n, scale, softcap, sharpness, is_counted
    is_whole = False
    if ODD:
        is_whole = ((start > 0) | (shift == 0)) & (start + BLOCK <= n + shift)
    if is_whole:
        x = tl.load(t.u + first + rn).to(tl.float32)
        dz = logit_grad(x, place, t, row, *numbers, ENTROPY)
        tl.store(t.dz + first + rn, round_to(dz, t.dz.dtype.element_ty))
    else:
        mask = (rn >= shift) & (rn < n + shift)
        dz = logit_grad(load(t.u + first + rn, mask), place, t, row, *numbers, ENTROPY)
        store(t.dz + first + rn, dz, mask)


def launch(rows: LogitRows, rule: LogitRule) -> None:
    """Run the kernel of the statistics on every row, or that of the gradient on every block."""
    m, n = rows.u.shape
    numbers = rule.ignore_index, rule.scale, rule.softcap, rule.sharpness
    block = max(ADJACENT_LOGITS.value, min(BLOCK, next_power_of_2(n)))
    how = {"ODD": n % 16 != 0, "ENTROPY": rule.entropy, "BLOCK": block}
    how["num_warps"] = 8 if block > 512 else 1
    if rows.dz is None:
        cross_entropy_kernel[(m,)](rows, n, *numbers, **how)
    else:
        blocks = cdiv(n + ADJACENT_LOGITS.value - 1 if how["ODD"] else n, block)
        cross_entropy_grad_kernel[(m * blocks,)](rows, n, *numbers, **how)


def statistics(u: Tensor, target: Tensor, rule: LogitRule, kernel: str) -> Tensor:
    """Return [M, 4] of logits from u [M, N]: log p(target), log-sum-exp, mean log p, entropy.

    target: int64 [M, 1]; kernel: "aten" or "triton". The result is at least float32.
    """
    y = u.new_empty(u.shape[0], WIDTH, dtype=torch.promote_types(u.dtype, torch.float32))
    target = target.reshape(-1).contiguous()
    if kernel == "aten":
        for rows in row_blocks(u):
            y[rows] = eager_statistics(u[rows], target[rows, None], rule)
    elif u.shape[0]:
        launch(LogitRows(u.contiguous(), target, y, None, None), rule)
    return y


def eager_statistics(u: Tensor, target: Tensor, rule: LogitRule) -> Tensor:
    """Return the statistics [..., 4] of u [..., N] and target [..., 1] in torch's ops."""
    z = logits(u, rule)[0]
    logp = torch.log_softmax(z, -1)
    counted = target != rule.ignore_index
    logp_target = logp.gather(-1, torch.where(counted, target, 0))
    # of one class: rounding makes other ties among log-probabilities than among logits
    best = z.argmax(-1, keepdim=True)
    lse = z.gather(-1, best) - logp.gather(-1, best)
    mean = logp.mean(-1, keepdim=True)
    entropy = torch.zeros_like(logp_target)
    if rule.entropy:
        p = logp.exp()
        # 0, not NaN, of classes without probability
        entropy = -(p * logp).masked_fill(p == 0.0, 0.0).sum(-1, keepdim=True)
    return torch.cat((logp_target, lse, mean, entropy), -1).masked_fill(~counted, 0.0)


def statistics_grad(
    dy: Tensor,
    u: Tensor,
    target: Tensor,
    y: Tensor,
    rule: LogitRule,
    kernel: str,
    dz: Tensor | None = None,
) -> Tensor:
    """Return the gradient [M, N] of u from dy and the statistics y [M, 4], in `dz`, or over u."""
    target = target.reshape(-1).contiguous()
    dy = dy.contiguous()
    dz = torch.empty_like(u, memory_format=torch.contiguous_format) if dz is None else dz
    if kernel != "aten":
        if u.shape[0]:
            launch(LogitRows(u.contiguous(), target, y.contiguous(), dy, dz), rule)
        return dz
    for rows in row_blocks(u):
        value, slope = logits(u[rows], rule)
        counted = (target[rows] != rule.ignore_index)[:, None]
        # of a mean of no tokens the gradient is infinite, and NaN times zero
        d_target, d_lse, d_mean, d_entropy = dy[rows].masked_fill(~counted, 0.0).split(1, 1)
        # a row that does not count has no statistics
        lse = y[rows, 1:2].masked_fill(~counted, torch.inf)
        p = (value - lse).exp_()
        share = d_lse - d_target - d_mean
        if rule.entropy:
            # - p log p, 0 where p is
            terms = torch.special.entr(p)
            share = share - d_entropy * terms.sum(1, keepdim=True)
            p.mul_(share).addcmul_(terms, d_entropy)
        else:
            p.mul_(share)
        p.add_(d_mean / max(u.shape[1], 1)).scatter_add_(1, target[rows, None] * counted, d_target)
        dz[rows] = p.mul_(slope)
    return dz


def logits(u: Tensor, rule: LogitRule) -> tuple[Tensor, Tensor | float]:
    """Return the logits that a rule makes of u, in at least float32, and their slope."""
    z = u.to(torch.promote_types(u.dtype, torch.float32))
    if rule.scale != 1:
        z = z * rule.scale
    slope: Tensor | float = rule.scale * rule.sharpness
    if rule.softcap is not None:
        t = torch.tanh(z / rule.softcap)
        z = rule.softcap * t
        slope = (1 - t * t) * slope
    return z * rule.sharpness if rule.sharpness != 1 else z, slope
