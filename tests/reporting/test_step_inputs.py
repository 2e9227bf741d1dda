"""Arguments and hooks of a step that report and plan take with care, or refuse before any step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from plan_models import planned
from support import DEVICE, randn
from torch import Tensor, nn

import fusedckpt


class SumOfParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)).to(DEVICE)

    def forward(self, parts: Iterable[Tensor], others: Iterator[Tensor] | None = None) -> Tensor:
        x = sum(parts, torch.zeros(2, 8, device=DEVICE))
        x = x if others is None else x + next(others)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


@pytest.mark.parametrize("make", [iter, lambda items: (x for x in items), partial(map, Tensor.neg)])
def test_iterators_start_anew_in_each_step(make: Callable[[list[Tensor]], Any]):
    items = [randn(2, 8), randn(2, 8)]
    assert fusedckpt.report(SumOfParts(), make(items), make(items)).saved_bytes > 0
    plan = planned(SumOfParts(), make(items), make(items), policy="all")
    assert [unit.name for unit in plan.chain.units] == ["layers.0", "layers.1", "layers.2"]
    assert all(x.grad is None for x in items)


def test_one_iterator_twice_is_one():
    both = iter([randn(2, 8) for _ in range(5)])
    # the second argument finds nothing left
    with pytest.raises(StopIteration):
        fusedckpt.report(SumOfParts(), both, both)


def in_closure(optimizers: dict[Any, Any]) -> Callable[[Any], None]:
    def step(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    return step


class Stepper:
    def __init__(self, optimizers: dict[Any, Any]):
        self.optimizers = optimizers

    def step(self, parameter: Any) -> None:
        in_closure(self.optimizers)(parameter)


def given(parameter: Any, optimizers: dict[Any, Any]) -> None:
    in_closure(optimizers)(parameter)


HOOKS: list[Callable[[dict[Any, Any]], Any]] = [
    in_closure,
    lambda optimizers: Stepper(optimizers).step,
    lambda optimizers: partial(given, optimizers=optimizers),
]


@pytest.mark.parametrize("make", HOOKS)
def test_optimizers_in_hooks_are_refused_first(make):
    model, x = SumOfParts(), [randn(2, 8)]
    optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(make(optimizers))
    before = [p.detach().clone() for p in model.parameters()]
    for call in (fusedckpt.report, partial(planned, policy="all")):
        with pytest.raises(ValueError, match=r"a hook of layers\.0\.weight steps an optimizer"):
            call(model, x)
    assert not any(optimizer.state for optimizer in optimizers.values())
    fusedckpt.report(model, x, optimizer=[*optimizers.values()])
    for p, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value)


def test_other_hooks_are_not_refused():
    model, x = SumOfParts(), [randn(2, 8)]
    norms = list[Tensor]()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm()))
    assert fusedckpt.report(model, x).saved_bytes > 0
    assert norms
