"""One of four ranks: fused blocks under tensor or sequence parallelism and FSDP2 together.

Run by test_sharded.py as `mesh_ranks.py STORE RANK`.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from support import as_rank  # after the path is set
from tensor_parallel import (
    MLP,
    Block,
    GatedMLP,
    Ranks,
    alike,
    as_dtensors,
    gathered_by_each,
    gathered_once,
    replicated,
)

from fusedckpt import checkpoint, fuse
from fusedckpt.autograd.dispatch import forced_path


def sharded(model: nn.Module, mesh: Any, way: Any) -> nn.Module:
    parallelize_module(model, mesh["tp"], way(model))
    for module in (*model.children(), model):
        # gloo has no sum that is scaled
        fully_shard(module, mesh=mesh["dp"]).set_force_sum_reduction_for_comms(True)
    return model


def trained(ranks: Ranks, model: nn.Module, way: Any) -> list[Any]:
    """Return outputs and gradients of two steps, each with an input of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for call in (model, lambda x: checkpoint(model, x)):
        found += ranks.results(model, way, call)
        optimizer.step()
    return found


def main(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ranks = Ranks(mesh["tp"], rank % 2)
    # every replica has data of its own
    ranks.x, ranks.dy = ranks.x + rank // 2, ranks.dy - rank // 2
    for way in (replicated, gathered_once, gathered_by_each, as_dtensors):
        for mlp in (GatedMLP(bias=True), MLP()):
            eager = Block(mlp)
            for parameter in eager.parameters():
                torch.distributed.broadcast(parameter.data, 0)
            fused = copy.deepcopy(eager)
            report = fuse(fused, verify=False)
            fused, eager = (sharded(model, mesh, way) for model in (fused, eager))
            alike(trained(ranks, fused, way), trained(ranks, eager, way))
            assert len(report.swapped) == 2, report
            assert report.fallbacks == {}, report
            # laid out over the other ranks
            for model in (fused.mlp, eager.mlp):
                with pytest.raises(Exception, match="mesh"):
                    model(DTensor.from_local(ranks.x, mesh["dp"], [Replicate()]))


if __name__ == "__main__":
    with forced_path("aten"):
        as_rank(main, 4)
