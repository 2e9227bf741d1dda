"""Recipes on two ranks: DDP, and FSDP2, which gathers the parameters of a unit for its calls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from recipe_nets import D, net, same, step, with_recipes
from support import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedckpt
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.memory import saved_tensors
from fusedckpt.recipes import recipe_mode


@forced_path("aten")
def on_a_rank(rank: int) -> None:
    recipe_mode.FLOOR_BYTES = 0
    mesh = init_device_mesh("cpu", (2,))
    for name in ("residual", "diffusion", "encoder"):
        eager, x = net(name, torch.float32)
        x = x + rank
        ours = with_recipes(eager)
        pairs = [DistributedDataParallel(copy.deepcopy(m)) for m in (ours, eager)]
        same(*[step(m, x) for m in pairs])
        for model in (ours, eager):
            for part in (*model, model):
                fully_shard(part, mesh=mesh).set_force_sum_reduction_for_comms(True)
        results = [step(m, x) for m in (ours, eager)]
        for a, b in zip(*results, strict=True):
            assert torch.equal(*[getattr(t, "_local_tensor", t) for t in (a, b)])

    for parallel in (DistributedDataParallel, partial(fully_shard, mesh=mesh)):
        compare_rounded(parallel, rank)


def compare_rounded(parallel: Callable[[nn.Module], nn.Module], rank: int) -> None:
    """Compare inputs in nine bits with inputs as they are, on a rank."""
    results = []
    for store in ("int8", None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(D, D), nn.RMSNorm(D), nn.Linear(D, D))
        fusedckpt.fuse(model, store=store)
        torch.manual_seed(rank)
        x = torch.randn(128, D)
        model = parallel(model)
        with saved_tensors([x]) as saved:
            y = model(x)
        y.sin().mean().backward()
        grads = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()]
        results.append((saved.nbytes, y.detach(), torch.cat([g.flatten() for g in grads])))
    (nbytes, y, found), (exact_nbytes, exact_y, expected) = results
    assert exact_nbytes - nbytes == 128 * D * (4 - 9 / 8)
    assert torch.equal(y, exact_y)
    assert 0 < (found - expected).norm() < 0.03 * expected.norm()


def test_on_two_ranks(tmp_path):
    """DDP, and FSDP2 of each block, which gathers parameters for a block's own backward alone."""
    run_ranks(on_a_rank, tmp_path)


class NormedView(nn.Module):
    """An MLP, and a norm of its result, of which it returns a view."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
        self.norm = nn.RMSNorm(D)

    def forward(self, x):
        return self.norm(self.mlp(x)).unsqueeze(0)[0]


class NormedViews(nn.Module):
    """Blocks, and an MLP that reads a view of the last one's result."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(NormedView() for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).unsqueeze(0)[0]
        return self.mlp(x)


@forced_path("aten")
def on_a_rank_of_post_norms(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    eager = NormedViews()
    ours = copy.deepcopy(eager)
    fusedckpt.fuse(ours)
    x = torch.randn(2, 4, D) + rank
    results: list[list[Tensor]] = []
    for model in (ours, eager):
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
        results.append([getattr(t, "_local_tensor", t) for t in step(model, x)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_a_norm_of_another_unit(tmp_path):
    """FSDP2 has freed its weight when backward reaches the MLP that reads its result."""
    run_ranks(on_a_rank_of_post_norms, tmp_path)
