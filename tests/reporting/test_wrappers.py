"""Reports and plans leave the reducer of DDP, and the root of FSDP2, as these were."""

from __future__ import annotations

import copy
from typing import Any

import torch
from plan_models import planned, transformer
from support import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedckpt

OPTIONS: list[dict[str, Any]] = [
    {"static_graph": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
]


class Branches(nn.Module):
    """Two recurrent branches, of which a step runs one, and a head that both share."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.LSTM(8, 8, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 8)
        self.uses = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.branches[self.uses](x)[0]).square().mean()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Return the gradients of three steps' last one, which no rank waits for in vain."""
    for _ in range(3):
        model.zero_grad()
        model(x).backward()
    return [p.grad for p in model.parameters()]


def check_first_step(rank: int, options: dict[str, Any], num_steps: int, way: str) -> None:
    """A loop goes on behind a report or a plan, before its first step and after it."""
    torch.manual_seed(0)
    model = transformer(2)
    batch = torch.randint(128, (2, 2, 16))
    whole = copy.deepcopy(model)
    parallel = DistributedDataParallel(model, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(num_steps):
        parallel.zero_grad()
        parallel(batch[rank]).backward()
    before = [*model.parameters()]
    if way == "report":
        reported = fusedckpt.report(parallel, batch[rank], optimizer=optimizer)
        alone = fusedckpt.report(copy.deepcopy(model), batch[rank])
        assert reported.saved_bytes == alone.saved_bytes
        assert reported.optimizer_bytes
        buckets = sum(p.nbytes for p in model.parameters())
        assert reported.resident_bytes == alone.resident_bytes + reported.optimizer_bytes + buckets
    else:
        planned(parallel, batch[rank], policy="uniform:2", optimizer=optimizer).apply(parallel)
    assert not optimizer.state
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    whole(batch.flatten(0, 1)).backward()
    for ours, theirs in zip(gradients(parallel, batch[rank]), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad)


def check_unused(rank: int) -> None:
    """The parameters that a report used are unused in the loop's first step, if they are."""
    torch.manual_seed(0)
    model = Branches()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    x = torch.randn(2, 3, 8)
    model.uses = 1
    fusedckpt.report(parallel, x)
    planned(parallel, x, policy="all", units=["head"])
    model.uses = 0
    parallel(x).backward()
    used, unused = ([p.grad is not None for p in lstm.parameters()] for lstm in model.branches)
    assert all(used)
    assert not any(unused)


def check_root(rank: int) -> None:
    """A report of a sharded part is no first forward, before it nor after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    whole = copy.deepcopy(model)
    x = torch.randn(2, 4, 8)
    mesh = init_device_mesh("cpu", (2,))
    for part in model:
        fully_shard(part, mesh=mesh)
    before = fusedckpt.report(model[0], x[rank])
    assert fusedckpt.report(model, x[rank]).saved_bytes > 0
    fully_shard(model, mesh=mesh)
    fusedckpt.report(model[1], x[rank])
    model(x[rank]).square().mean().backward()
    whole(x).square().mean().backward()
    assert fusedckpt.report(model[0], x[rank]).saved_bytes == before.saved_bytes
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        gradient: Any = ours.grad
        torch.testing.assert_close(gradient.full_tensor(), theirs.grad)


def main(rank: int) -> None:
    for options in OPTIONS:
        for num_steps in (0, 1):
            for way in ("report", "plan"):
                check_first_step(rank, options, num_steps, way)
    check_unused(rank)
    check_root(rank)


def test_first_steps(tmp_path):
    run_ranks(main, tmp_path)
