"""Gradients accumulated over micro-batches are those of one large batch, whatever is recomputed."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from support import DEVICE
from torch import Tensor, nn
from torch.nn import functional as F

import fusedckpt
from fusedckpt.autograd.dispatch import forced_path

BATCH, DIM, HIDDEN, CLASSES = 12, 24, 40, 5
EPS = torch.finfo(torch.float32).eps


def make_model() -> nn.Sequential:
    blocks = [fusedckpt.MLP(DIM, HIDDEN, norm=nn.LayerNorm(DIM), residual=True) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(DIM, CLASSES)).to(DEVICE)


def plain(model: nn.Sequential, x: Tensor) -> Tensor:
    return model(x)


def segments(model: nn.Sequential, x: Tensor) -> Tensor:
    return fusedckpt.checkpoint_sequential(model, 2, x)


def one_segment(model: nn.Sequential, x: Tensor) -> Tensor:
    return fusedckpt.checkpoint(model, x)


def preact(model: nn.Sequential, x: Tensor) -> Tensor:
    with fusedckpt.saving("preact"):
        return model(x)


def gradients(model: nn.Module, forward: Callable[..., Tensor], x: Tensor, y: Tensor, size: int):
    """Accumulate over micro-batches of at most `size` rows, each weighted by its share."""
    model.zero_grad()
    for rows, labels in zip(x.split(size), y.split(size), strict=True):
        loss = F.cross_entropy(forward(model, rows), labels)
        (loss * len(rows) / len(x)).backward()
    found = [parameter.grad for parameter in model.parameters()]
    return [gradient.double() for gradient in found if gradient is not None]


@pytest.fixture
def data():
    x = torch.randn(BATCH, DIM, device=DEVICE)
    return make_model(), x, torch.randint(CLASSES, (BATCH,), device=DEVICE)


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("forward", [plain, segments, one_segment, preact])
def test_micro_batches_give_the_gradients_of_one_batch(data, forward, size, path):
    model, x, y = data
    truth = copy.deepcopy(model).double()
    expected = gradients(truth, plain, x.double(), y, BATCH)
    whole = gradients(model, plain, x, y, BATCH)
    found = gradients(model, forward, x, y, size)
    for mine, one, exact in zip(found, whole, expected, strict=True):
        limit = 2 * (one - exact).norm() + 8 * EPS * max(1.0, exact.norm())
        assert (mine - exact).norm() <= limit


@pytest.mark.parametrize("forward", [segments, one_segment])
def test_checkpoints_accumulate_bit_for_bit_as_without(data, forward, path):
    model, x, y = data
    expected = gradients(model, plain, x, y, 4)
    found = gradients(model, forward, x, y, 4)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@forced_path("aten")
def test_a_planned_model_accumulates_as_an_unplanned_one(data):
    model, x, y = data
    expected = gradients(model, plain, x, y, 4)
    plan = fusedckpt.plan(model, x[:4], policy="all", progress=False)
    plan.apply(model)
    found = gradients(model, plain, x, y, 4)
    plan.undo()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
