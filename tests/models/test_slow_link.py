"""A GPipe stage recomputes while its gradient is on a slow link.

`PYTHONPATH=.:tests python tests/models/test_slow_link.py 512 0.03` prints the times of layers of
that width, which compute and do not sleep, and of transfers that take so many seconds.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import run_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import fusedckpt

D, ROWS, LAYERS, MICRO = 8, 16, 3, 4
# seconds that a layer's forward takes, and a transfer
LAYER, LINK = 0.01, 0.03
EVENTS: list[str] = []


class Sleep(torch.autograd.Function):
    """Takes time, and no CPU: in backward twice as much as in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(LAYER)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(2 * LAYER)
        return dy


class SleepingLayer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.sleeps = width == D

    def forward(self, x: Tensor) -> Tensor:
        EVENTS.append("again" if fusedckpt.is_recomputing() else "forward")
        z = self.linear(x)
        return (Sleep.apply(z) if self.sleeps else z).tanh()  # type: ignore[union-attr]


class Stage(PipelineStage):
    """A stage at a link on which a transfer takes LINK seconds once it is sent and asked for.

    Where `ahead`, it recomputes meanwhile what its backward needs first.
    """

    ahead, link = False, LINK

    def _post(self, ops: list[dist.P2POp], event: str) -> None:
        works = [op.op(op.tensor, op.peer, op.group) for op in ops]

        def deliver() -> None:
            for work in works:
                work.wait()
                time.sleep(self.link)

        # neither waiting nor sleeping takes CPU
        self.arriving, self.event = threading.Thread(target=deliver), event * bool(works)
        self.arriving.start()

    def _arrive(self) -> None:
        self.arriving.join()
        if self.event:
            EVENTS.append(self.event)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._post(super().get_fwd_recv_ops(fwd_chunk_id), "input")
        return []

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self._arrive()
        return super().forward_one_chunk(*args, **kwargs)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._post(super().get_bwd_recv_ops(bwd_chunk_id), "gradient")
        if self.ahead and not self.is_last:
            outputs, _ = self.fwd_cache[bwd_chunk_id]
            fusedckpt.prefetch_recompute(outputs)
        return []

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self._arrive()
        EVENTS.append("backward")
        return super().backward_one_chunk(*args, **kwargs)


def shown() -> type[PipelineStage]:
    """Return the stage of the page on checkpoints."""
    page = (Path(fusedckpt.__file__).parent / "checkpointing" / "README.md").read_text("utf-8")
    codes = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (code,) = [code for code in codes if "RecomputingStage" in code]
    found: dict[str, Any] = {"fusedckpt": fusedckpt}
    exec(code, found)
    return found["RecomputingStage"]


def made(width: int, rank: int, kind: Any = Stage) -> Any:
    torch.manual_seed(rank)
    layers = nn.Sequential(*(SleepingLayer(width) for _ in range(LAYERS)))
    stage = kind(fusedckpt.checkpoint_module(layers), rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICRO, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(2)
    x, target = torch.randn(2, max(ROWS, 4 * width * (width > D)), width)

    def step(ahead: bool) -> tuple[float, list[str], list[Tensor]]:
        """Return the seconds of a step of both ranks, this one's events, and its gradients."""
        stage.ahead = ahead
        layers.zero_grad()
        EVENTS.clear()
        dist.barrier()
        start = time.perf_counter()
        schedule.step(*([x] if rank == 0 else []), **({"target": target} if rank else {}))
        dist.barrier()
        seconds = time.perf_counter() - start
        return seconds, [*EVENTS], [p.grad.clone() for p in layers.parameters()]  # type: ignore[union-attr]

    return step


def check_events(rank: int, ahead: bool, events: list[str]) -> None:
    """Each micro-batch is recomputed once, where `ahead` before its gradient is there."""
    again = ["again"] * LAYERS
    if rank:
        forward = [["input", *["forward"] * LAYERS]] * MICRO
        backward = [["backward", *again]] * MICRO
    else:
        forward = [["forward"] * LAYERS] * MICRO
        waits = [*again, "gradient", "backward"] if ahead else ["gradient", "backward", *again]
        backward = [waits] * MICRO
    assert events == [event for part in forward + backward for event in part], events


def main(rank: int, width: int = D, link: float = LINK, rounds: int = 1) -> None:
    Stage.link = link
    step = made(width, rank)
    # the first looks at shapes
    step(False)
    times: dict[bool, list[float]] = {False: [], True: []}
    grads: list[list[Tensor]] = []
    for _ in range(rounds):
        grads.clear()
        for ahead, taken in times.items():
            seconds, events, found = step(ahead)
            check_events(rank, ahead, events)
            taken.append(seconds)
            grads.append(found)
        assert all(map(torch.equal, *grads))
    step = made(width, rank, shown())
    _, events, found = step(True), *step(True)[1:]
    assert all(map(torch.equal, grads[0], found))
    assert events.count("again") == LAYERS * MICRO
    ratios = [ours / plain for plain, ours in zip(*times.values(), strict=True)]
    print(f"rank {rank}: {times}, ratio {statistics.median(ratios):.3f}", flush=True)


def test_recomputing_while_a_gradient_is_on_its_way(tmp_path):
    run_ranks(main, tmp_path)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        timed = partial(main, width=int(sys.argv[1]), link=float(sys.argv[2]), rounds=3)
        print(*run_ranks(timed, Path(folder)))
