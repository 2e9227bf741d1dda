"""fuse before and after models are sharded over ranks."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from support import run_ranks
from tensor_parallel import (
    D,
    F,
    Ranks,
    alike,
    as_dtensors,
    fused_plan,
    gathered_by_each,
    gathered_once,
    make_block,
    make_mlp,
    make_swiglu,
    replicated,
    same,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from zoo import LlamaRMSNorm, SwiGLU

from fusedckpt import checkpoint, fuse
from fusedckpt.autograd.dispatch import forced_path


class DroppingSwiGLU(SwiGLU):
    def __init__(self, p: float):
        super().__init__(D, F, bias=True)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return self.down_proj(self.drop(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    norms = nn.Sequential(nn.LayerNorm(D), LlamaRMSNorm(D), nn.RMSNorm(D))
    mlp = nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Linear(F, D))
    return nn.Sequential(norms, make_swiglu(bias=True), mlp)


NAMES = ["0.0", "0.1", "0.2", "1", "2.0"]


def tensor_parallel(model: nn.Sequential, mesh) -> nn.Sequential:
    """Norms on parts of the sequence, an MLP on parts of its features: by our style if fused."""
    for norm in model[0]:
        parallelize_module(norm, mesh, SequenceParallel())
    is_fused = hasattr(model[1], "linears_to_shard")
    style = fused_plan(model[1], replicated) if is_fused else replicated(model[1])
    parallelize_module(model[1], mesh, style)
    return model


def outputs(model: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    n = model[0](x)
    y = model[2](model[1](whole(n)))
    y.square().sum().backward()
    return [y, *(p.grad for p in model.parameters())]


def check_tensor_parallel(mesh) -> None:
    eager, fused = build(), build()
    report = fuse(fused, verify=False)
    assert list(report.swapped) == NAMES, report
    x = torch.randn(2, 4, D)
    same(*(outputs(tensor_parallel(m, mesh), x) for m in (fused, eager)))
    assert report.fallbacks == {}, report
    after = fuse(tensor_parallel(build(), mesh), verify=False)
    assert [*after.swapped] == [name for name in NAMES if name != "1"], after
    assert [*after.left] == ["1"], after


def check_dropout(mesh) -> None:
    """A block that drops hidden features is refused, or runs on DTensors if it drops later."""
    torch.manual_seed(1)
    eager, x = DroppingSwiGLU(0.5), torch.randn(4, D, requires_grad=True)
    fused = copy.deepcopy(eager)
    report = fuse(fused, verify=False)
    with pytest.raises(ValueError, match="it applies dropout to its hidden features"):
        parallelize_module(fused, mesh, fused_plan(fused, replicated))
    fused.drop.p = 0.0
    parallelize_module(fused, mesh, fused_plan(fused, replicated))
    torch.testing.assert_close(fused(x), eager.eval()(x))
    assert report.fallbacks == {}, report
    fused.drop.p = 0.5
    fused(x).sum().backward()
    assert report.fallbacks == {"": ("dropout", "drop")}, report
    # scaled by 2 or dropped: the same in the mean
    samples = torch.stack([fused(x).detach() for _ in range(400)])
    error = (samples.mean(0) - eager(x)).abs()
    assert (error < 6 * samples.std(0) / 20).all()
    assert (error > 0).all()


def check_fuse_of_sharded(mesh) -> None:
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
        report = fuse(model, verify=False)
        assert report.swapped == {}, (way, report)
        prefix = "_fsdp_wrapped_module." if isinstance(model, FullyShardedDataParallel) else ""
        assert report.left == {prefix + name: ("fsdp", "") for name in NAMES}, (way, report)
        torch.testing.assert_close(model(x), expected)


def check_fused_then_sharded(mesh) -> None:
    eager, fused = build(), build()
    report = fuse(fused, verify=False)
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


@forced_path("aten")
def on_a_rank(_: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    check_tensor_parallel(mesh)
    check_dropout(mesh)
    check_fuse_of_sharded(mesh)
    check_fused_then_sharded(mesh)


def test_on_two_ranks(tmp_path):
    """Fused models under tensor and data parallelism, and fuse of sharded ones."""
    run_ranks(on_a_rank, tmp_path)


def sharded(model: nn.Module, mesh: Any, plan: Any) -> nn.Module:
    parallelize_module(model, mesh["tp"], plan)
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


@forced_path("aten")
def on_a_mesh(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ranks = Ranks(mesh["tp"], rank % 2)
    # every replica has data of its own
    ranks.x, ranks.dy = ranks.x + rank // 2, ranks.dy - rank // 2
    ways = (replicated, gathered_once, gathered_by_each, as_dtensors)
    for way, make in zip(ways, (make_mlp, partial(make_swiglu, bias=True)) * 2, strict=True):
        eager = make_block(make())
        for parameter in eager.parameters():
            torch.distributed.broadcast(parameter.data, 0)
        fused = copy.deepcopy(eager)
        report = fuse(fused, verify=False)
        fused = sharded(fused, mesh, fused_plan(fused, way))
        eager = sharded(eager, mesh, way(eager))
        alike(trained(ranks, fused, way), trained(ranks, eager, way))
        assert len(report.swapped) == 2, report
        assert report.fallbacks == {}, report
        # laid out over the other ranks
        for model in (fused.mlp, eager.mlp):
            with pytest.raises(Exception, match="mesh"):
                model(DTensor.from_local(ranks.x, mesh["dp"], [Replicate()]))


def test_on_a_mesh_of_four_ranks(tmp_path):
    """Fused blocks under tensor or sequence parallelism and FSDP2 together."""
    run_ranks(on_a_mesh, tmp_path, 4)
