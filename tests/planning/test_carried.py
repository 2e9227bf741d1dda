"""Bytes that live from one step into the next: a loop has the peak that a plan measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plan_models import planned
from support import DEVICE
from torch import Tensor, nn

from fusedckpt.memory import nbytes_of, peak_bytes


class Sine(torch.autograd.Function):
    """A function that keeps a tensor on `ctx`, beside what it saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.cos = (x @ w).cos()
        return (x @ w).sin()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        dz = grads[0] * ctx.cos
        return dz @ w.T, x.T @ dz


class OnCtx(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + Sine.apply(x, self.weight)


class InAttribute(OnCtx):
    """A unit that keeps its last result, with its graph."""

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.weight
        self.seen = h.detach()
        return x + h.tanh()


class PlainProduct(OnCtx):
    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.weight).tanh()


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def loop(model: nn.Module, x: Tensor, keeps_loss: bool) -> Callable[[], None]:
    def run() -> None:
        for _ in range(3):
            output = model(x)
            if keeps_loss:
                value = loss(output)
                value.backward()
            else:
                loss(output).backward()
            model.zero_grad()

    return run


@pytest.mark.parametrize("keeps_loss", [False, True])
@pytest.mark.parametrize("kind", [OnCtx, InAttribute, PlainProduct])
@pytest.mark.parametrize("policy", ["none", "all", "uniform:2", "budget"])
def test_peak_of_a_loop(kind, policy, keeps_loss):
    model = nn.Sequential(*(kind() for _ in range(6))).to(DEVICE)
    x = torch.randn(512, 64, device=DEVICE)
    options: dict[str, Any] = {"policy": policy}
    if policy == "budget":
        ends = [planned(model, x, policy=name, loss=loss) for name in ("memory", "none")]
        options = {"budget": sum(plan.measured_bytes or 0 for plan in ends) // 2}
    plan = planned(model, x, loss=loss, **options)
    assert plan.measured_bytes == pytest.approx(plan.predicted_bytes, rel=0.01)
    plan.apply(model)
    run = loop(model, x, keeps_loss)
    peak = nbytes_of([*model.parameters(), x]) + peak_bytes(run)
    assert plan.measured_bytes is not None
    # beside the scalar loss of the step before
    assert peak <= plan.measured_bytes + 4
    # an attribute counts until the next loss is computed, though a unit replaces it earlier
    kept = 6 * x.nbytes if kind is InAttribute else 0
    assert plan.measured_bytes <= 1.01 * peak + kept
