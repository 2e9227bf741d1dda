"""FSDP2: fuse before sharding, checkpoint each block, train on several ranks.

    torchrun --nproc-per-node 2 -m bench.examples.fsdp2

Prints, on the first rank, the report of `fuse`, the losses, which fall, and that its parameters are
half of the model. Sharded, a model is no longer fused: `fuse` would leave and name its modules.
Here ranks talk by gloo on CPUs; with GPUs it is `torch.device("cuda", rank)` and nccl.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fusedckpt
from bench.models import Transformer

LAYERS, DIM, SEQ, STEPS = 2, 64, 64, 4


def main() -> tuple[list[float], float]:
    """Return the losses of this rank, and its share of the parameters."""
    torch.manual_seed(0)
    model: Any = Transformer(LAYERS, DIM, SEQ, mlp="swiglu")
    report = fusedckpt.fuse(model)
    # ours, aware of fused layers, in place of apply_activation_checkpointing
    for i, block in enumerate(model.blocks):
        model.blocks[i] = fusedckpt.checkpoint_module(block, save_regions=["attention"])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    weights: list[DTensor] = list(model.parameters())
    share = sum(w.to_local().numel() for w in weights) / sum(w.numel() for w in weights)
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = (torch.arange(2 * SEQ).view(2, SEQ) + dist.get_rank()) % 251
    for _ in range(STEPS):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(report)
        print(f"losses: {losses}\nthis rank has {share:.0%} of the parameters")
    return losses, share


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
