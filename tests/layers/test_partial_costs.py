"""What gradients of some inputs, or of weights apart, cost: FLOPs and GEMMs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cases import CASES, loss_of
from support import DEVICE, flops, gemm_flops, randn, splits_backward
from torch import nn

import fusedckpt

pipelining = pytest.importorskip("torch.distributed.pipelining._backward")


D, F, ROWS, LAYERS = 12, 20, 6, 3


EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@EACH
@pytest.mark.usefixtures("on_aten")
def test_costs_what_it_costs_where_all_else_is_frozen(case):
    """GEMMs of every gradient alone, as `autograd.grad` and as `backward(inputs=...)`."""
    inputs = case.inputs((ROWS,), D, F)
    for index in range(len(inputs)):
        if inputs[index] is None:
            continue
        mask = tuple(i == index for i in range(len(inputs)))
        alone = flops(loss_of(case, case.inputs((ROWS,), D, F, mask=mask)).backward)
        ran = alone
        if case.name.startswith("experts"):
            # rows of no expert are not multiplied
            ran = gemm_flops(loss_of(case, case.inputs((ROWS,), D, F, mask=mask)).backward)
        for run in (
            lambda loss: torch.autograd.grad(loss, inputs[index]),  # noqa: B023  # called at once
            lambda loss: loss.backward(inputs=[inputs[index]]),  # noqa: B023
        ):
            loss = loss_of(case, inputs)
            # and not only by the formulas of our ops
            assert flops(partial(run, loss)) == alone
            if DEVICE.type == "cpu":
                loss = loss_of(case, inputs)
                assert gemm_flops(partial(run, loss)) == ran <= alone


def split(model, x):
    """Return the two steps of backward as a zero-bubble pipeline runs it."""
    weights = list(model.parameters())
    loss = model(x * 1).square().sum()
    found = []

    def inputs():
        found.append(pipelining.stage_backward_input([loss], None, [x], iter(weights)))

    def rest():
        pipelining.stage_backward_weight(iter(weights), found[0][1])

    return inputs, rest


MLPS = {"mlp": fusedckpt.MLP, "gated_mlp": fusedckpt.GatedMLP}


# GEMMs per layer: of the step for inputs, of the one for weights
PLAIN = {
    ("mlp", "inputs"): (3, 4),
    ("mlp", "preact"): (2, 3),
    ("gated_mlp", "inputs"): (5, 6),
    ("gated_mlp", "gate"): (4, 5),
    ("gated_mlp", "preact"): (3, 4),
}


def plain(cls, save):
    return [cls(D, F, save=save)]


def joined(cls, save):
    return [fusedckpt.RMSNorm(D), cls(D, F, save=save)]


def inside(cls, save):
    return [cls(D, F, save=save, norm=fusedckpt.RMSNorm(D), residual=True)]


def checkpointed(cls, save):
    return [fusedckpt.Checkpoint(nn.Sequential(*joined(cls, save)))]


def stocks(cls, save):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return [checkpoint_wrapper(nn.Sequential(*joined(cls, save)))]


@splits_backward
@pytest.mark.parametrize("layers", [plain, joined, inside, checkpointed, stocks])
@pytest.mark.parametrize(("name", "save"), PLAIN)
@pytest.mark.usefixtures("on_aten")
def test_gemms_of_inputs_and_of_weights_apart(name, save, layers):
    """A norm of the layer's own takes the GEMMs of its weight's gradient, one for each it feeds."""
    model = nn.Sequential(*(m for _ in range(LAYERS) for m in layers(MLPS[name], save))).to(DEVICE)
    of_inputs, of_weights = PLAIN[name, save]
    if layers is inside:
        of_weights += 1 if name == "mlp" else 2
    if layers in (checkpointed, stocks):
        of_inputs, of_weights = PLAIN[name, "inputs"]
    x, unit = randn(ROWS, D), 2 * ROWS * D * F * LAYERS
    inputs, rest = split(model, x)
    assert flops(inputs) == of_inputs * unit
    assert flops(rest) == of_weights * unit
    grads = [x.grad, *(p.grad for p in model.parameters())]
    expected = torch.autograd.grad(model(x * 1).square().sum(), [x, *model.parameters()])
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@splits_backward
@pytest.mark.usefixtures("on_aten")
def test_gemms_of_projections():
    """One per linear in either step; the norm's weight takes as many more."""
    model = fusedckpt.NormLinear(fusedckpt.RMSNorm(D), *(nn.Linear(D, F) for _ in range(3)))
    total = nn.Sequential(model.to(DEVICE), Total())
    inputs, rest = split(total, randn(ROWS, D))
    assert flops(inputs) == 3 * 2 * ROWS * D * F
    assert flops(rest) == 6 * 2 * ROWS * D * F


class Total(nn.Module):
    def forward(self, ys):
        return sum(ys)


def weights():
    return randn(F, D), randn(F), randn(D, F), randn(D)
