"""One of two ranks: gradients under DDP and FSDP2 with checkpoints equal those without.

Run by test_checkpoint_wrapper.py as `checkpoint_ranks.py STORE RANK`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))

from fusedckpt import Checkpoint, checkpoint  # after the path is set


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.unused = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return x + self.fc2(self.fc1(x).tanh()).sin()


class Model(nn.Module):
    def __init__(self, wrap: Callable[[Block], nn.Module], call: Callable[..., Any]):
        super().__init__()
        self.call = call
        self.blocks = nn.ModuleList(wrap(Block()) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = self.call(block, x)
        return x


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def keep(block: Block) -> Block:
    return block


def sharded(wrap: Any, call: Any, policy: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
    if policy is not None:
        options["mp_policy"] = policy
    model = Model(lambda block: fully_shard(wrap(block), **options), call)
    return fully_shard(model, **options)


def gradients(build: Callable[..., nn.Module], rank: int, *wraps: Any) -> list[Tensor | None]:
    """Return the gradients of a second step."""
    torch.manual_seed(0)
    model = build(*wraps)
    torch.manual_seed(rank + 1)
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]


def main(store: str, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    builds = {
        "ddp": lambda wrap, call: DistributedDataParallel(
            Model(wrap, call), find_unused_parameters=True
        ),
        "ddp static": lambda wrap, call: DistributedDataParallel(
            Model(wrap, call), static_graph=True
        ),
        "fsdp": partial(sharded, policy=None),
        "fsdp bf16": partial(sharded, policy=half),
    }
    for name, build in builds.items():
        expected = gradients(build, rank, keep, plain)
        assert sum(grad is not None for grad in expected) == 8
        # the checkpoint inside of what shards, and outside
        for wraps in ((Checkpoint, plain), (keep, checkpoint)):
            found = gradients(build, rank, *wraps)
            for a, b in zip(found, expected, strict=True):
                assert a is b is None or torch.equal(a, b), (name, wraps)
    with pytest.raises(TypeError, match="fully_shard the Checkpoint"):
        Checkpoint(fully_shard(Block()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    sys.stdout.flush()
    # gloo's threads may abort while a busy interpreter takes itself down
    os._exit(0)
