"""Two ranks agree before one of them plans for both, and take steps under that plan."""

from __future__ import annotations

import copy
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plan_models import count_calls, planned, tokens, transformer
from support import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from fusedckpt.memory import nbytes_of, peak_bytes
from fusedckpt.planning import planner, ranks, roles, trials
from fusedckpt.planning.offloading import CopyRates


def errors(model: nn.Module, x: torch.Tensor, **options: Any) -> list[str]:
    """Return what each rank's call raises."""
    try:
        planned(model, x, **options)
        error = "nothing"
    except ValueError as raised:
        error = str(raised)
    found = [""] * 2
    dist.all_gather_object(found, error)
    return found


def check_who_raises(rank: int) -> None:
    """What the first rank raises, all raise; the arguments of others do not count."""
    x = tokens()
    first, second = errors(transformer(1), x, budget=-1 if rank == 0 else "10MiB")
    assert first == second
    assert first.startswith("plan: a budget is bytes"), first
    assert errors(transformer(1), x, policy="all" if rank == 0 else "none") == ["nothing"] * 2
    # all ranks copy at once
    copies = list[torch.device]()
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr(planner, "copy_rates", lambda at: (copies.append(at), CopyRates())[1])
        planned(transformer(1), x, policy="all", offload=True)
    assert copies == [x.device]
    first, second = errors(transformer(1), x, budget=10)
    assert first == second
    assert "least feasible" in first
    error, message = [(KeyError, "missing"), (RuntimeError, "rank 0 raised KeyError: 'missing'")][
        rank
    ]
    with pytest.raises(error, match=message):
        planned(transformer(1), x, policy="all", loss=lambda _: {}["missing"])

    norm = nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    )
    with pytest.raises(ValueError, match=r"^plan: 1 is a SyncBatchNorm, .*plan first, then"):
        planned(norm, torch.ones(2, 1, 4, 4), policy="all", group=False)


def check_other_structures(rank: int) -> None:
    """A rank with another model is told of that where it applies the plan."""
    model = transformer(1)
    if rank:
        model.blocks[0].out = nn.Linear(64, 64, bias=False)
    plan = planned(model, tokens(), policy="all")
    if rank:
        with pytest.raises(ValueError, match="the plan was made for a"):
            plan.apply(model)
    else:
        plan.apply(model)


def check_who_is_alone(rank: int) -> None:
    """A rank that does not call is told of by the others; gloo has no group after that."""
    ranks._PATIENCE, group = timedelta(seconds=0.2), dist.new_group([0, 1])
    if rank == 0:
        with pytest.raises(ValueError, match=r"all ranks of the group \[0, 1\] must call plan"):
            planned(transformer(1), tokens(), policy="all", group=group)


def check_groups(rank: int) -> None:
    """Ranks with a group of their own, or none, plan for themselves."""
    x, model = tokens(), transformer(2 + rank)
    names = [f"blocks.{i}" for i in range(2 + rank)]
    own = [dist.new_group([i]) for i in (0, 1)][rank]
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
    for group in (own, False, mesh):
        found = planned(model, x, policy=names, group=group)
        assert names == [unit.name for unit in found.chain.units]
    found = errors(model, x, policy="all", group=init_device_mesh("cpu", (2, 1)))
    assert all("group must be a mesh of one dimension" in error for error in found), found


def check_one_measures(rank: int) -> None:
    model = transformer(2)
    calls = count_calls(model)
    found = planned(model, tokens(), policy="sqrt")
    assert (next(calls) > 0) == (rank == 0)
    pages = [""] * 2
    dist.all_gather_object(pages, str(found))
    assert pages[0] == pages[1]


def check_micro_batches_of_ddp(rank: int) -> None:
    """Two micro-batches on each of two ranks, within a budget, are a batch in one process."""
    torch.manual_seed(0)
    model, batch = transformer(2), torch.randint(128, (16, 64))
    whole = copy.deepcopy(model)
    parallel = DistributedDataParallel(model)
    mine = batch.view(2, 2, 4, 64)[rank]
    least, most = (
        planned(parallel, mine[0], policy=policy, accumulate=2).measured_bytes
        for policy in ("memory", "none")
    )
    budget = (least + most) // 2
    found = planned(parallel, mine[0], budget=budget, accumulate=2)
    found.apply(parallel)

    def step() -> None:
        parallel.zero_grad()
        with parallel.no_sync():
            (parallel(mine[0]) / 2).backward()
        (parallel(mine[1]) / 2).backward()

    def steps() -> None:
        # the second of these makes the buckets anew, so that they are seen
        for _ in range(3):
            step()

    held = nbytes_of([*model.parameters(), *model.buffers(), mine[0], mine[1]])
    peak = held + peak_bytes(steps)
    assert peak <= budget, (peak, budget)
    # between them: another micro-batch
    assert peak <= found.predicted_bytes + nbytes_of([mine[0]]) <= 1.03 * peak
    for part in batch.split(4):
        (whole(part) / 4).backward()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def _note(outputs: list[StorageWeakRef], block: nn.Module, args: Any, output: torch.Tensor) -> None:
    outputs.append(StorageWeakRef(output.untyped_storage()))


def check_sharded(rank: int, policy: str, dropped: list[bool]) -> None:
    """Segments of modules that FSDP2 shards train as one process does, and keep their inputs.

    dropped: whether what each block returns is no input that is kept.
    """
    torch.manual_seed(0)
    model, batch = transformer(4), torch.randint(128, (2, 4, 64))
    plain, x = copy.deepcopy(model), batch[rank]
    plain(batch.flatten(0, 1)).backward()
    names = [f"blocks.{i}" for i in range(4)]
    found = planned(model, x, policy=policy, units=names)
    mesh = init_device_mesh("cpu", (2,))
    for is_applied_first in (True, False):
        sharded = copy.deepcopy(model)
        if is_applied_first:
            found.apply(sharded)
        outputs: list[StorageWeakRef] = []
        for block in sharded.blocks:
            fully_shard(block, mesh=mesh).register_forward_hook(partial(_note, outputs))
        fully_shard(sharded, mesh=mesh)
        if not is_applied_first:
            found.apply(sharded)
        for _ in range(2):
            sharded.zero_grad()
            outputs.clear()
            loss = sharded(x)
            # the last one is the norm's input, which autograd keeps
            assert [storage.expired() for storage in outputs] == dropped
            loss.backward()
        for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        found.undo(sharded)
        assert type(sharded.blocks[0]).__name__ == "FSDPBlock"
        assert not any(roles.is_assigned(module) for module in sharded.modules())
        sharded(x).backward()


def main(rank: int) -> None:
    torch.manual_seed(0)
    # of pairs of steps one is timed
    trials._SECONDS = 0.0
    check_other_structures(rank)
    check_who_raises(rank)
    check_groups(rank)
    check_one_measures(rank)
    check_micro_batches_of_ddp(rank)
    check_sharded(rank, "uniform:2", [True, False, True, False])
    check_who_is_alone(rank)


def test_on_two_ranks(tmp_path):
    run_ranks(main, tmp_path)
