"""Optimizers of several kinds, several at once, and loops that free gradients before backward."""

from __future__ import annotations

import pytest
import torch
from plan_models import planned
from torch import nn

import fusedckpt
from fusedckpt.memory import nbytes_of, peak_bytes
from fusedckpt.reporting.trial import tensors_of

WIDTH, ROWS = 64, 64


def model_of(layers=6):
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(layers)),
        nn.Linear(WIDTH, WIDTH),
    )


def loss_of(y):
    return y.square().mean()


def state_of(optimizers):
    return [x for each in optimizers for x in tensors_of([*each.state.values()])]


def assert_near(predicted, actual):
    """Assert the bounds that predictions keep."""
    share = predicted / actual - 1
    assert -0.01 <= share <= 0.03, f"predicted {share:+.2%}"


@pytest.mark.parametrize("policy", ["none", "memory", "uniform:2"])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_gradients_that_live_until_backward_are_planned(kind, policy):
    model, x = model_of(), torch.randn(ROWS, WIDTH)
    make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[kind]
    optimizer = make(model.parameters())
    options = {"policy": policy, "optimizer": optimizer, "loss": loss_of, "zero_grad": "backward"}
    # before the first step, and after some
    early = planned(model, x, **options)

    output = None

    def step():
        nonlocal output
        output = model(x)
        loss = loss_of(output)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step()
    late = planned(model, x, **options)
    assert early.predicted_bytes == late.predicted_bytes
    assert early.measured_bytes == late.measured_bytes
    assert early.gradient_bytes == nbytes_of(model.parameters())
    early.apply(model)
    step()
    held = [*model.parameters(), x, *state_of([optimizer]), *(p.grad for p in model.parameters())]
    # the profiler does not tell of the frees of gradients from before: those of a step inside
    base, gradients = nbytes_of(held), nbytes_of(p.grad for p in model.parameters())
    for parameter in model.parameters():
        parameter.grad = None

    def with_gradients():
        nonlocal output
        output = torch.empty_like(output)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        step()

    actual = base - gradients + peak_bytes(with_gradients)
    assert_near(early.predicted_bytes, actual)
    assert_near(early.measured_bytes, actual)


def test_the_phase_of_zero_grad_is_checked():
    model, x = model_of(), torch.randn(ROWS, WIDTH)
    for options in ({"accumulate": 2}, {"activation_budget": 10**9}):
        policy = {} if "activation_budget" in options else {"policy": "all"}
        with pytest.raises(ValueError, match="zero_grad='backward' frees the gradients"):
            planned(model, x, zero_grad="backward", **policy, **options)
    with pytest.raises(ValueError, match="zero_grad"):
        planned(model, x, zero_grad="optimizer", policy="all")


def test_several_optimizers_are_counted():
    model, other, x = model_of(), model_of(12), torch.randn(ROWS, WIDTH)
    mine, theirs = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())
    one, two = (
        planned(model, x, policy="all", loss=loss_of, optimizer=optimizer)
        for optimizer in (mine, [mine, theirs])
    )
    # the other's parameters, and its state
    steps = 4 * len([*other.parameters()])
    more = 3 * nbytes_of(other.parameters()) + steps
    assert two.chain.resident_bytes - one.chain.resident_bytes == more
    assert not {**mine.state, **theirs.state}
    report = fusedckpt.report(model, x, loss=loss_of, optimizer=(mine, theirs))
    alone = fusedckpt.report(model, x, loss=loss_of, optimizer=mine)
    # of parameters without a gradient no state is made
    assert report.optimizer_bytes == alone.optimizer_bytes
    assert not {**mine.state, **theirs.state}
    with pytest.raises(TypeError, match=r"a list of these, or None, got Linear"):
        planned(model, x, policy="all", optimizer=[mine, nn.Linear(1, 1)])


def test_optimizers_of_parts_step_one_after_the_other():
    model, x = model_of(), torch.randn(ROWS, WIDTH)
    optimizers = [torch.optim.Adam(layer.parameters()) for layer in model]
    together = torch.optim.Adam(model.parameters())
    several, one = (
        planned(model, x, policy="memory", loss=loss_of, optimizer=optimizer)
        for optimizer in (optimizers, together)
    )
    assert several.chain.resident_bytes == one.chain.resident_bytes
    assert several.measured_bytes == pytest.approx(one.measured_bytes, rel=0.01)


def test_an_optimizer_with_a_closure_is_refused():
    model, x = model_of(), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.LBFGS(model.parameters())
    for take in (fusedckpt.report, planned):
        options = {} if take is fusedckpt.report else {"policy": "all"}
        with pytest.raises(ValueError, match=r"whose step\(\) needs no closure, got LBFGS"):
            take(model, x, optimizer=optimizer, **options)


class SparseTable(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table = nn.Embedding(500, WIDTH, sparse=sparse)
        self.body = model_of(3)

    def forward(self, tokens):
        return self.body(self.table(tokens))


def test_sparse_adam_is_planned():
    model, tokens = SparseTable(True), torch.randint(500, (ROWS,))
    optimizers = [
        torch.optim.SparseAdam(model.table.parameters()),
        torch.optim.Adam(model.body.parameters()),
    ]
    for policy in ("none", "memory"):
        found = planned(model, tokens, policy=policy, loss=loss_of, optimizer=optimizers)
        assert_near(found.predicted_bytes, found.measured_bytes)
    assert not any(optimizer.state for optimizer in optimizers)
    assert fusedckpt.report(model, tokens, loss=loss_of, optimizer=optimizers).optimizer_bytes > 0
    message = "SparseAdam takes only sparse gradients"
    with pytest.raises(ValueError, match=message):
        planned(model, tokens, policy="all", loss=loss_of, optimizer=optimizers, accumulate=2)
    dense = SparseTable(False)
    optimizer = torch.optim.SparseAdam(dense.table.parameters())
    for take in (fusedckpt.report, planned):
        options = {} if take is fusedckpt.report else {"policy": "all"}
        with pytest.raises(ValueError, match=message):
            take(dense, tokens, loss=loss_of, optimizer=optimizer, **options)
