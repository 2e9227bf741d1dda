"""Log-probabilities of k chosen classes of each row, beside the statistics of `cross_entropy.py`.

In torch's ops on [M, k]: little beside the passes over logits [M, N], which stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import cross_entropy
from .cross_entropy import WIDTH, LogitRule, logits


def statistics(u: Tensor, target: Tensor, ids: Tensor, rule: LogitRule, kernel: str) -> Tensor:
    """Return [M, 4 + k]: `cross_entropy.statistics`, and log p of the classes ids [M, k]."""
    y = cross_entropy.statistics(u, target, rule, kernel)
    is_counted = counted(target, ids, rule)
    z = logits(u.gather(1, torch.where(is_counted, ids, 0)), rule)[0]
    return torch.cat((y, torch.where(is_counted, z - y[:, 1:2], 0.0)), 1)


def eager_statistics(u: Tensor, target: Tensor, ids: Tensor, rule: LogitRule) -> Tensor:
    """Return the same [..., 4 + k] in torch's ops, which autograd differentiates."""
    is_counted = counted(target, ids, rule)
    logp = torch.log_softmax(logits(u, rule)[0], -1).gather(-1, torch.where(is_counted, ids, 0))
    y = cross_entropy.eager_statistics(u, target, rule)
    return torch.cat((y, logp.masked_fill(~is_counted, 0.0)), -1)


def counted(target: Tensor, ids: Tensor, rule: LogitRule) -> Tensor:
    """Return which ids [..., k] are not ignored, in rows where the target [..., 1] is not."""
    return (target != rule.ignore_index) & (ids != rule.ignore_index)


def statistics_grad(
    dy: Tensor,
    u: Tensor,
    target: Tensor,
    ids: Tensor,
    y: Tensor,
    rule: LogitRule,
    kernel: str,
    dz: Tensor | None = None,
) -> Tensor:
    """Return the gradient [M, N] of u from dy and y [M, 4 + k], in `dz`, or over u."""
    is_counted = counted(target, ids, rule)
    d_chosen = dy[:, WIDTH:].masked_fill(~is_counted, 0.0)
    d_own = dy[:, :WIDTH].masked_fill(target == rule.ignore_index, 0.0)
    # log p = z - log-sum-exp
    d_own[:, 1] -= d_chosen.sum(1)
    # an id that is ignored, or a row, takes the place of its target, or class 0
    places = torch.where(target == rule.ignore_index, 0, target)
    places = torch.cat((places, torch.where(is_counted, ids, places)), 1)
    logp = torch.cat((y[:, :1], torch.where(is_counted, y[:, WIDTH:], y[:, :1])), 1)
    d_logp = torch.cat((d_own[:, :1], d_chosen), 1)
    places, logp, sums = _join_equals(places, logp, d_logp)
    at_places = _grad_at(logp, sums, d_own, y, u.shape[1], rule)
    at_places = at_places.masked_fill(target == rule.ignore_index, 0.0)
    dz = cross_entropy.statistics_grad(d_own, u, target, y[:, :WIDTH], rule, kernel, dz)
    return dz.scatter_(1, places, at_places.to(dz.dtype))


def _join_equals(ids: Tensor, logp: Tensor, d_logp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return sorted ids, with one log p and one sum of gradients for all equal ones of a row.

    So equal ids store equal bits in any order, and sums have the same order in each run.
    """
    ids, order = ids.sort(stable=True, dim=1)
    first = torch.searchsorted(ids, ids)
    # one thread of a CPU adds a row in order
    sums = sum_at(first, d_logp.gather(1, order), sorts=not ids.is_cpu)
    return ids, logp.gather(1, order).gather(1, first), sums.gather(1, first)


def sum_at(places: Tensor, values: Tensor, sorts: bool) -> Tensor:
    """Return the sums of each row's values by their places, all [M, k].

    sorts: sort by places once more, where scatter_add_ adds in any order, as on a GPU.
    """
    sums = torch.zeros_like(values)
    if not sorts:
        return sums.scatter_add_(1, places, values)
    rows = torch.arange(len(places), device=places.device)[:, None].expand_as(places)
    return sums.index_put_((rows, places), values, accumulate=True)


def _grad_at(
    logp: Tensor, sums: Tensor, d_own: Tensor, y: Tensor, n: int, rule: LogitRule
) -> Tensor:
    """Return the gradient at the chosen classes, which is rounded once, when it is stored.

    Distillation's is a difference of two probabilities: a sum with a rounded gradient loses it.
    """
    d_target, d_lse, d_mean, d_entropy = d_own.split(1, 1)
    p = logp.exp()
    grad = p * (d_lse - d_target - d_mean) + d_mean / n + sums
    if rule.entropy:
        grad = grad - p * (logp.masked_fill(p == 0.0, 0.0) + y[:, 3:4]) * d_entropy
    slope = rule.scale * rule.sharpness
    if rule.softcap is None:
        return grad * slope
    t = (logp + y[:, 1:2]) / (rule.softcap * rule.sharpness)
    return grad * ((1 - t * t) * slope)
