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
from fusedckpt import functional
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.memory import saved_tensors

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


def test_a_micro_batch_keeps_its_share(data):
    model, x, _ = data

    def kept(rows: int) -> int:
        # not a leaf, as an input of a layer within a model
        with saved_tensors() as saved:
            output = segments(model, x[:rows] * 1)
        del output
        return saved.nbytes

    # the inputs of two segments
    assert kept(BATCH) == 2 * BATCH * DIM * 4
    assert kept(4) == kept(BATCH) // 3


@pytest.mark.parametrize("function", [functional.add_rms_norm, functional.add_layer_norm])
def test_leaves_of_a_sum_get_gradients_of_their_own(function):
    """x and the residual have one gradient; the second backward adds to each in place."""
    norm = F.layer_norm if function is functional.add_layer_norm else F.rms_norm
    fused, eager = (
        [torch.ones(2, 3, 8, device=DEVICE).requires_grad_() for _ in "xr"] for _ in "fe"
    )
    for scale in (1.0, 3.0):
        weights = scale * torch.randn(2, 3, 8, device=DEVICE)
        for (x, r), total in ((fused, function), (eager, lambda x, r, n: (norm(x + r, n), x + r))):
            y, added = total(x, r, (8,))
            (y * weights + added).sum().backward()
    for mine, theirs in zip(fused, eager, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert fused[0].grad.data_ptr() != fused[1].grad.data_ptr()


@pytest.mark.parametrize("shape", [(8,), (2, 3, 8)], ids=str)
def test_an_incoming_gradient_is_not_written(shape):
    """It is the gradient of x and of the residual, where the norm's result is not used."""
    x, r = (torch.ones(shape, device=DEVICE).requires_grad_() for _ in "xr")
    _, added = functional.add_rms_norm(x, r, (8,))
    incoming = torch.ones(shape, device=DEVICE)
    for times in (1, 2):
        added.backward(incoming, retain_graph=True)
        assert incoming.eq(1).all()
        assert x.grad.eq(times).all()
        assert r.grad.eq(times).all()
