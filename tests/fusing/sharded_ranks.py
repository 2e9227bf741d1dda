"""One of two ranks: fused models under tensor and data parallelism, and fuse of sharded ones.

Run by test_sharded.py as `sharded_ranks.py STORE RANK`.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from own_classes import LlamaRMSNorm  # after the path is set
from support import as_rank
from tensor_parallel import D, F, GatedMLP, replicated, same, whole

from fusedckpt import fuse
from fusedckpt.autograd.dispatch import forced_path


class Dropping(GatedMLP):
    def __init__(self, p: float):
        super().__init__(bias=True)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return self.down_proj(self.drop(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    norms = nn.Sequential(nn.LayerNorm(D), LlamaRMSNorm(D), nn.RMSNorm(D))
    mlp = nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Linear(F, D))
    return nn.Sequential(norms, GatedMLP(bias=True), mlp)


NAMES = ["0.0", "0.1", "0.2", "1", "2.0"]


def tensor_parallel(model: nn.Sequential, mesh) -> nn.Sequential:
    """Norms on parts of the sequence, an MLP on parts of its features."""
    for norm in model[0]:
        parallelize_module(norm, mesh, SequenceParallel())
    parallelize_module(model[1], mesh, replicated(model[1]))
    return model


def outputs(model: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    n = model[0](x)
    y = model[2](model[1](whole(n)))
    y.square().sum().backward()
    return [y, *(p.grad for p in model.parameters())]


def check_tensor_parallel(mesh) -> None:
    eager, fused = build(), build()
    report = fuse(fused)
    assert list(report.swapped) == NAMES, report
    x = torch.randn(2, 4, D)
    same(*(outputs(tensor_parallel(m, mesh), x) for m in (fused, eager)))
    assert report.fallbacks == {}, report
    after = fuse(tensor_parallel(build(), mesh))
    assert (after.swapped, after.left) == (report.swapped, {}), after


def check_dropout(mesh) -> None:
    """What drops inside runs its class, with the draws of each rank."""
    torch.manual_seed(1)
    eager, x = Dropping(0.5), torch.randn(4, D, requires_grad=True)
    fused = copy.deepcopy(eager)
    report = fuse(fused)
    for model in (eager, fused):
        parallelize_module(model, mesh, replicated(model))
    torch.testing.assert_close(fused.eval()(x), eager.eval()(x))
    assert report.fallbacks == {}, report
    found = []
    for model in (eager.train(), fused.train()):
        torch.manual_seed(2 + mesh.get_local_rank())
        found.append(model(x))
    torch.testing.assert_close(*found)
    assert report.fallbacks == {"": "drop drops inside while training"}, report


def check_fuse_of_sharded(mesh) -> None:
    why = "its parameters are sharded by FSDP: fuse before sharding"

    def each(model):
        for part in (*model[0], *model[1:]):
            fully_shard(part, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    cpu = torch.device("cpu")
    ways = {
        "flat": lambda m: FullyShardedDataParallel(m, device_id=cpu),
        "original": lambda m: FullyShardedDataParallel(m, device_id=cpu, use_orig_params=True),
        "fully_shard": lambda m: fully_shard(m, mesh=mesh),
        "of each module": each,
    }
    x = torch.randn(3, D)
    for way, shard in ways.items():
        model = shard(build())
        expected = model(x)
        # between two forwards, the memory of what was gathered is free
        expected.sum().backward()
        report = fuse(model)
        assert report.swapped == {}, (way, report)
        prefix = "_fsdp_wrapped_module." if isinstance(model, FullyShardedDataParallel) else ""
        assert report.left == {prefix + name: why for name in NAMES}, (way, report)
        torch.testing.assert_close(model(x), expected)


def check_fused_then_sharded(mesh) -> None:
    eager, fused = build(), build()
    report = fuse(fused)
    for shard in (
        lambda m: FullyShardedDataParallel(m, device_id=torch.device("cpu")),
        lambda m: fully_shard(m, mesh=mesh),
    ):
        x = torch.randn(3, D)
        model = shard(copy.deepcopy(fused))
        torch.testing.assert_close(model(x), eager(x))
        again = fuse(model)
        assert (again.swapped, again.left) == ({}, {}), again
        assert sorted(again.already.values()) == sorted(report.swapped.values()), again


def main(_: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    check_tensor_parallel(mesh)
    check_dropout(mesh)
    check_fuse_of_sharded(mesh)
    check_fused_then_sharded(mesh)


if __name__ == "__main__":
    with forced_path("aten"):
        as_rank(main)
