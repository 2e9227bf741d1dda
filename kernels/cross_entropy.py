"""Statistics of rows of logits, and their gradient written over the logits.

One kernel reads a row twice: first for its maximum and sums, then for the gradient. So no statistic
is saved between forward and backward, and no logits exist beside those that a GEMM has just made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .activations import tanh
from .runtime import jit_kernel, load, next_power_of_2, row_blocks, store, tl, triton

# of a row's result: log p(target), log-sum-exp, the mean of log p, entropy
WIDTH = 4
BLOCK = 4096


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
    # the statistics [M, 4] that the forward writes
    y: Tensor | None
    # the gradients of the statistics [M, 4]
    dy: Tensor | None
    # the gradient of u [M, N] that the backward writes
    dz: Tensor | None


@triton.jit
def bounded(u, scale, softcap):
    """Return softcap(scale u) and its slope."""
    z = u * scale
    slope = u * 0.0 + scale
    if softcap is not None:
        t = tanh(z / softcap, z, EXACT=True)[0]
        z = softcap * t
        slope = (1.0 - t * t) * scale
    return z, slope


@triton.jit
def row_statistics(u, n, scale, softcap, sharpness, ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    """Return log-sum-exp, mean and entropy of one row of logits."""
    # finite, so that a first block of -inf makes no NaN
    top = -3.0e38
    total = 0.0
    plain = 0.0
    weighted = 0.0
    for start in range(0, n, BLOCK):
        rn = start + tl.arange(0, BLOCK)
        z = bounded(load(u + rn, rn < n), scale, softcap)[0] * sharpness
        plain += tl.sum(tl.where(rn < n, z, 0.0))
        now = tl.maximum(top, tl.max(tl.where(rn < n, z, float("-inf"))))
        e = tl.where(rn < n, tl.exp(z - now), 0.0)
        shrink = tl.exp(top - now)
        total = total * shrink + tl.sum(e)
        if ENTROPY:
            weighted = weighted * shrink + tl.sum(e * tl.where(e == 0.0, 0.0, z))
        top = now
    lse = top + tl.log(total)
    return lse, plain / n, lse - weighted / total if ENTROPY else 0.0


@jit_kernel
def cross_entropy_kernel(
    t, n, ignored, scale, softcap, sharpness, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute the statistics of one row of `t`, LogitRows; or its dz, which may be its u."""
    row = tl.program_id(0).to(tl.int64)
    u = t.u + row * n
    target = tl.load(t.target + row)
    is_counted = target != ignored
    lse, mean, entropy = row_statistics(u, n, scale, softcap, sharpness, ENTROPY, BLOCK)
    column = tl.arange(0, 4)
    if t.dy is None:
        z_target = bounded(load(u + target, is_counted), scale, softcap)[0] * sharpness
        y = tl.where(column == 0, z_target - lse, tl.where(column == 1, lse, entropy))
        y = tl.where(column == 2, mean - lse, y)
        tl.store(t.y + row * 4 + column, tl.where(is_counted, y, 0.0))
    else:
        dy = tl.load(t.dy + row * 4 + column)
        d_target = tl.sum(tl.where(column == 0, dy, 0.0))
        d_lse = tl.sum(tl.where(column == 1, dy, 0.0))
        d_mean = tl.sum(tl.where(column == 2, dy, 0.0))
        d_entropy = tl.sum(tl.where(column == 3, dy, 0.0))
        for start in range(0, n, BLOCK):
            rn = start + tl.arange(0, BLOCK)
            z, slope = bounded(load(u + rn, rn < n), scale, softcap)
            logp = z * sharpness - lse
            p = tl.exp(logp)
            dz = (
                p * (d_lse - d_target - d_mean) + d_mean / n + tl.where(rn == target, d_target, 0.0)
            )
            if ENTROPY:
                dz -= p * (tl.where(p == 0.0, 0.0, logp) + entropy) * d_entropy
            dz = tl.where(is_counted, dz * slope * sharpness, 0.0)
            store(t.dz + row * n + rn, dz, rn < n)


def launch(rows: LogitRows, rule: LogitRule) -> None:
    """Run the kernel on every row."""
    m, n = rows.u.shape
    numbers = rule.ignore_index, rule.scale, rule.softcap, rule.sharpness
    block = min(BLOCK, next_power_of_2(n))
    cross_entropy_kernel[(m,)](
        rows, n, *numbers, ENTROPY=rule.entropy, BLOCK=block, num_warps=8 if block > 512 else 1
    )


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
    dy: Tensor, u: Tensor, target: Tensor, rule: LogitRule, kernel: str, dz: Tensor | None = None
) -> Tensor:
    """Return the gradient [M, N] of u from dy [M, 4], in `dz`, which may be u."""
    target = target.reshape(-1).contiguous()
    dy = dy.contiguous()
    dz = torch.empty_like(u, memory_format=torch.contiguous_format) if dz is None else dz
    if kernel != "aten":
        if u.shape[0]:
            launch(LogitRows(u.contiguous(), target, None, dy, dz), rule)
        return dz
    for rows in row_blocks(u):
        value, slope = logits(u[rows], rule)
        counted = (target[rows] != rule.ignore_index)[:, None]
        # of a mean of no tokens the gradient is infinite, and NaN times zero
        d_target, d_lse, d_mean, d_entropy = dy[rows].masked_fill(~counted, 0.0).split(1, 1)
        p = torch.log_softmax(value, 1).exp_()
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
