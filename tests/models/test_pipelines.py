"""Stages of pipelines, fused, checkpointed and planned, train as one process does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed.pipelining as pipelining
from support import SPLITS_BACKWARD, gemm_flops, run_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from zoo import MLPBlock

import fusedckpt

D, F, ROWS, MICRO, STEPS = 8, 12, 16, 4, 2
BLOCKS = 4
# of each rank's stages, which of all, and the ways to run them
SCHEDULES = {
    "ScheduleGPipe": (((0,), (1,)), ("fused", "planned")),
    "Schedule1F1B": (((0,), (1,)), ("eager", "checkpointed")),
    "ScheduleInterleaved1F1B": (((0, 2), (1, 3)), ("preact", "planned")),
    "ScheduleInterleavedZeroBubble": (
        ((0, 2), (1, 3)),
        ("eager", "fused", "preact", "checkpointed", "planned"),
    ),
    "ScheduleZBVZeroBubble": (((0, 3), (1, 2)), ("fused", "checkpointed")),
}
# GEMMs of a layer's backward: in one, and in two, inputs first (2 + 2, 3 + 4, 2 + 3)
GEMMS = {
    "eager": (4, 4),
    "fused": (5, 7),
    "preact": (4, 5),
    "checkpointed": (5, 7),
    "planned": (5, 7),
}


def block() -> MLPBlock:
    return MLPBlock(nn.LayerNorm(D), nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Linear(F, D)))


def whole() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(BLOCKS))).double()


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, D).double(), torch.randn(ROWS, D).double()


def eager(stage: nn.Sequential) -> nn.Sequential:
    return stage


def fused(stage: nn.Sequential, save: str = "inputs") -> nn.Sequential:
    # what is fused is compared below
    fusedckpt.fuse(stage, save=save, verify=False)
    return stage


def checkpointed(stage: nn.Sequential) -> nn.Sequential:
    return nn.Sequential(*(fusedckpt.checkpoint_module(block) for block in fused(stage)))


def planned(stage: nn.Sequential) -> nn.Sequential:
    x = torch.randn(ROWS // MICRO, D).double()
    fusedckpt.plan(fused(stage), x, policy="all", group=False, progress=False).apply(stage)
    return stage


WAYS: dict[str, Callable[[nn.Sequential], nn.Sequential]] = {
    "eager": eager,
    "fused": fused,
    "preact": partial(fused, save="preact"),
    "checkpointed": checkpointed,
    "planned": planned,
}


def stages(model: nn.Sequential, count: int, indices: tuple[int, ...]) -> dict[int, nn.Sequential]:
    """Return some of the stages that a model is cut into."""
    size = BLOCKS // count
    return {i: model[i * size : (i + 1) * size] for i in indices}


def train(schedule: str, own: dict[int, nn.Sequential], count: int) -> tuple[list[float], float]:
    """Train this rank's stages; return the losses, where the last is here, and a step's GEMMs."""
    placed = [
        pipelining.PipelineStage(part, index, count, torch.device("cpu"))
        for index, part in own.items()
    ]
    given: Any = placed if len(placed) > 1 else placed[0]
    schedule_of = getattr(pipelining, schedule)(given, MICRO, loss_fn=mse_loss)
    optimizer = torch.optim.SGD([p for part in own.values() for p in part.parameters()], lr=0.1)
    torch.manual_seed(1)
    losses: list[float] = []
    flops = 0
    for index in range(STEPS):
        x, target = data()
        parts: list[Tensor] = []
        optimizer.zero_grad()
        args = [x] if 0 in own else []
        kwargs = {"target": target, "losses": parts} if count - 1 in own else {}
        step = partial(schedule_of.step, *args, **kwargs)
        # the first runs the stages once more to see their shapes
        if index == STEPS - 1:
            flops = gemm_flops(step)
        else:
            step()
        optimizer.step()
        losses += [torch.stack(parts).mean().item()] if parts else []
    return losses, flops / (2 * ROWS * D * F)


def in_one_process() -> tuple[list[float], nn.Sequential]:
    model = whole()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses = []
    for _ in range(STEPS):
        x, target = data()
        optimizer.zero_grad()
        loss = mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def check(schedule: str, way: str, own: dict[int, nn.Sequential], count: int) -> None:
    """Compare with one process: losses, every parameter after the steps, and the GEMMs."""
    for index, part in stages(whole(), count, tuple(own)).items():
        with torch.no_grad():
            for parameter, first in zip(own[index].parameters(), part.parameters(), strict=True):
                parameter.copy_(first)
    losses, model = in_one_process()
    found, gemms = train(schedule, own, count)
    if count - 1 in own:
        torch.testing.assert_close(found, losses)
    for index, part in stages(model, count, tuple(own)).items():
        for ours, theirs in zip(own[index].parameters(), part.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
    # the first stage has no inputs to split off
    is_split = "ZeroBubble" in schedule
    expected = sum(2 + GEMMS[way][is_split and index > 0] for index in own) * BLOCKS // count
    assert gemms == expected, (gemms, expected)


def main(rank: int) -> None:
    for schedule, (places, ways) in SCHEDULES.items():
        count = sum(map(len, places))
        for way in ways if SPLITS_BACKWARD or "ZeroBubble" not in schedule else ():
            print(schedule, way, flush=True)
            parts = stages(whole(), count, places[rank])
            check(schedule, way, {i: WAYS[way](part) for i, part in parts.items()}, count)


def test_schedules(tmp_path):
    run_ranks(main, tmp_path)
