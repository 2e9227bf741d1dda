"""Units that save nothing, such as views and identities, and weights that autocast casts."""

from __future__ import annotations

import pytest
import torch
from plan_models import assert_as_planned, assert_equal, assert_predicted, planned
from torch import nn

from fusedckpt import Plan, checkpoint_sequential

WIDTH, ROWS = 32, 1024
POLICIES = ["none", "all", "memory", "sqrt", "uniform:2", "uniform:3"]


def repeated(*make):
    return lambda: nn.Sequential(*(kind() for _ in range(5) for kind in make))


def between(first, last):
    def make():
        ends = [[kind() for kind in kinds] for kinds in (first, last)]
        return nn.Sequential(*ends[0], *repeated(linear, nn.Tanh)(), *ends[1])

    return make


def linear():
    return nn.Linear(WIDTH, WIDTH)


def halved():
    return nn.Linear(WIDTH, WIDTH // 2)


class Concatenates(nn.Module):
    """Returns more than it gets, and saves nothing, as nn.Upsample does."""

    def forward(self, x):
        return torch.cat((x, x), -1)


class ResidualLists(nn.Module):
    """Lists of a linear and a dropout that does nothing, as diffusers' attention has them."""

    def __init__(self, is_residual):
        super().__init__()
        self.is_residual = is_residual
        self.out = nn.ModuleList(nn.ModuleList([linear(), nn.Dropout(0.0)]) for _ in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(6))

    def forward(self, x):
        for layers, norm in zip(self.out, self.norms, strict=True):
            y = norm(x)
            for layer in layers:
                y = layer(y)
            x = x + y if self.is_residual else y.sin()
        return x


MODELS = {
    "views": repeated(linear, lambda: nn.Unflatten(1, (4, 8)), nn.Flatten, nn.Tanh),
    "identity": repeated(linear, nn.Identity, nn.Tanh),
    "identity first": between([nn.Identity, nn.Flatten], []),
    "identity last": between([], [nn.Identity, nn.Flatten]),
    "dropout": repeated(lambda: nn.LayerNorm(WIDTH), lambda: nn.Dropout(0.0), linear, nn.GELU),
    "doubled": repeated(halved, Concatenates, nn.Tanh),
    "residual": lambda: ResidualLists(True),
    "plain": lambda: ResidualLists(False),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_units_that_save_nothing_are_predicted(name, policy):
    model, x = MODELS[name](), torch.randn(ROWS, WIDTH, requires_grad=name == "identity first")
    assert_as_planned(model, x, policy)


@pytest.mark.parametrize("name", ["views", "doubled", "residual"])
def test_budgets_that_a_policy_fits_are_not_refused(name):
    model, x = MODELS[name](), torch.randn(ROWS, WIDTH)
    plain = planned(model, x, policy="none").measured_bytes
    least = planned(model, x, policy="memory").measured_bytes
    assert least < plain or name == "doubled"
    for budget in (least, planned(model, x, policy="uniform:2").measured_bytes, plain):
        assert planned(model, x, budget=budget).measured_bytes <= budget


def test_units_that_save_nothing_belong_to_others(tmp_path):
    model, x = MODELS["views"](), torch.randn(ROWS, WIDTH)
    found = planned(model, x, policy="uniform:1")
    assert [unit.modules for unit in found.chain.units][:2] == [("0", "1", "2"), ("3",)]
    assert found.left_out == {}
    found.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == found
    model(x).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    checkpoint_sequential(model, loaded, x).square().mean().backward()
    assert_equal([p.grad for p in model.parameters()], expected)
    # the segment keeps the smaller of its inputs
    doubled = planned(MODELS["doubled"](), x, policy="all").chain.units
    assert [unit.modules for unit in doubled][:3] == [("0",), ("1", "2"), ("3",)]


def test_a_unit_that_saves_nothing_between_code_is_said():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([linear(), nn.Identity(), linear()])

        def forward(self, x):
            for part in self.parts:
                x = part(x) + x
            return x

    found = planned(Alone(), torch.randn(ROWS, WIDTH), policy="all")
    assert found.left_out == {"parts.1": "saves nothing"}
    assert_predicted(found)


class AutocastBlock(nn.Module):
    def __init__(self, width, own):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down, self.own = nn.Linear(4 * width, width), own

    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.own):
            return x + self.down(nn.functional.gelu(self.up(self.norm(x)))).float()


class AutocastSequential(nn.Sequential):
    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return super().forward(x)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("width", "rows"), [(64, 256), (64, 32)])
@pytest.mark.parametrize("where", ["outside", "in the model", "in units"])
def test_casts_of_weights_are_predicted(where, width, rows, policy):
    kind = AutocastSequential if where == "in the model" else nn.Sequential
    model = kind(*(AutocastBlock(width, where == "in units") for _ in range(8)))
    x = torch.randn(rows, width)

    def run():
        return planned(model, x, policy=policy, loss=lambda y: y.float().square().mean())

    if where == "outside":
        with torch.autocast("cpu", torch.bfloat16):
            assert_predicted(run())
    else:
        assert_predicted(run())


class Waves(nn.Module):
    def forward(self, x):
        return x.sin().cos()


class Starts(nn.Module):
    """Has a buffer that requires grad, and gets no tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("start", torch.randn(8, 16, requires_grad=True))
        self.tower = nn.Sequential(nn.Tanh(), nn.Tanh())

    def forward(self):
        return self.tower(self.start)


def test_a_model_of_buffers_alone():
    assert planned(Starts(), policy="all").measured_bytes is not None


@pytest.mark.parametrize("policy", ["all", "memory"])
def test_a_model_without_parameters(policy):
    model, x = nn.Sequential(Waves(), nn.Tanh(), Waves()), torch.randn(256, 64, requires_grad=True)
    found = planned(model, x, policy=policy)
    assert len(found.chain.units) == 3
    assert found.predicted_bytes == found.measured_bytes
    found.apply(model)
    (ours,) = torch.autograd.grad(model(x).square().mean(), x)
    found.undo()
    (eager,) = torch.autograd.grad(model(x).square().mean(), x)
    assert torch.equal(ours, eager)
