"""Outputs of units that code in between writes without a new version: no segment passes them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plan_models import planned
from support import DEVICE, randn
from torch import Tensor, nn


def clamp(x: Tensor) -> None:
    x.data.clamp_(-0.3, 0.3)


def clamp_wide(x: Tensor) -> None:
    """Write values that are all the same in this step."""
    x.data.clamp_(-1e3, 1e3)


def assign(x: Tensor) -> None:
    x.data = x.data.clamp(-0.3, 0.3)


def write_by_numpy(x: Tensor) -> None:
    x.detach().numpy().clip(-0.3, 0.3, out=x.detach().numpy())


def write_detached(x: Tensor) -> None:
    x.data[:, ::2].mul_(0.5)


class WritesOutput(nn.Module):
    """Blocks with a write to the output of the third."""

    def __init__(self, write: Callable[[Tensor], Any], by_hook: bool):
        super().__init__()
        blocks = (nn.Sequential(nn.Tanh(), nn.Linear(16, 16)) for _ in range(6))
        self.blocks = nn.ModuleList(blocks).to(DEVICE)
        self.write, self.by_hook = write, by_hook
        if by_hook:
            self.blocks[2].register_forward_hook(lambda *args: self.write(args[-1]) and None)

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 2 and not self.by_hook:
                self.write(x)
        return x


class MultipliesSkip(nn.Module):
    """Add two tensors, of which the first came from the block before."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * y


class WritesSkip(nn.Module):
    """A write to a tensor that two later units get."""

    def __init__(self):
        super().__init__()
        blocks = (nn.Sequential(nn.Tanh(), nn.Linear(16, 16)) for _ in range(2))
        self.units = nn.ModuleList([*blocks, MultipliesSkip()]).to(DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.units[0](x)
        x = self.units[1](skipped)
        clamp(skipped)
        return self.units[2](x, skipped)


def check(model: nn.Module, joined: list[bool], named: set[str]) -> None:
    x = randn(8, 16)

    def gradients() -> list[Tensor]:
        return [*torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])]

    expected = gradients()
    plan = planned(model, x, policy="uniform:1", loss=lambda y: y.square().sum())
    assert [unit.joined for unit in plan.chain.units] == joined
    assert {name for name, why in plan.left_out.items() if "writes their outputs" in why} == named
    assert ("not joined" in str(plan)) == bool(named)
    plan.apply(model)
    for ours, theirs in zip(gradients(), expected, strict=True):
        assert torch.equal(ours, theirs)


WRITES = [clamp, clamp_wide, write_by_numpy, write_detached]


@pytest.mark.parametrize("write", WRITES if DEVICE.type == "cpu" else [clamp, clamp_wide])
@pytest.mark.parametrize("by_hook", [False, True])
def test_write_between_units(write, by_hook):
    joined = [False, True, True, False, True, True]
    check(WritesOutput(write, by_hook), joined, {"blocks.3"})


def test_data_assigned():
    check(WritesOutput(assign, False), [False, True, True, False, True, True], {"blocks.3"})


def test_write_for_a_later_unit():
    # the unit before it would run again with the new values, and is left out for that
    check(WritesSkip(), [False, False, False], set())


@pytest.mark.parametrize("write", [lambda x: x.data.abs().max(), lambda x: x.detach().norm()])
def test_reads_between_units(write):
    check(WritesOutput(write, False), [False, *5 * [True]], set())
