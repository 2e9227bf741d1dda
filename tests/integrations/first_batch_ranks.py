"""One of two ranks: a plan and a report on the first batch, inside DDP, around it, and on FSDP2.

Run by test_first_batch.py as `first_batch_ranks.py STORE RANK`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import as_rank  # after the path is set

import fusedckpt
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.integrations.first_batch import at_first_batch

STEPS = 2


def build() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))
    model = nn.Sequential(*blocks)
    fusedckpt.fuse(model)
    return model


def trained(rank: int, wrap: Callable[[nn.Module], nn.Module], **options: Any) -> list[Tensor]:
    """Return the losses and the gradients of a few steps, looked at on the first batch or not."""
    model = build()
    if options.pop("inside", False):
        at_first_batch(model, **options)
        options = {}
    wrapped = wrap(model)
    if options:
        at_first_batch(wrapped, **options)
    found = []
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        if wrap is not DistributedDataParallel:
            # an accumulation loop: the last backward reduces what all of them found
            wrapped.set_requires_gradient_sync(step == STEPS - 1)
        loss = wrapped(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        found.append(loss.detach())
        if options and wrap is not DistributedDataParallel:
            fusedckpt.report(wrapped, torch.randn(4, 8, generator=generator.clone_state()))
    grads = (p.grad for p in wrapped.parameters())
    return found + [getattr(grad, "full_tensor", lambda grad=grad: grad)() for grad in grads]


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    for block in model:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


# what is not reduced yet is elsewhere than under `.grad`
MIXED = partial(sharded, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32))


def main(rank: int) -> None:
    planned = {"plan": {"policy": "all", "progress": False}}
    both = {**planned, "report": True}
    for wrap, options in (
        (DistributedDataParallel, {**both, "inside": True}),
        (DistributedDataParallel, both),
        (sharded, {"report": True}),
        (MIXED, {"report": True}),
    ):
        seen: list[Any] = []
        found = trained(rank, wrap, log=seen.append, **options)
        assert [type(one).__name__ for one in seen] == [
            name for name, key in (("Plan", "plan"), ("MemoryReport", "report")) if key in options
        ]
        for ours, theirs in zip(found, trained(rank, wrap), strict=True):
            torch.testing.assert_close(ours, theirs)


with forced_path("aten"):
    as_rank(main)
