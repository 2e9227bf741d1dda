"""Gradients in float32 on two ranks: averaged by DistributedDataParallel, and by FSDP2."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fusedckpt
from fusedckpt import accumulate_in_fp32

BF16 = torch.bfloat16


def main(rank: int) -> None:
    """Average 256 + 1 and 256 + 3 to 258 on two ranks, of which bfloat16 has 256 and 260."""
    for kind in ("ddp", "views", "fsdp", "shards of one"):
        layer = fusedckpt.Linear(4, 4, bias=False)
        nn.init.ones_(layer.weight)
        model = nn.Sequential(layer)
        if kind in ("ddp", "views"):
            model = DistributedDataParallel(model, gradient_as_bucket_view=kind == "views")
        else:
            sizes = (2,) if kind == "fsdp" else (2, 1)
            mesh = init_device_mesh(
                "cpu", sizes, mesh_dim_names=("replicate", "shard")[: len(sizes)]
            )
            policy = MixedPrecisionPolicy(BF16, torch.float32)
            fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
        accumulate_in_fp32(model)
        for _ in range(2):
            for value in (256.0, 1.0 + 2 * rank):
                is_last = value < 256
                without = nullcontext()
                if kind not in ("ddp", "views"):
                    model.set_requires_gradient_sync(is_last)
                elif not is_last:
                    without = model.no_sync()
                with without, torch.autocast("cpu", BF16, kind in ("ddp", "views")):
                    model(torch.full((1, 4), value)).sum().backward()
            grad = layer.weight.grad
            grad = grad.to_local() if isinstance(grad, DTensor) else grad
            assert grad.dtype == torch.float32, kind
            assert grad.eq(258).all(), (kind, grad)
            model.zero_grad(set_to_none=kind != "views")
    early = nn.Sequential(fusedckpt.Linear(4, 4))
    accumulate_in_fp32(early)
    fully_shard(early)
    with pytest.raises(RuntimeError, match="call accumulate_in_fp32 after"):
        early(torch.ones(1, 4))
    narrow = DistributedDataParallel(fusedckpt.Linear(4, 4, dtype=BF16))
    with pytest.raises(ValueError, match="buckets of DistributedDataParallel"):
        accumulate_in_fp32(narrow)
