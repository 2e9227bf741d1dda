"""`chunks=` on two ranks: DistributedDataParallel and FSDP2 get each weight's gradient once."""

from __future__ import annotations

import copy

import torch
from support import randn
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import fusedckpt

ROWS, D, F = 7, 8, 12


def main(rank: int) -> None:
    """Compare averaged gradients with those of both ranks' rows, uncut; count what is reduced."""
    torch.manual_seed(0)
    layer = fusedckpt.GatedMLP(D, F, norm=fusedckpt.RMSNorm(D), residual=True, save="inputs")
    rows = randn(2, ROWS, D)
    truth = copy.deepcopy(layer)
    (truth(rows).tanh().square().sum() / 2).backward()
    for kind in ("ddp", "fsdp"):
        chunked = copy.deepcopy(layer)
        chunked.chunks = 3
        seen: list[torch.Size] = []
        for parameter in chunked.parameters():
            parameter.register_hook(lambda grad, seen=seen: seen.append(grad.shape))
        block = nn.Sequential(chunked, nn.Tanh())
        model = DistributedDataParallel(block) if kind == "ddp" else fully_shard(block)
        with CommDebugMode() as communication:
            model(rows[rank]).square().sum().backward()
        for mine, theirs in zip(chunked.parameters(), truth.parameters(), strict=True):
            grad = mine.grad
            grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
            torch.testing.assert_close(grad, theirs.grad)
        counts = communication.get_comm_counts()
        if kind == "ddp":
            # a gradient of each parameter, in one bucket
            assert len(seen) == len([*truth.parameters()]), seen
            assert counts[torch.ops.c10d.allreduce_] == 1, counts
        else:
            assert counts[torch.ops.c10d._reduce_scatter_base_] == 1, counts
