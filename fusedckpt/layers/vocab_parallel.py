"""The head on a weight with its classes sharded over ranks: each rank makes its own logits alone.

A rank finds the statistics of its classes by the same Function as without ranks. Those of all
classes follow from them: three reductions of a number for each token, or four with the entropy.
Backward reduces the gradient of x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedckpt.kernels.cross_entropy import LogitRule
from fusedckpt.layers import parallel

__all__ = ["shares_classes", "statistics"]


def shares_classes(name: str, x: Any, weight: Any, target: Any, bias: Any) -> bool:
    """Whether the weight and the bias are sharded by classes; refuse tensors that do not fit."""
    if not parallel.is_sharded(weight):
        return False
    split = (parallel.library().Shard(0),)
    if weight.placements != split:
        return False
    mesh = weight.device_mesh
    if not parallel.is_sharded(x) or x.device_mesh != mesh:
        raise ValueError(
            f"{name}: x must be a DTensor on the mesh of weight, which is sharded by its classes, "
            f"got {type(x).__name__}"
        )
    if type(target) is not Tensor or target.shape != x.shape[:-1]:
        raise ValueError(
            f"{name}: target must be a plain tensor {list(x.shape[:-1])}, the same on every rank, "
            f"got a {type(target).__name__} {list(target.shape)}"
        )
    if bias is not None and getattr(bias, "placements", None) != split:
        raise ValueError(f"{name}: bias must be sharded as weight is")
    if weight.shape[0] % mesh.size():
        raise ValueError(
            f"{name}: weight must have as many classes on each of {mesh.size()} ranks, got "
            f"{weight.shape[0]}"
        )
    return True


def statistics(
    own: Callable[..., Tensor], rule: LogitRule, x: Any, weight: Any, target: Tensor, bias: Any
) -> Tensor:
    """Return [..., 4] of each token, the same on every rank; see `kernels/cross_entropy.py`.

    own: the same of one rank's tensors, with -1 as the target of tokens that are ignored.
    """
    mesh, found = weight.device_mesh, parallel.library()
    x = x.redistribute(placements=[found.Replicate()])
    x = x.to_local(grad_placements=[found.Partial()])
    classes = weight.shape[0] // mesh.size()
    place, counted = target - mesh.get_local_rank() * classes, target != rule.ignore_index
    is_own = (place >= 0) & (place < classes) & counted
    place = torch.where(is_own, place, counted.long() - 1)
    local = own(x, weight.to_local(), place, None if bias is None else bias.to_local())
    logp, lse, mean, entropy = local.unbind(-1)

    def total(part: Tensor, by: str = "sum") -> Tensor:
        partial = found.DTensor.from_local(part, mesh, [found.Partial(by)], run_check=False)
        return partial.redistribute(placements=[found.Replicate()]).to_local()

    top = total(lse.detach(), "max")
    share = (lse - top).exp()
    # a rank's part may read no total but top: gradients of totals are not summed over ranks
    shares = total(share)
    whole = top + shares.log()
    target_logit = total(torch.where(is_own, logp + lse, 0.0))
    mean_logit = total(mean + lse) / mesh.size()
    expected = total(share * (lse - entropy)) / shares if rule.entropy else whole
    every = (target_logit - whole, whole, mean_logit - whole, whole - expected)
    return torch.stack(every, -1).masked_fill(~counted.unsqueeze(-1), 0.0)
